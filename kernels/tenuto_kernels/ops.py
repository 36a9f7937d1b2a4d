"""The kernels' entry points: check shapes and dtypes, then hand over to the backend. Owns no state.

Letters in shapes: T tokens of the batch, R rows, L layers, Hq and Hkv query and KV heads, D head dimension, N blocks, F the
inner width of the feed-forward part, V the vocabulary. A pool is `[blocks, L, 2, Hkv, block_size, D]` (see `layout`). All checks raise ValueError and name the argument.
"""

import torch

from tenuto_kernels.dispatch import kernels_for
from tenuto_kernels.layout import POOL_DTYPES
from tenuto_kernels.rows import AttentionRows

__all__ = [
    "AttentionRows",
    "add_rms_norm",
    "copy_blocks",
    "gather_blocks",
    "paged_attention",
    "rms_norm",
    "rope_store",
    "sample_tokens",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
]


def store_kv(pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values of T tokens into `layer` of the pool, cast to its dtype.

    `k`, `v`: `[T, Hkv, D]`; `slots`: int64 `[T]`, slot = block * block_size + offset, no slot twice.
    """
    _check_pool(pool, layer)
    shape = (len(slots), pool.shape[3], pool.shape[5])
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != shape:
            raise ValueError(f"store_kv: {name} must be {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"store_kv: {name} must be floating point, got {tensor.dtype}")
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(f"store_kv: slots must be int64 [T], got {slots.dtype} {list(slots.shape)}")
    kernels_for(pool).store_kv(pool, layer, k, v, slots)


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: AttentionRows,
    scale: float,
    *,
    window: int | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Causal attention of every row's queries over its own pages: softmax(scale * q k^T) v, in q's dtype.

    `q`: `[T, Hq, D]` with Hq a multiple of Hkv (query head h reads KV head h // (Hq / Hkv)); returns `[T, Hq, D]`.
    Prefill rows and decode rows mix freely; all keys and values the rows can see must have been stored before.
    `window`: a query at position p sees only the positions above p - window. `invariant`: every query's result is
    bitwise independent of how its sequence was cut into rows and of the rest of the batch (slower; for tests).
    """
    _check_pool(pool, layer)
    heads_kv, head_dim = pool.shape[3], pool.shape[5]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % heads_kv:
        raise ValueError(
            f"paged_attention: q must be [T, a multiple of {heads_kv}, {head_dim}] for this pool, got {list(q.shape)}"
        )
    if q.dtype not in POOL_DTYPES:
        raise ValueError(f"paged_attention: q must be one of {POOL_DTYPES}, got {q.dtype}")
    if q.shape[0] != rows.num_tokens:
        raise ValueError(f"paged_attention: q has {q.shape[0]} tokens, rows describe {rows.num_tokens}")
    if rows.block_tables.device != pool.device or q.device != pool.device:
        raise ValueError(
            f"paged_attention: q ({q.device}) and block_tables ({rows.block_tables.device}) must be on {pool.device}"
        )
    if max(rows.context_len, default=0) > rows.block_tables.shape[1] * pool.shape[4]:
        raise ValueError(
            f"paged_attention: a context of {max(rows.context_len)} does not fit {rows.block_tables.shape[1]} blocks "
            f"of {pool.shape[4]}"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1, got {window}")
    return kernels_for(pool).paged_attention(q, pool, layer, rows, scale, window=window, invariant=invariant)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block `src[i]` to block `dst[i]` (int64 `[N]`) within one pool: copy-on-write.

    A block must not be both a source and a destination, nor a destination twice: the order is unspecified.
    """
    _check_pool(pool, 0)
    _check_blocks("copy_blocks", "src", src)
    _check_blocks("copy_blocks", "dst", dst)
    if len(src) != len(dst):
        raise ValueError(f"copy_blocks: {len(src)} sources for {len(dst)} destinations")
    kernels_for(pool).copy_blocks(pool, src, dst)


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Copy blocks `blocks` (int64 `[N]`) of the pool to `out` `[N, *block_shape]`: offload to staging or a host pool.

    `out` may live on another device than the pool; the copy is then enqueued on the current stream.
    """
    _check_pool(pool, 0)
    _check_blocks("gather_blocks", "blocks", blocks)
    _check_staging("gather_blocks", "out", pool, blocks, out)
    kernels_for(pool).gather_blocks(pool, blocks, out)


def scatter_blocks(pool: torch.Tensor, blocks: torch.Tensor, src: torch.Tensor) -> None:
    """Copy `src` `[N, *block_shape]` into blocks `blocks` (int64 `[N]`, none twice) of the pool: restore.

    `src` may live on another device than the pool; the copy is then enqueued on the current stream.
    """
    _check_pool(pool, 0)
    _check_blocks("scatter_blocks", "blocks", blocks)
    _check_staging("scatter_blocks", "src", pool, blocks, src)
    kernels_for(pool).scatter_blocks(pool, blocks, src)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019), in x's dtype.

    `x`: `[T, ..., width]`, where only the stride between tokens is free; `weight`: fp32 `[width]`.
    """
    _check_norm("rms_norm", x, weight)
    return kernels_for(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta`, rounded to x's dtype, and the `rms_norm` of that: a residual's end and the next part's beginning."""
    _check_norm("add_rms_norm", x, weight)
    if delta.shape != x.shape or delta.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: delta must be {x.dtype} {list(x.shape)}, got {delta.dtype} {list(delta.shape)}"
        )
    return kernels_for(x).add_rms_norm(x, delta, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for `[T, 2F]` holding gate, then up; returns `[T, F]` (Shazeer 2020, SwiGLU)."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [T, 2F], got {list(gate_up.shape)}")
    return kernels_for(gate_up).silu_mul(gate_up)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate q `[T, Hq, D]` and k `[T, Hkv, D]`, dimension i with i + D/2 by the token's angle (Su et al. 2021), write k
    and v into `layer` of the pool and return the rotated q. q and k may be overwritten.

    `cos`, `sin`: fp32 `[T, D/2]`; `slots`: int64 `[T]`, slot = block * block_size + offset, no slot twice. The Triton
    kernel skips negative slots (padding of a captured graph).
    """
    _check_pool(pool, layer)
    shape = (len(slots), pool.shape[3], pool.shape[5])
    if k.shape != shape or v.shape != shape or q.shape[::2] != shape[::2]:
        raise ValueError(f"rope_store: k and v must be {list(shape)}, got q {q.shape}, k {k.shape}, v {v.shape}")
    if cos.shape != (shape[0], shape[2] // 2) or sin.shape != cos.shape or cos.dtype != torch.float32:
        raise ValueError(
            f"rope_store: cos and sin must be fp32 [T, {shape[2] // 2}], got {cos.dtype} {list(cos.shape)}"
        )
    return kernels_for(pool).rope_store(q, k, v, cos, sin, pool, layer, slots)


def sample_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """One token for each row of `logits` (fp32 `[R, V]`, not changed): int64 `[R]` on their device.

    `settings`: fp64 `[4, R]` in host memory: temperature (0: the largest logit, else divides them), top_k (0: all; ties
    with the k-th stay), top_p over what is left (the smallest set of most likely tokens whose mass reaches it, with ties
    of the last) and a uniform in [0, 1). The token is the first at which the cumulative weight exceeds that share of the
    total. -1 for a row with a NaN or without a finite maximum.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"sample_tokens: logits must be fp32 [R, V], got {logits.dtype} {list(logits.shape)}")
    if settings.shape != (4, len(logits)) or settings.dtype != torch.float64 or settings.device.type != "cpu":
        raise ValueError(f"sample_tokens: settings must be fp64 [4, {len(logits)}] on the host, got {settings.shape}")
    return kernels_for(logits).sample_tokens(logits, settings)


