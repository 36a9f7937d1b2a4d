"""The operators of `native.py` in plain torch: what runs without a compiler, in the same signatures. Owns no state.

Arithmetic is in fp32 whatever the buffers hold, as in the native code.
"""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.nn.functional.linear(x.float(), weight.float(), bias)
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor
) -> None:
    for heads in (q, k):
        first, second = heads.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        heads.copy_(torch.cat([first * c - second * s, second * c + first * s], dim=-1))
    block, offset = slots // pool.shape[4], slots % pool.shape[4]
    pool[block, layer, 0, :, offset] = k.to(pool.dtype)
    pool[block, layer, 1, :, offset] = v.to(pool.dtype)


def paged_decode(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, context_len: Tensor, scale: float, out: Tensor
) -> None:
    start = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    paged_prefill(q, pool, layer, start, block_tables, context_len, scale, out)


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
    heads, size = pool.shape[3], pool.shape[4]
    group = q.shape[1] // heads
    starts, contexts = query_start.tolist(), context_len.tolist()
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        if context == 0:
            out[begin:end] = 0
            continue
        pages = pool[block_tables[row, : -(-context // size)].long(), layer]  # [blocks, 2, Hkv, size, D]
        kv = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].float().repeat_interleave(group, dim=1)
        scores = q[begin:end].float().transpose(0, 1) @ kv[0].transpose(1, 2) * scale
        position = torch.arange(context - (end - begin), context)
        scores.masked_fill_(torch.arange(context) > position[:, None], float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ kv[1]).transpose(0, 1).to(out.dtype)
