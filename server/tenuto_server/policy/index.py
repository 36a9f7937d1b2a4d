"""The Gittins index of a pause, on a distribution cut into cells. Pure functions and frozen values, no state.

A pause of unknown length R is drawn as a curve: against the expected waiting time A(t) = E[min(R, t)] stands the
probability C(t) = P(R <= t). From a point e seconds in, a lease of w more seconds gains C(e+w) - C(e) and costs
A(e+w) - A(e); both lack the same factor 1 / P(R > e). The best ratio (the Gittins index; "hit density" in LHD, Beckmann
et al., NSDI 2018) is therefore the steepest line from (A(e), C(e)) to a later point of the curve: either the tangent at e
(the hazard, w -> 0) or a line to a cell's edge, and those of all edges together are found by one sweep over the upper
hull from the right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf, log
from typing import NamedTuple, TypeAlias

from tenuto_server.policy.distributions import (
    Component,
    Empirical,
    Grid,
    LogNormal,
    Looked,
    Shape,
    grid_of,
    interpolate,
    shape_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A pause's curve with the index at every edge.

    ``edges`` seconds, first 0; ``mass``: P(R <= edge), ``area``: E[min(R, edge)]; ``index``: Gittins index at the edge in
    1/s; ``slope``, ``reach``: the steepest line from the edge to a later one and that one's number. ``total``: probability
    of returning at all, ``end_mass`` of not (they need not add up to 1: a keepalive lowers the latter).
    """

    edges: Sequence[float]
    mass: Sequence[float]
    area: Sequence[float]
    index: Sequence[float]
    slope: Sequence[float]
    reach: Sequence[int]
    total: float
    end_mass: float

    def mass_at(self, elapsed_s: float) -> float:
        """P(R <= elapsed_s)."""
        return interpolate(self.edges, self.mass, max(0.0, elapsed_s))

    def p_end(self, elapsed_s: float, before: float | None = None) -> float:
        """Probability that a pause which lasts ``elapsed_s`` already never ends; ``before`` as for ``return_by``."""
        left = self.total - (self.mass_at(elapsed_s) if before is None else before) + self.end_mass
        return self.end_mass / left if left > 0.0 else 1.0

    def index_at(self, elapsed_s: float) -> float:
        """The Gittins index ``elapsed_s`` seconds into the pause, 1/s; 0 past the end of the distribution."""
        return self.at(elapsed_s)[0]

    def at(self, elapsed_s: float) -> tuple[float, float]:
        """``index_at`` and ``mass_at`` of a time."""
        edges, mass, area, slope = self.edges, self.mass, self.area, self.slope
        if elapsed_s >= edges[-1]:
            return 0.0, mass[-1]
        if elapsed_s < 0.0:
            elapsed_s = 0.0
        j = bisect_right(edges, elapsed_s)
        start, end, gone = edges[j - 1], edges[j], mass[j - 1]
        in_cell, alive = mass[j] - gone, self.total + self.end_mass - gone
        near = end - elapsed_s <= 1e-9 * end
        if start > 0.0:
            ratio = log(end / start)
            before = gone + in_cell * (log(elapsed_s / start) / ratio)
            if near:
                return self.index[j], before
            left = log(end / elapsed_s)
            rest = left / ratio
            alive -= (1.0 - rest) * in_cell
            hazard = in_cell / (ratio * elapsed_s * alive) if in_cell > 0.0 else 0.0
        else:
            left, share = 0.0, elapsed_s / end
            before = gone + in_cell * share
            if near:
                return self.index[j], before
            rest = 1.0 - share
            alive -= (1.0 - rest) * in_cell
            hazard = in_cell / (end * alive) if in_cell > 0.0 else 0.0
        gain, width = rest * in_cell, end - elapsed_s
        # As in _areas, for what is left of the cell.
        if width <= 1e-6 * end or elapsed_s <= 0.0:
            wait = (alive - 0.5 * gain) * width
        else:
            wait = alive * width - gain * (end - width / (left if left else log(end / elapsed_s)))
        if wait <= 0.0:
            return self.index[j], before
        best, first = gain / wait, j
        while slope[j] > best:
            j = self.reach[j]
            best = (gain + mass[j] - mass[first]) / (wait + area[j] - area[first])
        return (best if best > hazard else hazard), before

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


