"""With which earlier pauses a session's pause is filed, by what the server sees when the turn ends. Pure functions, no state.

Pauses are told apart by the length of the answer before them, the session's last pause of the kind, the mean of all its own, and
the size of its context, in this order, each in steps: the first alone, the first two together, and so on. Sessions differ in
tempo, a long answer is another matter than a short one, and after a very short or a very long pause the next is more often
another such than the mean says; what joint steps have not been met often is shrunk towards those before
(``calibration.PauseStats``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import TypeAlias

from tenuto.wire import PauseKind
from tenuto_server.policy.histogram import masses_of, quantiles_of
from tenuto_server.policy.priors import KINDS, LENGTH

Rhythm: TypeAlias = tuple[str, ...]
"""Names of what a pause is filed under, from general to particular."""

HABIT_PACE = 0.2
"""Weight of the newest pause in a session's mean log length (KVCT: an EWMA of 0.2 tells as much as the whole session)."""
CENTRE: dict[PauseKind, float] = {kind: log(quantiles_of(masses_of(LENGTH[kind]), 1)[0]) for kind in KINDS}
"""Log seconds that lengths are measured from: the prior's median."""
_ANSWER, _LAST, _HABIT, _CONTEXT = 0.4, 1.2, 0.3, 0.7
_HUMAN_ANSWER, _HUMAN_LAST, _HUMAN_HABIT = 1.0, 2.4, 0.6
"""Widths of the steps, in logs. Of a person's pauses there are fewer, and they vary twice as much (log-sd 2.17 against 1.26 in KVCT)."""
_LOW, _HIGH = -12, 14
_MARK = "\x1f"
"""Between key and steps: in no tool's name."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a server knows of a session when a pause begins. ``habit``: mean log seconds of its own pauses of the kind
    (``next_habit``), ``last``: that of the last one; None before any. ``answer_tokens``: length of the answer just given,
    ``context_tokens``: of the context."""

    habit: float | None = None
    last: float | None = None
    answer_tokens: int = 0
    context_tokens: int = 0


def next_habit(habit: float | None, kind: PauseKind, length_s: float) -> float:
    """A session's mean log length of pauses of a kind, one pause later; None: this is the first, weighed against the prior."""
    before = CENTRE[kind] if habit is None else habit
    return before + HABIT_PACE * (log(max(length_s, 1.0)) - before)


def rhythm_of(kind: PauseKind, traits: Traits) -> Rhythm | None:
    """What such a session's pause is filed under; None where the kind is not known."""
    if kind == "unknown":
        return None
    centre, answer = CENTRE[kind], log(1.0 + traits.answer_tokens)
    if kind == "human":
        first = f"{_MARK}{int(answer / _HUMAN_ANSWER)}"
        second = f"{first},{_step(traits.last, centre, _HUMAN_LAST)}"
        return first, second, f"{second},{_step(traits.habit, centre, _HUMAN_HABIT)}"
    first = f"{_MARK}{int(answer / _ANSWER)}"
    second = f"{first},{_step(traits.last, centre, _LAST)}"
    third = f"{second},{_step(traits.habit, centre, _HABIT)}"
    return first, second, third, f"{third},{int(log(1.0 + traits.context_tokens) / _CONTEXT)}"


def _step(at: float | None, centre: float, width: float) -> int | str:
    """A session's first pause of the kind has a step of its own: whoever has never come back yet is another matter than
    whoever comes back after an average time."""
    if at is None:
        return ""
    step = round((at - centre) / width)
    return _LOW if step < _LOW else _HIGH if step > _HIGH else step
