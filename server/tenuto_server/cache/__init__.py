"""The prefix cache: extents of KV blocks over device, host and disk. Torch-free and clock-free."""
