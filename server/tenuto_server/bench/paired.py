"""Ratios of measurements taken side by side, with their interval. Pure.

Method: within a pair both sides are measured one after the other, in an order that alternates from pair to pair, so that what
the machine does meanwhile meets both. The figure is the geometric mean of the pairs' ratios; its interval is Student's t
interval of the mean of their logarithms (n - 1 degrees of freedom), which takes the pairs as independent and the logarithms as
roughly normal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

METHOD = "geometric mean of the pairs' ratios, 95 % Student t interval of the mean log ratio"

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the expansion below is exact to four digits.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_Z = 1.959964


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond 30 degrees of freedom by Cornish and Fisher's expansion around the
    normal quantile (Abramowitz and Stegun, 26.7.5)."""
    if freedom < 1:
        raise ValueError(f"degrees of freedom must be 1 or more, got {freedom}")
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, n = _Z, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)


@dataclass(frozen=True, slots=True)
class Ratio:
    """``low``, ``high``: the 95 % interval; None with a single pair, which tells nothing of its spread."""

    pairs: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(pairs: Sequence[float]) -> Ratio:
    """See the module. Raises ``ValueError`` for no pairs, or ratios that are not above 0."""
    if not pairs or min(pairs) <= 0:
        raise ValueError(f"ratios must be above 0, got {list(pairs)}")
    logs = [math.log(pair) for pair in pairs]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(tuple(pairs), math.exp(mean), None, None)
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(tuple(pairs), math.exp(mean), math.exp(mean - half), math.exp(mean + half))
