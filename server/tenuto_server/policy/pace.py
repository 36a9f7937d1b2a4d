"""How a session's pause will compare with others of its kind, guessed from what the server sees when the turn ends.

A ``Pace`` owns one kind's regression of the log of the pause's length on the session's own earlier pauses, the length of the
answer and of the context, with bends where a straight line is known to mislead: ridge regression taught one pause at a time
(recursive least squares). Coefficients start where nothing but the session's own habit counts, for half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from operator import mul, sub

_RIDGE, _RIDGE_BENT = 2.0, 50.0
"""Pauses that each starting coefficient is worth: of the lines, and of what bends them."""
_LINES = 5
_START = (0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_BENDS = (-1.2, 0.0, 1.2)
"""Where the effect of the answer's length may change, in log tokens from their mean: about one standard deviation."""
_ERROR_MAX = 4.0


@dataclass(frozen=True, slots=True)
class Traits:
    """What a server knows of a session when a pause begins. ``habit``: mean log seconds of its own pauses of the kind
    (``calibration.next_pace``), ``last``: that of the last one; None before any. ``answer_tokens``: length of the answer
    just given, ``context_tokens``: of the context."""

    habit: float | None = None
    last: float | None = None
    answer_tokens: int = 0
    context_tokens: int = 0


class Pace:
    """``centre``: log seconds that the kind is measured from."""

    __slots__ = ("_centre", "_spread", "answer", "context", "n", "weights")

    def __init__(self, centre: float) -> None:
        self._centre = centre
        self.n = 0
        self.answer = self.context = 0.0
        self.weights = list(_START)
        size = len(_START)
        ridges = [_RIDGE if i < _LINES else _RIDGE_BENT for i in range(size)]
        self._spread = [[1.0 / ridges[i] if i == j else 0.0 for j in range(size)] for i in range(size)]

    def _point(self, traits: Traits) -> tuple[float, ...]:
        habit = 0.0 if traits.habit is None else traits.habit - self._centre
        last = habit if traits.last is None else traits.last - self._centre
        answer = context = 0.0
        if self.n:
            answer, context = _log(traits.answer_tokens) - self.answer, _log(traits.context_tokens) - self.context
        low, middle, high = (max(0.0, answer - bend) for bend in _BENDS)
        return 1.0, habit, last, answer, context, low, middle, high, answer * last, max(0.0, habit)

    def expect(self, traits: Traits) -> float:
        """Expected log of the length in seconds."""
        return self._centre + _dot(self.weights, self._point(traits))

    def learn(self, traits: Traits, log_length: float) -> None:
        """A pause of a session with these traits took exp(``log_length``) seconds."""
        # Sizes are measured from their own mean: in what unit they come must not matter.
        share = 1.0 / (self.n + 1.0) if self.n < 1000 else 0.001
        self.answer += share * (_log(traits.answer_tokens) - self.answer)
        self.context += share * (_log(traits.context_tokens) - self.context)
        self.n += 1
        x, spread = self._point(traits), self._spread
        error = log_length - self._centre - _dot(self.weights, x)
        error = max(-_ERROR_MAX, min(_ERROR_MAX, error))
        pull = [sum(map(mul, row, x)) for row in spread]
        scale = 1.0 / (1.0 + _dot(pull, x))
        gains = [scale * p for p in pull]
        self.weights = [w + gain * error for w, gain in zip(self.weights, gains, strict=True)]
        self._spread = [list(map(sub, row, [gain * p for p in pull])) for row, gain in zip(spread, gains, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


def _log(tokens: int) -> float:
    return log(1.0 + tokens)
