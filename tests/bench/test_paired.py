"""Ratios and their interval against what the definitions give by hand and by integration."""

from __future__ import annotations

import math

import pytest

from tenuto_server.bench.paired import ratio_of, t_quantile


def student_cdf(t: float, freedom: int) -> float:
    """Student's distribution function by Simpson's rule over its density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    steps = 4000
    width = t / steps
    weights = [1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1)]
    total = sum(w * (1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i, w in enumerate(weights))
    return 0.5 + scale * total * width / 3


@pytest.mark.parametrize("freedom", [*range(1, 36), 60, 200])
def test_quantiles_are_students(freedom: int) -> None:
    assert student_cdf(t_quantile(freedom), freedom) == pytest.approx(0.975, abs=2e-5)


def test_a_ratio_by_hand() -> None:
    """Ratios 1 and 4: logarithms 0 and ln 4, mean ln 2, standard error ln 2; t(1) = 12.7062."""
    found = ratio_of([1.0, 4.0])
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0 ** (1 - 12.7062))
    assert found.high == pytest.approx(2.0 ** (1 + 12.7062))
    turned = ratio_of([1.0, 0.25])  # whoever is called the other side, the interval says the same
    assert turned.low == pytest.approx(1 / (found.high or 0))


def test_edges() -> None:
    alone = ratio_of([1.5])
    assert (alone.mean, alone.low, alone.high) == (pytest.approx(1.5), None, None)
    assert str(alone) == "1.50"
    for wrong in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="above 0"):
            ratio_of(wrong)
    with pytest.raises(ValueError, match="freedom"):
        t_quantile(0)
