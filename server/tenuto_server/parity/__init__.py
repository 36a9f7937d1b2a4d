"""The simulator against the server itself: one workload, the same agents, a real model on one side and a model of costs on
the other."""
