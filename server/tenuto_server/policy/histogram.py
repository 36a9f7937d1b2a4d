"""Pause lengths counted on a fixed logarithmic grid. A Histogram owns its counts; everything else here is pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import log, log2

BINS_PER_OCTAVE = 4
LOWEST_LOG2 = -7
BINS = BINS_PER_OCTAVE * 29
"""8 ms to 48 days."""
BIN_LOG_WIDTH = log(2.0) / BINS_PER_OCTAVE

# One observation speaks for lengths near it too (log-sd 0.27): without that, a few would make a comb of spikes.
_KERNEL = (1 / 16, 2 / 16, 3 / 16, 4 / 16, 3 / 16, 2 / 16, 1 / 16)
_HALF = len(_KERNEL) // 2


def bin_of(length_s: float) -> int:
    """The bin of a length in seconds; lengths off the grid go to its ends."""
    if length_s <= 2.0**LOWEST_LOG2:
        return 0
    return min(BINS - 1, int((log2(length_s) - LOWEST_LOG2) * BINS_PER_OCTAVE))


def bin_edge(i: int) -> float:
    """Lower edge of bin ``i`` in seconds."""
    return float(2.0 ** (LOWEST_LOG2 + i / BINS_PER_OCTAVE))


class Histogram:
    """Smoothed counts of pause lengths.

    Memory is fixed. Once ``total`` reaches ``cap`` everything is halved, so that old habits fade. ``epoch`` counts up each
    time the total has grown by about a quarter: whoever derives something from the counts need not do so more often.
    """

    __slots__ = ("_cap", "_next", "counts", "epoch", "total")

    def __init__(self, cap: float) -> None:
        self.counts = array("d", bytes(8 * BINS))
        self.total = 0.0
        self.epoch = 0
        self._next = 1.0
        self._cap = cap

    def add(self, length_s: float, share: float = 1.0) -> None:
        """Counts one pause of ``length_s`` seconds, or a share of one."""
        centre = bin_of(length_s)
        counts = self.counts
        if _HALF <= centre < BINS - _HALF:
            for offset, weight in enumerate(_KERNEL, centre - _HALF):
                counts[offset] += weight * share
        else:
            for offset, weight in enumerate(_KERNEL, centre - _HALF):
                counts[min(BINS - 1, max(0, offset))] += weight * share
        self.total += share
        if self.total >= self._next:
            self.epoch += 1
            self._next = self.total * 1.25 + 1.0
        if self.total >= self._cap:
            self.counts = array("d", (0.5 * count for count in counts))
            self.total *= 0.5
            self._next = self.total * 1.25 + 1.0


def masses_of(points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Bin masses of a distribution given as points (seconds, P(R <= seconds)), linear in log time between them.

    Below the first point the mass spreads evenly over the two octaves under it; beyond the last it falls off as a power
    law with exponent 1 (KVCT: having waited t, the median remaining wait is t to 3t).
    """
    last, p_last = points[-1]
    knots = [(0.25 * points[0][0], 0.0), *points]
    for i in range(1, 25):
        knots.append((last * 2.0**i, 1.0 - (1.0 - p_last) * 0.5**i))

    def below(length_s: float) -> float:
        if length_s <= knots[0][0]:
            return 0.0
        for (t0, p0), (t1, p1) in pairwise(knots):
            if length_s <= t1:
                return p0 + (p1 - p0) * log(length_s / t0) / log(t1 / t0)
        return 1.0

    cumulative = [0.0, *(below(bin_edge(i)) for i in range(1, BINS)), 1.0]
    return tuple(high - low for low, high in pairwise(cumulative))


def quantiles_of(masses: Sequence[float], n: int, halvings: int = 0) -> tuple[float, ...]:
    """Lengths in seconds at probabilities (i + 0.5) / n of a distribution given by bin masses that add up to 1, then, where
    each time half of what is left has come, ``halvings`` more."""
    out = []
    below, i, first, last, mass = 0.0, 0, bin_edge(0), BINS - 1, masses[0]
    for goal in _goals(n, halvings):
        while below + mass < goal and i < last:
            below += mass
            i += 1
            mass = masses[i]
        share = (goal - below) / mass if mass > 0.0 else 1.0
        out.append(first * 2.0 ** ((i + (share if share < 1.0 else 1.0)) / BINS_PER_OCTAVE))
    return tuple(out)


@lru_cache(maxsize=16)
def _goals(n: int, halvings: int) -> tuple[float, ...]:
    even = [(k + 0.5) / n for k in range(n)]
    return (*even, *[1.0 - 0.5 / n * 0.5**k for k in range(1, halvings + 1)])
