"""Pauses in the engine: asks the policy what they deserve and does it - rates, leases, early offload, prefetch.

Owner of the pause timers. Everything happens at events: a pause begins, a hint comes, a timer that the policy set goes
off, a copy ends. Nothing here runs per block or per step and session.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from tenuto.wire import PauseKind
from tenuto_server.cache.extent import DEVICE, DISK, HOST, TIERS, Extent
from tenuto_server.engine.core import Core
from tenuto_server.engine.session import SECOND_NS, Pause, Session
from tenuto_server.policy.calibration import GIVE_UP_S
from tenuto_server.policy.decision import Retention
from tenuto_server.policy.pace import next_habit

_VALID_S_MIN = 0.02
# Return rate (1/s) of a session whose pause has begun within this step.
_RATE_IN_USE = 1e3
# Share of a tier kept free by copying its least valuable blocks down before anyone asks for the room.
_WATERMARK = 0.04
_PREFETCHES_MAX = 2
_SWAP_MARGIN = 2.0
# The rank below which nobody is expected back for anything (priority, last use).
_UNWANTED = (0.0, -math.inf)


class RetentionKeeper:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timers: list[tuple[int, int, int, int]] = []
        self._prefetches: list[tuple[int, int, int, int]] = []
        self._ticket = 0
        self._pending: dict[int, str] = {}
        self._offloading: dict[int, None] = {}
        # Blocks that each prefetch may still bring up: what pressure takes back meanwhile is not fetched twice.
        self._prefetching: dict[int, int] = {}
        # Device blocks that nobody waits for any more, to be offered to those whose blocks had to leave.
        self._vacant = 0

    # ---- pauses --------------------------------------------------------------------------------------------------

    def begin_pause(self, session: Session, *, answer: int = 0, wait: bool = False) -> None:
        """A turn ended and no other of its session is active: the pause starts now. ``answer``: tokens
        generated; ``wait``: what the pause is will be told in the next step; until then the session's KV counts as in use."""
        session.turn_over(self._core.now_ns)
        session.pause = Pause(self._core.now_ns, answer_tokens=answer)
        session.prefetch = ""
        if wait:
            self._core.cache.set_rate(session.handle, _RATE_IN_USE)
            self._at(self._timers, session, 1e-9)
        else:
            self.evaluate(session, "turn_end")

    def evaluate_soon(self, session: Session, why: str) -> None:
        """Evaluates at the end of this step's events, unless one of them does so before."""
        self._pending[session.handle] = why

    def end_pause(self, session: Session, prompt: int, last_role: str | None, intact: float | None) -> None:
        """The session's next turn has arrived, with so many tokens: teaches what the pause was, settles what was promised for
        it. ``intact``: share of the context that the turn's prompt begins with, None where there is none."""
        core, pause = self._core, session.pause
        if session.compacted_from and core.policy.learns:
            core.knowledge.observe_compaction(session.tenant, came=prompt < session.compacted_from)
        session.compacted_from = 0
        session.turn_began_ns, session.last_pause_s = core.now_ns, 0.0
        if pause is None:
            return
        kind = pause.kind
        if kind == "unknown" and last_role is not None:
            kind = "tool" if last_role in ("tool", "function") else "human"
        elapsed = session.last_pause_s = pause.elapsed_s(core.now_ns)
        if core.policy.learns:
            self._teach(session, pause, kind, elapsed, intact)
        session.kinds[kind] = session.kinds.get(kind, 0) + 1
        core.count("pauses", label=kind)
        if session.prefetch:
            core.count("prefetches", label="on_time" if session.prefetch == "done" else "late")
        core.journal.write(core.now_ns, "pause_end", session=session.id, pause=kind, length_s=elapsed)
        session.pause, session.retention, session.prefetch = None, None, ""
        session.lease_until_ns = 0
        session.ended = False
        session.timer += 1
        core.fallen.forget(session.handle)
        self._offloading.pop(session.handle, None)
        self._prefetching.pop(session.handle, None)

    def _teach(self, session: Session, pause: Pause, kind: PauseKind, elapsed: float, intact: float | None) -> None:
        knowledge = self._core.knowledge
        knowledge.observe(
            session.tenant,
            kind,
            pause.key,
            elapsed,
            pause.said,
            pause.said_at_s,
            rhythm=session.rhythm(kind),
            given_up=pause.given_up,
            traits=session.traits(kind),
            intact=intact,
        )
        if pause.end_keep_s == 0.0:
            knowledge.observe_false_end(session.tenant, proved=pause.end_proved)
        session.habits[kind] = next_habit(session.habits.get(kind), kind, elapsed)
        session.last_logs[kind] = math.log(max(elapsed, 1.0))

    def end_session(self, session: Session, keep_s: float) -> None:
        """The harness is done with a session; its KV is worth keeping for ``keep_s`` more seconds."""
        if session.pause is None:
            session.pause = Pause(self._core.now_ns)
        announced = session.pause.end_keep_s == 0.0
        session.pause.end_keep_s = session.pause.elapsed_s(self._core.now_ns) + keep_s if keep_s else 0.0
        session.ended = True
        if not keep_s and not announced:
            self.vacate(self._core.cache.context(session.handle))
        self.evaluate(session, "agent.end")

    def vacate(self, extents: Iterable[Extent]) -> None:
        """Nobody is expected back for these any more: the room of those on the device that no other session uses can be
        filled from below."""
        if self._core.cache.tiers.tiered:
            self._vacant += sum(e.blocks for e in extents if e.slots[DEVICE] is not None and e.users <= 1)

    def evaluate(self, session: Session, why: str) -> Retention | None:
        """Asks the policy about an open pause and enacts the answer."""
        core = self._core
        pause = session.pause
        if pause is None or session.active:
            return None
        if why != "timer":
            pause.outlook = None  # something was said
        view = session.pause_view(pause, core.now_ns, learned=core.policy.learns)
        self._pending.pop(session.handle, None)
        if view.elapsed_s >= GIVE_UP_S:
            core.give_up(session, pause)
        decision = core.policy.retention(view, core.knowledge, core.system())
        session.retention, pause.outlook = decision, decision.outlook
        core.cache.set_rate(session.handle, decision.rate)
        self._grant(session, decision)
        session.timer += 1
        if math.isfinite(decision.valid_s):
            self._at(self._timers, session, max(_VALID_S_MIN, decision.valid_s))
        if decision.prefetch_s is not None and session.prefetch != "done":
            self._at(self._prefetches, session, decision.prefetch_s)
        core.journal.write(
            core.now_ns,
            "retention",
            session=session.id,
            why=why,
            pause=view.kind,
            elapsed_s=view.elapsed_s,
            rate=decision.rate,
            lease_s=decision.lease_s,
            reason=decision.reason,
        )
        if core.cache.tiers.tiered:
            core.fallen.rated(session.handle, decision.rate)
            self._offloading[session.handle] = None
        return decision

    def _grant(self, session: Session, decision: Retention) -> None:
        core = self._core
        if session.ended:  # its own word takes back what it was promised before, but for what it asked to be kept
            left_ns = int(self._kept_s(session) * SECOND_NS) if decision.lease_s else 0
            session.lease_until_ns = min(session.lease_until_ns, core.now_ns + left_ns) if left_ns else 0
            if not left_ns:
                return
        crowded, leased = core.cache.tiers.shares.over(core.owner(session.tenant)), session.leased(core.now_ns)
        if crowded and not leased and crowded & (1 << TIERS.index(decision.lease_tier)):
            return  # nothing is promised beyond a tenant's share
        until_ns = core.now_ns + int(min(decision.lease_s, core.config.lease_max_s) * SECOND_NS)
        if leased:
            # What was promised stands: a later look may add to it, only pressure breaks it.
            lower = TIERS.index(decision.lease_tier) > TIERS.index(session.lease_tier)
            if lower or until_ns <= session.lease_until_ns:
                return
        elif until_ns <= core.now_ns:
            return
        else:
            session.lease_id += 1
            session.lease_broken = False
            core.count("leases_granted")
        session.lease_until_ns, session.lease_tier = until_ns, decision.lease_tier
        session.lease_tokens = core.cache.held_tokens(session.handle)

    def _kept_s(self, session: Session) -> float:
        """For how much longer a session that has ended asked to be kept."""
        pause = session.pause
        return 0.0 if pause is None else max(0.0, (pause.end_keep_s or 0.0) - pause.elapsed_s(self._core.now_ns))

    def _at(self, heap: list[tuple[int, int, int, int]], session: Session, delay_s: float) -> None:
        self._ticket += 1
        due = self._core.now_ns + int(min(delay_s, 1e9) * SECOND_NS)
        heapq.heappush(heap, (due, self._ticket, session.handle, session.timer))

    # ---- every step ----------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Serves what is due: timers, prefetches, early offloads, and room kept free ahead of need."""
        core = self._core
        pending, self._pending = self._pending, {}
        for handle, why in pending.items():
            if (session := core.sessions.by_handle.get(handle)) is not None:
                self.evaluate(session, why)
        for session in self._due(self._timers):
            self.evaluate(session, "timer")
        for session in self._due(self._prefetches):
            self.prefetch(session)
        for handle in list(self._prefetching):
            self._continue_prefetch(handle)
        moves, moves_max = core.cache.tiers.moves, core.config.cache.transfers_inflight_max
        if self._offloading and len(moves) < moves_max:  # as many may wait as there are sessions
            for handle in list(self._offloading):
                if len(moves) >= moves_max:
                    break
                self._continue_offload(handle)
        self._keep_room()
        if self._vacant:
            self._refill()

    def _refill(self) -> None:
        """Brings up what is likeliest to be wanted next of what had to leave the device, one copy at a time and only while the
        links have nothing else to do. It takes no room from anything worth more."""
        core, tiers = self._core, self._core.cache.tiers
        if tiers.moves:
            return
        first = None
        while first is None and (handle := core.fallen.best()) is not None:
            session = core.sessions.by_handle.get(handle)
            if session is not None and session.retention is not None and session.retention.rate <= 0.0:
                break  # nor is anybody after it expected back
            first = self._first_below(session) if session is not None and session.retention is not None else None
            if first is None:
                core.fallen.forget(handle)
        if first is None:
            self._vacant = 0
            return
        piece = tiers.chunk(first)
        ceiling = self._worth_displacing(piece)
        move = tiers.begin_move(piece, piece.best_tier() or DISK, DEVICE, "prefetch", core.now_ns, ceiling=ceiling)
        if move is None:
            self._vacant = 0  # what is there is worth more
            return
        core.count("refills")
        self._vacant = max(0, self._vacant - move.blocks)

    def _first_below(self, session: Session) -> Extent | None:
        """The first blocks of a paused session's context that only a lower tier holds, if they can be brought up."""
        if session.pause is None or session.active:
            return None
        for extent in self._core.cache.context(session.handle):
            if extent.best_tier() in (HOST, DISK):
                return None if extent.refused & 1 else extent
        return None

    def _due(self, heap: list[tuple[int, int, int, int]]) -> list[Session]:
        core, due = self._core, []
        while heap and heap[0][0] <= core.now_ns:
            _, _, handle, timer = heapq.heappop(heap)
            session = core.sessions.by_handle.get(handle)
            if session is not None and session.timer == timer and session.pause is not None:
                due.append(session)
        return due

    def next_due_ns(self) -> int | None:
        """When the next timer goes off."""
        times = []
        for heap in (self._timers, self._prefetches):
            while heap:
                session = self._core.sessions.by_handle.get(heap[0][2])
                if session is not None and session.timer == heap[0][3]:
                    times.append(heap[0][0])
                    break
                heapq.heappop(heap)
        return min(times) if times else None

    def _continue_offload(self, handle: int) -> None:
        """Copies down what of a paused session's context the policy wants below, deepest blocks first."""
        core = self._core
        target = HOST if core.cache.tiers.pools[HOST].capacity and core.writable[HOST] else DISK
        if not core.cache.tiers.pools[target].capacity or not core.writable[target]:
            self._offloading.pop(handle, None)
            return
        kept = self._watermark(target)
        for extent in reversed(core.cache.context(handle)):
            if not self._wants_offload(extent, target):
                continue
            whole, piece = extent.blocks, core.cache.tiers.chunk(extent)
            # What is kept free there is for what has no other place: a copy made of it would make way at once, to be made again.
            if not core.cache.tiers.make_room(target, piece.blocks + kept, core.now_ns, ceiling=_UNWANTED):
                break
            move = core.cache.tiers.begin_move(piece, DEVICE, target, "offload", core.now_ns)
            if move is None:
                break
            core.count("offloads_early")
            if move.blocks < whole or len(core.cache.tiers.moves) >= core.config.cache.transfers_inflight_max:
                return  # more of it next time
        else:
            self._offloading.pop(handle, None)
            return
        self._offloading.pop(handle, None)

    def _wants_offload(self, extent: Extent, target: int) -> bool:
        return (
            extent.slots[DEVICE] is not None
            and not any(extent.slots[lower] is not None for lower in (HOST, DISK))
            and not extent.moves
            and not extent.pins
            and not extent.refused & (1 << target)
            and self._core.policy.offload_early(self._core.view(extent), self._core.system())
        )

    def prefetch(self, session: Session) -> bool:
        """Starts bringing a paused session's lower-tier blocks up. False: there is nothing to bring."""
        core = self._core
        waiting = [e for e in core.cache.context(session.handle) if e.best_tier() in (HOST, DISK)]
        if not waiting:
            return False
        session.prefetch = "running"
        blocks = self._prefetching[session.handle] = sum(e.blocks for e in waiting)
        core.journal.write(core.now_ns, "prefetch", session=session.id, blocks=blocks)
        self._continue_prefetch(session.handle)
        return True

    def _continue_prefetch(self, handle: int) -> None:
        """Front first: what comes earlier in the prompt is needed first. Takes no room from anything worth more."""
        core = self._core
        session = core.sessions.by_handle.get(handle)
        left, budget = False, self._prefetching[handle]
        for extent in core.cache.context(handle) if session is not None and budget > 0 else ():
            tier = extent.best_tier()
            if tier not in (HOST, DISK) or extent.refused & 1:
                continue
            left = True
            if extent.moving_to(DEVICE):
                continue
            if not self._link_is_idle():
                return  # it goes on when those have ended
            piece = core.cache.tiers.chunk(extent)
            ceiling = self._worth_displacing(piece)
            move = core.cache.tiers.begin_move(piece, tier, DEVICE, "prefetch", core.now_ns, ceiling=ceiling)
            if move is None:
                if not core.cache.tiers.moves:
                    self._prefetching.pop(handle, None)  # no room that is worth taking: give up until asked again
                return
            self._prefetching[handle] = budget = budget - piece.blocks
            if budget <= 0:
                break
        if budget <= 0:
            left = any(extent.moving_to(DEVICE) for extent in core.cache.context(handle))
        if not left:
            self._prefetching.pop(handle, None)
            if session is not None and session.prefetch == "running":
                session.prefetch = "done"

    def _link_is_idle(self) -> bool:
        """No turn waits for a load, and few loads ahead of need are on their way: whoever comes next waits for little."""
        ahead = 0
        for move in self._core.cache.tiers.moves.values():
            if move.purpose == "restore":
                return False
            ahead += move.dst == DEVICE
        return ahead < _PREFETCHES_MAX

    def _worth_displacing(self, extent: Extent) -> float:
        """The priority up to which others make way on the device for an extent that comes up ahead of need. Each brings a copy
        down now and up again later, so that little is gained by trading what is worth nearly the same."""
        core = self._core
        return core.policy.priority(core.view(extent), TIERS[DEVICE], core.system()) / _SWAP_MARGIN

    def _keep_room(self) -> None:
        """Copies the least valuable blocks of a nearly full tier down, so that later need finds free slots."""
        core = self._core
        if not core.cache.tiers.tiered:
            return
        for tier in (DEVICE, HOST):
            pool = core.cache.tiers.pools[tier]
            want = self._watermark(tier)
            if pool.free >= want:
                continue
            if any(core.cache.tiers.pools[t].capacity and core.writable[t] for t in range(tier + 1, 3)):
                core.cache.tiers.make_room(tier, want, core.now_ns)

    def _watermark(self, tier: int) -> int:
        """Blocks of a tier that are kept free; none of the last one, where what makes way is lost."""
        if tier == DISK:
            return 0
        cache = self._core.config.cache
        return min(int(self._core.cache.tiers.pools[tier].capacity * _WATERMARK), 2 * cache.transfer_blocks_max)
