"""Where blocks live: the slot pools and eviction heaps of the tiers, and the copies between them.

Owner of pools, heaps and moves. Everything that takes time has two phases: ``begin_move`` reserves and protects,
``finish_move`` makes the outcome true or puts everything back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import numpy as np

from tenuto_server.cache.clearing import Clearing
from tenuto_server.cache.extent import DEVICE, DISK, TIERS, Extent, LostLabel
from tenuto_server.cache.moves import Move, Purpose
from tenuto_server.cache.pool import SlotPool
from tenuto_server.cache.shares import Shares
from tenuto_server.cache.tree import PrefixTree

Priority = Callable[[Extent, int, int | None], float]
Below = Callable[[Extent, int], int | None]
# An eviction order: (priority, last use); what is lower goes first.
Rank = tuple[float, float]
Label = Callable[[Extent, int], LostLabel]

# Touched extents wait to be filed until somebody needs the order; this many at most.
_STALE_MAX = 4096
# A victim gives at least one in so many (as a power of two) of its tier's blocks: room for some turns, not for one.
_BITE_SHIFT = 10


class Residency:
    """Three tiers of blocks. ``priority(extent, tier, leaving)``: lowest goes first; ``leaving``: a tier whose copy goes when
    this one is made. ``below(extent, tier)``: where an extent leaving a tier under pressure is copied first, None to drop
    it; asked again with that answer for the tier after it. ``label(extent, tier)``: why a last copy was lost."""

    def __init__(
        self,
        tree: PrefixTree,
        capacities: tuple[int, int, int],
        moves_max: int,
        move_blocks_max: int,
        patience_s: float,
        priority: Priority,
        below: Below,
        label: Label,
    ) -> None:
        self.pools = tuple(SlotPool(capacity) for capacity in capacities)
        self.shares = Shares(capacities, self._touch_owner)
        self.moves: dict[int, Move] = {}
        self.recovered: dict[bytes, int] = {}
        self.dropped_disk: list[int] = []
        self.begun: list[Move] = []
        self.evicted_blocks: dict[str, int] = dict.fromkeys(TIERS, 0)
        self.dropped_blocks: dict[LostLabel, int] = {"retention": 0, "capacity": 0}
        self.corrupt_blocks: dict[str, int] = dict.fromkeys(TIERS, 0)
        self.failed_moves = 0
        self.evicted_priority = [0.0, 0.0, 0.0]
        self.clearing = (Clearing(), Clearing(), Clearing())
        self.pinned_device_blocks = 0
        self._tree = tree
        self.patience_ns = int(patience_s * 1e9)
        self._moves_max = moves_max
        self._move_blocks_max = move_blocks_max
        self._heaps: tuple[list[tuple[float, float, int, int, int, Extent]], ...] = ([], [], [])
        self.stale: dict[Extent, None] = {}
        self._lowest_tier = max((tier for tier, pool in enumerate(self.pools) if pool.capacity), default=DEVICE)
        self.tiered = self._lowest_tier != DEVICE
        self._priority, self._below, self._label = priority, below, label
        self._next_move = 0

    # ---- heaps ---------------------------------------------------------------------------------------------------

    def touch(self, extent: Extent) -> None:
        """Notes that anything which an extent's priority or evictability depends on has changed. Among equals the one used
        longest ago goes first, then the deepest: the part least often shared and least likely to be in the next prompt."""
        extent.stamp += 1
        self.stale[extent] = None
        self.file_many()

    def touch_path(self, extent: Extent) -> None:
        """Touches everything from ``extent`` up to below its root."""
        stale, node, parent = self.stale, extent, extent.parent
        while parent is not None:
            node.stamp += 1
            stale[node] = None
            node, parent = parent, parent.parent
        self.file_many()

    def _touch_owner(self, owner: int) -> None:
        """The order of everything of an owner has changed: it has more than its share of a tier, or no longer."""
        for extent in list(self._tree.of_owner(owner)):
            extent.stamp += 1
            self.stale[extent] = None

    def file_many(self) -> None:
        """Files what has been touched once it is too much to keep."""
        if len(self.stale) >= _STALE_MAX:
            self._file()

    def _file(self) -> None:
        """Files what has been touched: once per extent, however often it was, and not before anybody asks."""
        stale, self.stale = self.stale, {}
        if not self.tiered:
            self._file_device(stale)
            stale = {}
        for extent in stale:
            if extent.moves or extent.parent is None:
                continue
            on_device = extent.slots[DEVICE] is not None
            for tier in range(len(extent.slots)):
                # As ``Extent.evictable``: what is used is the copy on the device.
                if extent.slots[tier] is None or (extent.pins and (tier == DEVICE or not on_device)):
                    continue
                priority = self._priority(extent, tier, None)
                entry = (priority, extent.last_used_s, -extent.start, extent.order, extent.stamp, extent)
                heapq.heappush(self._heaps[tier], entry)
        for tier, heap in enumerate(self._heaps):
            if len(heap) > 256 and len(heap) > 4 * (self.pools[tier].capacity - self.pools[tier].free):
                self._compact(tier)

    def _file_device(self, stale: Iterable[Extent]) -> None:
        """As above where there is no other tier."""
        heap, push, priority = self._heaps[DEVICE], heapq.heappush, self._priority
        for extent in stale:
            if extent.moves or extent.parent is None or extent.pins or extent.slots[DEVICE] is None:
                continue
            rank = priority(extent, DEVICE, None)
            push(heap, (rank, extent.last_used_s, -extent.start, extent.order, extent.stamp, extent))

    def _compact(self, tier: int) -> None:
        heap = self._heaps[tier]
        heap[:] = [entry for entry in heap if entry[4] == entry[5].stamp and entry[5].evictable(tier)]
        heapq.heapify(heap)

    def _lowest(self, tier: int) -> tuple[Rank, Extent] | None:
        if self.stale:
            self._file()
        heap = self._heaps[tier]
        while heap:
            priority, used_s, _, _, stamp, extent = heap[0]
            if stamp == extent.stamp and extent.parent is not None and extent.evictable(tier):
                return (priority, used_s), extent
            heapq.heappop(heap)
        return None

    def price(self, tier: int) -> float:
        """The lowest index held on a full tier; 0 while there is room."""
        if self.pools[tier].free > 0:
            return 0.0
        lowest = self._lowest(tier)
        return max(0.0, lowest[0][0]) if lowest else 0.0

    def pin_path(self, extent: Extent, delta: int) -> None:
        """Pins (+1) or unpins (-1) everything from ``extent`` up to its root."""
        node: Extent | None = extent
        freed = False
        while node is not None:
            before = node.pins
            node.pins = pins = before + delta
            assert pins >= 0
            if not before:
                if node.slots[DEVICE] is not None:
                    self.pinned_device_blocks += node.blocks
            elif not pins:
                freed = True
                if node.slots[DEVICE] is not None:
                    self.pinned_device_blocks -= node.blocks
            node = node.parent
        if freed:
            self.touch_path(extent)

    # ---- making room ---------------------------------------------------------------------------------------------

    def make_room(self, tier: int, need: int, now_ns: int, *, ceiling: Rank | None = None, drop: bool = False) -> bool:
        """Frees slots until ``need`` are free; True if they are now. Victims that deserve a lower copy start their
        copy first and free their slots when it ends (call again then). ``ceiling``: take nothing from this rank up.
        ``drop``: lose what has no lower copy rather than wait for one."""
        pool = self.pools[tier]
        coming = self.coming(tier, now_ns)
        while pool.free + coming < need or (drop and pool.free < need):
            if tier == DISK and self.recovered:
                self._forget_recovered(need - pool.free)
                continue
            lowest = self._lowest(tier)
            if lowest is None or (ceiling is not None and lowest[0] >= ceiling):
                break
            self.evicted_priority[tier] = lowest[0][0]
            wanted = need - pool.free - (0 if drop else coming)
            victim = self._trim(lowest[1], tier, wanted, drop or tier == self._lowest_tier)
            copied = 0 if drop or tier == self._lowest_tier else self._copy_down(victim, tier, now_ns)
            if copied is None:
                break
            self.clearing[tier].note(now_ns, lowest[0][0], copied or victim.blocks)
            if copied:
                coming += copied
                continue
            self.drop(victim, tier)
            self._tree.join_lost(victim)
        return pool.free >= need

    def _copy_down(self, victim: Extent, tier: int, now_ns: int) -> int | None:
        """Starts copying a victim, or as much of its end as fits, to the first lower tier that takes any of it. Blocks on
        their way; 0: none takes it, or the next one has it; None: what deserves a copy waits, a lower tier or the link is
        busy making way (what has a copy farther down does not)."""
        held = any(slots is not None for slots in victim.slots[tier + 1 :])
        target = self._below(victim, tier)
        while target is not None and victim.slots[target] is None:
            if self.link_busy(now_ns):
                return 0 if held else None
            move = self.begin_move(victim, tier, target, "offload", now_ns, drop_source=True)
            if move is not None:
                return move.blocks
            if self.coming(target, now_ns):
                return 0 if held else None
            target = self._below(victim, target)
        return 0

    def link_busy(self, now_ns: int) -> bool:
        """As many copies are in flight as there may be, and one of them at least is expected to end soon."""
        return len(self.moves) >= self._moves_max and any(not self.overdue(m, now_ns) for m in self.moves.values())

    def coming(self, tier: int, now_ns: int) -> int:
        """Slots of a tier that copies in flight will free; a copy that is overdue is no longer counted on."""
        if not self.moves:
            return 0
        return sum(
            m.blocks for m in self.moves.values() if m.src == tier and m.drop_source and not self.overdue(m, now_ns)
        )

    def overdue(self, move: Move, now_ns: int) -> bool:
        """The copy has taken so long that nobody should wait for it."""
        return now_ns >= move.begun_ns + self.patience_ns

    def _trim(self, extent: Extent, tier: int, wanted: int, dropped: bool) -> Extent:
        """Of a victim, the part to take: its last blocks, a little more than wanted; at most one move's worth if it is not
        ``dropped`` at once."""
        most = extent.blocks if dropped else self._move_blocks_max
        take = max(1, min(max(wanted, 8, self.pools[tier].capacity >> _BITE_SHIFT), most))
        if extent.fill or extent.blocks <= take + 8:
            return extent if extent.blocks <= most else self._trim_exact(extent, take)
        return self._trim_exact(extent, take)

    def _trim_exact(self, extent: Extent, take: int) -> Extent:
        upper = self._tree.cut(extent, extent.blocks - take)
        self.touch(upper)
        self.touch(extent)
        return extent

    def _forget_recovered(self, count: int) -> None:
        for _ in range(min(count, len(self.recovered))):
            slot = self.recovered.pop(next(iter(self.recovered)))
            self.pools[DISK].give(np.array([slot], np.int32))
            self.dropped_disk.append(slot)

    def drop(self, extent: Extent, tier: int) -> None:
        """Frees an extent's slots on a tier now; if that was the last copy, it becomes a tombstone with a label."""
        slots = extent.slots[tier]
        assert slots is not None
        assert not any(move.src == tier for move in extent.moves)
        lost = self._label(extent, tier)
        extent.slots[tier] = None
        self.shares.add(tier, extent.owner, -extent.blocks)
        self._release(tier, slots)
        self.evicted_blocks[TIERS[tier]] += extent.blocks
        if not extent.resident and not extent.moves:
            extent.lost = lost
            self.dropped_blocks[lost] += extent.blocks
            self._tree.bury(extent)
        self.touch(extent)

    def _release(self, tier: int, slots: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        self.pools[tier].give(slots)
        if tier == DISK:
            self.dropped_disk.extend(slots.tolist())

    # ---- copies --------------------------------------------------------------------------------------------------

    def begin_move(
        self,
        extent: Extent,
        src: int,
        dst: int,
        purpose: Purpose,
        now_ns: int,
        *,
        drop_source: bool = False,
        ceiling: float | None = None,
    ) -> Move | None:
        """Starts copying an extent; None if the destination has no room, too many copies are in flight, or the destination
        has refused it. Upwards all of it goes or nothing, and nothing of priority ``ceiling`` or above is evicted for it;
        downwards, where the room that what is worth less leaves is not enough for all of it, as much of its end as fits."""
        source = extent.slots[src]
        if source is None or extent.slots[dst] is not None or extent.moving_to(dst) or extent.refused & (1 << dst):
            return None
        if src == DISK and any(move.src == DISK for move in extent.moves):
            return None
        down = dst > src
        if len(self.moves) >= self._moves_max or (not down and extent.blocks > self.pools[dst].capacity):
            return None
        rank = None if ceiling is None else (ceiling, -math.inf)
        if rank is None and dst != DEVICE:
            # One more copy of what stays where it is displaces nothing of its own rank.
            used_s = extent.last_used_s if drop_source or not down else -math.inf
            rank = (self._priority(extent, dst, src if drop_source else None), used_s)
        # The source must survive making room: a move protects it only once it is filed.
        extent.pins += 1
        self.shares.add(dst, extent.owner, extent.blocks)
        self.make_room(dst, min(extent.blocks, self.pools[dst].capacity), now_ns, ceiling=rank)
        extent.pins -= 1
        fits = self.pools[dst].free
        if fits < extent.blocks:
            self.shares.add(dst, extent.owner, (fits if down else 0) - extent.blocks)
            if not (down and fits):
                self.touch(extent)
                return None
            self._trim_exact(extent, fits)
            source = extent.slots[src]
            assert source is not None
        self._next_move += 1
        move = Move(
            self._next_move,
            src,
            dst,
            [extent],
            source.copy(),
            self.pools[dst].take(extent.blocks),
            purpose,
            drop_source,
            now_ns,
            extent.hashes,
            ahead=sum(other.blocks for other in self.moves.values() if other.src == src and other.dst == dst),
        )
        extent.moves.append(move)
        extent.stamp += 1
        self.moves[move.id] = move
        self.begun.append(move)
        return move

    def finish_move(self, move_id: int, ok: bool, bad: Iterable[int] = (), failed: Iterable[int] = ()) -> Move | None:
        """Ends a copy. ``bad``: positions whose *source* bytes are wrong: neither copy of those is kept. ``failed``: those
        that were not copied; their destination is given back and their source stands. Not ``ok``: none was copied. None
        for an unknown id."""
        move = self.moves.pop(move_id, None)
        if move is None:
            return None
        bad_set = set(bad)
        lacking = bad_set.union(failed)
        if not ok or lacking:
            self.failed_moves += 1
        if lacking:
            self._isolate(move, sorted(lacking) if ok else sorted(bad_set))
        self.corrupt_blocks[TIERS[move.src]] += len(bad_set)
        offset = 0
        for piece in list(move.pieces):
            slots = move.dst_slots[offset : offset + piece.blocks]
            is_bad, lacks = offset in bad_set, offset in lacking
            offset += piece.blocks
            piece.moves.remove(move)
            if ok and not lacks:
                piece.slots[move.dst] = slots
                piece.refused &= ~(1 << move.dst)
                if move.dst == DEVICE and piece.pins:
                    self.pinned_device_blocks += piece.blocks
                if move.drop_source and not piece.pins and not piece.moves and piece.slots[move.src] is not None:
                    self.drop(piece, move.src)
            else:
                self._release(move.dst, slots)
                self.shares.add(move.dst, piece.owner, -piece.blocks)
                piece.refused |= 1 << move.dst
                # What the device computed is never in doubt; another reader of the same bytes finds out by itself.
                doubted = is_bad and move.src != DEVICE and not any(m.src == move.src for m in piece.moves)
                if doubted and piece.slots[move.src] is not None:
                    self.drop(piece, move.src)
            self.touch(piece)
        return move

    def _isolate(self, move: Move, positions: list[int]) -> None:
        """Cuts the move's pieces so that every block at these positions is a piece of its own."""
        for position in positions:
            offset = 0
            for piece in list(move.pieces):
                if offset <= position < offset + piece.blocks:
                    if position > offset:
                        self._tree.cut(piece, position - offset)
                    if piece.blocks > 1:
                        self._tree.cut(piece, 1)
                    break
                offset += piece.blocks

    def adopt_device(self, extent: Extent, slots: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Gives an extent freshly computed device blocks, which have been charged to its owner."""
        assert extent.slots[DEVICE] is None
        assert len(slots) == extent.blocks
        self._tree.revive(extent)
        extent.slots[DEVICE] = np.ascontiguousarray(slots, np.int32).copy()
        extent.refused = 0
        if extent.pins:
            self.pinned_device_blocks += extent.blocks
        self.touch(extent)

    def adopt_disk(self, extent: Extent, slots: list[int]) -> None:
        """Gives an extent the disk blocks that an earlier process left of it."""
        extent.slots[DISK] = np.array(slots, np.int32)
        self.shares.add(DISK, extent.owner, extent.blocks)
        self.touch(extent)

    def chunk(self, extent: Extent) -> Extent:
        """The last piece of an extent that fits one move."""
        if extent.blocks <= self._move_blocks_max:
            return extent
        return self._trim_exact(extent, self._move_blocks_max)
