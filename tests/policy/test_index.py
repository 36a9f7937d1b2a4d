"""The Gittins index against closed forms, hand calculations and brute force."""

from __future__ import annotations

from itertools import pairwise
from math import erf, exp, inf, isfinite, log, sqrt
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.wire import Forecast
from tenuto_server.policy.distributions import SIGMA_UNSTATED, Component, Empirical, LogNormal, Looked, Part
from tenuto_server.policy.index import Curve, mixture


def exponential(mean_s: float, n: int = 64) -> Empirical:
    return Empirical(tuple(-mean_s * log(1.0 - (i + 0.5) / n) for i in range(n)))


def brute_force(components: list[Component], elapsed_s: float) -> float:
    """max over w of P(R <= e+w | R > e) / E[min(R-e, w) | R > e] by fine numerical integration of exact lognormals."""

    def returned(t: float) -> float:
        out = 0.0
        for weight, p, part in components:
            assert isinstance(part, LogNormal)
            d = (log(t) - part.log_median) / sqrt(2.0)
            out += weight * p * (0.5 + 0.5 * (0.95 * erf(d / part.sigma) + 0.05 * erf(d / part.wide)))
        return out

    steps = [elapsed_s + 1e-3 * 1.01**i for i in range(1800)]
    before, wait, at, best = returned(elapsed_s), 0.0, elapsed_s, 0.0
    for t in steps:
        wait += (1.0 - 0.5 * (returned(at) + returned(t))) * (t - at)
        at = t
        best = max(best, (returned(t) - before) / wait)
    return best


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_known_pause_has_belady_s_index(share: float) -> None:
    curve = mixture(((1.0, 1.0, Empirical((100.0,) * 64)),))
    assert curve.index_at(100.0 * share) == pytest.approx(1.0 / (100.0 * (1.0 - share)), rel=0.02)


@pytest.mark.parametrize("elapsed_s", [0.0, 10.0, 40.0, 100.0])
def test_a_memoryless_pause_has_its_hazard(elapsed_s: float) -> None:
    assert mixture(((1.0, 1.0, exponential(50.0)),)).index_at(elapsed_s) == pytest.approx(1.0 / 50.0, rel=0.05)


def test_two_possible_lengths_by_hand() -> None:
    # 1 s or 100 s, evenly: a lease of 1 s gains 1/2 and costs 1 s; one of 100 s gains 1 and costs (1 + 100) / 2 s.
    curve = mixture(((1.0, 1.0, Empirical((1.0,) * 32 + (100.0,) * 32)),))
    assert curve.index_at(0.0) == pytest.approx(0.5, rel=0.02)
    # Once the short one is ruled out: Belady for the long one.
    assert curve.index_at(20.0) == pytest.approx(1.0 / 80.0, rel=0.03)


def test_a_uniform_pause_by_hand() -> None:
    # U(0, T): waiting for all of it gains 1 and costs (T - e) / 2.
    curve = mixture(((1.0, 1.0, Empirical(tuple(100.0 * (i + 0.5) / 64 for i in range(64)))),))
    assert curve.index_at(0.0) == pytest.approx(2.0 / 100.0, rel=0.05)
    assert curve.index_at(50.0) == pytest.approx(2.0 / 50.0, rel=0.06)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.3])
@pytest.mark.parametrize("p_return", [1.0, 0.6])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.5, 5.0])
def test_forecasts_agree_with_brute_force(sigma: float, p_return: float, share: float) -> None:
    components: list[Component] = [(1.0, p_return, LogNormal(log(60.0), sigma))]
    # Coarser where the narrow part has died out and a twentieth of the mass is left.
    assert mixture(tuple(components)).index_at(60.0 * share) == pytest.approx(
        brute_force(components, max(1e-6, 60.0 * share)), rel=0.08 if share < 2.0 else 0.16
    )


def test_a_mixture_agrees_with_brute_force() -> None:
    components: list[Component] = [(0.7, 0.9, LogNormal(log(20.0), 0.3)), (0.3, 0.8, LogNormal(log(400.0), 1.0))]
    for elapsed_s in (1.0, 10.0, 25.0, 100.0, 1000.0):
        assert mixture(tuple(components)).index_at(elapsed_s) == pytest.approx(
            brute_force(components, elapsed_s), rel=0.06
        )


