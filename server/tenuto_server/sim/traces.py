"""Recorded agent sessions as the simulator sees them: requests, what each shares with the one before, and pauses.

Values only. The reader here is of the reduced session files (one JSON object per line); ``formats.py`` adds the others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from tenuto_server.errors import TenutoServerError

PauseClass: TypeAlias = Literal["tool", "human", "subagent", "permission", "background"]

BLOCK_TOKENS = 64
"""Granularity of what two prompts share: the blocks of the published hashes."""
COMPACTED_BELOW = 0.6
"""A prompt shorter than this share of the one before it has been compacted; a harness knows, and says so."""
# Median fit of recorded answers (KVCT, 61.4 tokens per second): an answer's duration where it was not recorded.
ANSWER_BASE_S, ANSWER_TOKEN_S = 2.22, 0.0163


class TraceFileError(TenutoServerError):
    """A trace cannot be read; the message names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a session.

    ``prompt``, ``out``: tokens. ``shared``: leading tokens of the prompt that equal those of the session's previous
    prompt. ``pause``: class of the pause after the answer, as its stop reason tells; ``pause_s``: its length, None after
    the last request. ``service_s``: request to end of answer where it was recorded, estimated otherwise.
    """

    prompt: int
    out: int
    shared: int
    pause: PauseClass
    pause_s: float | None
    service_s: float
    tool: str | None = None

    def away_s(self, *, served: bool) -> float | None:
        """How long until the session's next request where answers take no time themselves: the pause, with ``served`` the
        recorded time of the answer too. None after the last request."""
        if self.pause_s is None:
            return None
        return self.pause_s + (self.service_s if served else 0.0)


@dataclass(frozen=True, slots=True)
class Child:
    """A subagent: started ``after`` so many requests of its parent."""

    after: int
    session: Session


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. ``head``: tokens of tools and system prompt. ``thread``: "main" or "subagent"."""

    id: str
    requests: tuple[Request, ...]
    head: int = 0
    thread: Literal["main", "subagent"] = "main"
    children: tuple[Child, ...] = ()

    @property
    def paused_s(self) -> float:
        """Sum of its pauses: how long it lives where answers take no time."""
        return sum(request.pause_s or 0.0 for request in self.requests)

    @property
    def served_s(self) -> float:
        """Sum of its recorded service times, the last answer's aside."""
        return sum(request.service_s for request in self.requests[:-1])


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file or folder held. ``start_s``: arrival times where the source has them (one per session), else empty."""

    name: str
    format: str
    sessions: tuple[Session, ...]
    starts_s: tuple[float, ...] = field(default=())

    @property
    def requests(self) -> int:
        """Number of requests, subagents aside."""
        return sum(len(session.requests) for session in self.sessions)


def shrunk(trace: Trace, factor: float) -> Trace:
    """The trace with all token counts divided by ``factor`` and all times as they are: sessions for a model with a smaller
    window."""
    if factor == 1.0:
        return trace

    def smaller(session: Session) -> Session:
        requests = tuple(
            replace(r, prompt=int(r.prompt / factor), out=-int(-r.out // factor), shared=int(r.shared / factor))
            for r in session.requests
        )
        children = tuple(replace(child, session=smaller(child.session)) for child in session.children)
        return replace(session, requests=requests, head=int(session.head / factor), children=children)

    return replace(trace, sessions=tuple(smaller(session) for session in trace.sessions))


def open_text(path: Path) -> IO[str]:
    """Opens a text file, unpacking ``.gz``."""
    try:
        return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from None


def json_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every line that is not blank. ``growing``: somebody may be writing the last line."""
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    if growing and not line.endswith("\n"):
                        return
                    raise TraceFileError(f"{path}:{number}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise TraceFileError(f"{path}:{number}: a JSON object was expected, not {type(row).__name__}")
                yield number, row
        except (UnicodeDecodeError, OSError, EOFError) as error:
            raise TraceFileError(f"{path}:{number + 1}: cannot be read: {error}") from None


def read_reduced(path: Path) -> Trace:
    """The reduced kv-cache-tester sessions. Raises ``TraceFileError`` naming file and line."""
    sessions = []
    for number, row in json_lines(path):
        try:
            sessions.append(session_of_rows(str(row["id"]), row, row["reqs"]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TraceFileError(f"{path}:{number}: {what(error)}") from None
    if not sessions:
        raise TraceFileError(f"{path}: no sessions")
    return Trace(path.name, "reduced", tuple(sessions))


def session_of_rows(name: str, row: dict[str, Any], reqs: list[dict[str, Any]]) -> Session:
    """A session of the reduced form: request rows and, between them, subagent rows."""
    block = int(row.get("block", BLOCK_TOKENS))
    main = [req for req in reqs if "sub" not in req]
    if not main:
        raise ValueError("a session without requests")
    children: list[Child] = []
    after = 0
    for req in reqs:
        if "sub" not in req:
            after += 1
        elif req["sub"]:
            child = Session(f"{name}/{len(children)}", _requests(req["sub"], block), _head(req), "subagent")
            children.append(Child(max(1, after), child))
    return Session(name, _requests(main, block), _head(row), "main", tuple(children))


def _head(row: dict[str, Any]) -> int:
    return int(row.get("tool_tokens") or 0) + int(row.get("system_tokens") or 0)


def _requests(rows: list[dict[str, Any]], block: int) -> tuple[Request, ...]:
    requests = []
    for i, row in enumerate(rows):
        prompt = int(row["in"])
        if prompt < 1:
            raise ValueError(f"request {i}: a prompt of {prompt} tokens")
        following = rows[i + 1] if i + 1 < len(rows) else None
        requests.append(
            Request(
                prompt=prompt,
                out=int(row["out"]),
                shared=min(int(row["lcp"]) * block, prompt) if i else 0,
                pause="human" if row["stop"] == "end_turn" else "tool",
                pause_s=_pause_s(row, following) if following is not None else None,
                service_s=_service_s(row),
            )
        )
    return tuple(requests)


def service_s(out: float) -> float:
    """How long an answer of so many tokens takes where it was not recorded."""
    return ANSWER_BASE_S + ANSWER_TOKEN_S * out


def _service_s(row: dict[str, Any]) -> float:
    api = row.get("api")
    return float(api) if api is not None else service_s(float(row["out"]))


def _pause_s(row: dict[str, Any], following: dict[str, Any]) -> float:
    """The pause between two requests. ``think`` counts from the last *recorded* answer: after one that was not recorded
    it is wrong, and the pause is what start-to-start time leaves of the estimated answer."""
    if row.get("api") is not None and following.get("think") is not None:
        return float(following["think"])
    return max(0.0, float(following["t"]) - float(row["t"]) - _service_s(row))


def what(error: Exception) -> str:
    """An error while reading a row, for people."""
    return f"field {error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
