"""Bringing a waiting turn's blocks up: what to load, what to compute meanwhile, when to stop waiting.

Holds no state of its own: moves belong to the cache, progress to the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto_server.cache.extent import DEVICE, TIERS, Extent
from tenuto_server.cache.tree import path_to
from tenuto_server.engine.core import Core
from tenuto_server.engine.sequence import Sequence

_DEADLINE_S_MIN = 1.0
_LEAD_SHARE_MIN = 0.1
"""A front is computed only where that spares at least this share of the load: below, the forward and the copies hinder each
other by more than it gains, and whoever else computes pays for it."""


class Restorer:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def plan(self, sequence: Sequence) -> None:
        """At admission: how much of the first run of lower-tier blocks to compute while the rest loads; then starts
        loading."""
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
            lead = core.policy.split(start * core.cache.block_tokens, blocks, TIERS[slowest], core.system())
            lead = lead if lead >= _LEAD_SHARE_MIN * blocks else 0
            sequence.compute_until = start + min(blocks, lead)
            self._cut_at(run, sequence.compute_until)
            if lead:
                core.count("split_restores")
            core.journal.write(
                core.now_ns, "restore", session=sequence.session.id, blocks=blocks, compute=lead, tier=TIERS[slowest]
            )
        self._load(sequence)

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
                return self._late(sequence, extent, self._deadline_ns(extent, move.begun_ns))
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
        return sequence.stalled_since_ns + int(_DEADLINE_S_MIN * 1e9)

    def _deadline_ns(self, extent: Extent, begun_ns: int) -> int:
        """A load may take some times as long as computing would, and at least a second."""
        size = self._core.cache.block_tokens
        recompute_s = self._core.costs.prefill_s(extent.start * size, extent.end * size)
        limit_s = max(_DEADLINE_S_MIN, self._core.config.restore_deadline_factor * recompute_s)
        return begun_ns + int(limit_s * 1e9)

    def next_deadline_ns(self, running: Iterable[Sequence]) -> int | None:
        """When the first awaited load becomes late."""
        times = []
        for sequence in running:
            if sequence.stalled_since_ns and sequence.table is not None:
                times.append(self._patience_ns(sequence))
                waits = self._core.cache.settle(sequence.table)
                for move in waits.moves if waits is not None else ():
                    if waits is not None and move.dst == DEVICE:
                        times.append(self._deadline_ns(waits, move.begun_ns))
        later = [time for time in times if time > self._core.now_ns]
        return min(later) if later else None
