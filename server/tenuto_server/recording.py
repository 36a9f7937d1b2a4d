"""The server's traffic as a trace (``tenuto.trace``): who asked when, how long prompts, answers and pauses were. No text.

``TrafficRecorder`` stands between the loop and the engine; it changes nothing on the way. It owns what is open (turns,
pauses, the names that sessions have in the trace) and a thread that writes: a disk that hangs costs lines, never the engine.
Sessions are numbered, so that neither what clients call them nor whose they are reaches the file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from tenuto.trace import (
    TraceCompaction,
    TraceEnd,
    TraceEvent,
    TraceHeader,
    TraceModelSwitch,
    TracePause,
    TraceSession,
    TraceTurn,
    dump_event,
    dump_header,
)
from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentJoin,
    AgentModelSwitch,
    AgentPause,
    Envelope,
    Forecast,
    PauseKind,
)
from tenuto_server.engine.events import Event, HintBatch, PauseInferred, SubmitTurn
from tenuto_server.engine.loop import SteppedEngine
from tenuto_server.engine.plan import Output, StepPlan, TokensOut, TurnDone, TurnRejected, TurnStarted
from tenuto_server.errors import ConfigError

logger = logging.getLogger(__name__)

SESSIONS_MAX = 16_384
QUEUE_MAX = 8192
_WRITE_EVERY_S = 0.25

Key = tuple[str, str]


@dataclass(slots=True)
class _Turn:
    """A request on its way. ``at_s``: when it came; ``first_s``: when its first token left."""

    request: SubmitTurn
    at_s: float
    key: Key | None = None
    first_s: float | None = None


@dataclass(slots=True)
class _Session:
    """``name``: in the trace. ``tokens``: prompt and answer of its last turn. ``since_s``: when its pause began."""

    name: str
    tokens: int | None = None
    active: int = 0
    since_s: float | None = None
    kind: PauseKind = "unknown"
    tool: str | None = None
    program: str | None = None
    forecast: Forecast | None = None
    told: bool = False


@dataclass(slots=True)
class _Forked:
    """What a parent said of a child that has not asked yet."""

    parent: str
    messages: int | None = None
    tokens: int | None = None


@dataclass(slots=True)
class _Open:
    sessions: OrderedDict[Key, _Session] = field(default_factory=OrderedDict)
    turns: dict[str, _Turn] = field(default_factory=dict)
    forks: OrderedDict[Key, _Forked] = field(default_factory=OrderedDict)


class TraceFile:
    """Appends lines on a thread of its own. ``target``: a folder, which gets one file for every start of the server, or the
    name of a file that does not exist. At most ``bytes_max`` are written; what comes after, or while ``QUEUE_MAX`` lines
    wait, is counted as lost. Raises ``ConfigError`` if the file cannot be created."""

    def __init__(self, target: Path, header: TraceHeader, bytes_max: int) -> None:
        self.path = target
        if target.is_dir():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(header.started_unix_s))
            self.path = target / f"traffic-{stamp}-{os.getpid()}.jsonl"
        try:
            self._file = self.path.open("x", encoding="utf-8")
            self._file.write(dump_header(header) + "\n")
            self._file.flush()
        except FileExistsError:
            raise ConfigError(f"--recorder {target}: exists already; name a new file, or a folder") from None
        except OSError as error:
            raise ConfigError(f"--recorder {target}: {error.strerror}") from None
        self.lines = self.lost = 0
        self._left = bytes_max
        self._queue: deque[str] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenuto-recorder", daemon=True)
        self._thread.start()

    def put(self, event: TraceEvent) -> None:
        """Queues one event; returns at once."""
        if len(self._queue) >= QUEUE_MAX:
            self.lost += 1
            return
        self._queue.append(dump_event(event) + "\n")

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what waits and closes the file, unless the disk hangs."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.wait(_WRITE_EVERY_S):
            self._write()
        self._write()
        try:
            self._file.close()
        except OSError as error:
            logger.warning("recorder: %s", error)

    def _write(self) -> None:
        lines = [self._queue.popleft() for _ in range(len(self._queue))]
        kept: list[str] = []
        for line in lines:
            size = len(line.encode())
            if size > self._left:
                self._left = 0  # and nothing shorter after it: a trace has no holes
                break
            self._left -= size
            kept.append(line)
        try:
            if kept:
                self._file.write("".join(kept))
                self._file.flush()
            self.lines += len(kept)
        except (OSError, ValueError) as error:
            if not self.lost:
                logger.warning("recorder: %s; traffic is no longer recorded", error)
            kept, self._left = [], 0
        self.lost += len(lines) - len(kept)


class TrafficRecorder:
    """An engine for ``EngineLoop`` that writes down what passes. ``close`` after the loop has stopped."""

    def __init__(self, engine: SteppedEngine, target: Path, *, model: str, bytes_max: int) -> None:
        self._engine = engine
        header = TraceHeader(started_unix_s=round(time.time(), 3), model=model, notes="recorded by the server")
        self._file = TraceFile(target, header, bytes_max)
        self._open = _Open()
        self._names = 0
        self._off = False
        self._start_ns: int | None = None
        self._now_s = 0.0

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._file.path

    def step(self, now_ns: int, events: Sequence[Event]) -> StepPlan:
        """The engine's step."""
        if self._start_ns is None:
            self._start_ns = now_ns
        self._now_s = round((now_ns - self._start_ns) / 1e9, 6)
        plan = self._engine.step(now_ns, events)
        if not self._off:
            try:
                self._note(events, plan.outputs)
            except Exception:
                # A fault in keeping records must not end what they are kept of.
                self._off = True
                logger.exception("recorder: stopped by a fault of its own")
        return plan

    def _note(self, events: Sequence[Event], outputs: Sequence[Output]) -> None:
        for event in events:
            self._came(event)
        for output in outputs:
            self._left(output)

    def metrics(self) -> Mapping[str, float | dict[str, float]]:
        """The engine's, and how much is recorded and lost."""
        own = {"recorder_lines_total": float(self._file.lines), "recorder_lost_total": float(self._file.lost)}
        return {**self._engine.metrics(), **own}

    def close(self) -> None:
        """Ends the recording: pauses that are open are written as not ended."""
        for session in self._open.sessions.values():
            self._end_pause(session, returned=False)
        self._file.close()

    # ---- what comes ----------------------------------------------------------------------------------------------

    def _came(self, event: Event) -> None:
        match event:
            case SubmitTurn():
                if not event.warm:
                    self._open.turns[event.request_id] = _Turn(event, self._now_s)
                if event.hints is not None:
                    self._told(event.tenant, event.hints)
            case HintBatch(_, tenant, envelope):
                self._told(tenant, envelope)
            case PauseInferred(tenant, name, kind, tool, program):
                session = self._open.sessions.get((tenant, name))
                if session is not None and not session.told:
                    session.kind, session.tool, session.program = kind, tool, program

    def _told(self, tenant: str, envelope: Envelope) -> None:
        for carried in envelope.actions:
            try:
                action = carried.parse()
            except ValidationError:
                continue  # its receipt says so
            session = self._open.sessions.get((tenant, action.session)) if action is not None else None
            if action is None or session is None:
                continue
            match action:
                case AgentPause(kind=kind, tool=tool, program=program, forecast=forecast):
                    session.kind, session.tool, session.program = kind, tool, program
                    session.forecast, session.told = forecast, True
                case AgentCompaction(phase=phase, keep=keep, expect_tokens=tokens):
                    messages = keep.messages if keep is not None else None
                    self._file.put(TraceCompaction(self._now_s, session.name, phase, messages, tokens))
                case AgentModelSwitch(model=model, back_in_s=back_s):
                    self._file.put(TraceModelSwitch(self._now_s, session.name, model, back_s))
                case AgentFork(child=child, children=children, shared=shared):
                    for name in (*children, *([child] if child is not None else [])):
                        forked = _Forked(action.session)
                        if shared is not None:
                            forked.messages, forked.tokens = shared.messages, shared.tokens
                        self._open.forks[tenant, name] = forked
                        if len(self._open.forks) > SESSIONS_MAX:
                            self._open.forks.popitem(last=False)
                case AgentEnd(keep_s=keep_s):
                    self._end(session, keep_s, joined=False)
                case AgentJoin(child=child):
                    if (joined := self._open.sessions.get((tenant, child))) is not None:
                        self._end(joined, None, joined=True)

    def _end(self, session: _Session, keep_s: float | None, *, joined: bool) -> None:
        self._end_pause(session, returned=False)
        self._file.put(TraceEnd(self._now_s, session.name, keep_s, joined))

    # ---- what leaves ---------------------------------------------------------------------------------------------

    def _left(self, output: Output) -> None:
        match output:
            case TurnStarted(request_id, name, _):
                if (turn := self._open.turns.get(request_id)) is not None:
                    self._begin(turn, (turn.request.tenant, name))
            case TokensOut(request_id, _):
                if (turn := self._open.turns.get(request_id)) is not None and turn.first_s is None:
                    turn.first_s = self._now_s
            case TurnDone():
                if (turn := self._open.turns.pop(output.request_id, None)) is not None and turn.key is not None:
                    self._finish(turn, turn.key, output)
            case TurnRejected(request_id, _, _):
                self._open.turns.pop(request_id, None)

    def _begin(self, turn: _Turn, key: Key) -> None:
        turn.key = key
        session = self._session(turn, key)
        if session.kind == "unknown" and turn.request.last_role is not None:
            session.kind = "tool" if turn.request.last_role in ("tool", "function") else "human"
        self._end_pause(session, returned=True, at_s=turn.at_s)
        session.active += 1

    def _session(self, turn: _Turn, key: Key) -> _Session:
        found = self._open.sessions.get(key)
        if found is not None:
            self._open.sessions.move_to_end(key)
            return found
        self._names += 1
        session = self._open.sessions[key] = _Session(f"s{self._names}")
        fork = self._open.forks.pop(key, None)
        said = fork.parent if fork is not None else turn.request.parent
        parent = self._open.sessions.get((key[0], said)) if said is not None else None
        self._file.put(
            TraceSession(
                turn.at_s,
                session.name,
                parent.name if parent is not None and parent is not session else None,
                attended=turn.request.attended is not False,
                fork=fork is not None,
                shared_messages=fork.messages if fork is not None else None,
                shared_tokens=fork.tokens if fork is not None else None,
            )
        )
        if len(self._open.sessions) > SESSIONS_MAX:
            _, forgotten = self._open.sessions.popitem(last=False)
            self._end_pause(forgotten, returned=False)
        return session

    def _finish(self, turn: _Turn, key: Key, done: TurnDone) -> None:
        session = self._session(turn, key)
        session.active = max(0, session.active - 1)
        report, prompt = done.report, len(turn.request.tokens)
        if done.reason != "error":
            kept = 0 if session.tokens is None else min(session.tokens, prompt)
            if report.divergence is not None:
                kept = min(kept, report.divergence.token)
            self._file.put(
                TraceTurn(
                    turn.at_s,
                    session.name,
                    prompt,
                    done.completion_tokens,
                    round(self._now_s - turn.at_s, 6),
                    kept_tokens=kept,
                    ttft_s=None if turn.first_s is None else round(turn.first_s - turn.at_s, 6),
                    stop=done.reason,
                    cached={tier: count for tier, count in report.cached.items() if count},
                    misses={label: count for label, count in report.recomputed.items() if count},
                )
            )
            session.tokens = prompt + done.completion_tokens
        if not session.active:
            session.since_s, session.kind, session.told = self._now_s, "unknown", False
            session.tool = session.program = session.forecast = None

    def _end_pause(self, session: _Session, *, returned: bool, at_s: float | None = None) -> None:
        began_s, session.since_s = session.since_s, None
        if began_s is None:
            return
        forecast = session.forecast
        self._file.put(
            TracePause(
                began_s,
                session.name,
                session.kind,
                round(max(0.0, (self._now_s if at_s is None else at_s) - began_s), 6),
                session.tool,
                session.program,
                forecast.p50_s if forecast is not None else None,
                forecast.p90_s if forecast is not None else None,
                returned,
            )
        )
