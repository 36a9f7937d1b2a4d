"""What room on a tier has cost lately: the indices at which it was taken from somebody.

The lowest index that a tier holds says little about what will go next: it is 0 whenever a slot is free, and a tier kept
partly free ahead of need always has one. What was given up a moment ago tells what it takes to stay. Owner of the record of
recent evictions of one tier; its ``CacheManager`` writes it.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 300.0
"""Evictions older than this tell nothing any more."""
SHARE = 0.95
"""Of the blocks evicted lately this share went at or below the level; the rest are upsets (a burst that took what was in
use a moment before)."""
RECORDS_MAX = 512


class Clearing:
    """See the module."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, float, int]] = deque(maxlen=RECORDS_MAX)
        self._known: tuple[int, float] | None = None

    def note(self, now_ns: int, index: float, blocks: int) -> None:
        """``blocks`` of that index were evicted."""
        if self._taken and self._taken[-1][:2] == (now_ns, index):
            blocks += self._taken.pop()[2]
        self._taken.append((now_ns, index, blocks))
        self._known = None

    def level(self, now_ns: int) -> float:
        """The index up to which room was taken lately; 0 if none was, or none that anybody wanted."""
        since_ns = now_ns - int(WINDOW_S * 1e9)
        if self._known is not None and self._known[0] >= since_ns:
            return self._known[1]
        taken = self._taken
        while taken and taken[0][0] < since_ns:
            taken.popleft()
        above = (1.0 - SHARE) * sum(blocks for _, _, blocks in taken)
        level = 0.0
        for _, index, blocks in sorted(taken, key=lambda entry: -entry[1]):
            above -= blocks
            if above < 0.0:
                level = max(0.0, index)
                break
        self._known = (taken[0][0], level) if taken else None
        return level
