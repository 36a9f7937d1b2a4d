"""Attention of many rows of one query token each, in torch or through the native operator. Owns no state.

Rows of like context are padded to one length and attended together, so that the number of torch calls does not grow
with the batch.
"""

import functools
from dataclasses import dataclass, field

import torch

from tenuto_kernels.cpu import native
from tenuto_kernels.cpu.pages import gather_pages, page_index

#: At most this many padded keys (over all KV heads) in one group: the gathered pages stay in the last-level cache.
GROUP_KEYS = 1 << 16
#: A row joins a group while it fills at least this share of the group's longest context.
GROUP_FILL = 0.75
#: Query heads per KV head up to which the native operators keep a group in registers.
NATIVE_GROUP = 64


@dataclass(frozen=True)
class _Group:
    rows: torch.Tensor
    pages: torch.Tensor
    hidden: torch.Tensor
    visible: tuple[int, ...]


@dataclass(eq=False)
class DecodeRows:
    """Rows of one query each: `block_tables` int32 `[R, max_blocks]`, `context_len` R positions visible to each."""

    block_tables: torch.Tensor
    context_len: tuple[int, ...]
    _groups: dict[int | None, list[_Group]] = field(default_factory=dict)

    @functools.cached_property
    def context_tensor(self) -> torch.Tensor:
        return torch.tensor(self.context_len, dtype=torch.int32, device=self.block_tables.device)

    def groups(self, pool: torch.Tensor, window: int | None) -> list[_Group]:
        if window not in self._groups:
            self._groups[window] = _group(self, pool, window)
        return self._groups[window]


def decode_attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, rows: DecodeRows, scale: float, window: int | None
) -> torch.Tensor:
    """`q` `[R, Hq, D]` against its rows' pages: `[R, Hq, D]` in q's dtype."""
    if native_takes(q, pool, window):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        native.paged_decode(q.contiguous(), pool, layer, rows.block_tables, rows.context_tensor, scale, out)
        return out
    return _decode_torch(q, pool, layer, rows, scale, window)


def native_takes(q: torch.Tensor, pool: torch.Tensor, window: int | None) -> bool:
    """Whether the native operators are there and handle these arguments."""
    return (
        window is None
        and q.device.type == "cpu"
        and q.dtype != torch.float16
        and pool.dtype != torch.float16
        and q.shape[1] // pool.shape[3] <= NATIVE_GROUP
        and native.available()
    )


def _decode_torch(
    q: torch.Tensor, pool: torch.Tensor, layer: int, rows: DecodeRows, scale: float, window: int | None
) -> torch.Tensor:
    heads, dim = pool.shape[3], pool.shape[5]
    group = q.shape[1] // heads
    out = torch.empty_like(q)
    for part in rows.groups(pool, window):
        count = len(part.visible)
        kv = gather_pages(pool, layer, part.pages).float()
        for row, visible in enumerate(part.visible):
            # Slots past the context hold whatever was stored there before; a weight of zero does not cancel a NaN.
            kv[row, 1, :, visible:] = 0
        k, v = kv[:, 0].flatten(0, 1), kv[:, 1].flatten(0, 1)
        tile = q[part.rows].float().view(count * heads, group, dim)
        scores = torch.bmm(tile, k.transpose(1, 2)).mul_(scale).view(count, heads, group, -1)
        weights = scores.masked_fill_(part.hidden[:, None, None], float("-inf")).softmax(dim=-1)
        out[part.rows] = torch.bmm(weights.flatten(0, 1), v).view(count, heads * group, dim).to(q.dtype)
    return out


def _group(rows: DecodeRows, pool: torch.Tensor, window: int | None) -> list[_Group]:
    block_size, heads = pool.shape[4], pool.shape[3]
    first_block = [0 if window is None else max(0, c - window) // block_size for c in rows.context_len]
    length = [c - first * block_size for c, first in zip(rows.context_len, first_block, strict=True)]
    groups: list[list[int]] = []
    for row in sorted(range(len(length)), key=length.__getitem__, reverse=True):
        longest = length[groups[-1][0]] if groups else 0
        if (
            not groups
            or length[row] < GROUP_FILL * longest - block_size
            or (len(groups[-1]) + 1) * longest * heads > GROUP_KEYS
        ):
            groups.append([])
        groups[-1].append(row)
    return [_build_group(rows, pool, window, members, first_block, length) for members in groups]


def _build_group(
    rows: DecodeRows,
    pool: torch.Tensor,
    window: int | None,
    members: list[int],
    first_block: list[int],
    length: list[int],
) -> _Group:
    device, block_size = pool.device, pool.shape[4]
    num_blocks = -(-length[members[0]] // block_size)
    tables = torch.zeros((len(members), num_blocks), dtype=torch.int64, device=device)
    key = torch.arange(num_blocks * block_size, device=device)
    hidden = torch.empty((len(members), num_blocks * block_size), dtype=torch.bool, device=device)
    for at, row in enumerate(members):
        used = -(-length[row] // block_size)
        tables[at, :used] = rows.block_tables[row, first_block[row] : first_block[row] + used]
        oldest = 0 if window is None else max(0, length[row] - window)
        hidden[at] = (key >= length[row]) | (key < oldest)
    return _Group(
        rows=torch.tensor(members, device=device),
        pages=page_index(pool, tables),
        hidden=hidden,
        visible=tuple(length[row] for row in members),
    )
