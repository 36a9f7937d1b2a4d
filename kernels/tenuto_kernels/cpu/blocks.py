"""Moving whole blocks within a pool and between a pool and staging. Owns no state.

One `copy_` per run of consecutive blocks: a block is contiguous, so this is a plain memory copy (advanced indexing of
16-bit blocks runs at a tenth of the memory bandwidth). The same code serves a pool and staging on different devices.
"""

from collections.abc import Iterator

import torch


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """See `ops.copy_blocks`."""
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        pool[target].copy_(pool[source])


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """See `ops.gather_blocks`."""
    for at, first, count in runs(blocks.tolist()):
        out[at : at + count].copy_(pool[first : first + count], non_blocking=True)


def scatter_blocks(pool: torch.Tensor, blocks: torch.Tensor, src: torch.Tensor) -> None:
    """See `ops.scatter_blocks`."""
    for at, first, count in runs(blocks.tolist()):
        pool[first : first + count].copy_(src[at : at + count], non_blocking=True)


def runs(blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """`(index of the first, first block, count)` of every run of consecutive block numbers."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield start, blocks[start], index - start
            start = index
