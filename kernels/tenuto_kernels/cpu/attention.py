"""Paged attention on the CPU: sorts a batch into decode and longer rows and picks the path for each. Owns no state.

The native operators read the pages in place and beat the torch definitions at every size measured (by 1.4x and more),
so they run wherever they can; the torch definitions serve windows, fp16 and machines without a compiler.
"""

from dataclasses import dataclass

import torch

from tenuto_kernels.cpu import invariant as invariant_mode
from tenuto_kernels.cpu import native, prefill
from tenuto_kernels.cpu.decode import DecodeRows, decode_attention, native_takes
from tenuto_kernels.cpu.pages import gather_pages, page_index
from tenuto_kernels.dispatch import native_bf16
from tenuto_kernels.layout import KEY, VALUE
from tenuto_kernels.rows import AttentionRows


@dataclass(frozen=True, eq=False)
class _Ranges:
    """Some rows of a batch as the native operator takes them; `tokens` is None where they are the whole batch."""

    tokens: torch.Tensor | None
    query_start: torch.Tensor
    context: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """What all layers share. `decode_tokens` is None where every row is a decode row; `longer` are the other rows."""

    decode: DecodeRows | None
    decode_tokens: torch.Tensor | None
    longer: tuple[int, ...]


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
    if invariant:
        return _invariant(q, pool, layer, rows, scale, window)
    plan: _Plan = rows.once("plan", lambda: _plan(rows))
    if plan.decode is not None and plan.decode_tokens is None:
        return decode_attention(q, pool, layer, plan.decode, scale, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if plan.decode is not None:
        tokens = plan.decode_tokens
        out[tokens] = decode_attention(q[tokens], pool, layer, plan.decode, scale, window)
    if native_takes(q, pool, window):
        ranges = rows.once("longer", lambda: _ranges(rows, plan.longer))
        _native_prefill(q, pool, layer, ranges, scale, out)
        return out
    for row in plan.longer:
        span = slice(rows.query_start[row], rows.query_start[row + 1])
        out[span] = _prefill_row(q[span], pool, layer, rows, row, scale, window)
    return out


def compute_dtype(q: torch.Tensor, pool: torch.Tensor) -> torch.dtype:
    """bf16 only where everything is bf16 and the processor multiplies it natively; emulated it is slower than fp32."""
    both_bf16 = q.dtype == torch.bfloat16 and pool.dtype == torch.bfloat16
    return torch.bfloat16 if both_bf16 and (q.device.type != "cpu" or native_bf16()) else torch.float32


def _invariant(
    q: torch.Tensor, pool: torch.Tensor, layer: int, rows: AttentionRows, scale: float, window: int | None
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if native_takes(q, pool, window):
        # One operator for rows of every length: its sums run over a query's own prefix in an order of their own.
        everything = rows.once("all", lambda: _ranges(rows, tuple(range(rows.num_rows))))
        _native_prefill(q, pool, layer, everything, scale, out)
        return out
    for row in range(rows.num_rows):
        span = slice(rows.query_start[row], rows.query_start[row + 1])
        out[span] = invariant_mode.attend_row(
            q[span], pool, layer, rows.block_tables[row], rows.context_len[row], scale, window
        )
    return out


def _native_prefill(
    q: torch.Tensor, pool: torch.Tensor, layer: int, ranges: _Ranges, scale: float, out: torch.Tensor
) -> None:
    """Attend the ranges and write their tokens of `out`."""
    arguments = (pool, layer, ranges.query_start, ranges.tables, ranges.context, scale)
    if ranges.tokens is None:
        native.paged_prefill(q.contiguous(), *arguments, out)
        return
    part = q[ranges.tokens]
    result = torch.empty_like(part)
    native.paged_prefill(part, *arguments, result)
    out[ranges.tokens] = result


def _prefill_row(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: AttentionRows,
    row: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    n, heads_q, dim = q.shape
    heads, block_size = pool.shape[3], pool.shape[4]
    context = rows.context_len[row]
    pages = rows.once(("pages", row), lambda: page_index(pool, rows.block_tables[row, : -(-context // block_size)]))
    dtype = compute_dtype(q, pool)
    kv = gather_pages(pool, layer, pages)[:, :, :context].to(dtype)
    grouped = q.to(dtype).view(n, heads, heads_q // heads, dim).permute(1, 2, 0, 3)
    out = prefill.attend(grouped, kv[KEY], kv[VALUE], scale, window)
    return out.permute(2, 0, 1, 3).reshape(n, heads_q, dim).to(q.dtype)


def _plan(rows: AttentionRows) -> _Plan:
    singles = [row for row in range(rows.num_rows) if rows.query_len(row) == 1]
    longer = tuple(row for row in range(rows.num_rows) if rows.query_len(row) > 1)
    if not singles:
        return _Plan(None, None, longer)
    if not longer:
        return _Plan(DecodeRows(rows.block_tables.contiguous(), rows.context_len), None, ())
    device = rows.block_tables.device
    tokens = torch.tensor([rows.query_start[row] for row in singles], device=device)
    tables = rows.block_tables[torch.tensor(singles, device=device)]
    return _Plan(DecodeRows(tables, tuple(rows.context_len[row] for row in singles)), tokens, longer)


def _ranges(rows: AttentionRows, chosen: tuple[int, ...]) -> _Ranges:
    """For the native operator, so on the CPU."""
    starts = [0]
    for row in chosen:
        starts.append(starts[-1] + rows.query_len(row))
    tokens = None
    if len(chosen) < rows.num_rows:
        tokens = torch.cat([torch.arange(rows.query_start[row], rows.query_start[row + 1]) for row in chosen])
    return _Ranges(
        tokens=tokens,
        query_start=torch.tensor(starts, dtype=torch.int32),
        context=torch.tensor([rows.context_len[row] for row in chosen], dtype=torch.int32),
        tables=rows.block_tables[list(chosen)].contiguous() if tokens is not None else rows.block_tables.contiguous(),
    )
