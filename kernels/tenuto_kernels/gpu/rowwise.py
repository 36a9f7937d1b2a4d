# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What a decoder layer does row by row between its products: norm, rotation with the KV store, SwiGLU. Owns no state.

Each is one pass over memory where torch needs several; arithmetic is fp32 whatever the tensors hold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenuto_kernels.gpu.shared import narrow, power_of_two

#: Elements of one row that one program of the SwiGLU computes.
COLUMNS = 1024


@triton.jit
def rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    eps,
    stride_x,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Part `program 1` of token `program 0`. With ADD, x + delta is rounded, kept in `sum` and normalised instead of x."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = token * tl.num_programs(1) + part
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + token * stride_x + part * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        rounded = narrow(x, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, narrow(x * scale * weight, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * width + column, narrow(gate * tl.sigmoid(gate) * up, out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    pool_ptr,
    slots_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_block,
    layer_offset,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    HQP: tl.constexpr,
    HKVP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One token: q [HQ, D] is rotated in place, k rotated into the pool's slot, v copied there. A negative slot (padding)
    stores nothing. HQP, HKVP and PAIRS: HQ, HKV and D / 2 as powers of two."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    paired = pair < D // 2
    cos = tl.load(cos_ptr + token * (D // 2) + pair, mask=paired, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * (D // 2) + pair, mask=paired, other=0.0)[None, :]

    head = tl.arange(0, HQP)
    here = (head < HQ)[:, None] & paired[None, :]
    at = q_ptr + token * stride_q + (head * D)[:, None] + pair[None, :]
    first = tl.load(at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=here, other=0.0).to(tl.float32)
    tl.store(at, narrow(first * cos - second * sin, q_ptr.dtype.element_ty), mask=here)
    tl.store(at + D // 2, narrow(second * cos + first * sin, q_ptr.dtype.element_ty), mask=here)

    slot = tl.load(slots_ptr + token)
    head = tl.arange(0, HKVP)
    here = (head < tl.where(slot >= 0, HKV, 0))[:, None] & paired[None, :]
    offset = (head * D)[:, None] + pair[None, :]
    target = pool_ptr + slot // BS * stride_block + layer_offset + slot % BS * D
    target += (head * (BS * D))[:, None] + pair[None, :]
    first = tl.load(k_ptr + token * stride_k + offset, mask=here, other=0.0).to(tl.float32)
    second = tl.load(k_ptr + token * stride_k + offset + D // 2, mask=here, other=0.0).to(tl.float32)
    tl.store(target, narrow(first * cos - second * sin, pool_ptr.dtype.element_ty), mask=here)
    tl.store(target + D // 2, narrow(second * cos + first * sin, pool_ptr.dtype.element_ty), mask=here)
    target += HKV * BS * D
    first = tl.load(v_ptr + token * stride_v + offset, mask=here, other=0.0).to(tl.float32)
    second = tl.load(v_ptr + token * stride_v + offset + D // 2, mask=here, other=0.0).to(tl.float32)
    tl.store(target, narrow(first, pool_ptr.dtype.element_ty), mask=here)
    tl.store(target + D // 2, narrow(second, pool_ptr.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    return _rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    return _rms_norm(x, delta.contiguous(), weight, eps)


def _rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    # Only the stride between tokens is free: queries and keys are slices of one projection.
    if not x[0:1].is_contiguous():
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if delta is not None else out
    if x.numel():
        rms_norm_kernel[(x.shape[0], x[0].numel() // width)](
            x, delta if delta is not None else x, weight, total, out, eps, x.stride(0),
            WIDTH=width, BLOCK=power_of_two(width), ADD=delta is not None, num_warps=norm_warps(width),
        )  # fmt: skip
    return total, out


def norm_warps(width: int) -> int:
    """About eight elements a thread, so that a row stays in registers between the sum and the scaling."""
    return min(16, max(1, power_of_two(width) // 256))


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, COLUMNS))
        silu_mul_kernel[grid](gate_up.contiguous(), out, width, BLOCK=COLUMNS)
    return out


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor
) -> Tensor:
    """See `ops.rope_store`."""
    tokens, q_heads, dim = q.shape
    q, k, v = (part if part.stride()[1:] == (dim, 1) else part.contiguous() for part in (q, k, v))
    if tokens:
        heads = k.shape[1]
        rope_store_kernel[(tokens,)](
            q, k, v, cos, sin, pool, slots, q.stride(0), k.stride(0), v.stride(0), pool.stride(0),
            layer * pool.stride(1),
            HQ=q_heads, HKV=heads, D=dim, BS=pool.shape[4],
            HQP=power_of_two(q_heads), HKVP=power_of_two(heads), PAIRS=power_of_two(dim // 2),
        )  # fmt: skip
    return q
