"""Attention of one row of several query tokens, in torch. Owns no state.

Two ways, both measured at 512 queries over 8192 keys (9 query heads, 3 KV heads, D 64, two cores without bf16
arithmetic): `_split` (past and self, merged) 147 GFLOPS in fp32, `_blocked` 105 in fp32. Processors with native bf16
arithmetic run `_blocked` on bf16.
"""

from collections.abc import Callable

import torch

#: Query tokens of one blocked product: 64 rows of scores stay in cache at any context.
QUERY_TILE = 64

#: Private, and the only attention operator on CPU that also returns the log-sum-exp.
_FLASH: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of the last n positions of a context of c, causal.

    `q` `[Hkv, G, n, D]`, `k` and `v` `[Hkv, c, D]`, all of one dtype; returns `[Hkv, G, n, D]`.
    """
    if q.dtype == torch.float32 and q.device.type == "cpu" and window is None and _FLASH is not None:
        return _split(q, k, v, scale)
    return _blocked(q, k, v, scale, window)


def _split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Past keys without a mask (the query heads of a group folded into the query length, so that nothing is repeated),
    the row's own keys causally, merged by their log-sum-exp: softmax over a union is the mean weighted by exp(lse)."""
    assert _FLASH is not None
    heads, group, n, dim = q.shape
    past = k.shape[1] - n
    own_k, own_v = (
        part[:, None, past:].expand(heads, group, n, dim).reshape(1, heads * group, n, dim) for part in (k, v)
    )
    own, own_lse = _FLASH(q.reshape(1, heads * group, n, dim), own_k, own_v, 0.0, True, scale=scale)
    own = own.view(heads, group, n, dim)
    if not past:
        return own
    before, before_lse = _FLASH(
        q.reshape(1, heads, group * n, dim), k[None, :, :past], v[None, :, :past], 0.0, False, scale=scale
    )
    weight = torch.sigmoid(before_lse.view(heads, group, n, 1) - own_lse.view(heads, group, n, 1))
    return torch.lerp(own, before.view(heads, group, n, dim), weight)


def _blocked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Tiles of queries against all the keys they see; scores and sums in fp32, products in the dtype of `q`."""
    heads, group, n, dim = q.shape
    context = k.shape[1]
    out = torch.empty_like(q)
    for begin in range(0, n, QUERY_TILE):
        end = min(begin + QUERY_TILE, n)
        first, last = context - n + begin, context - n + end
        low = 0 if window is None else max(0, first - window + 1)
        tile = q[:, :, begin:end].reshape(heads, group * (end - begin), dim)
        scores = torch.bmm(tile, k[:, low:last].transpose(1, 2)).float().mul_(scale)
        position = torch.arange(first, last, device=q.device)[:, None]
        key = torch.arange(low, last, device=q.device)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        scores.view(heads, group, end - begin, last - low).masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(dim=-1).to(q.dtype)
        out[:, :, begin:end] = torch.bmm(weights, v[:, low:last]).view(heads, group, end - begin, dim)
    return out
