# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Moving whole blocks on the device; between device and host, one contiguous copy a run of blocks. Owns no state."""

import torch
import triton
import triton.language as tl

from tenuto_kernels.cpu import blocks as host

#: 4-byte words one program moves: enough to fill a warp's widest loads several times.
WORDS = 2048


@triton.jit
def move_kernel(
    src_ptr,
    dst_ptr,
    src_index_ptr,
    dst_index_ptr,
    words,
    SRC_INDEXED: tl.constexpr,
    DST_INDEXED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Block i of the source to block i of the destination, either of them through an index."""
    number = tl.program_id(0).to(tl.int64)
    source = number
    target = number
    if SRC_INDEXED:
        source = tl.load(src_index_ptr + number)
    if DST_INDEXED:
        target = tl.load(dst_index_ptr + number)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    data = tl.load(src_ptr + source * words + word, mask=inside)
    tl.store(dst_ptr + target * words + word, data, mask=inside)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """See `ops.copy_blocks`."""
    _move(pool, pool, src.to(pool.device), dst.to(pool.device))


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """See `ops.gather_blocks`. Pass `blocks` on the host where `out` is there: its values steer the copies."""
    if out.device != pool.device:
        host.gather_blocks(pool, blocks, out)
        return
    _move(pool, out, blocks.to(pool.device), None)


def scatter_blocks(pool: torch.Tensor, blocks: torch.Tensor, src: torch.Tensor) -> None:
    """See `ops.scatter_blocks`. Pass `blocks` on the host where `src` is there: its values steer the copies."""
    if src.device != pool.device:
        host.scatter_blocks(pool, blocks, src)
        return
    _move(src, pool, None, blocks.to(pool.device))


def _move(src: torch.Tensor, dst: torch.Tensor, src_index: torch.Tensor | None, dst_index: torch.Tensor | None) -> None:
    index = src_index if src_index is not None else dst_index
    assert index is not None
    if not len(index):
        return
    # A block holds keys and values, so even 16-bit blocks are a whole number of 4-byte words.
    source, target = src.contiguous().view(torch.int32), dst.view(torch.int32)
    words = source[0].numel()
    move_kernel[(len(index), triton.cdiv(words, WORDS))](
        source,
        target,
        src_index if src_index is not None else index,
        dst_index if dst_index is not None else index,
        words,
        SRC_INDEXED=src_index is not None,
        DST_INDEXED=dst_index is not None,
        WORDS=WORDS,
    )
