"""Bringing a waiting turn's blocks up: what to load, what to compute meanwhile, when to stop waiting.

Holds no state of its own: moves belong to the cache, progress to the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tenuto_server.cache.extent import DEVICE, DISK, HOST, TIERS, Extent
from tenuto_server.cache.moves import Move
from tenuto_server.cache.tree import path_to
from tenuto_server.engine.core import Core
from tenuto_server.engine.sequence import Sequence
from tenuto_server.policy.views import SystemView, TierName

_DEADLINE_S_MIN = 1.0
_QUEUE_PATIENCE = 2.0
_LEAD_SHARE_MIN = 0.1
"""A front is computed only where that spares at least this share of the load: below, the forward and the copies hinder each
other by more than it gains, and whoever else computes pays for it."""


class Restorer:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def plan(self, sequence: Sequence, others: int) -> None:
        """At admission: how much of the first run of lower-tier blocks to compute while the rest loads; then starts
        loading. ``others``: turns that run or wait now, for whom a forward of this one is a delay."""
        core, table = self._core, sequence.table
        assert table is not None
        sequence.compute_until = 0
        if not core.cache.tiers.tiered:
            return  # there is nothing to load from
        run: list[Extent] = []
        for extent in path_to(table.tip):
            tier = extent.best_tier()
            if tier == DEVICE and not run:
                continue
            if tier in (None, DEVICE) or extent.moving_to(DEVICE):
                break
            run.append(extent)
        if run:
            start, blocks = run[0].start, sum(extent.blocks for extent in run)
            slowest = max(extent.best_tier() or 0 for extent in run)
            system = self._at_present(TIERS[slowest], self._load_s(run) / blocks, others)
            lead = core.policy.split(start * core.cache.block_tokens, blocks, TIERS[slowest], system)
            lead = lead if lead >= _LEAD_SHARE_MIN * blocks else 0
            sequence.compute_until = start + min(blocks, lead)
            self._cut_at(run, sequence.compute_until)
            if lead:
                core.count("split_restores")
            core.journal.write(
                core.now_ns, "restore", session=sequence.session.id, blocks=blocks, compute=lead, tier=TIERS[slowest]
            )
        self._load(sequence)

    def _load_s(self, run: list[Extent]) -> float:
        """Seconds until all of a run is loaded, after what is on its way already. Tiers load side by side."""
        core, blocks = self._core, [0, 0, 0]
        for extent in run:
            blocks[extent.best_tier() or DEVICE] += extent.blocks
        for move in core.cache.tiers.moves.values():
            if move.dst == DEVICE and blocks[move.src]:
                blocks[move.src] += move.blocks
        return max(blocks[tier] * core.costs.load_s_per_block(tier) for tier in (HOST, DISK))

    def _at_present(self, tier: TierName, load_s_per_block: float, others: int) -> SystemView:
        """The system with what a load costs here and now, and with as many other turns as there are, if that is more than
        usual."""
        system = self._core.system()
        tiers = tuple(replace(v, load_s_per_block=load_s_per_block) if v.tier == tier else v for v in system.tiers)
        cost = replace(system.cost, waiting=max(system.cost.waiting, 1.0 + others))
        return replace(system, tiers=tiers, cost=cost)

    def _cut_at(self, run: list[Extent], block: int) -> None:
        """Makes the point where loading takes over from computing a boundary between extents."""
        for extent in run:
            if extent.start < block < extent.end:
                self._core.cache.cut(extent, block - extent.start)

    def _load(self, sequence: Sequence) -> None:
        """Starts loading, deepest blocks first: the front may be computed until the two meet."""
        core, table = self._core, sequence.table
        assert table is not None
        wanted = path_to(table.tip, table.front // core.cache.block_tokens)
        if table.cow is not None:
            wanted.append(table.cow)
        for extent in reversed(wanted):
            if not self._load_extent(sequence, extent):
                return

    def _load_extent(self, sequence: Sequence, extent: Extent) -> bool:
        """Starts loading one extent, move by move from its end; False: no more can be started now."""
        core, node = self._core, extent
        floor = 0 if extent.fill else sequence.compute_until
        while node.end > floor:
            tier = node.best_tier()
            if tier in (None, DEVICE) or node.moving_to(DEVICE) or node.refused & 1:
                return True
            first = node.start
            piece = core.cache.tiers.chunk(node)
            if core.cache.tiers.begin_move(piece, tier, DEVICE, "restore", core.now_ns) is None:
                return False
            core.count("restores")
            if piece.start == first or piece.parent is None:
                return True
            node = piece.parent  # what the chunk left of it
        return True

    def tend(self, sequence: Sequence) -> None:
        """Every step: keeps loading, and counts the time that a turn spends waiting for a copy."""
        core, table = self._core, sequence.table
        assert table is not None
        if not core.cache.tiers.tiered:
            return
        waits = core.cache.settle(table)
        stalled = waits is not None and not self.give_up(sequence, waits)
        if stalled and not sequence.stalled_since_ns:
            sequence.stalled_since_ns = core.now_ns
        elif not stalled and sequence.stalled_since_ns:
            sequence.restore_wait_ns += core.now_ns - sequence.stalled_since_ns
            sequence.stalled_since_ns = 0
        if waits is not None:
            self._load(sequence)

    def give_up(self, sequence: Sequence, extent: Extent) -> bool:
        """Whether an extent that is not on the device is to be computed rather than waited for."""
        core = self._core
        if extent.refused & 1:
            return True
        for move in extent.moves:
            if move.dst == DEVICE:
                return self._late(sequence, extent, self._deadline_ns(extent, move))
        table = sequence.table
        assert table is not None
        if extent is not table.cow and table.front < sequence.compute_until * core.cache.block_tokens:
            return True
        if extent.best_tier() is None:
            return True
        # Its load has not even begun (no room, too many copies): that cannot go on for ever either.
        return bool(sequence.stalled_since_ns) and self._late(sequence, extent, self._patience_ns(sequence))

    def _late(self, sequence: Sequence, extent: Extent, deadline_ns: int) -> bool:
        core = self._core
        if core.now_ns < deadline_ns:
            return False
        extent.refused |= 1
        core.count("restores_late")
        core.journal.write(core.now_ns, "restore_late", session=sequence.session.id, blocks=extent.blocks)
        return True

    def compute_limit(self, sequence: Sequence, extent: Extent) -> int:
        """Token position up to which an extent that was given up is to be computed in one go."""
        size = self._core.cache.block_tokens
        until = sequence.compute_until * size
        table = sequence.table
        assert table is not None
        if extent.best_tier() is not None:
            split = not extent.refused & 1 and table.front < until
            return min(until, extent.end * size) if split else extent.end * size
        end = extent.end
        for below in path_to(table.tip, end):  # what is lost just below is computed in the same go
            if not below.tombstone:
                return end * size
            end = below.end
        return end * size if table.cow is not None else sequence.count

    def _patience_ns(self, sequence: Sequence) -> int:
        """A load that could not be begun yet is waited for as long as others end, for some times as long as it would take to
        compute all that is missing."""
        core, table = self._core, sequence.table
        assert table is not None
        missing_s = core.costs.prefill_s(table.front, table.path_tokens(core.cache.block_tokens))
        limit_s = max(_DEADLINE_S_MIN, core.config.restore_deadline_factor * missing_s)
        moving_ns = max(sequence.stalled_since_ns, core.loaded_ns) + int(_DEADLINE_S_MIN * 1e9)
        return min(moving_ns, sequence.stalled_since_ns + int(limit_s * 1e9))

    def _deadline_ns(self, extent: Extent, move: Move) -> int:
        """A load may take some times as long as computing would, at least a second, and twice as long as the link needs for
        it and what was before it when it was begun: who waits in a queue that moves is not late."""
        core, size = self._core, self._core.cache.block_tokens
        recompute_s = core.costs.prefill_s(extent.start * size, extent.end * size)
        limit_s = max(_DEADLINE_S_MIN, core.config.restore_deadline_factor * recompute_s)
        limit_s = max(limit_s, _QUEUE_PATIENCE * (move.ahead + move.blocks) * core.costs.load_s_per_block(move.src))
        return move.begun_ns + int(limit_s * 1e9)

    def next_deadline_ns(self, running: Iterable[Sequence]) -> int | None:
        """When the first awaited load becomes late."""
        times = []
        for sequence in running:
            if sequence.stalled_since_ns and sequence.table is not None:
                times.append(self._patience_ns(sequence))
                waits = self._core.cache.settle(sequence.table)
                for move in waits.moves if waits is not None else ():
                    if waits is not None and move.dst == DEVICE:
                        times.append(self._deadline_ns(waits, move))
        later = [time for time in times if time > self._core.now_ns]
        return min(later) if later else None
