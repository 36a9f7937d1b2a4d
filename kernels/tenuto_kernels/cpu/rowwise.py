"""Norm, rotation with the KV store, and SwiGLU: the native operators where they apply, else plain torch; and the meaning of
a product with a quantised weight. Owns no state."""

from collections.abc import Callable

import torch
from torch import Tensor

from tenuto_kernels.cpu import native, native_torch
from tenuto_kernels.quant import QuantizedWeight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    native.rms_norm(x, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    native.silu_mul(gate_up, out)
    return out


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor
) -> Tensor:
    """See `ops.rope_store`."""
    native.rope_store(q, k, v, cos, sin, pool, layer, slots)
    return q


def quant_linear(
    weight: QuantizedWeight, bias: Tensor | None, *, invariant: bool = False
) -> Callable[[Tensor], Tensor]:
    """The definition, in fp32 over the dense weight; a CPU computes with `linear.PackedLinear` instead."""
    dense = weight.dense(torch.float32)
    return lambda x: native_torch.linear(x, dense, bias)
