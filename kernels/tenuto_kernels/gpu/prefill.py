# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Paged attention of arbitrary ranges of queries: one program a tile of queries and KV head. Owns no state.

The query heads of a group are packed into the rows of a tile (row m is query `m // GROUP`, head `m % GROUP`), so that a page
is read once for all of them.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tenuto_kernels.gpu.shared import fold_keys, power_of_two


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes and launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def queries(self, group: int) -> int:
        """Query tokens of one tile."""
        return self.block_m // group


def prefill_config(head_dim: int, group: int, fp32: bool) -> PrefillConfig:
    """Chosen so that neither sm_80 nor sm_90 spills registers (held by a test)."""
    if fp32:
        return PrefillConfig(block_m=max(32, power_of_two(group)), block_n=16, num_warps=8, num_stages=1)
    if head_dim <= 64:
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
    # Dividing rows by a group that is no power of two takes registers that a wide tile of keys would need.
    block_n = 64 if group == power_of_two(group) else 32
    return PrefillConfig(block_m=128, block_n=block_n, num_warps=8, num_stages=2)


@triton.jit
def prefill_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    tile_row_ptr,
    tile_first_ptr,
    start_ptr,
    context_ptr,
    out_ptr,
    scale_log2,
    stride_q,
    stride_block,
    layer_offset,
    stride_table,
    window,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP32: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """A tile starts at absolute position `tile_first`, which may lie before its row: those queries are padding."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tile_row_ptr + tile)
    first = tl.load(tile_first_ptr + tile)
    begin = tl.load(start_ptr + row)
    row_first = tl.load(context_ptr + row) - (tl.load(start_ptr + row + 1) - begin)
    context = tl.load(context_ptr + row)
    QUERIES: tl.constexpr = BLOCK_M // GROUP

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DP)
    position = first + m // GROUP
    live = (m < QUERIES * GROUP) & (position >= row_first) & (position < context)
    token = (begin + position - row_first).to(tl.int64)
    q_head = head * GROUP + m % GROUP
    here = live[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + (token * stride_q + q_head * D)[:, None] + dim[None, :], mask=here, other=0.0)
    if FP32:
        q = q.to(tl.float32)

    acc = tl.zeros((BLOCK_M, DP), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    keys_ptr = pool_ptr + layer_offset + head * (BS * D)
    pages_ptr = table_ptr + row.to(tl.int64) * stride_table
    low = 0
    unmasked_end = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        low = tl.maximum(0, first - window + 1) // BLOCK_N * BLOCK_N
        unmasked_end = low
    for key in range(low, unmasked_end, BLOCK_N):
        acc, peak, total = fold_keys(
            acc, peak, total, q, keys_ptr, pages_ptr, key, position, context, window, scale_log2, stride_block,
            HKV, D, DP, BS, BLOCK_N, FP32, False, WINDOWED,
        )  # fmt: skip
    for key in range(unmasked_end, tl.minimum(context, first + QUERIES), BLOCK_N):
        acc, peak, total = fold_keys(
            acc, peak, total, q, keys_ptr, pages_ptr, key, position, context, window, scale_log2, stride_block,
            HKV, D, DP, BS, BLOCK_N, FP32, True, WINDOWED,
        )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out_ptr + (token * (HKV * GROUP * D) + q_head * D)[:, None] + dim[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=here)
