"""Paged attention in torch. Owns no state."""

import torch

from tenuto_kernels.layout import KEY, VALUE
from tenuto_kernels.rows import AttentionRows


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
    """See `ops.paged_attention`."""
    out = torch.empty_like(q)
    group = q.shape[1] // pool.shape[3]
    for row in range(rows.num_rows):
        begin, end, context = rows.query_start[row], rows.query_start[row + 1], rows.context_len[row]
        table = rows.block_tables[row, : -(-context // pool.shape[4])].long()
        kv = pool[table, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].float()
        k, v = (kv[part].repeat_interleave(group, dim=0) for part in (KEY, VALUE))
        scores = torch.einsum("thd,hcd->htc", q[begin:end].float(), k) * scale
        position = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)[None]
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[begin:end] = torch.einsum("htc,hcd->thd", weights, v).to(q.dtype)
    return out
