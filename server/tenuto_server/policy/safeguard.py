"""A shadow of plain LRU beside the index, sizes only: what LRU would have found decides how far the index is trusted.

``Safeguard`` owns the shadow and the trust; the engine holds one and teaches it each turn. Two experts, of whom the second
is only shadowed: trust moves by multiplicative steps, down while the shadow finds more than the cache did, up otherwise.
"""

from __future__ import annotations

from collections import OrderedDict

FULL = 2.0
"""Trust: 2 all of it, 1 the index without forecasts, 0 plain LRU; in between, shares."""
MEMORY_TURNS = 400.0
"""Turns that the running comparison remembers (by its decay)."""
MARGIN = 0.002
"""Share of the reusable tokens by which the shadow must lead before trust falls: noise is below that."""
FALL, RISE = 0.02, 0.004
"""Trust lost and regained per turn: from all to none in 100 turns, back in 500."""
SESSIONS_MAX = 2048
"""Sessions shadowed one by one; beyond this many a share of them is, in as large a share of the memory."""
SHIFT_MAX = 16


class Safeguard:
    """``capacity``: tokens of the guarded tier. Tokens of ``turn`` and of the capacity must be the same kind.

    Sessions share prefixes with each other that this does not see: it shadows an LRU of whole contexts.
    """

    def __init__(self, capacity: int) -> None:
        self.trust = FULL
        self.lead = 0.0
        self._capacity = capacity
        self._shift = 0
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0
        self._found = self._shadow = self._reusable = 0.0

    def turn(self, session: int, prompt: int, reusable: int, found: int) -> None:
        """A turn of ``session`` began: its prompt, how much of that the session's last prompt shares, and how much of this
        the guarded tier held."""
        if session & ((1 << self._shift) - 1):
            return
        held = self._held.pop(session, 0)
        self._used -= held
        self._compare(reusable, min(found, reusable), min(held, reusable))
        self._put(session, prompt)

    def end(self, session: int) -> None:
        """The session is forgotten."""
        self._used -= self._held.pop(session, 0)

    def _compare(self, reusable: int, found: int, shadow: int) -> None:
        if reusable <= 0:
            return
        keep = 1.0 - 1.0 / MEMORY_TURNS
        self._reusable = self._reusable * keep + reusable
        self._found = self._found * keep + found
        self._shadow = self._shadow * keep + shadow
        self.lead = (self._found - self._shadow) / self._reusable
        if self.lead < -MARGIN:
            self.trust = max(0.0, self.trust - FALL)
        else:
            self.trust = min(FULL, self.trust + RISE)

    def _put(self, session: int, prompt: int) -> None:
        self._held[session] = prompt
        self._used += prompt
        self._shrink()
        if len(self._held) > SESSIONS_MAX and self._shift < SHIFT_MAX:
            self._shift += 1
            mask = (1 << self._shift) - 1
            for other in [other for other in self._held if other & mask]:
                self._used -= self._held.pop(other)
            self._shrink()

    def _shrink(self) -> None:
        room = self._capacity >> self._shift
        while self._used > room and self._held:
            oldest = next(iter(self._held))
            surplus = self._used - room
            if self._held[oldest] > surplus:
                # LRU takes blocks, not contexts: the oldest keeps what it can.
                self._held[oldest] -= surplus
                self._used = room
                return
            self._used -= self._held.pop(oldest)
