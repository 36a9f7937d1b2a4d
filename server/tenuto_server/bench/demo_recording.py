"""A recording of agents as something that can be played again: the trace of ``tenuto.recorder``, session by session.

Values only. What a pause waited for is read off the tool call that the next prompt carries, as a harness knows it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tenuto.trace import (
    TraceCompaction,
    TraceEnd,
    TraceEvent,
    TracePause,
    TraceSession,
    TraceTurn,
    read_trace,
)


@dataclass(frozen=True, slots=True)
class TurnStep:
    """One request: ``keep`` messages of the session's previous prompt and answer stay, then ``append``."""

    keep: int
    append: tuple[dict[str, Any], ...]
    answer: str
    request: dict[str, Any]
    prompt_tokens: int
    output_tokens: int
    end_s: float


@dataclass(frozen=True, slots=True)
class PauseStep:
    """A pause: what was waited for and how long (seconds). ``children``: sessions that ran inside it."""

    kind: str
    duration_s: float
    tool: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    children: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CompactionStep:
    """``begin``, then a summary turn, then ``commit``."""

    phase: str


Step: TypeAlias = TurnStep | PauseStep | CompactionStep


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One session. Times are seconds since the first session's start. ``parent``: it was forked from that session."""

    id: str
    start_s: float
    parent: str | None
    agent: str | None
    steps: tuple[Step, ...]
    end_s: float

    @property
    def turns(self) -> int:
        """How many requests it makes."""
        return sum(isinstance(step, TurnStep) for step in self.steps)

    def compacted(self, position: int, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``messages`` became in the compaction that ends at step ``position``: the next request's beginning."""
        following = next(step for step in self.steps[position:] if isinstance(step, TurnStep))
        return [*messages[: following.keep], *following.append]


@dataclass(frozen=True, slots=True)
class Recording:
    """All sessions by id, in order of their start."""

    sessions: dict[str, RecordedSession]

    @property
    def agents(self) -> dict[str, list[RecordedSession]]:
        """The sessions that were not forked, by agent, in order."""
        found: dict[str, list[RecordedSession]] = {}
        for session in self.sessions.values():
            if session.parent is None:
                found.setdefault(session.agent or session.id, []).append(session)
        return found

    def first_of_each(self) -> Recording:
        """Every agent's first session alone, with its subagents."""
        kept = {sessions[0].id for sessions in self.agents.values()}
        return Recording(
            {name: session for name, session in self.sessions.items() if name in kept or session.parent in kept}
        )

    @property
    def turns(self) -> int:
        """Requests of all sessions."""
        return sum(session.turns for session in self.sessions.values())


def mean_live_tokens(recording: Recording, new_tokens: Mapping[tuple[str, int], int]) -> float:
    """Time average of the KV (tokens) that sessions between their start and end hold, over the time in which at least
    half of the agents are in a session: before and after it nothing is scarce.

    ``new_tokens``: by (session, turn), prompt tokens that nobody had computed before. A token belongs to the session that
    computed it, so that shared prefixes count once; a session's answers count, what a compaction replaced does not.
    """
    changes: list[tuple[float, int, int]] = []  # (time, tokens more or less, agents more or less)
    for session in recording.sessions.values():
        agent = int(session.parent is None)
        held, turn = 0, 0
        changes.append((session.start_s, 0, agent))
        for step in session.steps:
            if isinstance(step, TurnStep):
                added = new_tokens[session.id, turn] + step.output_tokens
                changes.append((step.end_s, added, 0))
                held, turn, last_s = held + added, turn + 1, step.end_s
            elif isinstance(step, CompactionStep) and step.phase == "commit":
                changes.append((last_s, -held, 0))
                held = 0
        changes.append((session.end_s, -held, -agent))
    agents = len(recording.agents)
    total = busy_s = 0.0
    tokens = alive = 0
    before_s = 0.0
    for at_s, more_tokens, more_agents in sorted(changes):
        if 2 * alive >= agents:
            total += tokens * (at_s - before_s)
            busy_s += at_s - before_s
        tokens, alive, before_s = tokens + more_tokens, alive + more_agents, at_s
    return total / busy_s if busy_s > 0.0 else 0.0


def longest_context(recording: Recording) -> int:
    """Tokens of the longest prompt with its answer."""
    steps = [step for session in recording.sessions.values() for step in session.steps if isinstance(step, TurnStep)]
    return max((step.prompt_tokens + step.output_tokens for step in steps), default=0)


def load_recording(path: Path) -> Recording:
    """Reads a trace made with ``Recorder(content=True)``.

    Raises ``TraceError`` for a file that is no such trace, ``OSError`` when it cannot be read.
    """
    _, events = read_trace(path)
    opened = [event for event in events if isinstance(event, TraceSession)]
    by_session: defaultdict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        by_session[event.session].append(event)
    first_s = min((event.t_s for event in opened), default=0.0)
    forked = {event.session: event for event in opened if event.fork}
    sessions = {
        event.session: RecordedSession(
            event.session,
            event.t_s - first_s,
            event.parent if event.fork else None,
            event.agent,
            tuple(_steps(by_session[event.session], forked, first_s)),
            max(e.t_s for e in by_session[event.session]) - first_s,
        )
        for event in opened
    }
    return Recording(sessions)


def _steps(events: list[TraceEvent], forked: dict[str, TraceSession], first_s: float) -> list[Step]:
    steps: list[Step] = []
    waiting = {child: event for child, event in forked.items() if event.parent == events[0].session}
    for index, event in enumerate(events):
        if isinstance(event, TraceTurn):
            steps.append(_turn(event, first_s))
        elif isinstance(event, TracePause):
            children = [name for name, child in waiting.items() if event.kind == "subagent"]
            for name in children:
                del waiting[name]
            following = next((e for e in events[index:] if isinstance(e, TraceTurn)), None)
            arguments = _arguments(following, event.tool)
            steps.append(PauseStep(event.kind, event.duration_s, event.tool, arguments, tuple(children)))
        elif isinstance(event, TraceCompaction):
            steps.append(CompactionStep(event.phase))
        elif isinstance(event, TraceEnd):
            break
    return steps


def _turn(event: TraceTurn, first_s: float) -> TurnStep:
    answer = (event.answer or {}).get("content") or ""
    return TurnStep(
        event.keep_messages or 0,
        tuple(event.append or ()),
        str(answer),
        dict(event.request or {}),
        event.prompt_tokens,
        event.output_tokens,
        event.t_s + event.duration_s - first_s,
    )


def _arguments(turn: TraceTurn | None, tool: str | None) -> dict[str, Any]:
    for message in (turn.append or []) if turn is not None else []:
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] == tool:
                arguments = json.loads(call["function"]["arguments"])
                return arguments if isinstance(arguments, dict) else {}
    return {}
