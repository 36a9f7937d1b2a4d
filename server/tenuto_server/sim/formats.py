"""Trace files of every kind: finds out what a path holds and reads it into sessions. Holds no state.

A file is told by its first line (or its header), a folder by the files in it. Nothing is guessed about single rows: one that
does not fit its format is an error that names file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tenuto_server.sim import foreign, texts, transcripts
from tenuto_server.sim.generator import generate
from tenuto_server.sim.recorded import read_recorded
from tenuto_server.sim.traces import Session, Trace, TraceFileError, open_text, read_reduced

Reader = Callable[[Path], Trace]


class UnknownFormat(TraceFileError):
    """A file of JSON that is no trace. In a folder it stands beside traces: an index, a history, settings."""


def read(source: str | Path) -> Trace:
    """Reads a trace file or a folder of them, or makes ``synthetic:<sessions>[:<seed>]``. Raises ``TraceFileError`` naming
    file and line."""
    if made := re.fullmatch(r"synthetic:([1-9][0-9]{0,5})(?::([0-9]+))?", str(source)):
        return generate(int(made[1]), int(made[2] or 0))
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise TraceFileError(f"{path}: no such file or folder")
    trace = _reader(path)(path)
    if not trace.sessions:
        raise TraceFileError(f"{path}: holds no session ({trace.format})")
    return trace


def _reader(path: Path) -> Reader:
    name, head = path.name, _head(path)
    if name.endswith((".csv", ".csv.gz")):
        return foreign.read_azure
    if name.endswith(".json") and not isinstance(head, dict):
        head = _whole(path)  # one JSON object, printed over many lines
    if not isinstance(head, dict):
        raise TraceFileError(f"{path}:1: neither JSON lines nor a CSV that is known here")
    for fields, reader in (
        ({"tenuto_trace"}, read_recorded),
        ({"reqs", "id"}, read_reduced),
        ({"requests", "hash_id_scope"}, foreign.read_cache_tester),
        ({"requests", "tool_tokens"}, foreign.read_cache_tester),
        ({"hash_ids", "input_length"}, foreign.read_mooncake),
        ({"round_index", "timing_events"}, foreign.read_tracelab),
        ({"input", "output", "session_id"}, texts.read_lmcache),
    ):
        if fields <= head.keys():
            return reader
    if "record_type" in head or {"instructions", "git"} <= head.keys():
        raise UnknownFormat(f"{path}:1: a transcript of an early Codex, which holds no token counts")
    if "sessionId" in head or head.get("type") in (
        "summary",
        "session_meta",
        "file-history-snapshot",
        "queue-operation",
    ):
        return transcripts.read_transcript
    raise UnknownFormat(f"{path}:1: no known trace format has the fields {', '.join(sorted(head)[:8])}")


def _head(path: Path) -> Any:
    """The first line that is not blank, as JSON; None where it is none."""
    with open_text(path) as file:
        try:
            line = next((line for line in file if line.strip()), "")
        except (UnicodeDecodeError, OSError, EOFError) as error:
            raise TraceFileError(f"{path}:1: cannot be read: {error}") from None
    try:
        return json.loads(line)
    except ValueError:
        return None


def _whole(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceFileError(f"{path}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz", ".json")):
            yield path


def _folder(folder: Path) -> Trace:
    """Every session below a folder, whose traces must be of one format (transcripts of one tool, traces of one corpus). JSON
    that is no trace is passed over, a damaged file is not."""
    sessions: list[Session] = []
    starts: list[float] = []
    formats: set[str] = set()
    foreign: UnknownFormat | None = None
    for path in _files(folder):
        if path.stat().st_size == 0:
            continue
        try:
            trace = _reader(path)(path)
        except UnknownFormat as error:
            foreign = foreign or error
            continue
        formats.add(trace.format)
        if len(formats) > 1:
            raise TraceFileError(
                f"{path}: is of format {trace.format}, files before it of {', '.join(formats - {trace.format})}"
            )
        sessions.extend(trace.sessions)
        starts.extend(trace.starts_s or (0.0,) * len(trace.sessions))
    if not sessions:
        raise foreign or TraceFileError(f"{folder}: no session in any .jsonl or .json file below it")
    return Trace(folder.name, formats.pop(), tuple(sessions), tuple(starts) if any(starts) else ())
