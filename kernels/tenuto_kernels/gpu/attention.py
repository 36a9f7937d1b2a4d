"""Paged attention with Triton: sorts a batch into decode rows and prefill tiles and launches. Owns no state."""

import functools
from dataclasses import dataclass

import torch

from tenuto_kernels.gpu.decode import combine_kernel, decode_config, decode_kernel, num_splits
from tenuto_kernels.gpu.prefill import prefill_config, prefill_kernel
from tenuto_kernels.gpu.shared import LOG2_E, computes_fp32, power_of_two
from tenuto_kernels.rows import AttentionRows


@dataclass(frozen=True, eq=False)
class _Plan:
    """Device tensors (int32) that all layers share, and the longest context of a decode row."""

    start: torch.Tensor
    context: torch.Tensor
    tile_row: torch.Tensor
    tile_first: torch.Tensor
    decode_row: torch.Tensor
    tables: torch.Tensor
    longest_decode: int


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
    heads, block_size, dim = pool.shape[3:]
    group = q.shape[1] // heads
    q = q if q.stride()[1:] == (dim, 1) else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    fp32 = computes_fp32(q, pool)
    queries = prefill_config(dim, group, fp32).queries(group)
    plan: _Plan = rows.once((queries, invariant), lambda: _plan(rows, queries, invariant))
    strides = (q.stride(0), pool.stride(0), layer * pool.stride(1), plan.tables.stride(0), window or 0)
    shapes = {"HKV": heads, "GROUP": group, "D": dim, "DP": max(16, power_of_two(dim)), "BS": block_size}
    flags = {"FP32": fp32, "WINDOWED": window is not None}
    if len(plan.tile_row):
        tiles = prefill_config(dim, group, fp32)
        prefill_kernel[(len(plan.tile_row), heads)](
            q, pool, plan.tables, plan.tile_row, plan.tile_first, plan.start, plan.context, out, scale * LOG2_E,
            *strides, **shapes, **flags, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    if len(plan.decode_row):
        _decode(q, pool, plan, scale, strides, shapes, flags, out)
    return out


def _decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    plan: _Plan,
    scale: float,
    strides: tuple[int, ...],
    shapes: dict[str, int],
    flags: dict[str, bool],
    out: torch.Tensor,
) -> None:
    count, heads, dim, group = len(plan.decode_row), shapes["HKV"], shapes["D"], shapes["GROUP"]
    tiles = decode_config(dim, group, flags["FP32"])
    splits = num_splits(count, heads, plan.longest_decode, tiles.block_n, _processors(q.device))
    part = torch.empty((count, heads * group, splits, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((count, heads * group, splits), dtype=torch.float32, device=q.device)
    decode_kernel[(count, heads, splits)](
        q, pool, plan.tables, plan.decode_row, plan.start, plan.context, out, part, lse, scale * LOG2_E,
        *strides, **shapes, **flags, BLOCK_G=tiles.block_g, BLOCK_N=tiles.block_n, SPLITS=splits,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(count, heads * group)](
            part, lse, plan.decode_row, plan.start, out,
            HQ=heads * group, D=dim, DP=shapes["DP"], SPLITS=splits,
        )  # fmt: skip


def _plan(rows: AttentionRows, queries: int, invariant: bool) -> _Plan:
    """Tiles of `queries` consecutive positions; on absolute boundaries where the result must not depend on the cut, and
    then for decode rows as well, since the two kernels round differently."""
    if rows.device_context is not None:
        return _decoding_plan(rows, rows.device_context)
    tiles: list[tuple[int, int]] = []
    singles: list[int] = []
    for row, context in enumerate(rows.context_len):
        first = context - rows.query_len(row)
        if rows.query_len(row) == 1 and not invariant:
            singles.append(row)
            continue
        if invariant:
            first = first // queries * queries
        tiles.extend((row, position) for position in range(first, context, queries))
    lists = [list(rows.query_start), list(rows.context_len), [t[0] for t in tiles], [t[1] for t in tiles], singles]
    # One transfer for all of them: a step's bookkeeping should not be a handful of small synchronous copies.
    device = rows.block_tables.device
    packed = torch.tensor([value for part in lists for value in part], dtype=torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    start, context_len, tile_row, tile_first, decode_row = torch.split(packed, [len(part) for part in lists])
    longest = max((rows.context_len[row] for row in singles), default=0)
    return _Plan(start, context_len, tile_row, tile_first, decode_row, rows.block_tables.contiguous(), longest)


def _decoding_plan(rows: AttentionRows, context: torch.Tensor) -> _Plan:
    """All rows decode, and how long they are is known on the device alone: nothing is copied from the host."""
    start = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=context.device)
    none = start[:0]
    longest = max(rows.context_len, default=0)
    return _Plan(start, context, none, none, start[:-1], rows.block_tables.contiguous(), longest)


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter takes the place of a small device, so that parts are tested too."""
    if device.type != "cuda":
        return 16
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
