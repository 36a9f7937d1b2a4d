"""Trace files of every kind: finds out what a path holds and reads it into sessions. Holds no state."""

from __future__ import annotations

from pathlib import Path

from tenuto_server.sim.traces import Trace, TraceFileError, read_reduced


def read(source: str | Path) -> Trace:
    """Reads a trace. Raises ``TraceFileError`` naming file and line."""
    path = Path(source).expanduser()
    if not path.exists():
        raise TraceFileError(f"{path}: no such file")
    return read_reduced(path)
