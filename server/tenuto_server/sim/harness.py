"""The agents of a simulation: they send requests, pause, spawn subagents, and tell the server what their harness knows.

Owner of every session's progress. It speaks to the engine through the same events as the live server: requests, what the
server reads off an answer (``PauseInferred``), and hint envelopes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentJoin,
    AgentPause,
    AnyAction,
    Envelope,
    EnvelopeAction,
    Forecast,
    Shared,
)
from tenuto_server.engine.events import Event, HintBatch, PauseInferred, Sampling, SubmitTurn, TokenArray
from tenuto_server.sim.knowledge import Delivery, Knowledge, PauseScale
from tenuto_server.sim.traces import COMPACTED_BELOW, Request, Session
from tenuto_server.sim.workload import Workload
from tenuto_server.sim.world import Turn

FORECAST_MAX_S = 30 * 86400.0
LIED_END, LIED_COMPACTION = 0.3, 0.1
"""How often a lying harness claims, at a pause, that the session ended or that its prefix is superseded."""


class Stage(Protocol):
    """Where the agents act: virtual time (``World``) or real time with a real model (``parity.LiveWorld``)."""

    @property
    def now_ns(self) -> int:
        """The time."""
        ...

    def at(self, time_s: float, event: Event) -> None:
        """Hands an event to the engine at that time."""
        ...

    def soon(self, event: Event) -> None:
        """Hands it over before anything else happens."""
        ...

    def submit(self, turn: SubmitTurn, *, in_s: float = 0.0, then: Callable[[Turn], None] | None = None) -> Turn:
        """Sends a request ``in_s`` seconds from now."""
        ...


class Script(Protocol):
    """``answers``: what to answer, by sampling seed: the id of the first token, which then counts up."""

    answers: dict[int, int]


@dataclass(slots=True, eq=False)
class Line:
    """One session under way. ``prompt``: block ids of the request sent last, in units; ``next_id``: the first unused id;
    ``at``: number of the request that was sent last; ``primed``: the one before it was simulated too."""

    name: str
    tenant: str
    session: Session
    prompt: TokenArray
    rng: Random
    at: int = 0
    next_id: int = 0
    primed: bool = False
    seq: int = 0
    lies: bool = False
    parent: str | None = None
    children: int = 0

    @property
    def request(self) -> Request:
        """The request that was sent last."""
        return self.session.requests[self.at]


@dataclass(slots=True)
class Sent:
    """One finished request, for the record. ``reusable``: units that the session's previous prompt shares."""

    line: Line
    turn: Turn
    sent_s: float
    prompt: int
    reusable: int
    pause: str
    compacted: bool