def test_a_sharp_forecast_rises_until_the_return_and_falls_after_it() -> None:
    curve = mixture(((1.0, 1.0, LogNormal(log(100.0), 0.1)),))
    rising = [curve.index_at(e) for e in (0.0, 30.0, 60.0, 80.0, 95.0)]
    assert rising == sorted(rising)
    assert rising[-1] > 5 * rising[0]
    assert curve.index_at(300.0) < curve.index_at(95.0) / 10


def test_waiting_makes_never_returning_likelier() -> None:
    # 20 % never return; of the rest half are back after the median: 0.2 / (0.2 + 0.8 / 2).
    curve = mixture(((1.0, 0.8, exponential(50.0)),))
    assert curve.p_end(0.0) == pytest.approx(0.2)
    assert curve.p_end(50.0 * log(2.0)) == pytest.approx(0.2 / 0.6, rel=0.01)


def test_conditioning_on_a_later_start_is_bayes() -> None:
    whole = mixture(((1.0, 1.0, exponential(50.0)),))
    later = Empirical(exponential(50.0).quantiles, 30.0)
    assert later.survival() == pytest.approx(exp(-30.0 / 50.0), rel=0.02)
    for more in (1.0, 20.0, 60.0):
        assert mixture(((1.0, 1.0, later),)).index_at(more) == pytest.approx(whole.index_at(30.0 + more), rel=0.05)


def test_beyond_all_experience_the_power_law_goes_on() -> None:
    part = Empirical((1.0,) * 64, 1e9)
    assert part.survival() == 0.0
    # Exponent 1: as likely as not to last as long again.
    assert part.cdf([1e9]) == pytest.approx([0.5])
    assert mixture(((1.0, 1.0, part),)).index_at(0.0) > 0.0


def test_the_far_end_has_no_index() -> None:
    assert mixture(((1.0, 1.0, exponential(1.0)),)).index_at(1e9) == 0.0


def test_lognormal_density_integrates_to_one_and_matches_its_distribution() -> None:
    part = LogNormal(2.0, 0.4)
    width = 0.01
    grid = [-12.0 + width * i for i in range(2800)]
    assert sum(exp(part.log_density(x)) * width for x in grid) == pytest.approx(1.0, rel=1e-3)
    below = sum(exp(part.log_density(x)) * width for x in grid if x < 2.3)
    assert part.cdf([exp(2.3)])[0] == pytest.approx(below, abs=0.01)


def test_reading_a_forecast() -> None:
    part = LogNormal.read(Forecast(p50_s=10.0, p90_s=20.0), shift=log(2.0), factor=3.0)
    assert part.log_median == pytest.approx(log(20.0))
    assert part.sigma == pytest.approx(3.0 * log(2.0) / 1.28155, rel=1e-3)
    assert LogNormal.read(Forecast(p50_s=10.0)).sigma == SIGMA_UNSTATED
    assert isfinite(LogNormal.read(Forecast(p50_s=0.0, p90_s=0.0)).log_median)


def test_scans_find_the_crossings() -> None:
    curve = mixture(((1.0, 1.0, LogNormal(log(100.0), 0.1)),))
    rise = curve.first_above(0.0, 0.05)
    assert rise is not None
    assert 60.0 < rise < 100.0
    end = curve.above_until(rise, 0.05, 0.0)
    assert 100.0 < end < 200.0
    assert curve.index_at(end * 1.3) < 0.05
    assert curve.first_above(0.0, 1e9) is None
    # A gap longer than allowed ends the lease, a shorter one does not.
    assert curve.above_until(0.0, 0.05, 1.0) == 0.0
    assert curve.above_until(0.0, 0.05, 1000.0) == end
    assert curve.next_change(0.0, curve.index_at(0.0), 1.25) < 60.0
    assert curve.next_change(1e9, 0.0, 1.25) == inf


