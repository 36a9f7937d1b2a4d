"""The ordered log of decisions. Owner: the engine. Timestamps are data here, never an order."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Sink = Callable[[str], None]


class Journal:
    """Keeps the last ``entries_max`` decisions and hands each, as one JSON line, to ``sink`` if there is one."""

    def __init__(self, entries_max: int, sink: Sink | None = None) -> None:
        self.count = 0
        self._entries: deque[dict[str, Any]] = deque(maxlen=entries_max)
        self._sink = sink

    def write(self, now_ns: int, kind: str, /, **facts: Any) -> None:
        """One decision with its inputs and reason. Facts hold ids and numbers, never text of a prompt."""
        entry = {"n": self.count, "t_ns": now_ns, "kind": kind, **facts}
        self.count += 1
        self._entries.append(entry)
        if self._sink is not None:
            self._sink(json.dumps(entry, separators=(",", ":")))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._entries)