@dataclass(slots=True, eq=False)
class Harness:
    """Plays ``workload`` in ``world``; ``record`` hears of every finished request. ``unit``: tokens that one simulated
    token stands for. ``answers``: answers are generated unit by unit and become part of the next prompt; else a request
    ends with its first token and an answer takes no room. ``tenants``: whose the sessions are, drawn by weight; one
    tenant's unless given."""

    world: Stage
    machine: Script
    workload: Workload
    knowledge: Knowledge
    delivery: Delivery
    scale: PauseScale
    unit: int
    record: Callable[[Sent], None]
    answers: bool = False
    tenants: tuple[tuple[str, float], ...] = ()
    _number: int = 0
    _ids: int = 1

    def start(self) -> None:
        """Schedules the first request of every session."""
        for thread in self.workload.threads:
            self._open(thread.name, thread.session, thread.first, thread.start_s)

    def _open(self, name: str, session: Session, first: int, in_s: float, parent: Line | None = None) -> Line:
        rng = Random(f"{self.workload.seed}/{name}")
        lies = self.delivery.kind == "lying" and rng.random() < self.delivery.amount
        if parent is not None:
            lies = parent.lies
        tenant = "liar" if lies and self.delivery.amount < 1.0 else "sim"
        if self.tenants:
            tenant = parent.tenant if parent is not None else self._tenant(name)
        line = Line(name, tenant, session, np.empty(0, np.int32), rng)
        line.lies, line.at = lies, first - 1
        line.next_id, self._ids = self._ids, self._ids + self._new_ids(session, first)
        line.parent = parent.name if parent is not None else None
        self._send(line, in_s)
        return line

    def _tenant(self, name: str) -> str:
        names, weights = zip(*self.tenants, strict=True)
        # A draw of its own: whose a session is must not change what it does.
        return str(Random(f"{self.workload.seed}/{name}/tenant").choices(names, weights)[0])

    def _new_ids(self, session: Session, first: int) -> int:
        """How many block ids a session will need: ids are unique over all sessions."""
        needed = before = 0
        for request in session.requests[first:]:
            count = max(1, request.prompt // self.unit)
            needed += count - min(request.shared // self.unit, before, count)
            before = count
        return needed

    def _send(self, line: Line, in_s: float) -> None:
        """Schedules the next request of a session: what it shares with the last prompt, then new ids."""
        previous = line.session.requests[line.at] if line.primed else None
        line.at += 1
        request = line.request
        count = max(1, request.prompt // self.unit)
        shared = min(request.shared // self.unit, len(line.prompt), count) if previous is not None else 0
        fresh = np.arange(line.next_id, line.next_id + count - shared, dtype=np.int32)
        line.next_id += count - shared
        line.prompt = np.concatenate((line.prompt[:shared], fresh)) if shared else fresh
        self._number += 1
        # The next prompt, if it goes on from here, begins its new part with this answer.
        self.machine.answers[self._number] = line.next_id
        number = self._number
        turn = SubmitTurn(
            f"r{self._number}",
            line.tenant,
            line.prompt,
            Sampling(max(1, -(-request.out // self.unit)) if self.answers else 1, seed=self._number, ignore_eos=True),
            session=line.name,
            parent=line.parent if previous is None else None,
            inferred=True,
            last_role=None if previous is None else "user" if previous.pause == "human" else "tool",
        )
        sent_s = self.world.now_ns / 1e9 + in_s
        compacted = previous is not None and request.prompt < COMPACTED_BELOW * previous.prompt
        pause = previous.pause if previous is not None else "first"
        # The last token of a prompt is always computed: it is nobody's to reuse.
        reusable = min(shared, count - 1)
        self.world.submit(
            turn,
            in_s=in_s,
            then=lambda done: self._answered(line, Sent(line, done, sent_s, count, reusable, pause, compacted), number),
        )

    def _answered(self, line: Line, sent: Sent, number: int) -> None:
        del self.machine.answers[number]
        self.record(sent)
        line.primed = True
        request = line.request
        last = line.at + 1 == len(line.session.requests)
        self._tell(line, request, last)
        for child in line.session.children:
            if child.after - 1 == line.at:
                line.children += 1
                name = f"{line.name}/{line.children}"
                if self.knowledge.fork:
                    self._say(line, AgentFork(session=line.name, seq=self._seq(line), child=name))
                self._open(name, child.session, 0, 0.0, line)
        if not last:
            self._send(line, self._away_s(request) or 0.0)

    def _away_s(self, request: Request) -> float | None:
        """How long a session stays away after an answer. Where answers take no time, theirs is part of it."""
        return request.away_s(served=self.workload.served and not self.answers)

    # ---- what it tells -------------------------------------------------------------------------------------------

    def _tell(self, line: Line, request: Request, last: bool) -> None:
        know = self.knowledge
        # The server reads this off the answer whatever the harness says.
        self.world.soon(PauseInferred(line.tenant, line.name, request.pause, request.tool, answer_tokens=request.out))
        following = None if last else line.session.requests[line.at + 1]
        if line.lies:
            self._lie(line, request)
            return
        if know.r2 is not None:
            p50_s, p90_s = self.scale.forecast(request.pause, self._away_s(request), know.r2, line.rng)
            self._say(line, self._pause(line, request, p50_s, p90_s))
        if know.compaction and following is not None and following.prompt < COMPACTED_BELOW * request.prompt:
            kept = Shared(tokens=min(following.shared // self.unit, len(line.prompt)))
            self._say(line, AgentCompaction(session=line.name, seq=self._seq(line), phase="commit", keep=kept))
        if last and line.parent is not None and (know.fork or know.end):
            self._say(line, AgentJoin(session=line.parent, child=line.name))
        elif last and know.end:
            self._say(line, AgentEnd(session=line.name, seq=self._seq(line)))

    def _lie(self, line: Line, request: Request) -> None:
        """The opposite of the truth in everything that an honest harness would have told."""
        know = self.knowledge
        if know.r2 is not None:
            p50_s, p90_s = self.scale.lie(request.pause, self._away_s(request), line.rng)
            self._say(line, self._pause(line, request, p50_s, p90_s))
        if know.compaction and line.rng.random() < LIED_COMPACTION:
            kept = Shared(tokens=0)
            self._say(line, AgentCompaction(session=line.name, seq=self._seq(line), phase="commit", keep=kept))
        if know.end and request.pause_s is not None and line.rng.random() < LIED_END:
            self._say(line, AgentEnd(session=line.name, seq=self._seq(line)))

    def _pause(self, line: Line, request: Request, p50_s: float, p90_s: float) -> AgentPause:
        said = Forecast(p50_s=min(FORECAST_MAX_S, p50_s), p90_s=min(FORECAST_MAX_S, p90_s))
        return AgentPause(session=line.name, seq=self._seq(line), kind=request.pause, tool=request.tool, forecast=said)

    def _seq(self, line: Line) -> int:
        line.seq += 1
        return line.seq

    def _say(self, line: Line, action: AnyAction) -> None:
        """Sends one hint, as reliably as the simulation wants it."""
        for delay_s in self.delivery.delays_s(line.rng):
            self._number += 1
            late = action.model_copy(update={"at_s": delay_s}) if delay_s else action
            item = EnvelopeAction(
                action_id=f"a{self._number}",
                action_type=late.TYPE,
                payload=late.model_dump(mode="json", exclude_none=True),
            )
            envelope = Envelope(message_id=f"m{self._number}", actions=(item,))
            batch = HintBatch(f"h{self._number}", line.tenant, envelope)
            self.world.at(self.world.now_ns / 1e9 + delay_s, batch)
