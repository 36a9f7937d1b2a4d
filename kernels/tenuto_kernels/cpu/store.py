"""Storing keys and values in a pool. Owns no state."""

import torch

from tenuto_kernels.layout import KEY, VALUE


def store_kv(pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See `ops.store_kv`."""
    block_size = pool.shape[4]
    block, offset = slots // block_size, slots % block_size
    pages = pool[:, layer]
    pages[block, KEY, :, offset] = k.to(pool.dtype)
    pages[block, VALUE, :, offset] = v.to(pool.dtype)
