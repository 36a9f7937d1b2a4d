"""Turns: admitted in the policy's order, batched under one token budget, restored, preempted, ended.

Owner of the waiting and running sequences. One forward is in flight at a time; what it computes is believed only when its
``ForwardDone`` arrives.
"""

from __future__ import annotations

from tenuto.wire import Divergence, MissLabel
from tenuto_server.cache.extent import DEVICE, TIERS, LostLabel, TierName
from tenuto_server.engine.core import Core
from tenuto_server.engine.drafting import Drafting, Planned
from tenuto_server.engine.events import ForwardDone
from tenuto_server.engine.plan import FinishReason, ForwardPlan, ForwardRow, TokensOut, TurnDone, TurnStarted
from tenuto_server.engine.restore import Restorer
from tenuto_server.engine.retention import RetentionKeeper
from tenuto_server.engine.sequence import Sequence
from tenuto_server.policy.decision import TurnView

_FAILURES_MAX = 2
# Return rate (1/s) of a session whose next turn waits to be admitted: far above what any open pause earns.
WAITING_RATE = 100.0


class Scheduler:
    """See the module."""

    def __init__(self, core: Core, keeper: RetentionKeeper) -> None:
        self._core = core
        self._keeper = keeper
        self._restorer = Restorer(core)
        self._drafting = Drafting(core)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._flight: list[Planned] = []
        self._step = 0
        self.admit_again = True
        self._overdue_ns: int | None = None
        self._starved: Sequence | None = None

    # ---- arrival and departure -----------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """A turn has arrived; how much it lacks is looked up when there is an order to decide."""
        sequence.waiting_since_ns, sequence.estimated = self._core.now_ns, False
        self.waiting.append(sequence)
        self.admit_again = True

    def _estimate(self, sequence: Sequence) -> None:
        cache = self._core.cache
        root = cache.tree.roots.get(sequence.session.root)
        tokens = sequence.tokens[: sequence.count]
        restore = device = 0
        sequence.estimated = True
        if root is not None:
            match = cache.tree.match(root, tokens[:-1])
            for extent in match.path:
                blocks = match.last_blocks if extent is match.path[-1] else extent.blocks
                tier = extent.best_tier()
                restore += blocks if tier not in (None, DEVICE) else 0
                device += blocks if tier == DEVICE else 0
        sequence.restore_blocks = restore
        sequence.compute_tokens = sequence.count - (restore + device) * cache.block_tokens

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request, waiting or running."""
        for sequence in (*self.running, *self.waiting):
            if sequence.turn.request_id == request_id:
                return sequence
        return None

    def stop(self, sequence: Sequence, reason: FinishReason, keep: int | None = None) -> None:
        """Ends a turn from outside: now, or when the forward in flight has come back."""
        sequence.stop_at = keep
        if any(planned.sequence is sequence for planned in self._flight):
            sequence.cancelled = reason == "cancelled"
            return
        self.finish(sequence, reason)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a turn: its KV stays as cache, its pause begins, its caller hears the last word."""
        core, session = self._core, sequence.session
        if sequence.table is not None:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.turn.warm:
            self._keeper.evaluate(session, "warmed")
        else:
            self._turn_over(sequence)
        report = sequence.report(session, core.now_ns)
        session.last = report
        completed = sequence.generated if sequence.stop_at is None else min(sequence.generated, sequence.stop_at)
        core.outputs.append(TurnDone(sequence.turn.request_id, reason, completed, report, error))
        core.count("turns", label=reason)
        core.journal.write(core.now_ns, "turn_end", session=session.id, reason=reason, generated=sequence.generated)
        self.admit_again = True

    def _turn_over(self, sequence: Sequence) -> None:
        session = sequence.session
        session.active -= 1
        session.turns += 1
        if not session.active:
            self._keeper.begin_pause(
                session, answer=sequence.generated, wait=sequence.turn.inferred and not sequence.turn.final
            )
            if sequence.turn.final:
                self._keeper.end_session(session, 0.0)

    def _release(self, sequence: Sequence) -> None:
        core, session, table = self._core, sequence.session, sequence.table
        assert table is not None
        end = core.cache.release(table, sequence.tokens, core.now_s)
        sequence.table = None
        if end.parent is not None or session.handle not in core.cache.tips:
            core.cache.set_tip(session.handle, end)
            session.context_tokens = end.token_end(core.cache.block_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running turn's blocks; it waits again and later recomputes what it must."""
        core, table = self._core, sequence.table
        assert table is not None
        end = core.cache.release(table, sequence.tokens, core.now_s)
        # A preempted turn's context is in use, not paused: its tip shows what it holds.
        core.cache.set_tip(sequence.session.handle, end)
        core.cache.set_rate(sequence.session.handle, WAITING_RATE)
        sequence.table = None
        sequence.preemptions += 1
        self.running.remove(sequence)
        self.submit(sequence)
        core.count("preemptions")
        core.journal.write(core.now_ns, "preempt", session=sequence.session.id, generated=sequence.generated)

    # ---- admission -----------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Lets waiting turns in, in the policy's order, while their whole budget of blocks can be had."""
        core = self._core
        if not self.waiting:
            return
        overdue = core.cache.next_overdue_ns(core.now_ns)
        if not self.admit_again and overdue == self._overdue_ns:
            return
        self._overdue_ns = overdue
        self.admit_again = False
        if len(self.waiting) > 1:
            self.waiting.sort(key=self._order)
        while self.waiting and len(self.running) < core.config.running_max:
            if not self._admit(self.waiting[0]):
                break
            self.waiting.pop(0)

    def _order(self, sequence: Sequence) -> tuple[tuple[float, ...], int]:
        if not sequence.estimated:
            self._estimate(sequence)
        view = TurnView(
            attended=sequence.session.attended and not sequence.turn.warm,
            priority=sequence.turn.priority,
            age_s=(self._core.now_ns - sequence.arrived_ns) / 1e9,
            compute_tokens=sequence.compute_tokens,
            restore_blocks=sequence.restore_blocks,
        )
        return self._core.policy.admission(view), sequence.id

    def _budget_blocks(self, sequence: Sequence) -> int:
        left = min(sequence.turn.sampling.max_tokens - sequence.generated, sequence.reserve_tokens)
        return -(-(sequence.count + max(0, left)) // self._core.cache.block_tokens) + 1

    def _outstanding(self) -> int:
        """Blocks that running turns have been promised and do not hold yet."""
        cache, total = self._core.cache, 0
        for sequence in self.running:
            assert sequence.table is not None
            held = cache.held_blocks(sequence.table)
            total += max(0, self._budget_blocks(sequence) - held)
        return total

    def _admit(self, sequence: Sequence) -> bool:
        core, cache, session = self._core, self._core.cache, sequence.session
        capacity = sequence.prompt_tokens + sequence.turn.sampling.max_tokens + cache.block_tokens
        tokens = sequence.tokens[: sequence.count]
        table, found = cache.acquire(session.root, tokens, capacity, core.owner(session.tenant))
        if self.running:
            need = self._budget_blocks(sequence) - cache.held_blocks(table)
            if need > cache.reclaimable_device_blocks(core.now_ns) - self._outstanding():
                cache.release(table, tokens, None)
                return False
        cache.use(table, core.now_s)
        sequence.table, sequence.admitted_ns = table, core.now_ns
        if not sequence.started:
            self._account(sequence, found.cached, found.lost, found.known_tokens)
        self.running.append(sequence)
        if not sequence.turn.warm and not any(s.session is session and s is not sequence for s in self.waiting):
            core.cache.set_rate(
                session.handle, 0.0
            )  # pins keep what it uses; the rest of its old context is superseded
        self._restorer.plan(sequence, len(self.running) - 1 + sum(other is not sequence for other in self.waiting))
        if not sequence.started:
            sequence.started = True
            report = sequence.report(session, core.now_ns)
            core.outputs.append(TurnStarted(sequence.turn.request_id, session.id, report))
            core.journal.write(
                core.now_ns,
                "admit",
                session=session.id,
                prompt=sequence.prompt_tokens,
                cached=report.cached,
                recompute=report.recomputed,
            )
        return True

    def _account(self, sequence: Sequence, cached: dict[TierName, int], lost: dict[LostLabel, int], known: int) -> None:
        """Gives every prompt token one source: a tier, or a label that says why it must be computed."""
        core, session = self._core, sequence.session
        sequence.cached, sequence.recomputed = dict(cached), {}
        for label, count in lost.items():
            self._lose(sequence, label, count)
        length = sequence.prompt_tokens
        reach = min(core.cache.context_end(session.handle), length - 1)
        had = min(session.context_tokens, length - 1)
        common = reach
        if known < reach:
            common = max(known, core.cache.common_with(session.handle, sequence.turn.tokens))
            self._lose(sequence, "capacity", min(common, reach) - known)
            if common < reach:
                self._lose(sequence, "mutation", reach - common)
                sequence.divergence = Divergence(token=common, tokens_lost=reach - common)
        reusable = max(known, common)
        if common >= reach:
            self._lose(sequence, "capacity", had - max(reach, known))  # beyond what the tree still remembers
            reusable = max(reusable, had)
        core.guard(session, length, reusable, cached)
        rest = length - sum(sequence.cached.values()) - sum(sequence.recomputed.values())
        self._lose(sequence, "cold", rest)
        core.count("prompt_tokens", length)
        for tier, count in sequence.cached.items():
            core.count("cached_tokens", count, tier)
        for cause, count in sequence.recomputed.items():
            core.count("recomputed_tokens", count, cause)

    def _lose(self, sequence: Sequence, label: MissLabel, count: int) -> None:
        if count > 0:
            sequence.recomputed[label] = sequence.recomputed.get(label, 0) + count

    # ---- a forward -----------------------------------------------------------------------------------------------

    def plan(self) -> ForwardPlan | None:
        """The next batch: one token for every decoding turn, then prefill chunks up to the budget."""
        core = self._core
        if self._flight or not self.running:
            return None
        rows: list[ForwardRow] = []
        copies: list[tuple[int, int]] = []
        budget = core.config.step_tokens_max
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            assert sequence.table is not None
            core.cache.reconcile(sequence.table)
            (decoding if sequence.decoding else prefilling).append(sequence)
        # Whom nobody waits for lets the others' prompts by.
        prefilling.sort(key=lambda s: not s.session.attended)
        # Guesses are cheap while a forward is bound by memory: few tokens in all.
        guesses = max(0, core.config.speculate_batch_max - len(decoding)) // max(1, len(decoding))
        for sequence in (*decoding, *prefilling):
            if budget <= 0:
                break
            if sequence.table is not None:  # it may have been preempted for one before it
                budget -= self._plan_sequence(sequence, budget, rows, copies, guesses if sequence.decoding else 0)
        if not rows:
            self._end_starved()
            return None
        self._step += 1
        return ForwardPlan(self._step, tuple(rows), tuple(copies))

    def _end_starved(self) -> None:
        """A turn that runs alone and finds no block, with nothing in flight, has used up the device: it ends here."""
        starved, self._starved = self._starved, None
        if starved is not None and starved in self.running:
            self.finish(starved, "length")

    def _plan_sequence(
        self,
        sequence: Sequence,
        budget: int,
        rows: list[ForwardRow],
        copies: list[tuple[int, int]],
        guesses: int = 0,
    ) -> int:
        cache, table = self._core.cache, sequence.table
        assert table is not None
        used = 0
        while used < budget and table.front < sequence.count:
            waits = cache.settle(table)
            if waits is not None and not self._restorer.give_up(sequence, waits):
                break
            if waits is not None and waits is table.cow:
                cache.copied(table)  # its source will not come: compute those few tokens
                waits = None
            limit = sequence.count
            if waits is not None:
                limit = min(limit, self._restorer.compute_limit(sequence, waits))
            copying = table.cow_tokens if waits is None and table.front == table.path_tokens(cache.block_tokens) else 0
            end = min(limit, table.front + copying + budget - used)
            if end <= table.front or not self._allocate(sequence, end):
                break
            copy = cache.take_copy(table) if copying else None
            if copy is not None:
                copies.append(copy)
            sample = end == sequence.count and sequence.turn.sampling.max_tokens > 0
            draft = room = 0
            if sample and guesses:
                draft, room = self._drafting.guess(sequence, min(guesses, budget - used - 1))
            start, last, table.front = table.front, end + draft, end + draft + room
            used += table.front - start
            rows.append(
                ForwardRow(
                    sequence.id,
                    start,
                    sequence.tokens[start:last].copy(),
                    table.blocks[: -(-table.front // cache.block_tokens)].copy(),
                    sample,
                    sequence.turn.sampling,
                    sequence.generated,
                    draft,
                    room,
                    sequence.tokens[:last] if room else None,
                )
            )
            below = waits.best_tier() if waits is not None else None
            recomputes = TIERS[below] if below else None
            self._flight.append(Planned(sequence, start, table.front, sample, recomputes, draft or room, room > 0))
        return used

    def _allocate(self, sequence: Sequence, end: int) -> bool:
        """Blocks for a sequence up to ``end``: from free and retained ones first, by preempting others at last."""
        core, table = self._core, sequence.table
        assert table is not None
        if core.cache.allocate(table, end, core.now_ns):
            return True
        if core.cache.room_is_coming(core.now_ns):
            return False
        while not core.cache.allocate(table, end, core.now_ns, drop=True):
            flying = {planned.sequence for planned in self._flight}
            others = [s for s in self.running if s is not sequence and s not in flying and s.table is not None]
            if not others:
                if not core.cache.tiers.moves and len(self.running) == 1:
                    self._starved = sequence
                return False
            self.preempt(max(others, key=lambda s: (s.admitted_ns, s.id)))
        return True

    def done(self, event: ForwardDone) -> None:
        """The forward came back: publish what it computed, hand out tokens, end what is complete."""
        core = self._core
        if event.step != self._step or not self._flight:
            return
        flight, self._flight = self._flight, []
        if event.failed is not None:
            self._undo(flight, event.failed)
            return
        sampled: dict[int, list[int]] = {}
        for number, token in event.sampled:
            sampled.setdefault(number, []).append(token)
        drafted = dict(event.drafted)
        self._learn(flight, event.elapsed_ns)
        cache, size, decoded = core.cache, core.cache.block_tokens, 0
        for planned in flight:
            sequence, table = planned.sequence, planned.sequence.table
            assert table is not None
            if planned.draft:
                drawn = sampled.get(sequence.id, [])
                self._drafting.confirm(planned, drawn, drafted.get(sequence.id, 0))
            if table.cow is not None and planned.end > table.path_tokens(size):
                cache.copied(table)
            if planned.start // size < table.path_blocks or planned.end // size > table.path_blocks:
                cache.publish(table, sequence.tokens, planned.start, planned.end)
            count = planned.end - planned.start
            if sequence.generated and (count == 1 or planned.draft):
                decoded += count
            else:
                core.count("prefill_tokens", count)
            if planned.recomputes is not None:
                self._reclassify(sequence, planned, count)
        if decoded:
            core.count("decode_tokens", decoded)
        for planned in flight:
            sequence = planned.sequence
            if sequence.table is None:  # ended by a row before this one
                continue
            if sequence.cancelled or sequence.stop_at is not None:
                self.finish(sequence, "cancelled" if sequence.cancelled else "stop")
            elif planned.sample:
                self._sampled(sequence, sampled.get(sequence.id, []))
            elif planned.end == sequence.count and sequence.turn.sampling.max_tokens == 0:
                self.finish(sequence, "length")

    def _reclassify(self, sequence: Sequence, planned: Planned, count: int) -> None:
        """Tokens that a lower tier held but that were computed after all (split restore, a failed or late load)."""
        tier = planned.recomputes
        if tier is not None and sequence.cached.get(tier, 0) >= count:
            sequence.cached[tier] -= count
            self._lose(sequence, "capacity", count)
            self._core.count("computed_instead_of_loaded", count)

    def _sampled(self, sequence: Sequence, drawn: list[int]) -> None:
        core, sampling = self._core, sequence.turn.sampling
        if not drawn:
            self.finish(sequence, "error", "the executor returned no token for a row that asked for one")
            return
        if sequence.first_token_ns is None:
            sequence.first_token_ns = core.now_ns
        reason: FinishReason | None = None
        said: list[int] = []
        stops = frozenset() if sampling.ignore_eos else sampling.stop_ids
        for token in drawn:
            if token in stops:
                reason = "stop"
                break
            sequence.append(token)
            said.append(token)
            if sequence.generated >= sampling.max_tokens or sequence.count >= core.config.max_context_tokens:
                reason = "length"
                break
        if said:
            core.outputs.append(TokensOut(sequence.turn.request_id, tuple(said)))
        if reason is not None:
            self.finish(sequence, reason)

    def _undo(self, flight: list[Planned], reason: str) -> None:
        """Nothing of a failed forward is trusted: its rows are planned again, and given up after a few failures."""
        core = self._core
        core.count("forwards_failed")
        for sequence in dict.fromkeys(planned.sequence for planned in flight):
            table = sequence.table
            assert table is not None
            start = min(planned.start for planned in flight if planned.sequence is sequence)
            table.front = start
            if table.cow is not None and start >= table.path_tokens(core.cache.block_tokens):
                table.front = table.path_tokens(core.cache.block_tokens)
            sequence.failures += 1
            if sequence.cancelled or sequence.failures > _FAILURES_MAX:
                self.finish(sequence, "cancelled" if sequence.cancelled else "error", reason)

    def _learn(self, flight: list[Planned], elapsed_ns: int) -> None:
        prefill = [p for p in flight if p.end - p.start > 1]
        tokens = sum(p.end - p.start for p in prefill)
        if tokens >= 128 and len(flight) - len(prefill) <= 4:
            predicted = sum(self._core.costs.prefill_s(p.start, p.end) for p in prefill)
            self._core.costs.saw_forward(predicted, elapsed_ns / 1e9)

    # ---- waiting for copies --------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Keeps restores going and notes who waits for them."""
        if not self._core.cache.tiers.tiered:
            return
        for sequence in self.running:
            self._restorer.tend(sequence)

    def next_deadline_ns(self) -> int | None:
        """When the earliest copy that a turn waits for becomes late."""
        now_ns = self._core.now_ns
        if not self._core.cache.tiers.tiered:
            return None
        times = [self._restorer.next_deadline_ns(self.running)]
        if self.waiting or self.running:
            times.append(self._core.cache.next_overdue_ns(now_ns))
        return min((time for time in times if time is not None), default=None)
