"""The sessions: who they are, what pause they are in, what was promised to them.

Owner of the session table. The engine writes it; policies see ``PauseView`` copies of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tenuto.wire import Forecast, Lease, PauseKind, SessionView
from tenuto_server.engine.plan import Report
from tenuto_server.policy.decision import Retention
from tenuto_server.policy.index import Outlook
from tenuto_server.policy.pace import Rhythm, Traits, rhythm_of
from tenuto_server.policy.views import Cycle, PauseView, TierName

State: TypeAlias = Literal["new", "waiting", "running", "paused", "ended"]
SECOND_NS = 1_000_000_000
RECENT_MAX = 8
"""Pauses of a session that a policy may look back on."""


@dataclass(slots=True)
class Pause:
    """A pause that is open. Times within it are seconds since ``started_ns``.

    ``said``: the first thing that the client said about its length; that is what its forecasts are judged by. ``given_up``:
    it has been counted as one that never ends though nobody said so, ``end_proved``: as one that somebody rightly said to
    be the last. ``answer_tokens``: length of the answer before it;
    ``rhythm``: what was expected of it when it was first decided about, and as which kind; ``outlook``: what the
    last decision rested on.
    """

    started_ns: int
    kind: PauseKind = "unknown"
    tool: str | None = None
    program: str | None = None
    forecast: Forecast | None = None
    forecast_at_s: float = 0.0
    said: Forecast | None = None
    said_at_s: float = 0.0
    resume_at_s: float | None = None
    alive_until_s: float = 0.0
    end_keep_s: float | None = None
    told: bool = False
    given_up: bool = False
    end_proved: bool = False
    answer_tokens: int = 0
    rhythm: tuple[PauseKind, Rhythm | None] | None = None
    outlook: Outlook | None = None

    @property
    def key(self) -> str | None:
        """What its history is filed under: tool and program."""
        if self.tool is None:
            return None
        return f"{self.tool} {self.program}" if self.program else self.tool

    def elapsed_s(self, now_ns: int) -> float:
        """Seconds since it began."""
        return max(0.0, (now_ns - self.started_ns) / SECOND_NS)

    def say(self, forecast: Forecast, at_s: float) -> None:
        """Remembers the first word about the pause's length."""
        if self.said is None:
            self.said, self.said_at_s = forecast, at_s


@dataclass(slots=True)
class Session:
    """One agent conversation. ``handle``: its number in the cache; ``active``: turns waiting or running now."""

    handle: int
    tenant: str
    id: str
    root: bytes
    named: bool = True
    side: bool = False
    parent: int | None = None
    children: list[int] = field(default_factory=list)
    agent: str | None = None
    model: str | None = None
    attended: bool = True
    priority: float = 0.0
    seq: int = 0
    turns: int = 0
    active: int = 0
    context_tokens: int = 0
    ended: bool = False
    compacting: bool = False
    pause: Pause | None = None
    kinds: dict[PauseKind, int] = field(default_factory=dict)
    recent: tuple[Cycle, ...] = ()
    habits: dict[PauseKind, float] = field(default_factory=dict)
    last_logs: dict[PauseKind, float] = field(default_factory=dict)
    compacted_from: int = 0
    last_pause_s: float = 0.0
    turn_began_ns: int | None = None
    retention: Retention | None = None
    drafted: int = 0
    confirmed: int = 0
    lease_until_ns: int = 0
    lease_tier: TierName = "device"
    lease_tokens: int = 0
    lease_id: int = 0
    lease_broken: bool = False
    prefetch: Literal["", "running", "done"] = ""
    timer: int = 0
    last: Report | None = None

    @property
    def state(self) -> State:
        """What it is doing."""
        if self.active:
            return "running"
        if self.ended:
            return "ended"
        return "paused" if self.pause is not None else "new"

    def turn_over(self, now_ns: int) -> None:
        """Its last active turn has ended: files the pause before it and how long the turn took."""
        began_ns = self.turn_began_ns if self.turn_began_ns is not None else now_ns
        cycle = Cycle(self.last_pause_s, (now_ns - began_ns) / SECOND_NS)
        self.recent = (*self.recent[1 - RECENT_MAX :], cycle)

    def traits(self, kind: PauseKind) -> Traits:
        """What bears on the length of the pause that is open, were it of that kind."""
        answer = self.pause.answer_tokens if self.pause is not None else 0
        return Traits(self.habits.get(kind), self.last_logs.get(kind), answer, self.context_tokens)

    def rhythm(self, kind: PauseKind) -> Rhythm | None:
        """What the open pause is filed under, as a pause of that kind: it stays what it was at the first look."""
        pause = self.pause
        if pause is None:
            return None
        if pause.rhythm is None or pause.rhythm[0] != kind:
            pause.rhythm = kind, rhythm_of(kind, self.traits(kind))
        return pause.rhythm[1]

    def leased(self, now_ns: int) -> bool:
        """It holds a lease that is still running and unbroken."""
        return self.lease_until_ns > now_ns and not self.lease_broken

    def lease(self, now_ns: int) -> Lease | None:
        """The lease as a client sees it."""
        if not self.leased(now_ns):
            return None
        until = (self.lease_until_ns - now_ns) / SECOND_NS
        return Lease(until_s=round(until, 3), tier=self.lease_tier, tokens=self.lease_tokens, id=f"L{self.lease_id}")

    def pause_view(self, pause: Pause, now_ns: int, *, learned: bool) -> PauseView:
        """What a policy may know of its open pause; ``learned``: pauses have taught anything."""
        # In the order of the fields, and by position: this is built for every decision.
        return PauseView(
            self.tenant,
            pause.kind,
            pause.key,
            pause.elapsed_s(now_ns),
            tuple(sorted(self.kinds.items())) if pause.kind == "unknown" else (),
            pause.forecast,
            pause.forecast_at_s,
            pause.resume_at_s,
            pause.alive_until_s,
            pause.end_keep_s,
            self.attended,
            self.turns,
            self.context_tokens,
            self.recent,
            self.rhythm(pause.kind) if learned else None,
            pause.outlook,
        )


