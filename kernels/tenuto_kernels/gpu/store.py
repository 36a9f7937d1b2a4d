# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Storing keys and values in a pool: one program a token. Owns no state."""

import torch
import triton
import triton.language as tl

from tenuto_kernels.gpu.shared import INTERPRETED, power_of_two


@triton.jit
def store_kernel(
    pool_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    stride_k,
    stride_v,
    stride_block,
    layer_offset,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, BLOCK)
    inside = element < HKV * D
    target = pool_ptr + slot // BS * stride_block + layer_offset
    target += element // D * (BS * D) + slot % BS * D + element % D
    k = tl.load(k_ptr + token * stride_k + element, mask=inside)
    v = tl.load(v_ptr + token * stride_v + element, mask=inside)
    tl.store(target, k.to(pool_ptr.dtype.element_ty), mask=inside)
    tl.store(target + HKV * BS * D, v.to(pool_ptr.dtype.element_ty), mask=inside)


def store_kv(pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See `ops.store_kv`."""
    tokens, heads, dim = k.shape
    if not tokens:
        return
    if INTERPRETED:
        # The interpreter cuts off the bits that the hardware's conversion to bf16 rounds.
        k, v = k.to(pool.dtype), v.to(pool.dtype)
    # Only the stride between tokens is free: keys and values are usually slices of one projection.
    k, v = (part if part.stride()[1:] == (dim, 1) else part.contiguous() for part in (k, v))
    store_kernel[(tokens,)](
        pool,
        k,
        v,
        slots,
        k.stride(0),
        v.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        HKV=heads,
        D=dim,
        BS=pool.shape[4],
        BLOCK=power_of_two(heads * dim),
    )