def test_return_by_is_a_conditional_quantile() -> None:
    curve = mixture(((1.0, 0.8, exponential(50.0)),))
    assert curve.return_by(0.0, 0.5) == pytest.approx(50.0 * log(2.0), rel=0.03)
    assert curve.return_by(30.0, 0.5) == pytest.approx(30.0 + 50.0 * log(2.0), rel=0.05)


lengths = st.floats(0.01, 1e5)
parts = st.one_of(
    st.builds(LogNormal, st.floats(log(0.01), log(1e5)), st.floats(0.02, 4.0)),
    st.builds(
        lambda xs, after: Empirical(tuple(sorted(xs)), after),
        st.lists(lengths, min_size=1, max_size=64),
        st.one_of(st.just(0.0), lengths),
    ),
)
probabilities = st.floats(0.0, 1.0)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Component, ...]:
    found = draw(st.lists(st.tuples(st.floats(0.01, 1.0), probabilities, parts), min_size=1, max_size=4))
    total = sum(weight for weight, _, _ in found)
    return tuple((weight / total, p, part) for weight, p, part in found)


def well_formed(curve: Curve) -> bool:
    rising = all(a <= b + 1e-12 for a, b in zip(curve.mass, curve.mass[1:], strict=False))
    return rising and all(a < b for a, b in zip(curve.edges, curve.edges[1:], strict=False))


@settings(deadline=None, max_examples=150)
@given(mixtures(), st.floats(0.0, 1e6))
def test_the_index_is_finite_and_never_negative(components: tuple[Component, ...], elapsed_s: float) -> None:
    curve = mixture(components)
    assert well_formed(curve)
    assert isfinite(curve.index_at(elapsed_s))
    assert curve.index_at(elapsed_s) >= 0.0
    assert 0.0 <= curve.p_end(elapsed_s) <= 1.0
    assert curve.return_by(elapsed_s, 0.5) >= elapsed_s


@settings(deadline=None, max_examples=100)
@given(mixtures(), st.floats(0.0, 1e4), st.floats(0.0, 2.0))
def test_more_mass_at_never_is_never_worth_more(
    components: tuple[Component, ...], elapsed_s: float, more: float
) -> None:
    curve = mixture(components)
    worse = mixture(components, curve.end_mass + more)
    assert worse.index_at(elapsed_s) <= curve.index_at(elapsed_s) * (1 + 1e-9)


@settings(deadline=None, max_examples=100)
@given(mixtures(), st.one_of(st.just(0.0), st.floats(1e-9, 1e4)), st.floats(0.1, 10.0))
def test_stretching_time_shrinks_the_index(components: tuple[Component, ...], elapsed_s: float, c: float) -> None:
    def stretch(part: Part) -> Part:
        if isinstance(part, LogNormal):
            return LogNormal(part.log_median + log(c), part.sigma)
        if isinstance(part, Looked):
            return Looked(tuple(q * c for q in part.quantiles), part.log_middle + log(c), part.sigma)
        return Empirical(tuple(q * c for q in part.quantiles), part.after_s * c)

    stretched = mixture(tuple((weight, p, stretch(part)) for weight, p, part in components))
    assert stretched.index_at(elapsed_s * c) * c == pytest.approx(
        mixture(components).index_at(elapsed_s),
        rel=5e-2,
        abs=1e-12,  # edges near each other may fall together in one unit only
    )


