"""Distributions of a pause's length, cut into cells: forecasts, what was observed, and what was observed seen through a forecast.
Pure functions and frozen values; ``index`` makes curves of them.

Within a cell the density falls as 1 / t, because pauses spread over orders of magnitude; the first cell, which begins at 0, is
uniform.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import erf, exp, inf, log, pi, sqrt
from operator import mul, sub, truediv
from typing import NamedTuple, TypeAlias

from tenuto.wire import Forecast

WIDE_SHARE = 0.05
"""Share of a forecast's mass that is spread widely: forecasts miss by far more often than a lognormal admits."""
WIDE_SIGMA = 2.2
"""Log-sd of that share, at least: that of human gaps as a class (KVCT, 2.17), the widest class there is."""
SIGMA_UNSTATED = 1.4
"""Log-sd of a forecast that gives no p90: that of tool run times within one tool and program (AgentCgroup, 1.36)."""
_Z90 = 1.2815515655446004
_Z_FAR = (3.25, 3.5, 4.0, 4.5)
_Z_NARROW = (*(-z for z in reversed(_Z_FAR)), *(i * 0.125 for i in range(-24, 25)), *_Z_FAR)
_Z_WIDE = tuple(i * 0.25 for i in range(-14, 15))
_LOOK_REACH = 4.0
"""How many sigma around its middle a look tells anything."""
_Z_LOOK = tuple(i * 0.5 for i in range(-8, 9))
"""Where cells that are wider than a look's sigma are cut for it."""
_TAIL_DOUBLINGS = 12
EVEN = 64
"""Of a longer list of quantiles the first so many are evenly spaced; each further one halves what is left."""
_SQRT2 = sqrt(2.0)
_SQRT2PI = sqrt(2.0 * pi)


class LogNormal(NamedTuple):
    """A forecast: 95 % lognormal around exp(``log_median``) seconds with log-sd ``sigma``, 5 % as wide as a class."""

    log_median: float
    sigma: float

    @property
    def wide(self) -> float:
        """Log-sd of the wide share."""
        return max(WIDE_SIGMA, 2.5 * self.sigma)

    @classmethod
    def read(cls, forecast: Forecast, shift: float = 0.0, factor: float = 1.0) -> LogNormal:
        """The forecast with its median moved by ``shift`` in log seconds and its log-spread multiplied by ``factor``."""
        p50_s = max(forecast.p50_s, 1e-3)
        sigma = SIGMA_UNSTATED if forecast.p90_s is None else log(max(forecast.p90_s / p50_s, 1.0)) / _Z90
        return cls(log(p50_s) + shift, min(4.0, max(0.02, sigma * factor)))

    def log_density(self, log_length: float) -> float:
        """Log of the density of log R at ``log_length``."""
        d, wide = log_length - self.log_median, self.wide
        narrow = exp(-0.5 * min(1400.0, (d / self.sigma) ** 2)) / self.sigma
        return log(
            (1.0 - WIDE_SHARE) * narrow / _SQRT2PI + WIDE_SHARE * exp(-0.5 * (d / wide) ** 2) / (wide * _SQRT2PI)
        )

    def log_edges(self) -> dict[float, float]:
        """Cell edges in seconds, each with its logarithm."""
        wide, sigma = self.wide, self.sigma
        reach = _Z_NARROW[-1] * sigma
        offsets = [z * sigma for z in _Z_NARROW]
        offsets += [z * wide for z in _Z_WIDE if abs(z * wide) > reach]
        return {exp(self.log_median + offset): self.log_median + offset for offset in offsets}

    def cdf(self, edges: Sequence[float], logs: Sequence[float] | None = None) -> list[float]:
        """P(R <= t) at each of ``edges`` (> 0 seconds), whose logarithms are ``logs`` where known."""
        narrow, wide, median = 1.0 / (self.sigma * _SQRT2), 1.0 / (self.wide * _SQRT2), self.log_median
        out = []
        for at in logs or map(log, edges):
            d = at - median
            out.append(0.5 + 0.5 * ((1.0 - WIDE_SHARE) * erf(d * narrow) + WIDE_SHARE * erf(d * wide)))
        return out


