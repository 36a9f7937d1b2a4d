"""``Engine.step(now_ns, events) -> StepPlan``: the whole control plane as one deterministic state machine.

The live server, the simulator and the tests run this object. It owns the session table, the cache and the scheduler, reads
no clock and starts no thread; the same calls give the same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Events
from functools import lru_cache
from typing import Any

import numpy as np

from tenuto.wire import SessionView
from tenuto_server.cache.extent import DEVICE, DISK, HOST, TIERS
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.moves import Move
from tenuto_server.config import EngineConfig
from tenuto_server.engine.core import Core
from tenuto_server.engine.events import (
    CancelTurn,
    DiskRecovered,
    Event,
    ForwardDone,
    HintBatch,
    PauseInferred,
    QuerySessions,
    StopTurn,
    SubmitTurn,
    TierFailed,
    TokenArray,
    TransferDone,
)
from tenuto_server.engine.hints import HintDesk
from tenuto_server.engine.journal import Journal, Sink
from tenuto_server.engine.plan import HintsDone, SessionsOut, StepPlan, Transfer, TurnRejected
from tenuto_server.engine.retention import RetentionKeeper
from tenuto_server.engine.scheduler import WAITING_RATE, Scheduler
from tenuto_server.engine.sequence import Sequence
from tenuto_server.engine.session import Session
from tenuto_server.policy.decision import Policy

_CHAIN_TIPS_MAX = 64


class Engine:
    """``identity``: the root of all block hashes. ``journal``: gets every decision as a JSON line."""

    def __init__(
        self, config: EngineConfig, policy: Policy, identity: RootIdentity, journal: Sink | None = None
    ) -> None:
        self._core = Core(config, policy, Journal(config.journal_entries_max, journal))
        # The root of a tenant's hashes, looked up without hashing the identity each time.
        self._root: Callable[[str, str], bytes] = lru_cache(maxsize=4096)(identity.root)
        self._keeper = RetentionKeeper(self._core)
        self._scheduler = Scheduler(self._core, self._keeper)
        self._hints = HintDesk(self._core, self._keeper, lambda tenant: self._root(tenant, ""))
        self._handlers: dict[type, Callable[[Any], None]] = {
            SubmitTurn: self._submit,
            ForwardDone: self._scheduler.done,
            TransferDone: self._transferred,
            StopTurn: self._stop,
            CancelTurn: self._cancel,
            PauseInferred: self._inferred,
            HintBatch: self._hinted,
            QuerySessions: self._query,
            TierFailed: self._tier_failed,
            DiskRecovered: self._recovered,
        }
        self._next_sequence = 0
        self._sides: list[Session] = []

    @property
    def core(self) -> Core:
        """The shared tables, for inspection by tests and the simulator."""
        return self._core

    def step(self, now_ns: int, events: Events[Event]) -> StepPlan:
        """Takes what happened since the last step and says what to do next. Call again when anything of it is done,
        when anything new happens, or at ``wake_ns``."""
        core = self._core
        core.begin_step(now_ns)
        for event in events:
            self._handlers[type(event)](event)
        self._keeper.tend()
        self._scheduler.admit()
        self._scheduler.tend()
        forward = self._scheduler.plan()
        core.costs.saw_queue(len(self._scheduler.running) + len(self._scheduler.waiting))
        core.cache.prune()
        moves, core.cache.tiers.begun = core.cache.tiers.begun, []
        dropped, core.cache.tiers.dropped_disk = core.cache.tiers.dropped_disk, []
        transfers = tuple(self._transfer(move) for move in moves)
        return StepPlan(forward, transfers, tuple(core.outputs), self._wake_ns(), tuple(dropped))

    def _stop(self, event: StopTurn) -> None:
        if sequence := self._scheduler.find(event.request_id):
            self._scheduler.stop(sequence, "stop", event.keep_tokens)

    def _cancel(self, event: CancelTurn) -> None:
        if sequence := self._scheduler.find(event.request_id):
            self._core.count("cancelled_blocks", sequence.table.owned if sequence.table else 0)
            self._scheduler.stop(sequence, "cancelled")

    def _hinted(self, event: HintBatch) -> None:
        receipts = self._hints.apply(event.tenant, event.envelope)
        self._core.outputs.append(HintsDone(event.ticket, receipts))

    def _query(self, event: QuerySessions) -> None:
        self._core.outputs.append(SessionsOut(event.ticket, self._views(event.tenant, event.session)))

    def _tier_failed(self, event: TierFailed) -> None:
        core = self._core
        core.writable[TIERS.index(event.tier)] = event.writable
        core.count("tier_failures", label=event.tier)
        core.journal.write(core.now_ns, "tier", tier=event.tier, writable=event.writable, reason=event.reason)

    def _recovered(self, event: DiskRecovered) -> None:
        self._core.count("disk_blocks_recovered", self._core.cache.recover_disk(event.hashes, event.slots))

    # ---- requests ------------------------------------------------------------------------------------------------

    def _submit(self, turn: SubmitTurn) -> None:
        core, config = self._core, self._core.config
        refusal = self._refusal(turn)
        root = self._root(turn.tenant, turn.salt)
        session = None
        if refusal is None:
            name = turn.session
            if turn.side:
                self._forget_sides()
            elif name is None:
                name = self._chain(turn.tenant, root, turn.tokens)
            session = core.open_session(turn.tenant, name, root)
            if session is None:
                limit = config.sessions_per_tenant_max
                refusal = TurnRejected(
                    turn.request_id, "too_many_sessions", f"limit: sessions_per_tenant_max is {limit}"
                )
        if refusal is not None or session is None:
            assert refusal is not None
            core.count("rejected", label=refusal.code)
            core.outputs.append(refusal)
            return
        self._describe(session, turn)
        receipts = self._hints.apply(turn.tenant, turn.hints) if turn.hints is not None else ()
        if not session.active and not turn.warm:
            intact = self._intact(session, turn.tokens) if core.policy.learns else None
            self._keeper.end_pause(session, len(turn.tokens), turn.last_role, intact)
            # Its turn is here: until it is admitted, nothing comes back sooner than what it needs.
            core.cache.set_rate(session.handle, WAITING_RATE)
        if session.root != root:  # another salt: nothing of the old context can match
            core.cache.set_tip(session.handle, None)
            session.root, session.context_tokens = root, 0
        session.active += not turn.warm
        self._next_sequence += 1
        count = len(turn.tokens)
        tokens = np.empty(count + min(turn.sampling.max_tokens, 1024) + 1, np.int32)
        tokens[:count] = turn.tokens
        sequence = Sequence(
            self._next_sequence, turn, session, tokens, count, core.now_ns, config.reserve_tokens_max, receipts=receipts
        )
        self._scheduler.submit(sequence)

    def _intact(self, session: Session, tokens: TokenArray) -> float | None:
        """The share of a session's context that its new prompt begins with."""
        had = self._core.cache.context_end(session.handle)
        return self._core.cache.common_with(session.handle, tokens) / had if had else None

    def _refusal(self, turn: SubmitTurn) -> TurnRejected | None:
        config, count = self._core.config, len(turn.tokens)
        size = config.cache.block_tokens
        limit = min(config.max_context_tokens, (config.cache.device_blocks - 2) * size)
        if count >= limit:
            which = "the model's context" if limit == config.max_context_tokens else "device KV memory"
            text = f"the prompt has {count} tokens; {which} holds {limit} including at least one generated token"
            return TurnRejected(turn.request_id, "too_long", text)
        if len(self._scheduler.waiting) >= config.waiting_max:
            return TurnRejected(turn.request_id, "busy", f"limit: waiting_max is {config.waiting_max} turns")
        return None

    def _forget_sides(self) -> None:
        """Side calls that are over leave no session behind."""
        core = self._core
        for session in [side for side in self._sides if not side.active]:
            self._sides.remove(session)
            if core.sessions.by_handle.get(session.handle) is session:
                core.cache.set_tip(session.handle, None)
                core.sessions.forget(session)
                core.safeguard.end(session.handle)

    def _describe(self, session: Session, turn: SubmitTurn) -> None:
        if turn.side:
            session.side = True
            self._sides.append(session)
        if turn.model is not None:
            session.model = turn.model
        if turn.agent is not None:
            session.agent = turn.agent
        if turn.attended is not None:
            session.attended = turn.attended
        if turn.parent is not None and turn.parent != turn.session:
            parent = self._core.sessions.find(turn.tenant, turn.parent)
            if parent is not None:
                self._core.sessions.adopt(parent, session)

    def _chain(self, tenant: str, root: bytes, tokens: TokenArray) -> str | None:
        """The unnamed session whose context this prompt continues, by longest prefix."""
        core, node = self._core, self._core.cache.tree.roots.get(root)
        if node is None:
            return None
        size = core.cache.block_tokens
        match = core.cache.tree.match(node, tokens)
        whole = match.path if not match.path or match.last_blocks == match.path[-1].blocks else match.path[:-1]
        candidates = []
        if match.path == whole:
            end = match.path[-1] if match.path else node
            rest = tokens[match.blocks * size :]
            candidates = [tail for tail in end.tails if np.array_equal(tail.tokens, rest[: len(tail.tokens)])]
        for extent in (*candidates, *reversed(whole)):
            for handle in sorted(extent.tips, reverse=True)[:_CHAIN_TIPS_MAX]:
                session = core.sessions.by_handle.get(handle)
                if session is None or session.named or session.active or session.side:
                    continue
                if session.tenant == tenant:
                    return session.id
        return None

    def _inferred(self, event: PauseInferred) -> None:
        session = self._core.sessions.find(event.tenant, event.session)
        if session is None or session.pause is None or session.pause.told or session.active:
            return
        session.pause.kind, session.pause.tool, session.pause.program = event.kind, event.tool, event.program
        if event.answer_tokens is not None:
            session.pause.answer_tokens = event.answer_tokens
        self._keeper.evaluate_soon(session, "inferred")

    def _views(self, tenant: str, name: str | None) -> tuple[SessionView, ...]:
        core = self._core
        found = core.sessions.of_tenant(tenant) if name is None else [core.sessions.find(tenant, name)]
        return tuple(
            core.sessions.view(session, core.now_ns, core.cache.resident_tokens(session.handle))
            for session in found
            if session is not None and not session.side
        )

    # ---- copies --------------------------------------------------------------------------------------------------

    def _transfer(self, move: Move) -> Transfer:
        self._core.count("transferred_blocks", move.blocks, f"{TIERS[move.src]}>{TIERS[move.dst]}")
        urgent = move.purpose == "restore" or move.drop_source
        return Transfer(move.id, TIERS[move.src], TIERS[move.dst], move.src_slots, move.dst_slots, move.hashes, urgent)

    def _transferred(self, event: TransferDone) -> None:
        core = self._core
        move = core.cache.finish_move(event.transfer, event.ok, event.bad, event.failed)
        if move is None:
            return
        if move.dst == DEVICE:
            core.loaded_ns = core.now_ns
        if event.ok and not event.bad and not event.failed:
            core.costs.saw_transfer(max(move.src, move.dst), move.blocks, event.elapsed_ns / 1e9)
        else:
            core.count("transfers_failed", label=f"{TIERS[move.src]}>{TIERS[move.dst]}")
            if move.src != DEVICE:  # what was computed here is never in doubt: then the copy could not be written
                core.count("corrupt_blocks", len(event.bad), TIERS[move.src])
            core.journal.write(
                core.now_ns,
                "transfer_failed",
                src=TIERS[move.src],
                dst=TIERS[move.dst],
                bad=len(event.bad),
                failed=len(event.failed) if event.ok else move.blocks - len(event.bad),
                reason=event.reason,
            )
        self._scheduler.admit_again = True

    def _wake_ns(self) -> int | None:
        times = [t for t in (self._keeper.next_due_ns(), self._scheduler.next_deadline_ns()) if t is not None]
        return min(times) if times else None

    # ---- figures -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float | dict[str, float]]:
        """Counters and gauges by name; a dictionary has one value per label. ``*_total`` count since start."""
        core, cache, tiers = self._core, self._core.cache, self._core.cache.tiers
        figures: dict[str, float | dict[str, float]] = {f"{k}_total": float(v) for k, v in core.counters.items()}
        for name, labels in core.labelled.items():
            figures[f"{name}_total"] = {label: float(value) for label, value in labels.items()}
        figures["blocks"] = {TIERS[t]: float(tiers.pools[t].capacity) for t in (DEVICE, HOST, DISK)}
        figures["blocks_used"] = {TIERS[t]: float(cache.used_blocks(t)) for t in (DEVICE, HOST, DISK)}
        figures["evicted_blocks_total"] = {k: float(v) for k, v in tiers.evicted_blocks.items()}
        figures["lost_blocks_total"] = {k: float(v) for k, v in tiers.dropped_blocks.items()}
        figures["price"] = core.prices()
        figures["tier_writable"] = {TIERS[t]: float(ok) for t, ok in core.writable.items()}
        figures["device_blocks_pinned"] = float(tiers.pinned_device_blocks)
        figures["device_blocks_private"] = float(cache.private_blocks)
        figures["tombstone_blocks"] = float(cache.tree.tombstone_blocks)
        figures["transfers_inflight"] = float(len(tiers.moves))
        figures["turns_running"] = float(len(self._scheduler.running))
        figures["turns_waiting"] = float(len(self._scheduler.waiting))
        figures["sessions"] = float(len(core.sessions.by_handle))
        figures["copied_blocks_total"] = float(cache.copied_blocks)
        figures["prefill_seconds_per_token"] = core.costs.prefill_a_s
        figures["policy_trust"] = core.safeguard.trust
        figures["policy_lead_over_lru"] = core.safeguard.lead
        figures["decisions_total"] = float(core.journal.count)
        return figures
