"""Paged attention in torch: sorts a batch into decode rows and prefill rows. Owns no state."""

from dataclasses import dataclass

import torch

from tenuto_kernels.cpu import invariant as invariant_mode
from tenuto_kernels.cpu import prefill
from tenuto_kernels.cpu.decode import DecodeRows, decode_attention
from tenuto_kernels.cpu.pages import gather_pages, page_index
from tenuto_kernels.dispatch import native_bf16
from tenuto_kernels.layout import KEY, VALUE
from tenuto_kernels.rows import AttentionRows


@dataclass(frozen=True, eq=False)
class _PrefillRow:
    begin: int
    end: int
    context: int
    pages: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """What all layers share: `decode_tokens` is None where every token of the batch is a decode row."""

    decode: DecodeRows | None
    decode_tokens: torch.Tensor | None
    prefill: tuple[_PrefillRow, ...]


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
    if invariant:
        for row in range(rows.num_rows):
            begin, end = rows.query_start[row], rows.query_start[row + 1]
            out[begin:end] = invariant_mode.attend_row(
                q[begin:end], pool, layer, rows.block_tables[row], rows.context_len[row], scale, window
            )
        return out
    plan: _Plan = rows.once(("cpu", pool.shape[1:]), lambda: _plan(rows, pool))
    if plan.decode is not None and plan.decode_tokens is None:
        return decode_attention(q, pool, layer, plan.decode, scale, window)
    if plan.decode is not None:
        tokens = plan.decode_tokens
        out[tokens] = decode_attention(q[tokens], pool, layer, plan.decode, scale, window)
    for part in plan.prefill:
        out[part.begin : part.end] = _prefill_row(q[part.begin : part.end], pool, layer, part, scale, window)
    return out


def compute_dtype(q: torch.Tensor, pool: torch.Tensor) -> torch.dtype:
    """bf16 only where everything is bf16 and the processor multiplies it natively; emulated it is slower than fp32."""
    both_bf16 = q.dtype == torch.bfloat16 and pool.dtype == torch.bfloat16
    return torch.bfloat16 if both_bf16 and (q.device.type != "cpu" or native_bf16()) else torch.float32


def _prefill_row(
    q: torch.Tensor, pool: torch.Tensor, layer: int, row: _PrefillRow, scale: float, window: int | None
) -> torch.Tensor:
    n, heads_q, dim = q.shape
    heads = pool.shape[3]
    dtype = compute_dtype(q, pool)
    kv = gather_pages(pool, layer, row.pages)[:, :, : row.context].to(dtype)
    grouped = q.to(dtype).view(n, heads, heads_q // heads, dim).permute(1, 2, 0, 3)
    out = prefill.attend(grouped, kv[KEY], kv[VALUE], scale, window)
    return out.permute(2, 0, 1, 3).reshape(n, heads_q, dim)


def _plan(rows: AttentionRows, pool: torch.Tensor) -> _Plan:
    block_size = pool.shape[4]
    singles = [row for row in range(rows.num_rows) if rows.query_len(row) == 1]
    longer = [row for row in range(rows.num_rows) if rows.query_len(row) > 1]
    prefill_rows = tuple(
        _PrefillRow(
            begin=rows.query_start[row],
            end=rows.query_start[row + 1],
            context=rows.context_len[row],
            pages=page_index(pool, rows.block_tables[row, : -(-rows.context_len[row] // block_size)]),
        )
        for row in longer
    )
    if not singles:
        return _Plan(decode=None, decode_tokens=None, prefill=prefill_rows)
    if not longer:
        return _Plan(decode=DecodeRows(rows.block_tables, rows.context_len), decode_tokens=None, prefill=())
    chosen = torch.tensor(singles, device=pool.device)
    tokens = torch.tensor([rows.query_start[row] for row in singles], device=pool.device)
    decode = DecodeRows(rows.block_tables[chosen], tuple(rows.context_len[row] for row in singles))
    return _Plan(decode=decode, decode_tokens=tokens, prefill=prefill_rows)
