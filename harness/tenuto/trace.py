"""The trace schema: what sessions did and how long they paused, as JSON lines. Shared by recorder and simulator.

The first line is the header ``{"tenuto_trace": 1, ...}``; every other line is one event, ordered by ``t_s``: seconds
since the start of the trace. Token counts are of the model that was recorded. Unknown fields and unknown event types are
ignored on read, so that a newer writer's trace stays readable within one major version. Values only, no state.

An event type is a frozen dataclass; its ``EVENT`` is the ``event`` field of its line. Prompts are stored, if at all, as
what changed: ``keep_messages`` of the session's previous prompt and its answer, then ``append``.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, TypeAlias

from tenuto.errors import TraceError

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """First line. ``started_unix_s``: wall time of t = 0. ``model``: default of the turns. ``notes``: free text."""

    tenuto_trace: int = TRACE_VERSION
    started_unix_s: float = 0.0
    model: str | None = None
    notes: str = ""


@dataclass(frozen=True, slots=True)
class TraceSession:
    """A session opened. ``fork``: it starts on ``parent``'s prefix, ``shared_messages`` messages of it."""

    EVENT: ClassVar[str] = "session"
    t_s: float
    session: str
    parent: str | None = None
    agent: str | None = None
    model: str | None = None
    attended: bool = True
    fork: bool = False
    shared_messages: int | None = None
    shared_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request and its answer; ``t_s`` is the request's start.

    ``prompt_tokens``: whole prompt. ``kept_tokens``: leading tokens equal to the session's previous prompt and answer;
    None when unknown. ``duration_s``: request to end of answer. ``cached``: tokens reused by tier, as the server said.
    ``stop``: finish reason. ``tools``: names of the tools the answer called. ``request``: the remaining body fields.
    """

    EVENT: ClassVar[str] = "turn"
    t_s: float
    session: str
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    kept_tokens: int | None = None
    ttft_s: float | None = None
    stop: str | None = None
    model: str | None = None
    tools: tuple[str, ...] = ()
    cached: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    keep_messages: int | None = None
    append: list[dict[str, Any]] | None = None
    answer: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TracePause:
    """A pause, written when it ended; ``t_s`` is its start.

    ``returned``: False when the session ended inside it. ``p50_s``, ``p90_s``: what was forecast at its start.
    ``output``: the tool's output, where recorded.
    """

    EVENT: ClassVar[str] = "pause"
    t_s: float
    session: str
    kind: str
    duration_s: float
    tool: str | None = None
    program: str | None = None
    p50_s: float | None = None
    p90_s: float | None = None
    returned: bool = True
    output: str | None = None


@dataclass(frozen=True, slots=True)
class TraceCompaction:
    """A compaction phase: begin, commit or abort. ``keep_messages``: leading messages that stay."""

    EVENT: ClassVar[str] = "compaction"
    t_s: float
    session: str
    phase: str
    keep_messages: int | None = None
    expect_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TraceModelSwitch:
    """The next turns use another model."""

    EVENT: ClassVar[str] = "model_switch"
    t_s: float
    session: str
    model: str
    back_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class TraceEnd:
    """The session ended. ``joined``: as a subagent, its result went to the parent."""

    EVENT: ClassVar[str] = "end"
    t_s: float
    session: str
    keep_s: float | None = None
    joined: bool = False


TraceEvent: TypeAlias = TraceSession | TraceTurn | TracePause | TraceCompaction | TraceModelSwitch | TraceEnd

EVENTS: dict[str, type[TraceEvent]] = {
    cls.EVENT: cls for cls in (TraceSession, TraceTurn, TracePause, TraceCompaction, TraceModelSwitch, TraceEnd)
}
_FIELDS = {name: {f.name: f for f in dataclasses.fields(cls)} for name, cls in EVENTS.items()}


def dump_header(header: TraceHeader) -> str:
    """The header as one line, without its newline."""
    return json.dumps(_compact(header), ensure_ascii=False, separators=(",", ":"))


def dump_event(event: TraceEvent) -> str:
    """An event as one line, without its newline; fields at their default are left out."""
    return json.dumps({"event": event.EVENT, **_compact(event)}, ensure_ascii=False, separators=(",", ":"))


def parse_header(line: str) -> TraceHeader:
    """Reads the first line. Raises ``TraceError`` when it is no trace header or of another version."""
    data = _object(line, 1)
    if data.get("tenuto_trace") != TRACE_VERSION:
        raise TraceError(f"line 1: not a version {TRACE_VERSION} trace: tenuto_trace is {data.get('tenuto_trace')!r}")
    known = {f.name for f in dataclasses.fields(TraceHeader)}
    return TraceHeader(**{name: value for name, value in data.items() if name in known})


def parse_event(line: str, number: int = 0) -> TraceEvent | None:
    """Reads one event line; None for an unknown event type. Raises ``TraceError`` naming the line and the field."""
    data = _object(line, number)
    cls = EVENTS.get(str(data.get("event")))
    if cls is None:
        return None
    fields = _FIELDS[cls.EVENT]
    values = {name: value for name, value in data.items() if name in fields}
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise TraceError(f"line {number}: {cls.EVENT}: field {name!r} is missing")
        if name in values and not _fits(values[name], str(spec.type)):
            raise TraceError(f"line {number}: {cls.EVENT}: field {name!r} has the wrong type")
    if "tools" in values:
        values["tools"] = tuple(values["tools"])
    return cls(**values)


def read_trace(path: str | os.PathLike[str]) -> tuple[TraceHeader, list[TraceEvent]]:
    """Reads a whole trace file (``.gz`` is unpacked). A last line cut off by a crash is ignored.

    Raises ``TraceError`` for anything else that cannot be read, ``OSError`` when the file cannot be opened.
    """
    with _open_text(Path(path)) as file:
        return _read(iter(file))


def write_trace(path: str | os.PathLike[str], header: TraceHeader, events: Iterable[TraceEvent]) -> None:
    """Writes a whole trace, events sorted by time. ``.gz`` in the name compresses."""
    target = Path(path)
    lines = [dump_header(header), *(dump_event(event) for event in sorted(events, key=lambda e: e.t_s))]
    text = "\n".join(lines) + "\n"
    if target.suffix == ".gz":
        target.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        target.write_text(text, "utf-8")


def _read(lines: Iterator[str]) -> tuple[TraceHeader, list[TraceEvent]]:
    header = parse_header(next(lines, ""))
    events: list[TraceEvent] = []
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        try:
            event = parse_event(line, number)
        except TraceError:
            if not line.endswith("\n"):
                break
            raise
        if event is not None:
            events.append(event)
    events.sort(key=lambda e: e.t_s)  # pauses and turns are written when they end
    return header, events


def _open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise TraceError(f"line {number}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise TraceError(f"line {number}: not a JSON object")
    return data


def _compact(value: TraceHeader | TraceEvent) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for spec in dataclasses.fields(value):
        item = getattr(value, spec.name)
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        if item != default or spec.name == "tenuto_trace":
            out[spec.name] = item
    return out


def _fits(value: Any, annotation: str) -> bool:
    if value is None:
        return "None" in annotation
    head = annotation.split(" | ")[0].split("[")[0]
    if head == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds: dict[str, type] = {"int": int, "str": str, "bool": bool, "tuple": list, "list": list, "dict": dict}
    return isinstance(value, kinds[head]) and (head == "bool" or not isinstance(value, bool))
