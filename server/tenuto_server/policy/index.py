"""The Gittins index of a pause, on a distribution cut into cells. Pure functions and frozen values, no state.

A pause of unknown length R is drawn as a curve: against the expected waiting time A(t) = E[min(R, t)] stands the
probability C(t) = P(R <= t). From a point e seconds in, a lease of w more seconds gains C(e+w) - C(e) and costs
A(e+w) - A(e); both lack the same factor 1 / P(R > e). The best ratio (the Gittins index; "hit density" in LHD, Beckmann
et al., NSDI 2018) is therefore the steepest line from (A(e), C(e)) to a later point of the curve: either the tangent at e
(the hazard, w -> 0) or a line to a cell's edge, and those of all edges together are found by one sweep over the upper
hull from the right. Within a cell the density falls as 1 / t, because pauses spread over orders of magnitude; the first
cell, which begins at 0, is uniform.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
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
_TAIL_DOUBLINGS = 12
EVEN = 64
"""Of a longer list of quantiles the first so many are evenly spaced; each further one halves what is left."""
_SQRT2 = sqrt(2.0)
_SQRT2PI = sqrt(2.0 * pi)


@dataclass(frozen=True, slots=True)
class LogNormal:
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


@dataclass(frozen=True, slots=True)
class Empirical:
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
        shape = _shape(self.quantiles)
        return 1.0 - _interpolate(shape.times, shape.mass, self.after_s)

    def log_edges(self) -> dict[float, float]:
        """Cell edges in seconds, each with its logarithm."""
        shape = _shape(self.quantiles)
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
        shape = _shape(self.quantiles)
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

    def _cdf_after(self, shape: _Shape, edges: Sequence[float]) -> list[float]:
        times, mass = shape.times, shape.mass
        before = _interpolate(times, mass, self.after_s)
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


@dataclass(frozen=True, slots=True)
class Looked:
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
        """Whether such a look is at anything observed: within 4 sigma of it (the power-law tail counts)."""
        starts = _shape(quantiles).starts
        return starts[0] - 4.0 * sigma < log_middle < starts[-1] + 4.0 * sigma

    def log_edges(self) -> dict[float, float]:
        """Cell edges in seconds, each with its logarithm."""
        shape = _shape(self.quantiles)
        low, high = log(0.1 * shape.times[1]), shape.starts[-1]
        middle, step = self.log_middle, 2.0 * self.sigma
        logs = [at for z in _Z_WIDE if low < (at := middle + step * z) < high]
        return {**dict(zip(map(exp, logs), logs, strict=True)), **shape.log_of}

    def cdf(self, edges: Sequence[float], logs: Sequence[float] | None = None) -> list[float]:
        """P(R <= t) at each of ``edges`` (> 0 seconds, ascending), whose logarithms are ``logs`` where known."""
        shape = _shape(self.quantiles)
        starts, density, number = shape.starts, shape.density, shape.number_of.get
        scale, middle = 1.0 / (self.sigma * _SQRT2), self.log_middle
        # At most 4 sigma off, differences of erf are exact enough.
        seen = [erf((start - middle) * scale) for start in starts]
        sums = list(accumulate(map(mul, density, map(sub, seen[1:], seen)), initial=0.0))
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
class _Shape:
    """What is derived of a list of quantiles. ``times``, ``mass``: the distribution function as points (seconds,
    probability), from (0, 0) to the end of the power-law tail. ``starts``, ``density``: log seconds where cells begin and the
    last ends, and mass per log second in each: what comes before the first quantile spreads evenly over the two octaves
    under it. ``number_of``, ``log_of``: the place of a time in the former two, and its logarithm."""

    times: tuple[float, ...]
    mass: tuple[float, ...]
    starts: tuple[float, ...]
    density: tuple[float, ...]
    number_of: dict[float, int]
    log_of: dict[float, float]


_shapes: OrderedDict[int, tuple[tuple[float, ...], _Shape]] = OrderedDict()
_SHAPES_MAX = 1024


def _shape(quantiles: tuple[float, ...]) -> _Shape:
    """The shape of quantiles, remembered for the very tuple: whoever knows them hands out the same one while it holds."""
    known = _shapes.get(id(quantiles))
    if known is not None:
        return known[1]  # the tuple is held here, so nothing else can have its identity
    shape = _derive(quantiles)
    _shapes[id(quantiles)] = quantiles, shape
    if len(_shapes) > _SHAPES_MAX:
        _shapes.popitem(last=False)
    return shape


def _derive(quantiles: tuple[float, ...]) -> _Shape:
    n = min(EVEN, len(quantiles))
    times, mass = [0.0], [0.0]
    left = 1.0
    for i, quantile in enumerate(quantiles):
        # Ties would be atoms; each gets a cell of a hundred-thousandth of its length.
        times.append(max(quantile, times[-1] * 1.00001, 1e-6))
        left = 1.0 - (i + 0.5) / n if i < n else 0.5 * left
        mass.append(1.0 - left)
    for _ in range(_TAIL_DOUBLINGS):
        left *= 0.5
        times.append(times[-1] * 2.0)
        mass.append(1.0 - left)
    mass[-1] = 1.0
    starts = (log(0.25 * times[1]), *(log(time) for time in times[1:]))
    return _Shape(
        tuple(times),
        tuple(mass),
        starts,
        tuple((mass[i] - mass[i - 1]) / (starts[i] - starts[i - 1]) for i in range(1, len(times))),
        {time: i for i, time in enumerate(times)},
        dict(zip(times[1:], starts[1:], strict=True)),
    )


def _share_of_cell(start: float, end: float, time: float) -> float:
    """The share of a cell's mass that lies before ``time``."""
    return log(time / start) / log(end / start) if start > 0.0 else time / end


