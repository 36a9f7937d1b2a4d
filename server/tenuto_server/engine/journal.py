"""The ordered log of decisions. Owner: the engine. Timestamps are data here, never an order."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Sink = Callable[[str], None]
_DIGITS = {"elapsed_s": 6, "length_s": 6, "lease_s": 3}


class Journal:
    """Keeps the last ``entries_max`` decisions and hands each, as one JSON line, to ``sink`` if there is one."""

    def __init__(self, entries_max: int, sink: Sink | None = None) -> None:
        self.count = 0
        self._entries: deque[tuple[int, int, str, dict[str, Any]]] = deque(maxlen=entries_max)
        self._sink = sink

    def write(self, now_ns: int, kind: str, /, **facts: Any) -> None:
        """One decision with its inputs and reason. Facts hold ids and numbers, never text of a prompt."""
        entry = (self.count, now_ns, kind, facts)
        self.count += 1
        self._entries.append(entry)
        if self._sink is not None:
            self._sink(json.dumps(_plain(entry), separators=(",", ":")))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_plain, self._entries)


def _plain(entry: tuple[int, int, str, dict[str, Any]]) -> dict[str, Any]:
    """An entry as it is read: figures rounded only then, since most are never read."""
    number, now_ns, kind, facts = entry
    plain = {"n": number, "t_ns": now_ns, "kind": kind, **facts}
    for name, digits in _DIGITS.items():
        if name in facts:
            plain[name] = round(facts[name], digits)
    if "rate" in facts:
        plain["rate"] = float(f"{facts['rate']:.6g}")
    return plain
