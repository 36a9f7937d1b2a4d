"""Paused sessions that lost device blocks, the likeliest to return first: what room that comes free is offered to.

Owner of the list; the engine's core notes who falls, the keeper who is worth what. Every call costs O(log n).
"""

from __future__ import annotations

import heapq

_SPARE = 64


class Fallen:
    """At most ``most`` sessions, by handle; those that fell longest ago are forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = 0
        # By handle, in the order of falling: the entry of ``_ranked`` that counts. All others of a handle are stale.
        self._entries: dict[int, tuple[float, int, int]] = {}
        self._ranked: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, handle: int) -> bool:
        return handle in self._entries

    def fell(self, handle: int, rate: float) -> None:
        """A session with that return rate (1/s) has lost device blocks."""
        self._entries.pop(handle, None)
        self._number += 1
        self._rank(handle, rate, self._number)
        if len(self._entries) > self._most:
            del self._entries[next(iter(self._entries))]

    def rated(self, handle: int, rate: float) -> None:
        """The rate of a session has changed; nothing to do for one that is not here."""
        if (entry := self._entries.get(handle)) is not None and entry[0] != -rate:
            self._rank(handle, rate, entry[1])

    def forget(self, handle: int) -> None:
        """A session has nothing to bring up, or nobody waits for it."""
        self._entries.pop(handle, None)

    def best(self) -> int | None:
        """The session with the highest rate, of equals the one that fell first; None where there is none."""
        ranked = self._ranked
        while ranked:
            if self._entries.get(ranked[0][2]) == ranked[0]:
                return ranked[0][2]
            heapq.heappop(ranked)
        return None

    def _rank(self, handle: int, rate: float, number: int) -> None:
        entry = self._entries[handle] = (-rate, number, handle)
        heapq.heappush(self._ranked, entry)
        if len(self._ranked) > 4 * len(self._entries) + _SPARE:
            self._ranked = sorted(self._entries.values())
