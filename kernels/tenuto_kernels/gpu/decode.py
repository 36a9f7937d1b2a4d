# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Paged attention of single queries, split over the keys: one program a row, KV head and part. Owns no state.

A lone long context would occupy as many processors as it has KV heads; splitting its keys and merging the parts by their
log-sum-exp fills the device.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tenuto_kernels.gpu.shared import fold_keys, power_of_two

#: More parts than this cost more to merge than they gain.
SPLITS_MAX = 32


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and launch options; `block_g` rows hold the query heads of one group, padded to a product's minimum."""

    block_g: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_config(head_dim: int, group: int, fp32: bool) -> DecodeConfig:
    """Chosen so that neither sm_80 nor sm_90 spills registers (held by a test)."""
    block_g = max(16, power_of_two(group))
    if fp32:
        return DecodeConfig(block_g, block_n=32, num_warps=8, num_stages=1)
    return DecodeConfig(block_g, block_n=64, num_warps=4, num_stages=3 if head_dim <= 64 else 2)


def num_splits(rows: int, heads: int, longest: int, block_n: int, processors: int) -> int:
    """Parts per row, a power of two: two programs a processor, and at least four tiles of keys a part."""
    wanted = -(-2 * processors // (rows * heads))
    useful = max(1, longest // (4 * block_n))
    return min(power_of_two(wanted), 1 << (useful.bit_length() - 1), SPLITS_MAX)


@triton.jit
def decode_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    row_ptr,
    start_ptr,
    context_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
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
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    FP32: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """With one part the result goes to `out`; else to `part` [R, HKV * GROUP, SPLITS, D] and `lse` [.., SPLITS]."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(row_ptr + index)
    context = tl.load(context_ptr + row)
    token = tl.load(start_ptr + row).to(tl.int64)

    g = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, DP)
    here = (g < GROUP)[:, None] & (dim < D)[None, :]
    q_head = head * GROUP + g
    q = tl.load(q_ptr + token * stride_q + (q_head * D)[:, None] + dim[None, :], mask=here, other=0.0)
    if FP32:
        q = q.to(tl.float32)

    low = 0
    if WINDOWED:
        low = tl.maximum(0, context - window) // BLOCK_N * BLOCK_N
    chunk = tl.cdiv(tl.cdiv(context - low, SPLITS), BLOCK_N) * BLOCK_N
    begin = low + split * chunk
    end = tl.minimum(context, begin + chunk)
    position = tl.zeros((BLOCK_G,), dtype=tl.int32) + (context - 1)
    acc = tl.zeros((BLOCK_G, DP), dtype=tl.float32)
    peak = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    keys_ptr = pool_ptr + layer_offset + head * (BS * D)
    pages_ptr = table_ptr + row.to(tl.int64) * stride_table
    for key in range(begin, end, BLOCK_N):
        acc, peak, total = fold_keys(
            acc, peak, total, q, keys_ptr, pages_ptr, key, position, context, window, scale_log2, stride_block,
            HKV, D, DP, BS, BLOCK_N, FP32, True, WINDOWED,
        )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        target = out_ptr + (token * (HKV * GROUP) + q_head)[:, None] * D + dim[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=here)
    else:
        part = (index.to(tl.int64) * (HKV * GROUP) + q_head) * SPLITS + split
        tl.store(part_ptr + part[:, None] * D + dim[None, :], result, mask=here)
        # An empty part has total 0 and peak -inf: its logarithm is -inf, and its weight in the merge 0.
        tl.store(lse_ptr + part, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=g < GROUP)


@triton.jit
def combine_kernel(
    part_ptr,
    lse_ptr,
    row_ptr,
    start_ptr,
    out_ptr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the parts of one row and query head: the mean of their results weighted by 2^lse."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(start_ptr + tl.load(row_ptr + index)).to(tl.int64)
    base = (index.to(tl.int64) * HQ + head) * SPLITS
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DP)
    inside = (dim < D)[None, :]
    lse = tl.load(lse_ptr + base + split)
    peak = tl.max(lse, 0)
    # A row of length 0 (padding) has empty parts alone: zeros then, rather than numbers that are none.
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    parts = tl.load(part_ptr + (base + split)[:, None] * D + dim[None, :], mask=inside, other=0.0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (token * HQ + head) * D + dim, result.to(out_ptr.dtype.element_ty), mask=dim < D)
