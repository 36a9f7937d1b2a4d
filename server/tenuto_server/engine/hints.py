"""Hints in the engine: every action of an envelope is applied to the session table and earns a receipt.

Advice only: nothing here changes a token, and a hint reaches its own tenant's sessions at most. Late and duplicate
hints are told by their sequence number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentJoin,
    AgentKeepalive,
    AgentModelSwitch,
    AgentPause,
    AgentPauseUpdate,
    AgentResumeSoon,
    AgentSession,
    AnyAction,
    Envelope,
    Forecast,
    KvCommand,
    KvDemote,
    KvPrefetch,
    KvRelease,
    KvRetain,
    Outcome,
    Receipt,
    describe_error,
)
from tenuto_server.cache.extent import DEVICE, DISK, HOST, Extent
from tenuto_server.cache.identity import HASH_BYTES
from tenuto_server.engine.core import Core
from tenuto_server.engine.limits import RateLimits
from tenuto_server.engine.retention import RetentionKeeper
from tenuto_server.engine.session import Pause, Session
from tenuto_server.policy.retention import progress_forecast

Answer = tuple[Outcome, str]


class HintDesk:
    """See the module. ``root_of(tenant)`` gives the hash root under which a new session of that tenant starts."""

    def __init__(self, core: Core, keeper: RetentionKeeper, root_of: Callable[[str], bytes]) -> None:
        self._core = core
        self._keeper = keeper
        self._root_of = root_of
        self._rates = RateLimits(core.config.hint_rate_per_s, core.config.hint_burst)
        self._handlers: dict[type, Callable[[Any, Session], Answer]] = {
            AgentSession: self._session,
            AgentPause: self._pause,
            AgentPauseUpdate: self._update,
            AgentResumeSoon: self._resume_soon,
            AgentKeepalive: self._keepalive,
            AgentFork: self._fork,
            AgentJoin: self._join,
            AgentCompaction: self._compaction,
            AgentModelSwitch: self._model_switch,
            AgentEnd: self._end,
            KvRetain: self._retain,
            KvDemote: self._demote,
            KvRelease: self._release,
            KvPrefetch: self._prefetch,
        }

    def apply(self, tenant: str, envelope: Envelope) -> tuple[Receipt, ...]:
        """Applies an envelope; one receipt per action, in order. Over a limit, nothing of it is applied."""
        core, actions = self._core, envelope.actions
        if len(actions) > core.config.hint_actions_max:
            return self._refuse(envelope, f"limit: hint_actions_max is {core.config.hint_actions_max} per envelope")
        if not self._rates.take(tenant, max(1, len(actions)), core.now_ns):
            return self._refuse(envelope, f"limit: hint_rate_per_s is {core.config.hint_rate_per_s:g} per tenant")
        receipts = []
        for item in actions:
            try:
                action = item.parse()
            except ValidationError as error:
                receipt = Receipt(action_id=item.action_id, outcome="rejected", reason=describe_error(error))
            else:
                receipt = self._one(tenant, item.action_id, item.action_type, action)
            core.count("hints", label=receipt.outcome)
            receipts.append(receipt)
        return tuple(receipts)

    def _refuse(self, envelope: Envelope, reason: str) -> tuple[Receipt, ...]:
        self._core.count("hints", len(envelope.actions), label="limited")
        return tuple(Receipt(action_id=a.action_id, outcome="rejected", reason=reason) for a in envelope.actions)

    def _one(self, tenant: str, action_id: str, action_type: str, action: AnyAction | None) -> Receipt:
        core = self._core
        if action is None:
            return Receipt(action_id=action_id, outcome="rejected", reason=f"unknown action {action_type}"[:200])
        name = action.target.session or action.session if isinstance(action, KvCommand) else action.session
        session = core.sessions.find(tenant, name)
        if session is None and isinstance(action, AgentSession):
            session = core.open_session(tenant, name, self._root_of(tenant))
        if session is None:
            return Receipt(action_id=action_id, outcome="missing", reason="no such session")
        if action.seq and action.seq <= session.seq:
            return Receipt(
                action_id=action_id, outcome="rejected", reason=f"stale: seq {action.seq} is not after {session.seq}"
            )
        session.seq = max(session.seq, action.seq)
        if not core.policy.hears_hints and not isinstance(action, AgentSession):
            return Receipt(action_id=action_id, outcome="rejected", reason=f"policy {core.policy.name} takes no hints")
        core.sessions.touch(session)
        outcome, reason = self._handlers[type(action)](action, session)
        lease = session.lease(core.now_ns)
        return Receipt(action_id=action_id, outcome=outcome, reason=reason, lease=lease)

    # ---- agent.* -------------------------------------------------------------------------------------------------

    def _session(self, action: AgentSession, session: Session) -> Answer:
        if action.agent is not None:
            session.agent = action.agent
        if action.model is not None:
            session.model = action.model
        if action.priority is not None:
            session.priority = action.priority
        if action.attended is not None:
            session.attended = action.attended
        if action.parent is not None:
            parent = self._core.sessions.find(session.tenant, action.parent)
            if parent is None:
                return "accepted", "parent unknown"
            self._core.sessions.adopt(parent, session)
        return "accepted", ""

    def _open_pause(self, session: Session, at_s: float) -> Pause | None:
        """The open pause, if what happened ``at_s`` seconds ago lies within it."""
        pause = session.pause
        if pause is None or session.active:
            return None
        # Clocks of client and server start a pause up to a round trip apart.
        if at_s > pause.elapsed_s(self._core.now_ns) + 1.0:
            return None
        return pause

    def _pause(self, action: AgentPause, session: Session) -> Answer:
        pause = self._open_pause(session, action.at_s)
        if pause is None:
            return "rejected", "no open pause: the next turn has begun or none has ended"
        pause.kind, pause.tool, pause.program, pause.told = action.kind, action.tool, action.program, True
        self._set_forecast(pause, action.forecast, action.at_s)
        return self._decided(session, "agent.pause")

    def _set_forecast(self, pause: Pause, forecast: Forecast | None, at_s: float) -> None:
        if forecast is not None:
            pause.forecast = forecast
            pause.forecast_at_s = max(0.0, pause.elapsed_s(self._core.now_ns) - at_s)
            pause.say(forecast, pause.forecast_at_s)

    def _decided(self, session: Session, why: str) -> Answer:
        decision = self._keeper.evaluate(session, why)
        if decision is None:
            return "accepted", ""
        return "accepted", decision.reason

    def _update(self, action: AgentPauseUpdate, session: Session) -> Answer:
        pause = self._open_pause(session, action.at_s)
        if pause is None:
            return "rejected", "no open pause"
        forecast = action.forecast
        if forecast is None and action.progress:
            elapsed_s = max(0.0, pause.elapsed_s(self._core.now_ns) - action.at_s)
            forecast = progress_forecast(elapsed_s, action.progress)
        self._set_forecast(pause, forecast, action.at_s)
        return self._decided(session, "agent.pause_update")

    def _resume_soon(self, action: AgentResumeSoon, session: Session) -> Answer:
        pause = self._open_pause(session, action.at_s)
        if pause is None:
            return "rejected", "no open pause"
        elapsed_s = max(0.0, pause.elapsed_s(self._core.now_ns) - action.at_s)
        pause.resume_at_s = elapsed_s + action.in_s
        pause.say(Forecast(p50_s=action.in_s), elapsed_s)
        return self._decided(session, "agent.resume_soon")

    def _keepalive(self, action: AgentKeepalive, session: Session) -> Answer:
        pause = self._open_pause(session, action.at_s)
        if pause is None:
            return "accepted", "no pause is open: nothing to keep alive"
        limit = self._core.config.keepalive_max_s
        pause.alive_until_s = pause.elapsed_s(self._core.now_ns) + min(action.for_s, limit)
        outcome, reason = self._decided(session, "agent.keepalive")
        if action.for_s > limit:
            return "clipped", f"limit: keepalive_max_s is {limit:g}"
        return outcome, reason

    def _fork(self, action: AgentFork, session: Session) -> Answer:
        core, names = self._core, [*action.children]
        if action.child is not None:
            names.append(action.child)
        tip = core.cache.tips.get(session.handle)
        for name in names:
            child = core.open_session(session.tenant, name, session.root)
            if child is None:
                return "clipped", "limit: sessions_per_tenant_max"
            core.sessions.adopt(session, child)
            if child.turns or child.active:
                continue
            child.agent = child.agent or name
            if tip is not None:
                core.cache.set_tip(child.handle, tip.extent)
            self._expect(child, action.when_s or 0.0, "agent.fork")
        if not names or action.when_s is not None:
            pause = self._open_pause(session, action.at_s)
            if pause is not None and not names:
                pause.resume_at_s = pause.elapsed_s(core.now_ns) + (action.when_s or 0.0)
                return self._decided(session, "agent.fork")
        return "accepted", f"{len(names)} children share this prefix" if names else ""

    def _expect(self, child: Session, in_s: float, why: str) -> None:
        """A session that has not spoken yet is waited for like one that pauses."""
        child.pause = Pause(self._core.now_ns, kind="subagent", resume_at_s=in_s, told=True)
        self._keeper.evaluate(child, why)

    def _join(self, action: AgentJoin, session: Session) -> Answer:
        child = self._core.sessions.find(session.tenant, action.child)
        if child is None or child.parent != session.handle:
            return "missing", "no such child"
        if not action.keep:
            self._keeper.end_session(child, 0.0)
        return "accepted", ""

    def _compaction(self, action: AgentCompaction, session: Session) -> Answer:
        core = self._core
        if action.phase == "begin":
            session.compacting = True
            pause = self._open_pause(session, action.at_s)
            if pause is not None:
                pause.resume_at_s = pause.elapsed_s(core.now_ns)
                return self._decided(session, "agent.compaction")
            return "accepted", ""
        session.compacting = False
        if action.phase == "abort":
            return "accepted", ""
        keep = action.keep.tokens if action.keep is not None and action.keep.tokens is not None else 0
        if session.active:
            return "deferred", "a turn is running: its successor supersedes the old prefix by itself"
        before = session.context_tokens
        session.compacted_from = max(session.compacted_from, before)
        if not core.knowledge.believes_compaction(session.tenant):
            return "deferred", "compactions announced by this tenant did not come"
        whole = core.cache.context(session.handle)
        core.cache.shorten_tip(session.handle, keep)
        self._keeper.vacate(extent for extent in whole if not extent.users)
        session.context_tokens = min(before, keep)
        core.journal.write(core.now_ns, "compaction", session=session.id, kept=session.context_tokens, before=before)
        return self._decided(session, "agent.compaction")

    def _model_switch(self, action: AgentModelSwitch, session: Session) -> Answer:
        pause = self._open_pause(session, action.at_s)
        session.model = action.model
        if pause is None:
            return "accepted", ""
        pause.kind = "background"
        if action.back_in_s is not None:
            self._set_forecast(pause, Forecast(p50_s=action.back_in_s), action.at_s)
        return self._decided(session, "agent.model_switch")

    def _end(self, action: AgentEnd, session: Session) -> Answer:
        keep_s = min(action.keep_s or 0.0, self._core.config.lease_max_s)
        if session.active:
            return "deferred", "a turn is running"
        self._keeper.end_session(session, keep_s)
        if action.keep_s is not None and action.keep_s > keep_s:
            return "clipped", f"limit: lease_max_s is {self._core.config.lease_max_s:g}"
        return "accepted", ""

    # ---- kv.* ----------------------------------------------------------------------------------------------------

    def _targets(self, action: KvCommand, session: Session) -> list[Extent]:
        """The extents a command addresses, all of this session's tenant."""
        size, target = self._core.config.cache.block_tokens, action.target
        if target.block_hashes is not None:
            wanted = {bytes.fromhex(h) for h in target.block_hashes if len(h) == 2 * HASH_BYTES}
            root = self._core.cache.tree.roots.get(session.root)
            stack, found = ([root] if root else []), []
            while stack:
                node = stack.pop()
                stack.extend((*node.children.values(), *node.tails))
                hashes = (node.hashes[i : i + HASH_BYTES] for i in range(0, len(node.hashes), HASH_BYTES))
                if node.parent is not None and wanted.intersection(hashes):
                    found.append(node)
            return found
        low, high = target.start or 0, target.end if target.end is not None else 1 << 62
        return [
            e for e in self._core.cache.context(session.handle) if e.start * size < high and e.token_end(size) > low
        ]

    def _retain(self, action: KvRetain, session: Session) -> Answer:
        for_s = action.duration_s if action.duration_s is not None else 300.0
        return self._keepalive(AgentKeepalive(session=session.id, for_s=for_s), session)

    def _demote(self, action: KvDemote, session: Session) -> Answer:
        core, begun = self._core, 0
        target = DISK if action.tier == "disk" else HOST
        if not core.cache.tiers.pools[target].capacity or not core.writable[target]:
            return "rejected", "no such tier"
        for extent in self._targets(action, session):
            if extent.slots[DEVICE] is None or extent.pins or extent.moves or extent.users > 1:
                continue
            if extent.slots[target] is not None:
                core.cache.tiers.drop(extent, DEVICE)
                begun += extent.blocks
                continue
            piece = core.cache.tiers.chunk(extent)
            move = core.cache.tiers.begin_move(piece, DEVICE, target, "offload", core.now_ns, drop_source=True)
            begun += move.blocks if move else 0
        return ("accepted", f"{begun} blocks") if begun else ("deferred", "nothing of it can move now")

    def _release(self, action: KvRelease, session: Session) -> Answer:
        if session.active:
            return "deferred", "a turn is running"
        self._keeper.end_session(session, 0.0)
        return "accepted", ""

    def _prefetch(self, action: KvPrefetch, session: Session) -> Answer:
        if session.active:
            return "accepted", "a turn is running"
        if self._keeper.prefetch(session):
            return "accepted", ""
        return ("accepted", "already on the device") if self._core.cache.context(session.handle) else ("missing", "")