_Cells: TypeAlias = tuple[Grid, list[float]]


class Outlook(NamedTuple):
    """A pause as it was looked at once: its curve, which begins ``from_s`` seconds into the pause, the ``weight`` of the
    client's words in it, the ``trust`` in forecasts that it was made with, and the elapsed time until which it stands."""

    curve: Curve
    from_s: float
    weight: float
    trust: float
    until_s: float


def _shared_shape(components: tuple[Component, ...]) -> Shape | None:
    """The shape whose cells are fine enough for all parts, if there is one: nothing has to be cut then."""
    shape = None
    for _, _, part in components:
        if isinstance(part, LogNormal) or (isinstance(part, Empirical) and part.after_s):
            return None
        if shape is None:
            shape = shape_of(part.quantiles)
        elif shape_of(part.quantiles) is not shape:
            return None
        if isinstance(part, Looked) and part.cuts():
            return None
    return shape


@lru_cache(maxsize=512)
def _cells(components: tuple[Component, ...]) -> _Cells:
    """The mixture on the union of its parts' edges: the grid, and P(R <= edge) at each of its edges."""
    shape = _shared_shape(components)
    if shape is not None:
        on_grid = [0.0] * len(shape.places)
        for weight, p_return, part in components:
            values = part.on_grid() if isinstance(part, Looked) else shape.mass_on_grid
            scale = weight * p_return / values[-1]
            on_grid = [m + scale * v for m, v in zip(on_grid, values, strict=True)]
        return shape.grid, on_grid
    found: dict[float, float] = {}
    for weight, _, part in components:
        if weight > 0.0:
            found.update(part.log_edges())
    grid = grid_of(found)
    edges = grid.edges[1:]
    mass = [0.0] * len(edges)
    for weight, p_return, part in components:
        if weight > 0.0:
            values = part.cdf(edges, grid.logs)
            scale = weight * p_return / values[-1]
            mass = [m + scale * v for m, v in zip(mass, values, strict=True)]
    return grid, [0.0, *mass]


@lru_cache(maxsize=2048)
def mixture(components: tuple[Component, ...], end_mass: float | None = None) -> Curve:
    """The curve of a mixture whose weights add up to 1.

    ``end_mass`` replaces the mass of never returning (None: what the returns leave of 1).
    """
    grid, mass = _cells(components)
    total = mass[-1]
    never = max(0.0, 1.0 - total) if end_mass is None else end_mass
    alive = total + never
    n, scales = len(mass), grid.scales
    area = _areas(grid, mass, alive)
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
    return Curve(grid.edges, mass, area, index, slope, reach, total, never)


def _areas(grid: Grid, mass: list[float], alive: float) -> list[float]:
    """E[min(R, edge)] at each edge: the integral of P(R > t). Over a cell at whose start that is ``s`` and which holds mass m
    it is s * width - m * (end - width / log(end / start)), or (s - m / 2) * width for a uniform cell: the first, which begins
    at 0, and those too narrow to tell."""
    first = (alive - 0.5 * mass[1]) * grid.edges[1]
    if not grid.narrow:
        cells = zip(mass[1:], mass[2:], grid.widths, grid.pulls, strict=False)
        terms = [(alive - gone) * width - (held - gone) * pull for gone, held, width, pull in cells]
    else:
        terms = []
        for gone, held, width, pull in zip(mass[1:], mass[2:], grid.widths, grid.pulls, strict=False):
            if pull < 0.0:
                terms.append((alive - gone - 0.5 * (held - gone)) * width)
            else:
                terms.append((alive - gone) * width - (held - gone) * pull)
    return [0.0, *accumulate(terms, initial=first)]
