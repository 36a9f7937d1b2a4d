"""Reader of our own recorder's traces (``tenuto.trace``). Pure."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import tenuto
from tenuto.trace import TracePause, TraceTurn, read_trace
from tenuto_server.sim.traces import Child, PauseClass, Request, Session, Trace, TraceFileError, service_s

_CLASSES: dict[str, PauseClass] = {name: name for name in get_args(PauseClass)}


def read_recorded(path: Path) -> Trace:
    """Sessions of a recording. The class of a pause is the recorded one; without one, what the stop reason tells."""
    try:
        _, events = read_trace(path)
    except tenuto.TraceError as error:
        raise TraceFileError(f"{path}: {error}") from None
    turns: dict[str, list[TraceTurn]] = {}
    pauses: dict[str, list[TracePause]] = {}
    parents: dict[str, str] = {}
    for event in events:
        if isinstance(event, TraceTurn):
            turns.setdefault(event.session, []).append(event)
        elif isinstance(event, TracePause):
            pauses.setdefault(event.session, []).append(event)
        elif event.EVENT == "session" and getattr(event, "parent", None):
            parents[event.session] = str(getattr(event, "parent", ""))
    lines = {name: _requests(found, pauses.get(name, [])) for name, found in turns.items()}
    sessions, starts = [], []
    for name, requests in lines.items():
        if parents.get(name) in lines:
            continue
        children = tuple(
            Child(_after(turns[name], turns[child][0].t_s), Session(child, lines[child], thread="subagent"))
            for child, parent in parents.items()
            if parent == name and child in lines
        )
        sessions.append(Session(name, requests, children=children))
        starts.append(turns[name][0].t_s)
    return Trace(path.name, "tenuto", tuple(sessions), tuple(starts))


def _after(turns: list[TraceTurn], at_s: float) -> int:
    return max(1, sum(turn.t_s <= at_s for turn in turns))


def _requests(turns: list[TraceTurn], pauses: list[TracePause]) -> tuple[Request, ...]:
    requests = []
    for i, turn in enumerate(turns):
        following = turns[i + 1] if i + 1 < len(turns) else None
        served = turn.duration_s or service_s(turn.output_tokens)
        end_s = turn.t_s + served
        said = next((p for p in pauses if turn.t_s <= p.t_s and (following is None or p.t_s <= following.t_s)), None)
        cls: PauseClass = "tool" if turn.tools or turn.stop in ("tool_use", "tool_calls") else "human"
        if said is not None:
            cls = _CLASSES.get(said.kind, cls)
        before = turns[i - 1] if i else None
        kept = turn.kept_tokens
        if kept is None and before is not None:
            kept = before.prompt_tokens if turn.prompt_tokens >= before.prompt_tokens else 0
        shared = min(kept or 0, turn.prompt_tokens, before.prompt_tokens) if before is not None else 0
        pause_s = max(0.0, following.t_s - end_s) if following is not None else None
        requests.append(
            Request(
                max(1, turn.prompt_tokens),
                turn.output_tokens,
                shared,
                cls,
                pause_s,
                served,
                said.tool if said else None,
            )
        )
    return tuple(requests)