class Empirical(NamedTuple):
    """Observed lengths as ``quantiles`` at evenly spaced probabilities (i + 0.5) / n, in seconds, ascending; beyond the
    64th, each where half of what is left has come.

    Beyond the last one follows a power law with exponent 1 ("having waited t, the median remaining wait is about t").
    ``after_s``: only lengths beyond it count, and time starts there.
    """

    quantiles: tuple[float, ...]
    after_s: float = 0.0

    def __hash__(self) -> int:
        # Of seventy numbers a few tell as much as all: equal parts have equal ones.
        values = self.quantiles
        return hash((values[0], values[len(values) // 2], values[-1], self.after_s))

    def survival(self) -> float:
        """P(R > after_s)."""
        shape = shape_of(self.quantiles)
        return 1.0 - interpolate(shape.times, shape.mass, self.after_s)

    def log_edges(self) -> dict[float, float]:
        """Cell edges in seconds, each with its logarithm."""
        shape = shape_of(self.quantiles)
        if not self.after_s:
            return shape.log_of
        times = shape.times
        rest = [time - self.after_s for time in times[bisect_right(times, self.after_s) :]]
        # Counted from a later start the density does not rise towards 0: no logarithmic cells there.
        while len(rest) > 2 and rest[1] > 1.6 * rest[0]:
            rest.pop(0)
        # Past everything ever seen: the power law goes on from where the pause is now.
        rest = rest or [self.after_s * (2.0**i - 1.0) for i in range(1, _TAIL_DOUBLINGS + 1)]
        return {edge: log(edge) for edge in rest}

    def cdf(self, edges: Sequence[float], logs: Sequence[float] | None = None) -> list[float]:
        """P(R <= after_s + t | R > after_s) at each of ``edges`` (> 0 seconds, ascending), whose logarithms are ``logs`` where known."""
        shape = shape_of(self.quantiles)
        if self.after_s:
            return self._cdf_after(shape, edges)
        times, mass, starts, number = shape.times, shape.mass, shape.starts, shape.number_of.get
        out = []
        for edge, at in zip(edges, logs or map(log, edges), strict=True):
            i = number(edge)  # its own edges, mostly
            if i is None:
                i = bisect_right(times, edge)
                if i < 2 or i == len(times):
                    share = edge / times[1] if i < 2 else 0.0
                else:
                    share = (at - starts[i - 1]) / (starts[i] - starts[i - 1])
                below = mass[i - 1]
                out.append(below + share * (mass[i] - below) if share else below)
            else:
                out.append(mass[i])
        return out

    def _cdf_after(self, shape: Shape, edges: Sequence[float]) -> list[float]:
        times, mass = shape.times, shape.mass
        before = interpolate(times, mass, self.after_s)
        if before >= 1.0:
            return [1.0 - self.after_s / (self.after_s + edge) for edge in edges]
        out, i, last = [], 1, len(times) - 1
        scale = 1.0 / (1.0 - before)
        for edge in edges:
            time = edge + self.after_s
            while i < last and times[i] < time:
                i += 1
            if times[i] <= time:  # its own edges, mostly
                out.append((mass[i] - before) * scale)
                continue
            share = _share_of_cell(times[i - 1], times[i], time)
            out.append((mass[i - 1] + share * (mass[i] - mass[i - 1]) - before) * scale)
        return out


class Looked(NamedTuple):
    """Observed lengths seen through a noisy look at log R: their density times a Gaussian around ``log_middle`` with log-sd
    ``sigma`` (Bayes). It keeps the shape of what is observed - the shortest there is, the skew, the tail - where a lognormal
    around the forecast does not."""

    quantiles: tuple[float, ...]
    log_middle: float
    sigma: float

    def __hash__(self) -> int:
        return hash((self.quantiles[0], self.quantiles[-1], self.log_middle, self.sigma))

    @classmethod
    def fits(cls, quantiles: tuple[float, ...], log_middle: float, sigma: float) -> bool:
        """Whether such a look is at anything observed: within the reach of it (the power-law tail counts)."""
        starts = shape_of(quantiles).starts
        return starts[0] - _LOOK_REACH * sigma < log_middle < starts[-1] + _LOOK_REACH * sigma

    def cuts(self) -> list[float]:
        """Log seconds at which cells of what is observed must be cut for this look: none where all that it reaches are narrower
        than its sigma, as most are but the first and those of the tail."""
        starts, middle, sigma = shape_of(self.quantiles).starts, self.log_middle, self.sigma
        first = bisect_right(starts, middle - _LOOK_REACH * sigma)
        reached = starts[max(0, first - 1) : bisect_left(starts, middle + _LOOK_REACH * sigma) + 1]
        found: list[float] = []
        for start, end in pairwise(reached):
            if end - start > sigma:
                found += [at for z in _Z_LOOK if start < (at := middle + sigma * z) < end]
        return found

    def log_edges(self) -> dict[float, float]:
        """Cell edges in seconds, each with its logarithm."""
        cuts = self.cuts()
        return {**dict(zip(map(exp, cuts), cuts, strict=True)), **shape_of(self.quantiles).log_of}

    def on_grid(self) -> list[float]:
        """P(R <= t) at the edges of the grid of what is observed."""
        shape = shape_of(self.quantiles)
        _, sums = self._seen(shape)
        total = sums[-1]
        return [sums[i] / total for i in shape.places]

    def _seen(self, shape: Shape) -> tuple[list[float], list[float]]:
        """At the start of every cell of what is observed and at the end of the last: the Gaussian's erf, and up to a factor
        P(R <= t)."""
        scale, middle = 1.0 / (self.sigma * _SQRT2), self.log_middle
        # Within its reach, differences of erf are exact enough.
        seen = [erf((start - middle) * scale) for start in shape.starts]
        return seen, list(accumulate(map(mul, shape.density, map(sub, seen[1:], seen)), initial=0.0))

    def cdf(self, edges: Sequence[float], logs: Sequence[float] | None = None) -> list[float]:
        """P(R <= t) at each of ``edges`` (> 0 seconds, ascending), whose logarithms are ``logs`` where known."""
        shape = shape_of(self.quantiles)
        starts, density, number = shape.starts, shape.density, shape.number_of.get
        scale, middle = 1.0 / (self.sigma * _SQRT2), self.log_middle
        seen, sums = self._seen(shape)
        total, last = sums[-1], len(density) - 1
        out = []
        for edge, at in zip(edges, logs or map(log, edges), strict=True):
            i = number(edge)
            if i is None:
                i = min(last, bisect_left(starts, at, 1) - 1)
                inside = density[i] * (erf((at - middle) * scale) - seen[i]) if at > starts[i] else 0.0
                out.append(min(1.0, (sums[i] + inside) / total))
            else:
                out.append(sums[i] / total)
        return out


Part: TypeAlias = LogNormal | Empirical | Looked
Component: TypeAlias = tuple[float, float, Part]
"""(weight in the mixture, probability of any return at all, distribution of the length if it returns)."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What is derived of a list of quantiles. ``times``, ``mass``: the distribution function as points (seconds,
    probability), from (0, 0) to the end of the power-law tail. ``starts``, ``density``: log seconds where cells begin and the
    last ends, and mass per log second in each: what comes before the first quantile spreads evenly over the octave
    under it. ``number_of``, ``log_of``: the place of a time in the former two, and its logarithm.
    ``grid``: what is observed as cells, ``places``: where its edges are among ``times``, ``mass_on_grid``: their mass."""

    times: tuple[float, ...]
    mass: tuple[float, ...]
    starts: tuple[float, ...]
    density: tuple[float, ...]
    number_of: dict[float, int]
    log_of: dict[float, float]
    grid: Grid
    places: tuple[int, ...]
    mass_on_grid: tuple[float, ...]


_shapes: OrderedDict[int, tuple[tuple[float, ...], Shape]] = OrderedDict()
_SHAPES_MAX = 1024


def shape_of(quantiles: tuple[float, ...]) -> Shape:
    """The shape of quantiles, remembered for the very tuple: whoever knows them hands out the same one while it holds."""
    known = _shapes.get(id(quantiles))
    if known is not None:
        return known[1]  # the tuple is held here, so nothing else can have its identity
    shape = _derive(quantiles)
    _shapes[id(quantiles)] = quantiles, shape
    if len(_shapes) > _SHAPES_MAX:
        _shapes.popitem(last=False)
    return shape


def _derive(quantiles: tuple[float, ...]) -> Shape:
    n = len(quantiles)
    times, last = [0.0], 0.0
    for quantile in quantiles:
        # Ties would be atoms; each gets a cell of a hundred-thousandth of its length.
        least = last * 1.00001
        last = quantile if quantile > least else least
        if last < 1e-6:
            last = 1e-6
        times.append(last)
    for _ in range(_TAIL_DOUBLINGS):
        last *= 2.0
        times.append(last)
    mass = _masses_of(n)
    logs = list(map(log, times[1:]))
    starts = (log(0.5 * times[1]), *logs)
    number_of = dict(zip(times, range(n + _TAIL_DOUBLINGS + 1), strict=True))
    log_of = dict(zip(times[1:], logs, strict=True))
    grid = grid_of(log_of)
    places = tuple([number_of[edge] for edge in grid.edges])
    return Shape(
        tuple(times),
        mass,
        starts,
        tuple(map(truediv, map(sub, mass[1:], mass), map(sub, starts[1:], starts))),
        number_of,
        log_of,
        grid,
        places,
        tuple([mass[i] for i in places]),
    )


@lru_cache(maxsize=64)
def _masses_of(count: int) -> tuple[float, ...]:
    """P(R <= t) at 0, at ``count`` quantiles and at the doublings after the last."""
    n = min(EVEN, count)
    mass, left = [0.0], 1.0
    for i in range(count):
        left = 1.0 - (i + 0.5) / n if i < n else 0.5 * left
        mass.append(1.0 - left)
    for _ in range(_TAIL_DOUBLINGS):
        left *= 0.5
        mass.append(1.0 - left)
    mass[-1] = 1.0
    return tuple(mass)


def _share_of_cell(start: float, end: float, time: float) -> float:
    """The share of a cell's mass that lies before ``time``."""
    return log(time / start) / log(end / start) if start > 0.0 else time / end


def interpolate(times: Sequence[float], mass: Sequence[float], time: float) -> float:
    if time >= times[-1]:
        return mass[-1]
    i = bisect_right(times, time)
    return mass[i - 1] + (mass[i] - mass[i - 1]) * _share_of_cell(times[i - 1], times[i], time)


class Grid(NamedTuple):
    """Cells by their ``edges`` in seconds, the first 0, with the ``logs`` of all others, and what the area under a density that
    falls as 1 / t takes of each cell: ``widths`` and ``pulls`` in seconds from the second cell on, ``scales`` (time by which the
    mass is divided for the hazard at the start) from the first. ``narrow``: some cell is too narrow for its logarithms, its pull is -1."""

    edges: tuple[float, ...]
    logs: list[float]
    widths: list[float]
    pulls: list[float]
    scales: list[float]
    narrow: bool


def grid_of(found: dict[float, float]) -> Grid:
    """The grid of edges given with their logarithms."""
    raw = sorted(found)
    edges = raw
    if min(map(truediv, raw[1:], raw), default=inf) <= 1.0005:
        # Of a cluster of edges only the first and the last matter: what lies between them is one narrow cell.
        edges = [
            edge
            for before, edge, after in zip([0.0, *raw], raw, [*raw[1:], inf], strict=False)
            if edge > before * 1.0005 or after > edge * 1.0005
        ]
    logs = [found[edge] for edge in edges]
    ratios = list(map(sub, logs[1:], logs))
    widths = list(map(sub, edges[1:], edges))
    pulls, scales = [], [edges[0]]
    narrow = False
    for start, end, width, ratio in zip(edges, edges[1:], widths, ratios, strict=False):
        if width <= 1e-6 * end:  # too narrow to tell the difference of two logarithms from none
            narrow = True
            pulls.append(-1.0)
            scales.append(width)
        else:
            pulls.append(end - width / ratio)
            scales.append(ratio * start)
    return Grid((0.0, *edges), logs, widths, pulls, scales, narrow)