def test_a_look_at_a_lognormal_gives_its_conjugate_posterior() -> None:
    # Prior N(2, 1), look N(3, 0.5): precisions 1 and 4 add up, the posterior is N(2.8, 1 / sqrt(5)).
    normal = NormalDist()
    prior = tuple(exp(2.0 + normal.inv_cdf((i + 0.5) / 64)) for i in range(64))
    points = [-2.0, -1.0, 0.0, 1.0, 2.0]
    seen = Looked(prior, 3.0, 0.5).cdf([exp(2.8 + z / sqrt(5.0)) for z in points])
    assert seen == pytest.approx([normal.cdf(z) for z in points], abs=0.01)


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("middle", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("z", [-inf, -1.0, 0.0, 1.0])
def test_the_index_of_a_look_is_that_of_its_conjugate_posterior(sigma: float, middle: float, z: float) -> None:
    # Prior N(2, 1), look N(middle, sigma): the posterior's precision is 1 + 1 / sigma^2. Integrated finely; beyond one sd the tail
    # of what was observed is a power law, on purpose.
    normal = NormalDist()
    prior = tuple(exp(2.0 + normal.inv_cdf((i + 0.5) / 64)) for i in range(64))
    precision = 1.0 + sigma**-2
    posterior = NormalDist((2.0 + middle * sigma**-2) / precision, precision**-0.5)
    elapsed_s = exp(posterior.mean + z * posterior.stdev)
    before, wait, at, best = posterior.cdf(log(elapsed_s)) if elapsed_s else 0.0, 0.0, max(elapsed_s, 1e-9), 0.0
    for i in range(1500):
        t = elapsed_s + 1e-3 * 1.01**i
        wait += (1.0 - 0.5 * (posterior.cdf(log(t)) + posterior.cdf(log(at)))) * (t - at)
        at, best = t, max(best, (posterior.cdf(log(t)) - before) / wait)
    assert mixture(((1.0, 1.0, Looked(prior, middle, sigma)),)).index_at(elapsed_s) == pytest.approx(best, rel=0.1)


@settings(deadline=None, max_examples=60)
@given(st.floats(-3.0, 14.0), st.floats(0.05, 3.0), st.lists(st.floats(0.5, 5000.0), min_size=2, max_size=40))
def test_no_cell_within_reach_of_a_look_is_coarse_against_it(middle: float, sigma: float, lengths: list[float]) -> None:
    part = Looked(tuple(sorted(lengths)), middle, sigma)
    logs = sorted(part.log_edges().values())
    for start, end in pairwise(logs):
        if middle - 3.0 * sigma < start and end < middle + 3.0 * sigma:
            assert end - start <= 1.0001 * sigma


def test_a_look_keeps_the_shape_of_what_was_observed() -> None:
    # All pauses last 10 or 1,000 s: a look at 100 s cannot tell which, one at 30 s can.
    prior = (10.0,) * 32 + (1000.0,) * 32
    assert Looked(prior, log(100.0), 0.5).cdf([100.0, 1e4]) == pytest.approx([0.5, 1.0], abs=0.03)
    # Likelihood ratio of both: exp((log(1000/30)^2 - log(30/10)^2) / (2 * 0.5^2)) is beyond 1e8.
    assert Looked(prior, log(30.0), 0.5).cdf([100.0])[0] > 0.999


@settings(deadline=None, max_examples=60)
@given(st.floats(-3.0, 14.0), st.floats(0.05, 3.0), st.lists(st.floats(0.5, 5000.0), min_size=2, max_size=40))
def test_what_was_looked_at_is_a_distribution(middle: float, sigma: float, lengths: list[float]) -> None:
    quantiles = tuple(sorted(lengths))
    if Looked.fits(quantiles, middle, sigma):
        part = Looked(quantiles, middle, sigma)
        edges = sorted(part.log_edges())
        values = part.cdf(edges)
        assert edges == sorted(edges)
        assert values == sorted(values)
        assert values[0] >= 0.0
        assert values[-1] == pytest.approx(1.0)
        assert isfinite(mixture(((1.0, 0.9, part),)).index_at(exp(middle)))


def test_nothing_is_looked_at_far_from_everything_observed() -> None:
    assert Looked.fits((10.0,) * 64, log(20.0), 0.3)
    assert not Looked.fits((10.0,) * 64, log(1e12), 0.3)
    assert not Looked.fits((10.0,) * 64, log(1e-3), 0.3)


def test_edges_that_only_rounding_tells_apart_make_no_infinite_hazard() -> None:
    near = tuple(100.0 * (i + 1) for i in range(64))
    apart = tuple(q * (1.0 + 4e-16) for q in near)
    curve = mixture(((0.5, 0.9, Empirical(near)), (0.5, 0.9, Empirical(apart))))
    alone = mixture(((1.0, 0.9, Empirical(near)),))
    for elapsed_s in (0.0, 150.0, 100.0, 3000.0):
        assert curve.index_at(elapsed_s) == pytest.approx(alone.index_at(elapsed_s), rel=1e-6)