def _check_norm(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() < 2 or weight.shape != x.shape[-1:] or weight.dtype != torch.float32:
        raise ValueError(
            f"{op}: weight must be fp32 [{x.shape[-1]}] for x {list(x.shape)}, got {weight.dtype} {list(weight.shape)}"
        )


def _check_pool(pool: torch.Tensor, layer: int) -> None:
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            f"pool must be a contiguous [blocks, L, 2, Hkv, block_size, D] tensor, got {list(pool.shape)} "
            f"with strides {list(pool.stride())}"
        )
    if pool.dtype not in POOL_DTYPES:
        raise ValueError(f"pool must be one of {POOL_DTYPES}, got {pool.dtype}")
    if not 0 <= layer < pool.shape[1]:
        raise ValueError(f"layer {layer} is outside the pool's {pool.shape[1]} layers")


def _check_blocks(op: str, name: str, blocks: torch.Tensor) -> None:
    if blocks.dtype != torch.int64 or blocks.dim() != 1:
        raise ValueError(f"{op}: {name} must be int64 [N], got {blocks.dtype} {list(blocks.shape)}")


def _check_staging(op: str, name: str, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    shape = (len(blocks), *pool.shape[1:])
    if staging.shape != shape or staging.dtype != pool.dtype:
        raise ValueError(f"{op}: {name} must be {pool.dtype} {list(shape)}, got {staging.dtype} {list(staging.shape)}")
