"""What executes a plan: the torch executor, the KV pools of the three tiers, and the copies between them."""