def _area_of_cell(start: float, end: float, alive: float, mass: float) -> float:
    """Integral of P(R > t) over a cell at whose start it is ``alive`` and which holds ``mass``."""
    width = end - start
    if width <= 1e-6 * end or start <= 0.0:
        return (alive - 0.5 * mass) * width
    return alive * width - mass * (end - width / log(end / start))


def _interpolate(times: Sequence[float], mass: Sequence[float], time: float) -> float:
    if time >= times[-1]:
        return mass[-1]
    i = bisect_right(times, time)
    return mass[i - 1] + (mass[i] - mass[i - 1]) * _share_of_cell(times[i - 1], times[i], time)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A pause's curve with the index at every edge.

    ``edges`` seconds, first 0; ``mass``: P(R <= edge), ``area``: E[min(R, edge)]; ``index``: Gittins index at the edge in
    1/s; ``slope``, ``reach``: the steepest line from the edge to a later one and that one's number. ``total``: probability
    of returning at all, ``end_mass`` of not (they need not add up to 1: a keepalive lowers the latter).
    """

    edges: tuple[float, ...]
    mass: tuple[float, ...]
    area: tuple[float, ...]
    index: tuple[float, ...]
    slope: tuple[float, ...]
    reach: tuple[int, ...]
    total: float
    end_mass: float

    def mass_at(self, elapsed_s: float) -> float:
        """P(R <= elapsed_s)."""
        return _interpolate(self.edges, self.mass, max(0.0, elapsed_s))

    def p_end(self, elapsed_s: float, before: float | None = None) -> float:
        """Probability that a pause which lasts ``elapsed_s`` already never ends; ``before`` as for ``return_by``."""
        left = self.total - (self.mass_at(elapsed_s) if before is None else before) + self.end_mass
        return self.end_mass / left if left > 0.0 else 1.0

    def index_at(self, elapsed_s: float) -> float:
        """The Gittins index ``elapsed_s`` seconds into the pause, 1/s; 0 past the end of the distribution."""
        edges, mass, area, slope = self.edges, self.mass, self.area, self.slope
        if elapsed_s >= edges[-1]:
            return 0.0
        elapsed_s = max(0.0, elapsed_s)
        j = bisect_right(edges, elapsed_s)
        start, end = edges[j - 1], edges[j]
        if end - elapsed_s <= 1e-9 * end:
            return self.index[j]
        in_cell = mass[j] - mass[j - 1]
        alive = self.total + self.end_mass - mass[j - 1]
        if start > 0.0:
            rest = log(end / elapsed_s) / log(end / start)
            alive -= (1.0 - rest) * in_cell
            hazard = in_cell / (log(end / start) * elapsed_s * alive) if in_cell > 0.0 else 0.0
        else:
            rest = 1.0 - elapsed_s / end
            alive -= (1.0 - rest) * in_cell
            hazard = in_cell / (end * alive) if in_cell > 0.0 else 0.0
        gain, wait = rest * in_cell, _area_of_cell(elapsed_s, end, alive, rest * in_cell)
        if wait <= 0.0:
            return self.index[j]
        best, first = gain / wait, j
        while slope[j] > best:
            j = self.reach[j]
            best = (gain + mass[j] - mass[first]) / (wait + area[j] - area[first])
        return max(best, hazard)

    def next_change(self, elapsed_s: float, now: float, factor: float) -> float:
        """The first edge after ``elapsed_s`` at which the index differs from ``now`` by ``factor`` or more; inf if none."""
        low, high = now / factor, now * factor
        edges, index = self.edges, self.index
        for i in range(bisect_right(edges, elapsed_s), len(edges)):
            if not low < index[i] < high:
                return edges[i]
        return inf

    def above_until(self, elapsed_s: float, threshold: float, gap_s: float, limit_s: float = inf) -> float:
        """The last time up to which the index stays above ``threshold``, gaps shorter than ``gap_s`` aside.

        Nobody asks beyond ``limit_s``: the answer is then at least that.
        """
        edges, index = self.edges, self.index
        last = elapsed_s
        if threshold <= 0.0:
            # Anything still possible is enough.
            return max(last, edges[-1]) if self.total > 0.0 else last
        for i in range(bisect_right(edges, elapsed_s), len(edges)):
            if last >= limit_s:
                break
            if index[i] > threshold:
                last = edges[i]
            elif edges[i] - last > gap_s:
                break
        return last

    def first_above(self, elapsed_s: float, threshold: float) -> float | None:
        """The first time from ``elapsed_s`` on at which the index exceeds ``threshold``; None if never."""
        if threshold <= 0.0:
            return elapsed_s if elapsed_s < self.edges[-1] and self.total > 0.0 else None
        if self.index_at(elapsed_s) > threshold:
            return elapsed_s
        for i in range(bisect_right(self.edges, elapsed_s), len(self.edges)):
            if self.index[i] > threshold:
                return self.edges[i]
        return None

    def return_by(self, elapsed_s: float, share: float, before: float | None = None) -> float:
        """The time by which ``share`` of the returns that can still come have come; ``before``: ``mass_at`` of the time."""
        before = self.mass_at(elapsed_s) if before is None else before
        goal = before + share * (self.total - before)
        i = min(max(1, bisect_right(self.mass, goal)), len(self.edges) - 1)
        width = self.mass[i] - self.mass[i - 1]
        part = min(1.0, (goal - self.mass[i - 1]) / width) if width > 0.0 else 1.0
        start, end = self.edges[i - 1], self.edges[i]
        return max(elapsed_s, start * (end / start) ** part if start > 0.0 else end * part)


_Cells: TypeAlias = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


class Outlook(NamedTuple):
    """A pause as it was looked at once: its curve, which begins ``from_s`` seconds into the pause, the ``weight`` of the
    client's words in it, the ``trust`` in forecasts that it was made with, and the elapsed time until which it stands."""

    curve: Curve
    from_s: float
    weight: float
    trust: float
    until_s: float


