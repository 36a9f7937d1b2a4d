"""Storing keys and values in a pool. Owns no state."""

import torch

from tenuto_kernels.layout import KEY, VALUE


def store_kv(pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See `ops.store_kv`."""
    block_size = pool.shape[4]
    block, offset = slots // block_size, slots % block_size
    pages = _words(pool)[:, layer]
    pages[block, KEY, :, offset] = _words(k.to(pool.dtype))
    pages[block, VALUE, :, offset] = _words(v.to(pool.dtype))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as 8-byte words where D allows it: indexed stores cost per element, not per byte."""
    if tensor.shape[-1] * tensor.itemsize % 8 or tensor.stride(-1) != 1:
        return tensor
    return tensor.contiguous().view(torch.int64)
