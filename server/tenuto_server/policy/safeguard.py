"""A shadow of plain LRU beside the index, sizes only: what LRU would have found decides how far the index is trusted.

``Safeguard`` owns the shadow and the trust; the engine holds one and teaches it each turn. Two experts, of whom the second
is only shadowed: trust moves by steps, down while the shadow finds more than the cache did, up otherwise. Where there are
several tiers, what is found counts by the share of its recompute that it saves there: a token on the host is worth almost
one on the device if loading it takes no time, and one on a slow disk little.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

FULL = 2.0
"""Trust: 2 all of it, 1 the index without forecasts, 0 plain LRU; in between, shares."""
MEMORY_TURNS = 400.0
"""Turns that the lead told in the metrics, and the mean of what is reusable, remember (by their decay)."""
MARGIN = 0.005
"""Share of the reusable tokens by which the shadow may lead for ever: half of what policy.md lets the index lose."""
SLACK_TURNS = 20.0
"""What the shadow may lead by beyond that, in turns' worth of reusable tokens. Single contexts are as large as several turns'
worth, so a smaller slack takes their luck for the index's fault."""
DEBT_MAX_TURNS = 60.0
"""What is remembered of a loss: repaid at the margin, trust is tried again after 8,000 turns at the latest."""
FALL, RISE = 0.02, 0.004
"""Trust lost and regained per turn: from all to none in 100 turns, back in 500."""
SESSIONS_MAX = 2048
"""Sessions shadowed one by one; beyond this many a share of them is, in as large a share of the memory."""
SHIFT_MAX = 16


class Safeguard:
    """``trust`` is what the index has earned, ``lead`` the share of the reusable tokens by which the cache found more than the
    shadow of late, ``debt`` by how much it found less, beyond the margin, in tokens (Page's CUSUM, Biometrika 41, 1954:
    what it found more before does not count, so that luck is told from loss as soon as can be).

    ``capacities``: tokens that LRU would hold on the fastest tier, on that and the next one, and so on. Tokens of ``turn``
    and of the capacities must be the same kind.

    Sessions share prefixes with each other that this does not see: it shadows an LRU of whole contexts.
    """

    def __init__(self, *capacities: int) -> None:
        self.trust = FULL
        self.lead = 0.0
        self.debt = 0.0
        self._shift = 0
        self._shadows = tuple(_Shadow(capacity) for capacity in capacities)
        self._found = self._shadow = self._reusable = self._turns = 0.0

    @property
    def shadowed(self) -> Sequence[int]:
        """The sessions that are shadowed, least recently used first."""
        return tuple(self._shadows[-1].held)

    def turn(
        self,
        session: int,
        prompt: int,
        reusable: int,
        found: Sequence[int],
        worth: Sequence[float] = (1.0,),
        owner: int = 0,
    ) -> None:
        """A turn of ``session`` began: its prompt, how much of that the session's last prompt shares, how much of this each
        tier held, and what a token there is worth (0 to 1, a token of the fastest tier being worth 1). ``owner``: whose it
        is; the shadow gives each the same share, as the cache does."""
        if session & ((1 << self._shift) - 1):
            return
        left, actual = reusable, 0.0
        for count, value in zip(found, worth, strict=False):
            actual += value * min(count, left)
            left -= min(count, left)
        above, shadow = 0, 0.0
        for level, value in zip(self._shadows, worth, strict=False):
            upto = min(level.take(session), reusable)
            shadow += value * max(0, upto - above)
            above = max(above, upto)
        self._compare(reusable, actual, shadow)
        for level in self._shadows:
            level.put(session, prompt, self._shift, owner)
        if len(self._shadows[-1].held) > SESSIONS_MAX and self._shift < SHIFT_MAX:
            self._shift += 1
            for level in self._shadows:
                level.thin(self._shift)

    def end(self, session: int) -> None:
        """The session is forgotten."""
        for level in self._shadows:
            level.take(session)

    def _compare(self, reusable: int, found: float, shadow: float) -> None:
        if reusable <= 0:
            return
        keep = 1.0 - 1.0 / MEMORY_TURNS
        self._turns = self._turns * keep + 1.0
        self._reusable = self._reusable * keep + reusable
        self._found = self._found * keep + found
        self._shadow = self._shadow * keep + shadow
        self.lead = (self._found - self._shadow) / self._reusable
        turn = self._reusable / self._turns
        self.debt = min(DEBT_MAX_TURNS * turn, max(0.0, self.debt + shadow - found - MARGIN * reusable))
        if self.debt > SLACK_TURNS * turn:
            self.trust = max(0.0, self.trust - FALL)
        else:
            self.trust = min(FULL, self.trust + RISE)


class _Shadow:
    """An LRU of contexts, sizes only. Owners above an equal share make way first."""

    def __init__(self, capacity: int) -> None:
        # By session, least recently used first: its tokens and its owner.
        self.held: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._capacity = capacity
        self._used = 0
        self._by_owner: dict[int, int] = {}

    def take(self, session: int) -> int:
        """Takes a session out; how many of its tokens there were."""
        held, owner = self.held.pop(session, (0, 0))
        self._charge(owner, -held)
        return held

    def put(self, session: int, tokens: int, shift: int, owner: int) -> None:
        """A session is the one used last."""
        self.held[session] = tokens, owner
        self._charge(owner, tokens)
        self._shrink(shift)

    def thin(self, shift: int) -> None:
        """Forgets all but one in 2 ** shift sessions, and as large a share of the memory."""
        mask = (1 << shift) - 1
        for other in [other for other in self.held if other & mask]:
            self.take(other)
        self._shrink(shift)

    def _charge(self, owner: int, tokens: int) -> None:
        self._used += tokens
        left = self._by_owner.get(owner, 0) + tokens
        if left:
            self._by_owner[owner] = left
        else:
            self._by_owner.pop(owner, None)

    def _shrink(self, shift: int) -> None:
        room = self._capacity >> shift
        while self._used > room and self.held:
            oldest, tokens, owner = self._next(room)
            surplus = self._used - room
            if tokens > surplus:
                # LRU takes blocks, not contexts: the oldest keeps what it can.
                self.held[oldest] = tokens - surplus, owner
                self._charge(owner, -surplus)
                return
            self.take(oldest)

    def _next(self, room: int) -> tuple[int, int, int]:
        """Who goes next: (session, tokens, owner). Where more is held than there is room, somebody is above the share."""
        share = room / len(self._by_owner)
        for session, (tokens, owner) in self.held.items():
            if len(self._by_owner) == 1 or self._by_owner.get(owner, 0) > share:
                return session, tokens, owner
        raise AssertionError("less is held than there is room")