@lru_cache(maxsize=512)
def _cells(components: tuple[Component, ...]) -> _Cells:
    """The mixture on the union of its parts' edges: (edges in seconds, first 0; their logarithms, nothing for the first;
    P(R <= edge))."""
    found: dict[float, float] = {}
    for weight, _, part in components:
        if weight > 0.0:
            found.update(part.log_edges())
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
    mass = [0.0] * len(edges)
    for weight, p_return, part in components:
        if weight > 0.0:
            values = part.cdf(edges, logs)
            scale = weight * p_return / values[-1]
            mass = [m + scale * v for m, v in zip(mass, values, strict=True)]
    return (0.0, *edges), (-inf, *logs), (0.0, *mass)


@lru_cache(maxsize=2048)
def mixture(components: tuple[Component, ...], end_mass: float | None = None) -> Curve:
    """The curve of a mixture whose weights add up to 1.

    ``end_mass`` replaces the mass of never returning (None: what the returns leave of 1).
    """
    edges, logs, mass = _cells(components)
    total = mass[-1]
    never = max(0.0, 1.0 - total) if end_mass is None else end_mass
    alive = total + never
    n = len(edges)
    # As _area_of_cell, whose logarithm the hazard needs again. The first cell begins at 0.
    start, gone, sofar = edges[1], mass[1], (alive - 0.5 * mass[1]) * edges[1]
    area, scales = [0.0, sofar], [start]
    for end, ratio, held in zip(edges[2:], map(sub, logs[2:], logs[1:]), mass[2:], strict=False):
        width, in_cell = end - start, held - gone
        if width <= 1e-6 * end:  # too narrow to tell the difference of two logarithms from none
            sofar += (alive - gone - 0.5 * in_cell) * width
            scales.append(width)
        else:
            sofar += (alive - gone) * width - in_cell * (end - width / ratio)
            scales.append(ratio * start)
        area.append(sofar)
        start, gone = end, held
    index, slope, reach = [0.0] * n, [0.0] * n, [n - 1] * n
    later_mass, later_area, later_slope = mass[n - 1], area[n - 1], 0.0
    for i in range(n - 2, -1, -1):
        j, begun, gone = i + 1, area[i], mass[i]
        in_cell, left, spent = later_mass - gone, alive - gone, later_area - begun
        hazard = in_cell / (scales[i] * (left if left > 1e-300 else 1e-300))
        best = in_cell / (spent if spent > 1e-300 else 1e-300)
        steeper = later_slope
        while steeper > best:
            j = reach[j]
            spent = area[j] - begun
            best = (mass[j] - gone) / (spent if spent > 1e-300 else 1e-300)
            steeper = slope[j]
        slope[i], reach[i], index[i] = best, j, best if best > hazard else hazard
        later_mass, later_area, later_slope = gone, begun, best
    return Curve(edges, mass, tuple(area), tuple(index), tuple(slope), tuple(reach), total, never)
