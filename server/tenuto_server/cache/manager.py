"""The cache's only writer: sequences acquire a prefix, publish what they compute, and let go; sessions leave their tip.

Owner of the prefix tree, the tiers and every sequence's block table. Torch-free and clock-free: slots are numbers, time
is an argument, and everything that takes time is begun and finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tenuto_server.cache.extent import DEVICE, DISK, HOST, RATE_PARTS, TIERS, Extent, LostLabel, TierName
from tenuto_server.cache.identity import HASH_BYTES
from tenuto_server.cache.moves import Move
from tenuto_server.cache.recovered import adopt_recovered
from tenuto_server.cache.residency import Below, Label, Priority, Residency
from tenuto_server.cache.table import BlockTable
from tenuto_server.cache.tree import Match, PrefixTree, common_tokens, path_to
from tenuto_server.config import CacheConfig


@dataclass(slots=True)
class Found:
    """What an acquired prompt finds. Tokens by tier, tokens lost by label, and the extents that wait in lower tiers."""

    cached: dict[TierName, int] = field(default_factory=dict)
    lost: dict[LostLabel, int] = field(default_factory=dict)
    known_tokens: int = 0


@dataclass(slots=True)
class _Tip:
    extent: Extent
    rate: int


class CacheManager:
    """See the module. ``priority``, ``below`` and ``label`` are the engine's doors to the policy (``residency.py``)."""

    def __init__(self, config: CacheConfig, priority: Priority, below: Below, label: Label) -> None:
        self.config = config
        self.block_tokens = config.block_tokens
        self.tree = PrefixTree(config.block_tokens, config.extent_blocks_max, config.tombstone_blocks_max)
        self.tiers = Residency(
            self.tree,
            (config.device_blocks, config.host_blocks, config.disk_blocks),
            config.transfers_inflight_max,
            config.transfer_blocks_max,
            config.transfer_patience_s,
            priority,
            below,
            label,
        )
        self.tables: set[BlockTable] = set()
        self.tips: dict[int, _Tip] = {}
        self.private_blocks = 0
        self.copied_blocks = 0
        self._searched: tuple[Extent, NDArray[np.int32]] | None = None

    # ---- a turn begins -------------------------------------------------------------------------------------------

    def acquire(
        self, root_hash: bytes, tokens: NDArray[np.int32], capacity_tokens: int, owner: int = 0
    ) -> tuple[BlockTable, Found]:
        """Pins the longest known prefix of a prompt (its last token is always left to compute) and opens a block table
        with room for ``capacity_tokens``. ``owner``: number of the tenant."""
        size = self.block_tokens
        root = self.tree.root(root_hash, owner)
        usable = tokens[: len(tokens) - 1]
        if self.tiers.recovered:
            self._adopt_recovered(root, usable)
        match = self.tree.match(root, usable)
        tip = root
        if match.path:
            tip = self.tree.cut(match.path[-1], match.last_blocks)
            if tip is not match.path[-1]:
                self.tiers.touch(match.path[-1])
            if match.partial is match.path[-1]:
                match.partial_at -= match.last_blocks
        blocks = np.empty(-(-capacity_tokens // size), np.int32)
        blocks.fill(-1)
        table = BlockTable(root, tip, blocks, match.blocks)
        self.tiers.pin_path(tip, 1)
        self.tables.add(table)
        self._acquire_partial(table, match)
        return table, self._found(table)

    def use(self, table: BlockTable, now_s: float) -> None:
        """Notes that a turn uses what it acquired."""
        node = table.tip
        while node.parent is not None:
            node.last_used_s = now_s
            node.uses += 1
            node = node.parent
        if table.cow is not None:
            table.cow.last_used_s = now_s
            table.cow.uses += 1

    def held_blocks(self, table: BlockTable) -> int:
        """Device blocks that a table already has: its own and the resident part of its path."""
        resident = sum(extent.blocks for extent in path_to(table.tip) if extent.slots[DEVICE] is not None)
        return resident + table.owned

    def _acquire_partial(self, table: BlockTable, match: Match) -> None:
        source = match.partial
        if source is None:
            return
        if source.blocks > 1:
            if match.partial_at:
                self.tree.cut(source, match.partial_at)
            below = source
            source = self.tree.cut(source, 1)
            if source is not below:
                self.tiers.touch(below)
        table.cow, table.cow_tokens = source, match.partial_tokens
        self.tiers.pin_path(source, 1)

    def _found(self, table: BlockTable) -> Found:
        size = self.block_tokens
        cached: dict[TierName, int] = {}
        lost: dict[LostLabel, int] = {}
        path = path_to(table.tip)
        if table.cow is not None:
            path.append(table.cow)
        for extent in path:
            count = table.cow_tokens if extent is table.cow else extent.blocks * size
            tier = extent.best_tier()
            if tier is not None:
                name = TIERS[tier]
                cached[name] = cached.get(name, 0) + count
            else:
                label = extent.lost or "capacity"
                lost[label] = lost.get(label, 0) + count
        return Found(cached, lost, table.path_blocks * size + table.cow_tokens)

    def _adopt_recovered(self, root: Extent, tokens: NDArray[np.int32]) -> None:
        if self._searched is not None and self._searched[0] is root and np.array_equal(self._searched[1], tokens):
            return  # a turn that waits for admission asks again and again
        self._searched = root, tokens.copy()
        adopt_recovered(self.tree, self.tiers, root, tokens)

    # ---- while it runs -------------------------------------------------------------------------------------------

    def settle(self, table: BlockTable) -> Extent | None:
        """Advances the table's front over everything that is on the device; returns the extent it waits for, if any."""
        size = self.block_tokens
        if table.front < table.path_blocks * size:
            for extent in path_to(table.tip, table.front // size):
                slots = extent.slots[DEVICE]
                if slots is None:
                    return extent
                start = extent.start
                end, first = start + extent.blocks, max(start, table.front // size)
                if table.owned:
                    self._own(table, first, end, give_back=True)
                table.blocks[first:end] = slots[first - start :] if first > start else slots
                table.front = end * size
        if table.cow is not None and table.front == table.path_blocks * size and table.cow.slots[DEVICE] is None:
            return table.cow
        return None

    def allocate(self, table: BlockTable, upto_tokens: int, now_ns: int, *, drop: bool = False) -> bool:
        """Gives the sequence its own device blocks for everything between its front and ``upto_tokens``. ``drop``: lose
        retained blocks at once rather than wait for them to be copied down."""
        size = self.block_tokens
        first, last = table.front // size, -(-upto_tokens // size)
        if last - first == 1 and table.private[first]:
            return True  # the next token of an answer, mostly
        missing: slice | NDArray[np.intp] = slice(first, last)
        count = last - first
        if table.owned:
            missing = first + (~table.private[first:last]).nonzero()[0]
            count = len(missing)
        if count <= 0:
            return True
        # Charged before room is made: whoever needs more than a share makes it among what is its own.
        self.tiers.shares.add(DEVICE, table.root.owner, count)
        if not self.tiers.make_room(DEVICE, count, now_ns, drop=drop):
            self.tiers.shares.add(DEVICE, table.root.owner, -count)
            return False
        table.blocks[missing] = self.tiers.pools[DEVICE].take(count)
        table.private[missing] = True
        table.owned += count
        self.private_blocks += count
        return True

    def take_copy(self, table: BlockTable) -> tuple[int, int] | None:
        """The copy-on-write that must precede the first computed token after the path, as (source, destination) device
        slots; None if there is nothing to copy. The source stays pinned until ``copied``."""
        if table.cow is None or table.front != table.path_blocks * self.block_tokens:
            return None
        source = table.cow.slots[DEVICE]
        assert source is not None
        assert table.private[table.path_blocks]
        table.front += table.cow_tokens
        self.copied_blocks += 1
        return int(source[0]), int(table.blocks[table.path_blocks])

    def copied(self, table: BlockTable) -> None:
        """The copy is made (or given up): lets its source go."""
        if table.cow is not None:
            source, table.cow, table.cow_tokens = table.cow, None, 0
            self.tiers.pin_path(source, -1)
            self._coalesce(source)

    def publish(self, table: BlockTable, tokens: NDArray[np.int32], start: int, end: int) -> None:
        """The KV of tokens [start, end) has been computed: makes its full blocks known to others. ``tokens``: the
        sequence's tokens from 0 to at least ``end``."""
        size = self.block_tokens
        first, last = start // size, end // size
        if first < table.path_blocks:
            table.strays = True
        for extent in path_to(table.tip, first):
            low, high = max(first, extent.start), min(last, extent.end)
            if low < high and extent.slots[DEVICE] is None and not extent.moves:
                self._fill_hole(table, extent, low, high)
        while table.path_blocks < last:
            self._extend_path(table, tokens[: last * size])

    def reconcile(self, table: BlockTable) -> None:
        """Gives back or hands over blocks that a sequence computed for itself while a copy of the same blocks was in
        flight (a late load). Not while a forward reads them."""
        if not table.strays:
            return
        done = min(table.front // self.block_tokens, table.path_blocks)
        own: list[int] = table.private[:done].nonzero()[0].tolist()
        if not own:
            table.strays = bool(np.count_nonzero(table.private[done : table.path_blocks]))
            return
        for extent in path_to(table.tip, own[0]):
            mine = [block for block in own if extent.start <= block < extent.end]
            slots = extent.slots[DEVICE]
            if not mine or (slots is None and extent.moves):
                continue
            if slots is not None:
                low, high = mine[0], mine[-1] + 1
                self._own(table, low, high, give_back=True)
                table.blocks[low:high] = slots[low - extent.start : high - extent.start]
            elif mine == list(range(mine[0], mine[-1] + 1)):
                self._fill_hole(table, extent, mine[0], mine[-1] + 1)

    def _fill_hole(self, table: BlockTable, extent: Extent, low: int, high: int) -> None:
        piece = extent
        if low > extent.start:
            self.tree.cut(extent, low - extent.start)
        if high < extent.end:
            piece = self.tree.cut(extent, high - low)
        self.tiers.adopt_device(piece, table.blocks[low:high])
        self._own(table, low, high, give_back=False)

    def _extend_path(self, table: BlockTable, tokens: NDArray[np.int32]) -> None:
        size, at = self.block_tokens, table.path_blocks
        rest = tokens[at * size :]
        child = table.tip.children.get(rest[:size].tobytes())
        if child is None:
            child = self.tree.add(table.tip, rest)
            child.pins = 1
            child.last_used_s, child.uses = table.tip.last_used_s, 1
            self.tiers.adopt_device(child, table.blocks[at : at + child.blocks])
            self._own(table, at, at + child.blocks, give_back=False)
        else:
            below = child
            child = self.tree.cut(child, common_tokens(child.tokens, rest) // size)
            if child is not below:
                self.tiers.touch(below)
            if child.slots[DEVICE] is not None and not child.pins:
                self.tiers.pinned_device_blocks += child.blocks
            child.pins += 1
            child.stamp += 1
            slots = child.slots[DEVICE]
            if slots is not None:
                self._own(table, at, at + child.blocks, give_back=True)
                table.blocks[at : at + child.blocks] = slots
            elif not child.moves:
                self.tiers.adopt_device(child, table.blocks[at : at + child.blocks])
                self._own(table, at, at + child.blocks, give_back=False)
            else:
                table.strays = True
        table.tip = child
        table.path_blocks += child.blocks

    def _own(self, table: BlockTable, first: int, end: int, *, give_back: bool) -> None:
        """The table stops owning blocks [first, end): their slots go back, or an extent has taken them over."""
        if not table.owned:
            return
        mine = table.private[first:end]
        count = mine.tobytes().count(1)
        if not count:
            return
        if give_back:
            self.tiers.pools[DEVICE].give(table.blocks[first:end][mine])
            self.tiers.shares.add(DEVICE, table.root.owner, -count)
        mine[:] = False
        table.owned -= count
        self.private_blocks -= count

    # ---- it ends -------------------------------------------------------------------------------------------------

    def release(self, table: BlockTable, tokens: NDArray[np.int32], now_s: float | None) -> Extent:
        """Closes a table: the partial last block becomes a tail, private blocks go back, pins are lifted. ``tokens``:
        the sequence's tokens from 0 to at least its front. ``now_s`` None: it was never used. Returns the extent that its
        context ends in."""
        size = self.block_tokens
        self.copied(table)
        end = table.tip
        fill = table.front - table.path_blocks * size
        if 0 < fill < size and table.private[table.path_blocks]:
            end = self._leave_tail(table, tokens[table.path_blocks * size : table.front])
        self._own(table, 0, len(table.blocks), give_back=True)
        if now_s is not None:
            node = table.tip
            while node.parent is not None:
                node.last_used_s = now_s
                node = node.parent
            end.last_used_s = now_s
        if end is not table.tip:
            self.tiers.touch(end)
        self.tiers.pin_path(table.tip, -1)
        self.tables.discard(table)
        return end

    def _leave_tail(self, table: BlockTable, tokens: NDArray[np.int32]) -> Extent:
        for tail in table.tip.tails:
            if len(tail.tokens) == len(tokens) and common_tokens(tail.tokens, tokens) == len(tokens):
                if tail.slots[DEVICE] is None and not tail.moves:
                    break
                return tail
        else:
            tail = self.tree.add(table.tip, tokens)
            tail.uses = 1
        at = table.path_blocks
        self.tiers.adopt_device(tail, table.blocks[at : at + 1])
        self._own(table, at, at + 1, give_back=False)
        return tail

    # ---- sessions ------------------------------------------------------------------------------------------------

    def set_tip(self, session: int, extent: Extent | None) -> None:
        """A session's context now ends in ``extent`` (None: the session is forgotten)."""
        old = self.tips.get(session)
        rate = old.rate if old else 0
        if old is not None:
            self._count(old.extent, -1, -rate)
            old.extent.tips.discard(session)
            del self.tips[session]
        if extent is not None:
            extent.tips.add(session)
            self._count(extent, 1, rate)
            self.tips[session] = _Tip(extent, rate)
        if old is not None and old.extent is not extent:
            self._coalesce(old.extent)
        if extent is not None:
            self._coalesce(extent)

    def set_rate(self, session: int, rate: float) -> None:
        """A session's return rate (1/s) changed: every extent of its context is re-filed."""
        tip, parts = self.tips.get(session), round(rate * RATE_PARTS)
        if tip is not None and parts != tip.rate:
            self._count(tip.extent, 0, parts - tip.rate)
            tip.rate = parts

    def shorten_tip(self, session: int, tokens: int) -> None:
        """Only the first ``tokens`` tokens of a session's context are still wanted (a compaction)."""
        tip = self.tips.get(session)
        if tip is None:
            return
        node, block = tip.extent, tokens // self.block_tokens
        while node.parent is not None and node.start >= block:
            node = node.parent
        if node.parent is not None and node.end > block and not node.fill:
            below = node
            node = self.tree.cut(node, block - node.start)
            self.tiers.touch(below)
        if node is not tip.extent:
            self.set_tip(session, node)

    def _count(self, extent: Extent, users: int, rate: int) -> None:
        stale, node, parent = self.tiers.stale, extent, extent.parent
        while parent is not None:
            node.users += users
            node.rate += rate
            node.stamp += 1
            stale[node] = None
            node, parent = parent, parent.parent
        node.users += users
        node.rate += rate
        self.tiers.file_many()

    def context(self, session: int) -> list[Extent]:
        """The extents of a session's last context, in order."""
        tip = self.tips.get(session)
        return path_to(tip.extent) if tip else []

    def context_end(self, session: int) -> int:
        """How many tokens of a session's last context the tree still knows, resident or not."""
        tip = self.tips.get(session)
        return tip.extent.token_end(self.block_tokens) if tip else 0

    def common_with(self, session: int, tokens: NDArray[np.int32]) -> int:
        """Length of the common prefix of a prompt and a session's last context."""
        at = 0
        for extent in self.context(session):
            same = common_tokens(extent.tokens, tokens[at:])
            at += same
            if same < len(extent.tokens):
                break
        return at

    # ---- copies --------------------------------------------------------------------------------------------------

    def finish_move(self, move_id: int, ok: bool, bad: Iterable[int] = (), failed: Iterable[int] = ()) -> Move | None:
        """Ends a copy (``Residency.finish_move``) and joins what became equal."""
        move = self.tiers.finish_move(move_id, ok, bad, failed)
        if move is not None:
            for piece in move.pieces:
                if piece.parent is not None:
                    self._coalesce(piece)
        return move

    def recover_disk(self, hashes: Iterable[bytes], slots: Iterable[int]) -> int:
        """Blocks that a restart found on disk, by chained hash; they join the tree when a prompt reaches them."""
        found = {
            h: s for h, s in zip(hashes, slots, strict=True) if len(h) == HASH_BYTES and s < self.config.disk_blocks
        }
        if found:
            self.tiers.pools[DISK].claim(np.fromiter(found.values(), np.int32, len(found)))
            self.tiers.recovered.update(found)
        return len(found)

    def prune(self) -> None:
        """Keeps the memory of lost blocks within its limit."""
        if self.tree.tombstone_blocks > self.config.tombstone_blocks_max:
            self.tree.prune(self._leave)

    def _leave(self, extent: Extent) -> None:
        parent = extent.parent
        assert parent is not None
        for session in list(extent.tips):
            extent.tips.discard(session)
            parent.tips.add(session)
            self.tips[session].extent = parent

    def _coalesce(self, extent: Extent) -> None:
        for changed in self.tree.coalesce(extent):
            self.tiers.touch(changed)

    def cut(self, extent: Extent, blocks: int) -> None:
        """Makes a boundary after the first ``blocks`` blocks of an extent."""
        self.tiers.touch(self.tree.cut(extent, blocks))
        self.tiers.touch(extent)

    def room_is_coming(self, now_ns: int) -> bool:
        """Copies are in flight that will free device blocks soon, or make way for those that will, below or on the link."""
        return self.tiers.link_busy(now_ns) or any(self.tiers.coming(tier, now_ns) for tier in (DEVICE, HOST))

    def next_overdue_ns(self, now_ns: int) -> int | None:
        """When the next copy in flight stops being waited for."""
        times = [move.begun_ns + self.tiers.patience_ns for move in self.tiers.moves.values()]
        return min((time for time in times if time > now_ns), default=None)

    # ---- figures -------------------------------------------------------------------------------------------------

    def reclaimable_device_blocks(self, now_ns: int) -> int:
        """Device blocks that are free or can be freed without touching a running sequence."""
        tiers, inflight = self.tiers, 0
        for move in tiers.moves.values():
            if move.dst == DEVICE:
                inflight += move.blocks
            elif tiers.overdue(move, now_ns):  # a stuck copy holds its source
                inflight += sum(p.blocks for p in move.pieces if not p.pins and p.slots[DEVICE] is not None)
        return self.config.device_blocks - tiers.pinned_device_blocks - self.private_blocks - inflight

    def resident_tokens(self, session: int) -> dict[str, int]:
        """Tokens of a session's context by the fastest tier that holds them."""
        totals: dict[str, int] = {}
        for extent in self.context(session):
            tier = extent.best_tier()
            if tier is not None:
                totals[TIERS[tier]] = totals.get(TIERS[tier], 0) + len(extent.tokens)
        return totals

    def held_tokens(self, session: int) -> int:
        """Tokens of a session's context that any tier holds."""
        tip, total = self.tips.get(session), 0
        node = tip.extent if tip is not None else None
        while node is not None and node.parent is not None:
            if node.resident:
                total += len(node.tokens)
            node = node.parent
        return total

    def used_blocks(self, tier: int) -> int:
        """Slots of a tier that are not free."""
        return self.tiers.pools[tier].capacity - self.tiers.pools[tier].free


__all__ = ["DEVICE", "DISK", "HOST", "CacheManager", "Found"]
