"""The prefix tree: roots, matching, cutting and joining extents, and the bounded memory of what was lost.

Owner of the tree's shape. Residency of the nodes belongs to ``residency.py``; both are driven by ``CacheManager`` only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenuto_server.cache.extent import Extent, join, joinable, split

# Siblings looked at for a block that matches in part; more would buy at most a few tokens each.
_SIBLINGS_MAX = 32


@dataclass(slots=True, eq=False)
class Match:
    """The longest known prefix of some tokens. ``path``: extents from the root down; all of each is used but for the
    last, of which ``last_blocks`` are. ``blocks``: full blocks in all. ``partial``: an extent whose block ``partial_at``
    continues the prefix for ``partial_tokens`` more tokens."""

    path: list[Extent]
    last_blocks: int
    blocks: int
    partial: Extent | None = None
    partial_at: int = 0
    partial_tokens: int = 0


def common_tokens(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the common prefix of two token arrays."""
    n = min(len(a), len(b))
    if not n:
        return 0
    a, b = a[:n], b[:n]
    if a.tobytes() == b.tobytes():  # mostly; twice as fast as to look for a difference
        return n
    return int((a != b).argmax())


class PrefixTree:
    """Extents by content, one root per (tenant, salt)."""

    def __init__(self, block_tokens: int, extent_blocks_max: int, tombstone_blocks_max: int) -> None:
        self.block_tokens = block_tokens
        self.roots: dict[bytes, Extent] = {}
        self.tombstone_blocks = 0
        self._extent_blocks_max = extent_blocks_max
        self._tombstone_blocks_max = tombstone_blocks_max
        self._graveyard: deque[tuple[Extent, int]] = deque()
        self._order = 0

    def root(self, root_hash: bytes, owner: int = 0) -> Extent:
        """The root of that hash, made on first use for that owner."""
        node = self.roots.get(root_hash)
        if node is None:
            node = Extent(None, 0, 0, np.empty(0, np.int32), self.next_order(), hashes=root_hash)
            node.owner = owner
            self.roots[root_hash] = node
        return node

    def of_owner(self, owner: int) -> Iterator[Extent]:
        """Every extent of an owner, roots excluded."""
        return self._below([root for root in self.roots.values() if root.owner == owner])

    def next_order(self) -> int:
        """A running number that breaks ties the same way in every run."""
        self._order += 1
        return self._order

    def match(self, root: Extent, tokens: NDArray[np.int32]) -> Match:
        """The longest prefix of ``tokens`` that the tree knows, resident or not. Changes nothing."""
        size = self.block_tokens
        full = len(tokens) // size
        node, at, used = root, 0, 0
        path: list[Extent] = []
        while at < full:
            child = node.children.get(tokens[at * size : (at + 1) * size].tobytes())
            if child is None:
                break
            used = min(common_tokens(child.tokens, tokens[at * size :]) // size, full - at)
            path.append(child)
            at += used
            node = child
            if used < child.blocks:
                break
        found = Match(path, used, at)
        rest = tokens[at * size : (at + 1) * size]
        if len(rest):
            self._match_partial(found, node if path else root, rest)
        return found

    def _match_partial(self, found: Match, node: Extent, rest: NDArray[np.int32]) -> None:
        size = self.block_tokens
        candidates: list[tuple[Extent, int]] = []
        if found.path and found.last_blocks < node.blocks:
            candidates.append((node, found.last_blocks))
        else:
            candidates.extend((tail, 0) for tail in node.tails[-_SIBLINGS_MAX:])
            for index, child in enumerate(node.children.values()):
                if index == _SIBLINGS_MAX:
                    break
                candidates.append((child, 0))
        best = (0, False)
        for extent, at in candidates:
            if not extent.resident:
                continue
            count = common_tokens(extent.tokens[at * size : (at + 1) * size], rest)
            rank = (count, extent.slots[0] is not None)
            if count and rank > best:
                best = rank
                found.partial, found.partial_at, found.partial_tokens = extent, at, count

    def cut(self, extent: Extent, blocks: int) -> Extent:
        """Splits; returns the part with the first ``blocks`` blocks (the extent itself if that is all of it)."""
        if blocks == extent.blocks:
            return extent
        upper = split(extent, blocks, self.block_tokens, self.next_order())
        if upper.tombstone:
            self._graveyard.append((upper, upper.stamp))
        return upper

    def add(self, parent: Extent, tokens: NDArray[np.int32]) -> Extent:
        """A new extent below ``parent``; a tail when ``tokens`` is less than one block."""
        size = self.block_tokens
        fill = len(tokens) if len(tokens) < size else 0
        tokens = np.ascontiguousarray(tokens, dtype=np.int32).copy()
        node = Extent(parent, parent.end, 1 if fill else len(tokens) // size, tokens, self.next_order(), fill)
        if fill:
            parent.tails.append(node)
        else:
            parent.children[tokens[:size].tobytes()] = node
        return node

    def coalesce(self, extent: Extent) -> list[Extent]:
        """Joins equal neighbours from ``extent`` up to the root. Returns the extents that changed."""
        changed: list[Extent] = []
        node: Extent | None = extent
        while node is not None and node.parent is not None:
            upper = node.parent
            if joinable(upper, node, self._extent_blocks_max):
                join(upper, node, self.block_tokens)
                if not changed or changed[-1] is not node:
                    changed.append(node)
            else:
                node = upper
        return changed

    def join_lost(self, extent: Extent) -> None:
        """Joins a tombstone with the one below it: a context that is eaten from its end leaves one, not one per bite."""
        if len(extent.children) == 1 and extent.tombstone:
            (below,) = extent.children.values()
            if joinable(extent, below, self._extent_blocks_max):
                join(extent, below, self.block_tokens)

    def bury(self, extent: Extent) -> None:
        """Counts an extent that has just lost its last copy."""
        self.tombstone_blocks += extent.blocks
        self._graveyard.append((extent, extent.stamp))

    def revive(self, extent: Extent) -> None:
        """Counts a tombstone that is about to hold blocks again."""
        if extent.lost is not None:
            self.tombstone_blocks -= extent.blocks
            extent.lost = None

    def prune(self, on_remove: Callable[[Extent], None], limit: int | None = None) -> None:
        """Forgets the oldest childless tombstones beyond the limit. ``on_remove`` moves sessions off a node first."""
        limit = self._tombstone_blocks_max if limit is None else limit
        waiting: list[tuple[Extent, int]] = []
        while self.tombstone_blocks > limit and self._graveyard:
            extent, stamp = self._graveyard.popleft()
            if extent.parent is None or not extent.tombstone:
                continue
            if extent.pins:
                waiting.append((extent, stamp))
                continue
            if extent.children or extent.tails:
                continue  # its last child brings it back here
            on_remove(extent)
            self._remove(extent)
        self._graveyard.extendleft(reversed(waiting))

    def _remove(self, extent: Extent) -> None:
        parent = extent.parent
        assert parent is not None
        if extent.fill:
            parent.tails.remove(extent)
        else:
            del parent.children[extent.tokens[: self.block_tokens].tobytes()]
        self.tombstone_blocks -= extent.blocks
        extent.parent = None
        extent.stamp += 1
        if parent.tombstone and not parent.children and not parent.tails:
            self._graveyard.append((parent, parent.stamp))
        elif parent.parent is None and not parent.children and not parent.tails and not parent.tips and not parent.pins:
            self.roots.pop(parent.hashes, None)

    def nodes(self) -> Iterator[Extent]:
        """Every extent, roots excluded."""
        return self._below(list(self.roots.values()))

    def _below(self, roots: list[Extent]) -> Iterator[Extent]:
        stack = [child for root in roots for child in (*root.children.values(), *root.tails)]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            stack.extend(node.tails)


def path_to(extent: Extent, from_block: int = 0) -> list[Extent]:
    """The extents that end after block ``from_block``, down to ``extent``, in order; tails count by their block."""
    path: list[Extent] = []
    node = extent
    while node.parent is not None and node.start + node.blocks > from_block:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def root_of(extent: Extent) -> Extent:
    """The root above an extent."""
    while extent.parent is not None:
        extent = extent.parent
    return extent
