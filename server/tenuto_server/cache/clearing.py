"""What room on a tier has cost lately: the indices at which it was taken from somebody.

The lowest index that a tier holds says little about what will go next: it is 0 whenever a slot is free, and a tier kept
partly free ahead of need always has one. What was given up a moment ago tells what it takes to stay. Owner of the record of
recent evictions of one tier; its ``CacheManager`` writes it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

WINDOW_S = 300.0
"""Evictions older than this tell nothing any more."""
SHARE = 0.95
"""Of the blocks evicted lately this share went at or below the level; the rest are upsets (a burst that took what was in
use a moment before)."""
RECORDS_MAX = 512
_WINDOW_NS = int(WINDOW_S * 1e9)


class Clearing:
    """See the module."""

    def __init__(self) -> None:
        # The same evictions twice: (time, index, blocks, number) as they came, (-index, number, blocks) from dear to cheap.
        self._taken: deque[tuple[int, float, int, int]] = deque()
        self._ranked: list[tuple[float, int, int]] = []
        self._blocks = self._number = 0
        self._known: tuple[int, float] | None = None

    def note(self, now_ns: int, index: float, blocks: int) -> None:
        """``blocks`` of that index were evicted."""
        if self._taken and self._taken[-1][:2] == (now_ns, index):
            blocks += self._forget(self._taken.pop())
        elif len(self._taken) == RECORDS_MAX:
            self._forget(self._taken.popleft())
        self._number += 1
        self._taken.append((now_ns, index, blocks, self._number))
        insort(self._ranked, (-index, self._number, blocks))
        self._blocks += blocks
        self._known = None

    def _forget(self, entry: tuple[int, float, int, int]) -> int:
        _, index, blocks, number = entry
        del self._ranked[bisect_left(self._ranked, (-index, number))]
        self._blocks -= blocks
        return blocks

    def level(self, now_ns: int) -> float:
        """The index up to which room was taken lately; 0 if none was, or none that anybody wanted."""
        since_ns = now_ns - _WINDOW_NS
        if self._known is not None and self._known[0] >= since_ns:
            return self._known[1]
        taken = self._taken
        while taken and taken[0][0] < since_ns:
            self._forget(taken.popleft())
        above = (1.0 - SHARE) * self._blocks
        level = 0.0
        for minus_index, _, blocks in self._ranked:
            above -= blocks
            if above < 0.0:
                level = max(0.0, -minus_index)
                break
        self._known = (taken[0][0], level) if taken else None
        return level
