"""Batch-invariant attention: the test mode in which one query's result never depends on its company. Owns no state.

The result of a matrix product's row may change with the shape of the product (another kernel, another order of sums). So
every shape here is a function of the query's absolute position alone: position p is computed in row `p % QUERY_TILE` of a
tile of `QUERY_TILE` consecutive positions, against the keys from a position fixed for that tile up to the tile's end.
Positions of the tile that are not in the batch are padding, keys that do not exist yet are zeros behind the mask.
Everything is fp32, so that no rounding depends on the dtype of q.
"""

import torch

from tenuto_kernels.cpu.pages import gather_pages, page_index
from tenuto_kernels.layout import KEY, VALUE

#: Query positions of one tile. Small, because a lone decode token pays for a whole one.
QUERY_TILE = 16


def attend_row(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    context: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The last n positions of a context: `q` `[n, Hq, D]`, `table` `[max_blocks]`; returns fp32 `[n, Hq, D]`."""
    heads, block_size, dim = pool.shape[3:]
    n, group = q.shape[0], q.shape[1] // heads
    start = context - n
    keys, values = _positions_first(pool, layer, table[: -(-context // block_size)], context)
    out = torch.empty((n, heads, group, dim), device=q.device)
    for tile in range(start // QUERY_TILE, (context - 1) // QUERY_TILE + 1):
        first = tile * QUERY_TILE
        begin, end = max(first, start), min(first + QUERY_TILE, context)
        padded = torch.zeros((QUERY_TILE, heads, group, dim), device=q.device)
        padded[begin - first : end - first] = q[begin - start : end - start].view(-1, heads, group, dim)
        low = 0 if window is None else max(0, first - window + 1) // QUERY_TILE * QUERY_TILE
        result = _tile(padded, keys, values, first, low, scale, window)
        out[begin - start : end - start] = result[begin - first : end - first]
    return out.flatten(1, 2)


def _positions_first(
    pool: torch.Tensor, layer: int, table: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[padded context, Hkv, D]` in fp32, zero past `context`.

    Position first, so that the strides of any range of positions are the same whatever the context is.
    """
    heads, _, dim = pool.shape[3:]
    padded = -(-context // QUERY_TILE) * QUERY_TILE
    kv = gather_pages(pool, layer, page_index(pool, table))
    out = torch.zeros((2, padded, heads, dim), device=pool.device)
    for part in (KEY, VALUE):
        out[part, :context] = kv[part, :, :context].transpose(0, 1)
    return out[KEY], out[VALUE]


def _tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    low: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Queries at positions `first ...` against keys `low ... first + QUERY_TILE`: `[QUERY_TILE, Hkv, G, D]`."""
    _, heads, group, dim = q.shape
    high = first + QUERY_TILE
    rows = q.permute(1, 2, 0, 3).reshape(heads, group * QUERY_TILE, dim)
    scores = torch.bmm(rows, keys[low:high].permute(1, 2, 0)).mul_(scale)
    position = torch.arange(first, high, device=q.device)[:, None]
    key = torch.arange(low, high, device=q.device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores.view(heads, group, QUERY_TILE, high - low).masked_fill_(hidden, float("-inf"))
    result = torch.bmm(scores.softmax(dim=-1), values[low:high].transpose(0, 1))
    return result.view(heads, group, QUERY_TILE, dim).permute(2, 0, 1, 3)
