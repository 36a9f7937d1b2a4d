"""Distributions of pause lengths on one log grid: bounded histograms, priors by quantile knots, posteriors. Values only.

The grid: ``GRID_BINS`` bins of a factor e^0.2 each, from 5 ms to 28 days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tenuto.priors import Knots

GRID_MIN_S = 0.005
GRID_STEP = 0.2
GRID_BINS = 100
SKETCH_WEIGHT_MAX = 512.0
# One pause speaks for lengths near it too, the fewer there are the wider: a triangle with a half-width of so many bins, and so
# many over sqrt(n) more. Named tools have favourite lengths, people have none. Without it, a few pauses make a comb of spikes
# (0.15 to 0.35 nats a pause worse on KVCT).
KERNEL_NAMED, KERNEL_WIDE = (1.0, 5.0), (2.0, 8.0)
# The spread follows the number of pauses in steps of this factor: in between, one more pause is only added.
KERNEL_KEPT = 1.1
_LOG_MIN = math.log(GRID_MIN_S)


class LogSketch:
    """A histogram of log-durations.

    ``wide``: of pauses that have no favourite length. Bounded in size; above ``SKETCH_WEIGHT_MAX`` observations all weights
    halve, so that the recent past counts more.
    """

    __slots__ = ("_kernel", "_shares", "_smooth", "_until", "bins", "weight")

    def __init__(self, bins: Mapping[int, float] | None = None, *, wide: bool = False) -> None:
        self._kernel = KERNEL_WIDE if wide else KERNEL_NAMED
        self.bins: dict[int, float] = dict(bins or {})
        self.weight = math.fsum(self.bins.values())
        self._smooth: list[float] | None = None
        self._shares: list[float] = []
        self._until = 0.0

    def add(self, duration_s: float) -> None:
        """Adds one duration, clipped to the grid."""
        self.add_bin(bin_of(duration_s))

    def add_bin(self, index: int) -> None:
        """Adds one duration of that bin."""
        self.bins[index] = self.bins.get(index, 0.0) + 1.0
        self.weight += 1.0
        if self.weight > SKETCH_WEIGHT_MAX:
            self.bins = {i: w / 2 for i, w in self.bins.items() if w >= 0.1}
            self.weight = math.fsum(self.bins.values())
            self._smooth = None
        elif self.weight > self._until:
            self._smooth = None
        elif self._smooth is not None:
            self._spread(index, 1.0)

    def smooth(self) -> list[float]:
        """Weight by bin, each pause spread over the bins around it. Not to be changed."""
        if self._smooth is None:
            self._smooth = [0.0] * GRID_BINS
            self._until = KERNEL_KEPT * self.weight
            width = self._kernel[0] + self._kernel[1] / math.sqrt(max(1.0, self.weight))
            half = int(width)
            kernel = [width - abs(k) for k in range(-half, half + 1)]
            scale = 1.0 / math.fsum(kernel)
            self._shares = [share * scale for share in kernel]
            for index, weight in self.bins.items():
                self._spread(index, weight)
        return self._smooth

    def _spread(self, index: int, weight: float) -> None:
        smooth, shares = self._smooth, self._shares
        assert smooth is not None
        first = index - len(shares) // 2
        if first >= 0 and first + len(shares) <= GRID_BINS:
            for at, share in enumerate(shares, first):
                smooth[at] += weight * share
        else:
            for at, share in enumerate(shares, first):
                smooth[min(GRID_BINS - 1, max(0, at))] += weight * share


class PauseDistribution:
    """The distribution of a pause that will end: ``GRID_BINS`` masses on the log grid, summing to one."""

    __slots__ = ("_tail", "masses")

    def __init__(self, masses: Sequence[float]) -> None:
        self.masses = tuple(masses)
        tail = [0.0] * (GRID_BINS + 1)
        for i in range(GRID_BINS - 1, -1, -1):
            tail[i] = tail[i + 1] + self.masses[i]
        self._tail = tail  # summed from the far end: a small survival keeps its relative precision

    def survival(self, at_s: float) -> float:
        """P(pause > at_s)."""
        position = _position(at_s)
        index = min(int(position), GRID_BINS - 1)
        return self._tail[index + 1] + self.masses[index] * max(0.0, index + 1 - position)

    def quantile(self, q: float, *, elapsed_s: float = 0.0) -> float:
        """The time (seconds) by which a share ``q`` of pauses has ended, among those longer than ``elapsed_s``.

        Counts from the start of the pause. Beyond the grid it follows a power law of exponent 1, by which a pause
        that has lasted t is expected to last as long again.
        """
        start = self.survival(elapsed_s)
        if start <= 0.0 or elapsed_s >= _edge(GRID_BINS):
            return elapsed_s / max(1.0 - q, 1e-3)
        target = start * (1.0 - q)
        low, high = 0, GRID_BINS
        while low < high:  # the last bin edge whose survival is still at least the target
            middle = (low + high + 1) // 2
            if self._tail[middle] >= target:
                low = middle
            else:
                high = middle - 1
        inside = 0.0
        if low < GRID_BINS and self.masses[low] > 0.0:
            inside = min(1.0, max(0.0, (self._tail[low] - target) / self.masses[low]))
        return max(elapsed_s, math.exp(_LOG_MIN + GRID_STEP * (low + inside)))


def posterior(base: list[float], learned: float, sketch: LogSketch | None, pseudo: float) -> tuple[list[float], float]:
    """``base`` weighs as much as ``pseudo`` pauses against those of ``sketch``; (masses, share that rests on pauses seen)."""
    if sketch is None or sketch.weight <= 0.0:
        return base, learned
    scale = 1.0 / (sketch.weight + pseudo)
    masses = [(m * pseudo + w) * scale for m, w in zip(base, sketch.smooth(), strict=True)]
    return masses, (sketch.weight + pseudo * learned) * scale


_PRIOR_MASSES: dict[Knots, tuple[float, ...]] = {}


def prior_masses(knots: Knots) -> tuple[float, ...]:
    """Masses of a prior: log-linear between its knots, a power law of exponent 1 beyond the last one."""
    if knots not in _PRIOR_MASSES:
        edges = [1.0 - _knot_cdf(knots, _edge(i)) for i in range(GRID_BINS)] + [0.0]
        edges[0] = 1.0
        _PRIOR_MASSES[knots] = tuple(max(0.0, edges[i] - edges[i + 1]) for i in range(GRID_BINS))
    return _PRIOR_MASSES[knots]


def _knot_cdf(knots: Knots, at_s: float) -> float:
    last_s, last_p = knots[-1]
    if at_s >= last_s:
        return 1.0 - (1.0 - last_p) * last_s / at_s
    before_s, before_p = GRID_MIN_S, 0.0
    for knot_s, knot_p in knots:
        if at_s < knot_s:
            return before_p + (knot_p - before_p) * math.log(at_s / before_s) / math.log(knot_s / before_s)
        before_s, before_p = knot_s, knot_p
    return last_p


def _position(seconds: float) -> float:
    if seconds <= GRID_MIN_S:
        return 0.0
    return min((math.log(seconds) - _LOG_MIN) / GRID_STEP, float(GRID_BINS))


def bin_of(seconds: float) -> int:
    """The bin of a duration; those off the grid go to its ends."""
    return min(int(_position(seconds)), GRID_BINS - 1)


def _edge(index: int) -> float:
    return math.exp(_LOG_MIN + GRID_STEP * index)
