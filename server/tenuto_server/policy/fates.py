"""What becomes of contexts by their size: do their sessions come back, and does the next prompt still begin with them?

``Fates`` owns the counts; ``calibration.PauseStats`` holds one. Near a harness's limit many contexts are replaced or left
for good, and the limit shows in the counts without anybody naming it.
"""

from __future__ import annotations

from functools import lru_cache
from math import log

from tenuto.wire import PauseKind
from tenuto_server.policy.priors import P_INTACT, P_RETURN

DEPTHS_PER_OCTAVE = 8
"""Sizes are told apart in steps of 9 %."""
_LOG2 = log(2.0)
_PRIOR_PAUSES = 20.0
_CAP = 4000.0


@lru_cache(maxsize=4096)
def depth_of(context_tokens: int) -> int:
    """The size class of a context."""
    return int(DEPTHS_PER_OCTAVE * log(context_tokens if context_tokens > 1 else 1) / _LOG2)


class _Fate:
    """Pauses that returned, that never ended, and of those that returned the sum of the shares of the context that the next
    prompt began with; halved now and then."""

    __slots__ = ("ended", "intact", "returned")

    def __init__(self) -> None:
        self.returned = self.ended = self.intact = 0.0

    def count(self, returned: float, ended: float, intact: float) -> None:
        self.returned += returned
        self.ended = max(0.0, self.ended + ended)
        self.intact += intact
        if self.returned + self.ended > _CAP:
            self.returned, self.ended, self.intact = 0.5 * self.returned, 0.5 * self.ended, 0.5 * self.intact

    def p_end(self, before: float) -> float:
        return (_PRIOR_PAUSES * before + self.ended) / (_PRIOR_PAUSES + self.returned + self.ended)

    def p_intact(self, before: float) -> float:
        return (_PRIOR_PAUSES * before + self.intact) / (_PRIOR_PAUSES + self.returned)


class Fates:
    """By kind, and below that by size; each level is worth 20 pauses of the one above."""

    def __init__(self) -> None:
        self._kinds: dict[PauseKind, _Fate] = {}
        self._sizes: dict[tuple[PauseKind, int], _Fate] = {}

    def returned(self, kind: PauseKind, depth: int, intact: float, given_up: bool) -> None:
        """A pause ended and the next prompt began with a share ``intact`` of the context. ``given_up``: it had been counted
        by ``ended``."""
        for fate in self._both(kind, depth):
            fate.count(1.0, -1.0 if given_up else 0.0, intact)

    def ended(self, kind: PauseKind, depth: int) -> None:
        """A session of that context was given up."""
        for fate in self._both(kind, depth):
            fate.count(0.0, 1.0, 0.0)

    def _both(self, kind: PauseKind, depth: int) -> tuple[_Fate, _Fate]:
        return self._kinds.setdefault(kind, _Fate()), self._sizes.setdefault((kind, depth), _Fate())

    def end_odds(self, kind: PauseKind, depth: int) -> float:
        """By what the size multiplies the odds, among pauses of the kind, of never returning."""
        here, all_of_it = self._sizes.get((kind, depth)), self._kinds.get(kind)
        if here is None or all_of_it is None:
            return 1.0
        whole = all_of_it.p_end(1.0 - P_RETURN[kind])
        part = here.p_end(whole)
        return part / (1.0 - part) / (whole / (1.0 - whole))

    def p_intact(self, kind: PauseKind, depth: int | None) -> float:
        """Share of a context of that size (None: of any) that the prompt after such a pause begins with."""
        p = P_INTACT[kind]
        if (fate := self._kinds.get(kind)) is not None:
            p = fate.p_intact(p)
        if depth is not None and (fate := self._sizes.get((kind, depth))) is not None:
            p = fate.p_intact(p)
        return p