class SessionTable:
    """Sessions by handle and by (tenant, id), bounded per tenant: the one idle for longest is forgotten first."""

    def __init__(self, per_tenant_max: int) -> None:
        self.by_handle: dict[int, Session] = {}
        self._by_id: defaultdict[str, OrderedDict[str, Session]] = defaultdict(OrderedDict)
        self._per_tenant_max = per_tenant_max
        self._next = 0

    def find(self, tenant: str, name: str) -> Session | None:
        """The session of that tenant and name, if known."""
        return self._by_id[tenant].get(name) if tenant in self._by_id else None

    def of_tenant(self, tenant: str) -> list[Session]:
        """All sessions of a tenant, longest idle first."""
        return list(self._by_id[tenant].values()) if tenant in self._by_id else []

    def touch(self, session: Session) -> None:
        """Notes that a session was heard of."""
        self._by_id[session.tenant].move_to_end(session.id)

    def open(self, tenant: str, name: str | None, root: bytes) -> tuple[Session, list[Session]] | None:
        """The session of that name, new if need be (a name is made up for None), and the sessions that had to be
        forgotten for it; None when the tenant is at its limit and all its sessions are at work."""
        if name is not None and (known := self.find(tenant, name)) is not None:
            self.touch(known)
            return known, []
        mine = self._by_id[tenant]
        forgotten = []
        while len(mine) >= self._per_tenant_max:
            idle = next((s for s in mine.values() if not s.active), None)
            if idle is None:
                return None
            self.forget(idle)
            forgotten.append(idle)
        self._next += 1
        session = Session(self._next, tenant, name or f"chain-{self._next}", root, named=name is not None)
        mine[session.id] = session
        self.by_handle[session.handle] = session
        return session, forgotten

    def forget(self, session: Session) -> None:
        """Removes a session; its children lose their parent."""
        del self._by_id[session.tenant][session.id]
        del self.by_handle[session.handle]
        for child in session.children:
            if child in self.by_handle:
                self.by_handle[child].parent = None
        if session.parent in self.by_handle:
            self.by_handle[session.parent].children.remove(session.handle)

    def adopt(self, parent: Session, child: Session) -> None:
        """Makes one session the child of another (once; no cycles)."""
        node: Session | None = parent
        while node is not None:
            if node is child:
                return
            node = self.by_handle.get(node.parent) if node.parent is not None else None
        if child.parent is None:
            child.parent = parent.handle
            parent.children.append(child.handle)

    def view(self, session: Session, now_ns: int, resident: dict[str, int]) -> SessionView:
        """The session as ``GET /v1/sessions`` shows it."""
        pause = session.pause
        parent = self.by_handle.get(session.parent) if session.parent is not None else None
        return SessionView(
            id=session.id,
            parent=parent.id if parent else None,
            children=tuple(self.by_handle[c].id for c in session.children if c in self.by_handle),
            agent=session.agent,
            model=session.model,
            state=session.state,
            attended=session.attended,
            turns=session.turns,
            context_tokens=session.context_tokens,
            pause_kind=pause.kind if pause else None,
            pause_age_s=round(pause.elapsed_s(now_ns), 3) if pause else None,
            forecast=pause.forecast if pause else None,
            resident={tier: resident[tier] for tier in ("device", "host", "disk") if tier in resident},
            lease=session.lease(now_ns),
            drafted=session.drafted,
            confirmed=session.confirmed,
            last=session.last.wire() if session.last is not None else None,
        )
