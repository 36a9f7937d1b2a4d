"""Native CPU operators: typed entry points over the C++ library, each with a torch definition behind it.

Owner of the state: none here; the library handle belongs to `native_build`. An operator runs natively when the library
is there and its tensors are contiguous fp32 or bf16 on the CPU, and in plain torch (`native_torch`) otherwise; the two
agree within rounding. It runs on at most `torch.get_num_threads()` threads, of a pool of its own (native_pool.h says why).

What the native code promises beyond the torch definitions: the bits of a row of `linear` and of a query of
`paged_prefill` depend on that row alone (its prefix, for attention), never on what shares the call.
"""

import ctypes

import torch
from torch import Tensor

from tenuto_kernels.cpu import native_torch
from tenuto_kernels.cpu.native_build import library

_FLOATS = (torch.float32, torch.bfloat16)
_MAX_GROUP = 64


def available() -> bool:
    """Whether the native library is loaded; the first call may build it (seconds)."""
    return library() is not None


def _bf16(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _takes(*tensors: Tensor) -> bool:
    return all(t.dtype in _FLOATS and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension; weight in fp32; out may be x."""
    loaded = library()
    if loaded is None or not _takes(x, out, weight) or weight.dtype != torch.float32 or out.dtype != x.dtype:
        native_torch.rms_norm(x, weight, eps, out)
        return
    width = x.shape[-1]
    _same_shape("out", out, x.shape)
    _same_shape("weight", weight, (width,))
    rows = x.numel() // width
    loaded.tn_rms_norm(
        x.data_ptr(), _bf16(x), weight.data_ptr(), out.data_ptr(), rows, width, eps, torch.get_num_threads()
    )


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [T, F] = silu(gate) * up for gate_up [T, 2F] = gate | up."""
    loaded = library()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    _same_shape("out", out, (rows, width))
    if loaded is None or not _takes(gate_up, out) or out.dtype != gate_up.dtype:
        native_torch.silu_mul(gate_up, out)
        return
    loaded.tn_silu_mul(gate_up.data_ptr(), _bf16(gate_up), out.data_ptr(), rows, width, torch.get_num_threads())


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor
) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place, pairs (i, i + D/2), and write k and v to the pool's slots.

    cos, sin: [T, D/2] fp32. slots: [T] int64, block * block_size + offset. q, k and v may be slices of one [T, ...]
    projection: only the stride between tokens is free. Raises ValueError on a slot outside the pool.
    """
    loaded = library()
    tokens, q_heads, dim = q.shape
    _same_shape("cos", cos, (tokens, dim // 2))
    _same_shape("sin", sin, (tokens, dim // 2))
    _same_shape("v", v, k.shape)
    _same_shape("slots", slots, (tokens,))
    native = (
        loaded is not None
        and _takes(cos, sin, pool)
        and cos.dtype == sin.dtype == torch.float32
        and q.dtype in _FLOATS
        and q.dtype == k.dtype == v.dtype
        and all(t.stride(2) == 1 and t.stride(1) == dim and t.device.type == "cpu" for t in (q, k, v))
        and slots.dtype == torch.int64
        and slots.is_contiguous()
    )
    if not native or loaded is None:
        native_torch.rope_store(q, k, v, cos, sin, pool, layer, slots)
        return
    blocks, layers, _, kv_heads, size, _ = pool.shape
    strides = q.stride(0), k.stride(0), v.stride(0)
    shape = (ctypes.c_int64 * 11)(tokens, q_heads, kv_heads, dim, *strides, layers, layer, size, blocks)
    failed = loaded.tn_rope_store(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        _bf16(q),
        cos.data_ptr(),
        sin.data_ptr(),
        pool.data_ptr(),
        _bf16(pool),
        slots.data_ptr(),
        shape,
        torch.get_num_threads(),
    )
    if failed:
        raise ValueError(f"layer {layer} or a slot lies outside the pool {tuple(pool.shape)}")


def paged_decode(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, context_len: Tensor, scale: float, out: Tensor
) -> None:
    """One query a row: q, out [R, Hq, D]; pool [B, L, 2, Hkv, block, D]; block_tables int32 [R, N]; context_len int32
    [R], including the query's own position. A row without context yields zeros.

    Raises ValueError where a table entry or length does not fit the pool.
    """
    loaded = library()
    if loaded is None or not _attends(q, pool, block_tables, context_len, out):
        native_torch.paged_decode(q, pool, layer, block_tables, context_len, scale, out)
        return
    failed = loaded.tn_paged_decode(
        q.data_ptr(),
        _bf16(q),
        pool.data_ptr(),
        _bf16(pool),
        block_tables.data_ptr(),
        context_len.data_ptr(),
        scale,
        out.data_ptr(),
        _attention_shape(q, pool, layer, block_tables),
        torch.get_num_threads(),
    )
    if failed:
        raise ValueError(f"layer {layer}, a block table or a length does not fit the pool {tuple(pool.shape)}")


def paged_prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    query_start: Tensor,
    block_tables: Tensor,
    context_len: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Causal ranges: row r's queries q[query_start[r] : query_start[r + 1]] sit at the last positions of its context.

    q, out [T, Hq, D]; query_start int32 [R + 1]; the rest as in `paged_decode`. A query's bits depend on its own prefix
    only. Raises ValueError where a table entry, range or length does not fit the pool.
    """
    loaded = library()
    lengths = query_start.dtype == torch.int32 and query_start.is_contiguous()
    if loaded is None or not lengths or not _attends(q, pool, block_tables, context_len, out):
        native_torch.paged_prefill(q, pool, layer, query_start, block_tables, context_len, scale, out)
        return
    failed = loaded.tn_paged_prefill(
        q.data_ptr(),
        _bf16(q),
        pool.data_ptr(),
        _bf16(pool),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_len.data_ptr(),
        scale,
        out.data_ptr(),
        _attention_shape(q, pool, layer, block_tables),
        torch.get_num_threads(),
    )
    if failed:
        raise ValueError(f"layer {layer}, a block table, range or length does not fit the pool {tuple(pool.shape)}")


def _attends(q: Tensor, pool: Tensor, block_tables: Tensor, context_len: Tensor, out: Tensor) -> bool:
    _same_shape("out", out, q.shape)
    if q.shape[1] % pool.shape[3] or q.shape[2] != pool.shape[5]:
        raise ValueError(f"q {tuple(q.shape)} does not fit the pool {tuple(pool.shape)}")
    if block_tables.shape[0] != context_len.shape[0]:
        raise ValueError(f"{block_tables.shape[0]} block tables for {context_len.shape[0]} rows")
    integers = all(t.dtype == torch.int32 and t.is_contiguous() for t in (block_tables, context_len))
    return integers and _takes(q, pool, out) and q.dtype == out.dtype and q.shape[1] // pool.shape[3] <= _MAX_GROUP


def _attention_shape(q: Tensor, pool: Tensor, layer: int, block_tables: Tensor) -> ctypes.Array[ctypes.c_int64]:
    blocks, layers, _, kv_heads, size, dim = pool.shape
    rows, width = block_tables.shape
    q_stride = q.shape[1] * dim
    return (ctypes.c_int64 * 10)(rows, q.shape[1], kv_heads, dim, size, layers, layer, width, blocks, q_stride)


def _same_shape(name: str, tensor: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
