# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the Triton kernels share: the step over one tile of keys, and how the kernels were bound. Owns no state.

Kernel parameters carry no Python types (they are Triton values), hence the exemption above. Written to what Triton 3.6 to
3.9 have in common.
"""

import os

import torch
import triton
import triton.language as tl

# Fused multiply-adds, as every Triton up to 3.9 generates unasked; 3.10 changes the default, 3.9 warns until one is set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@triton.jit
def fold_keys(
    acc,
    peak,
    total,
    q,
    keys_ptr,
    table_ptr,
    first_key,
    position,
    context,
    window,
    scale_log2,
    stride_block,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP32: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Online softmax over keys `first_key ... first_key + BLOCK_N` (Milakov and Gimelshein 2018, in base 2).

    `acc` [M, DP], `peak` and `total` [M] are the running sum, maximum and weight; `position` [M] the queries' positions;
    `keys_ptr` the layer's keys of this head in block 0 (its values lie `HKV * BS * D` further). Without MASKED every key
    of the tile exists and is visible to every query.
    """
    key = first_key + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DP)
    exists = key < context
    if MASKED:
        block = tl.load(table_ptr + key // BS, mask=exists, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BS).to(tl.int64)
    offset = block * stride_block + (key % BS) * D
    k_ptr = keys_ptr + offset[None, :] + dim[:, None]
    v_ptr = keys_ptr + HKV * BS * D + offset[:, None] + dim[None, :]
    # Slots past the context hold anything, NaN included: they must not even be loaded.
    if MASKED:
        k = tl.load(k_ptr, mask=exists[None, :] & (dim < D)[:, None], other=0.0)
        v = tl.load(v_ptr, mask=exists[:, None] & (dim < D)[None, :], other=0.0)
    elif DP != D:
        k = tl.load(k_ptr, mask=(dim < D)[:, None], other=0.0)
        v = tl.load(v_ptr, mask=(dim < D)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr)
        v = tl.load(v_ptr)
    if FP32:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    if MASKED:
        visible = (key[None, :] <= position[:, None]) & exists[None, :]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    peak_next = tl.maximum(peak, tl.max(scores, 1))
    # A query that has seen no key yet has a peak of -inf, and -inf - -inf is no number.
    base = tl.where(peak_next == float("-inf"), 0.0, peak_next)
    decay = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, peak_next, total


#: Whether the kernels of this process run in Triton's interpreter, on CPU tensors.
INTERPRETED: bool = not isinstance(fold_keys, triton.runtime.JITFunction)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """fp32 to `dtype`, to nearest even. The interpreter cuts bits off where the hardware's conversion to bf16 rounds."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = (bits & -65536).to(tl.float32, bitcast=True)
    return value.to(dtype)


LOG2_E = 1.4426950408889634


def computes_fp32(q: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether products run in fp32: where q or the pool is, and in the interpreter, whose bf16 products are wrong."""
    return INTERPRETED or q.dtype != pool.dtype or q.dtype == torch.float32


def power_of_two(value: int) -> int:
    """The smallest power of two not below `value`."""
    return 1 << (value - 1).bit_length()
