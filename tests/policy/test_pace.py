"""The regression of a pause's length, against ridge regression worked out by hand and by a linear solver."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tenuto_server.policy import PauseStats
from tenuto_server.policy.distributions import Empirical
from tenuto_server.policy.fates import depth_of
from tenuto_server.policy.pace import Pace, Traits


def test_before_anything_is_learned_half_the_habit_counts() -> None:
    pace = Pace(2.0)
    assert pace.expect(Traits()) == 2.0
    assert pace.expect(Traits(habit=3.0, last=9.0, answer_tokens=5000)) == pytest.approx(2.5)


def test_it_is_the_ridge_regression_of_all_it_was_taught() -> None:
    rnd = Random(1)
    pace, centre = Pace(2.0), 2.0
    rows, lengths = [], []
    for _ in range(300):
        # Sizes alternate about a mean that the running one meets at once: then their deviations are known beforehand.
        traits = Traits(rnd.gauss(2.0, 0.6), rnd.gauss(2.0, 1.0), 99, 9999)
        length = 2.0 + 0.3 * (traits.habit or 0.0) + rnd.gauss(0.0, 0.5)
        pace.learn(traits, length)
        habit, last = (traits.habit or 0.0) - centre, (traits.last or 0.0) - centre
        # An answer of mean length lies 1.2 beyond the first bend and before the two others.
        rows.append([1.0, habit, last, 0.0, 0.0, 1.2, 0.0, 0.0, 0.0, max(0.0, habit)])
        lengths.append(length - centre)
    x, y, start = np.array(rows), np.array(lengths), np.array([0.0, 0.5, *(0.0,) * 8])
    ridges = np.diag([2.0] * 5 + [50.0] * 5)
    expected = start + np.linalg.solve(x.T @ x + ridges, x.T @ (y - x @ start))
    assert pace.weights == pytest.approx(expected.tolist(), abs=1e-9)


def test_longer_answers_come_to_mean_longer_pauses_in_any_unit() -> None:
    for unit in (1, 64):
        rnd, pace = Random(2), Pace(2.0)
        for _ in range(2000):
            answer = rnd.choice((100, 1000))
            pace.learn(Traits(2.0, 2.0, answer * unit, 50_000), 2.0 + (answer == 1000) * 1.0 + rnd.gauss(0.0, 0.3))
        gap = pace.expect(Traits(2.0, 2.0, 1000 * unit, 50_000)) - pace.expect(Traits(2.0, 2.0, 100 * unit, 50_000))
        assert gap == pytest.approx(1.0, abs=0.06)


def test_rhythm_is_what_is_expected_in_steps() -> None:
    stats = PauseStats()
    assert stats.rhythm("unknown", Traits()) is None
    # Half of 1.2 log seconds above the prior's 9 s are three steps of 0.2; a last one of 9 s is no step.
    assert stats.rhythm("tool", Traits(habit=np.log(9.0) + 1.2, last=np.log(9.0))) == 3


def test_a_session_that_never_came_back_yet_is_told_from_one_of_average_pauses() -> None:
    stats, new, known = PauseStats(), Traits(), Traits(habit=np.log(9.0), last=np.log(9.0))
    for _ in range(60):
        stats.observe_censored("t", "tool", 3600.0, rhythm=stats.rhythm("tool", new))
        stats.observe("t", "tool", None, 9.0, rhythm=stats.rhythm("tool", known))
    assert stats.p_return("t", "tool", None, stats.rhythm("tool", new)) < 0.6
    assert stats.p_return("t", "tool", None, stats.rhythm("tool", known)) > 0.6


def test_contexts_near_the_limit_end_more_often_and_are_replaced() -> None:
    stats, full, small = PauseStats(), Traits(context_tokens=160_000), Traits(context_tokens=20_000)
    for i in range(400):
        stats.observe("t", "tool", None, 9.0, traits=small, intact=1.0)
        if i % 4 == 0:
            stats.observe_censored("t", "tool", 3600.0, traits=full)
        else:
            stats.observe("t", "tool", None, 9.0, traits=full, intact=0.5 if i % 2 else 1.0)
    deep, shallow = depth_of(160_000), depth_of(20_000)
    assert shallow != deep
    # 100 of 400 and 0 of 400 ended, 100 of 800 in all; each level is worth 20 pauses of the one above.
    whole = (20 * 0.008 + 100) / 820
    here = (20 * whole + 100) / 420
    p = stats.p_return("t", "tool")
    odds = (1 - p) / p * here / (1 - here) / (whole / (1 - whole))
    assert stats.p_return("t", "tool", depth=deep) == pytest.approx(1 / (1 + odds))
    assert stats.p_return("t", "tool", depth=deep) < 0.8 < 0.97 < stats.p_return("t", "tool", depth=shallow)
    assert stats.p_return("t", "tool", depth=depth_of(10**6)) == p
    # 300 of the deep ones returned, 200 of them (odd i) with half of it: 200 / 300; all of the shallow ones whole.
    whole = (20 * 0.986 + 400 + 200) / 720
    assert stats.p_intact("tool", deep) == pytest.approx((20 * whole + 200) / 320)
    assert stats.p_intact("tool", shallow) > 0.97


def test_a_pause_given_up_that_ends_after_all_is_no_end() -> None:
    stats, plain, traits = PauseStats(), PauseStats(), Traits(context_tokens=1000)
    stats.observe_censored("t", "human", 3600.0, traits=traits)
    stats.observe("t", "human", None, 9000.0, traits=traits, given_up=True, intact=1.0)
    plain.observe("t", "human", None, 9000.0, traits=traits, intact=1.0)
    for depth in (None, depth_of(1000)):
        assert stats.p_return("t", "human", depth=depth) == pytest.approx(plain.p_return("t", "human", depth=depth))
        assert stats.p_intact("human", depth) == plain.p_intact("human", depth)


def test_lengths_count_by_what_was_still_wanted() -> None:
    """As many pauses of 10 s as of 1,000 s, but of the long ones only a tenth brings the context back."""
    stats = PauseStats()
    for _ in range(2000):
        stats.observe("t", "tool", None, 10.0, traits=Traits(), intact=1.0)
        stats.observe("t", "tool", None, 1000.0, traits=Traits(), intact=0.1)
    quantiles = stats.quantiles("t", "tool", None)[:64]
    assert sum(q < 100.0 for q in quantiles) / 64 == pytest.approx(1.0 / 1.1, abs=0.03)


def test_a_bend_is_learned_where_answers_change_what_follows() -> None:
    """Short answers make no difference among themselves, long ones do: log R = 2 + 0.8 * max(0, log answer - 6)."""
    pace, rnd = Pace(2.0), Random(5)

    def truth(answer: int) -> float:
        return float(2.0 + 0.8 * max(0.0, np.log(answer) - 6.0))

    for _ in range(4000):
        answer = round(np.exp(rnd.gauss(6.0, 1.5)))
        pace.learn(Traits(2.0, 2.0, answer, 50_000), truth(answer) + rnd.gauss(0.0, 0.3))
    for answer in (30, 120, 1000, 5000):
        assert pace.expect(Traits(2.0, 2.0, answer, 50_000)) == pytest.approx(truth(answer), abs=0.25)


def test_of_the_longest_pauses_a_level_keeps_the_shape_of_the_one_above() -> None:
    """300 long pauses of the kind, then 200 short ones of one key: past all of its own, the key's odds of lasting twice as
    long are the kind's."""
    stats, rnd = PauseStats(), Random(8)
    for _ in range(3000):
        stats.observe("a", "human", None, float(np.exp(rnd.gauss(6.0, 1.5))))
    for _ in range(200):
        stats.observe("b", "human", "k", float(np.exp(rnd.gauss(3.0, 0.3))))

    def doubling(tenant: str, key: str | None) -> float:
        part = Empirical(stats.quantiles(tenant, "human", key))
        at, twice = part.cdf([200.0, 400.0])
        return (1.0 - twice) / (1.0 - at)

    assert doubling("b", "k") == pytest.approx(doubling("c", None), abs=0.1)


def test_sessions_with_the_same_expectation_are_told_apart_by_their_last_pause() -> None:
    """After 2 s half of the next pauses take 2 s and half 200 s, after 200 s all take 20 s: the same mean logs."""
    stats, rnd = PauseStats(), Random(9)
    short, long = Traits(2.2, float(np.log(1.0))), Traits(2.2, float(np.log(200.0)))
    for _ in range(1500):
        for traits, length in ((short, rnd.choice((2.0, 200.0))), (long, 20.0)):
            stats.observe("t", "tool", None, length, rhythm=stats.rhythm("tool", traits), traits=traits)

    def within(traits: Traits, low: float, high: float) -> float:
        quantiles = stats.quantiles("t", "tool", None, stats.rhythm("tool", traits))[:64]
        return sum(low < quantile < high for quantile in quantiles) / 64

    assert within(long, 10.0, 40.0) > 0.9
    assert within(short, 10.0, 40.0) < 0.1
    assert within(short, 1.0, 4.0) == pytest.approx(0.5, abs=0.1)
