"""Readers of traces that hold the prompts' text. Tokens are estimated at four characters each. Pure."""

from __future__ import annotations

from pathlib import Path

from tenuto_server.sim.traces import Request, Session, Trace, TraceFileError, json_lines, service_s, what

CHARS_PER_TOKEN = 4


def tokens_of(chars: int) -> int:
    """Tokens of so many characters of English or code, at least one."""
    return max(1, chars // CHARS_PER_TOKEN)


def common_chars(a: str, b: str) -> int:
    """Length of the common prefix of two texts, by halving: most prompts begin with the whole of the one before."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def read_lmcache(path: Path) -> Trace:
    """LMCache agent traces: full prompts, time in microseconds, rows in any order; every pause is a tool's."""
    found: dict[str, list[tuple[float, str, int]]] = {}
    for number, row in json_lines(path):
        try:
            entry = float(row["timestamp"]) / 1e6, str(row["input"]), tokens_of(len(str(row["output"])))
            found.setdefault(str(row["session_id"]), []).append(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceFileError(f"{path}:{number}: {what(error)}") from None
    sessions, starts = [], []
    for name, rows in found.items():
        rows.sort(key=lambda entry: entry[0])
        requests = []
        for i, (at_s, prompt, out) in enumerate(rows):
            shared = tokens_of(common_chars(rows[i - 1][1], prompt)) if i else 0
            served = service_s(out)
            pause_s = max(0.0, rows[i + 1][0] - at_s - served) if i + 1 < len(rows) else None
            count = tokens_of(len(prompt))
            requests.append(Request(count, out, min(shared, count), "tool", pause_s, served))
        sessions.append(Session(name, tuple(requests)))
        starts.append(rows[0][0])
    first = min(starts, default=0.0)
    return Trace(path.name, "lmcache", tuple(sessions), tuple(at - first for at in starts))
