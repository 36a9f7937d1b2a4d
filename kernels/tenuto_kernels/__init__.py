"""KV-cache kernels: torch definitions and Triton implementations."""
