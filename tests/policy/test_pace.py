"""What a pause is filed under, and what is learned of it there."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.wire import PauseKind
from tenuto_server.policy import PauseStats
from tenuto_server.policy.calibration import _masses, _Node
from tenuto_server.policy.distributions import Empirical
from tenuto_server.policy.fates import depth_of
from tenuto_server.policy.histogram import masses_of
from tenuto_server.policy.pace import Traits, rhythm_of
from tenuto_server.policy.priors import KINDS, LENGTH


def steps(kind: PauseKind, traits: Traits) -> list[str]:
    """The last step of each name."""
    return [name[1:].split(",")[-1] for name in rhythm_of(kind, traits) or ()]


def test_a_pause_is_filed_by_answer_last_habit_and_context_in_steps() -> None:
    assert rhythm_of("unknown", Traits()) is None
    # The prior's median is 9 s. log 200 is 5.3: 13 steps of 0.4; 1.2 and 0.6 log seconds above 9 s: one step of 1.2, two of 0.3;
    # log 30,000 is 10.3: 14 steps of 0.7.
    traits = Traits(
        habit=float(np.log(9.0)) + 0.6, last=float(np.log(9.0)) + 1.2, answer_tokens=199, context_tokens=29_999
    )
    assert steps("tool", traits) == ["13", "1", "2", "14"]
    assert steps("tool", Traits()) == ["0", "", "", "0"]
    assert steps("tool", Traits(habit=99.0, last=-99.0))[1:3] == ["-12", "14"]
    # A person's median is 192 s; steps are wider, and the context is not asked.
    assert len(steps("human", traits)) == 3


def test_names_go_from_general_to_particular() -> None:
    names = rhythm_of("tool", Traits(1.0, 2.0, 100, 1000)) or ()
    assert all(longer.startswith(shorter + ",") for shorter, longer in pairwise(names))
    assert rhythm_of("tool", Traits(9.0, 2.0, 100, 1000))[:2] == names[:2]  # type: ignore[index]


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.none() | st.floats(-50, 50),
    st.none() | st.floats(-50, 50),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_there_are_so_many_steps_at_most(kind: PauseKind, habit: float, last: float, answer: int, context: int) -> None:
    for step in steps(kind, Traits(habit, last, answer, context)):
        assert step == "" or -12 <= int(step) <= 60


def test_after_longer_answers_the_longer_pauses_are_known() -> None:
    """After 100 tokens 5 s, after 1,000 30 s: whichever is asked for, and neither by a session of another tempo."""
    stats, rnd = PauseStats(), Random(2)
    for _ in range(1000):
        answer, length = rnd.choice(((100, 5.0), (1000, 30.0)))
        traits = Traits(2.0, rnd.gauss(2.0, 1.0), answer, 50_000)
        stats.observe("t", "tool", None, length, rhythm=rhythm_of("tool", traits), traits=traits)
    for answer, length in ((100, 5.0), (1000, 30.0)):
        for last in (2.0, 9.0):  # met, and never met: then its answer alone tells
            median = stats.quantiles("t", "tool", None, rhythm_of("tool", Traits(2.0, last, answer, 50_000)))[32]
            assert median == pytest.approx(length, rel=0.2)


def test_what_has_been_seen_once_or_twice_is_not_asked() -> None:
    """Two pauses of one rhythm change what is known of all, and of it no more than that."""
    stats, traits = PauseStats(), Traits(2.0, 2.0, 100, 50_000)
    for seen in range(4):
        own, others = (stats.quantiles("t", "tool", None, rhythm) for rhythm in (rhythm_of("tool", traits), None))
        assert (own == others) == (seen < 3)
        stats.observe("t", "tool", None, 500.0, rhythm=rhythm_of("tool", traits), traits=traits)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.0, 1.0)), max_size=40), st.floats(1.0, 30.0))
def test_shrunk_masses_are_the_hazards_pooled_by_hand(seen: list[tuple[float, float]], k: float) -> None:
    """One level over the prior, bin by bin: (k x prior hazard + count) / (k + lasting)."""
    node = _Node(1e9)
    for length_s, intact in seen:
        node.add(length_s, intact)
    prior, counts = masses_of(LENGTH["tool"]), list(node.lengths.counts)
    left, mine, lasting, expected = 1.0, 1.0, sum(counts), []
    for mass, count in zip(prior, counts, strict=True):
        hazard = mass / left if left > mass else 1.0
        hazard = (k * hazard + count) / (k + max(0.0, lasting))
        expected.append(mine * hazard)
        mine -= expected[-1]
        left -= mass
        lasting -= count
    assert _masses("tool", [(node, k)]) == pytest.approx(expected, abs=1e-9)
    assert sum(expected) == pytest.approx(1.0)


def test_a_session_that_never_came_back_yet_is_told_from_one_of_average_pauses() -> None:
    stats, new, known = PauseStats(), Traits(), Traits(habit=np.log(9.0), last=np.log(9.0))
    for _ in range(60):
        stats.observe_censored("t", "tool", 3600.0, rhythm=rhythm_of("tool", new))
        stats.observe("t", "tool", None, 9.0, rhythm=rhythm_of("tool", known))
    assert stats.p_return("t", "tool", None, rhythm_of("tool", new)) < 0.6
    assert stats.p_return("t", "tool", None, rhythm_of("tool", known)) > 0.6


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
            stats.observe("t", "tool", None, length, rhythm=rhythm_of("tool", traits), traits=traits)

    def within(traits: Traits, low: float, high: float) -> float:
        quantiles = stats.quantiles("t", "tool", None, rhythm_of("tool", traits))[:64]
        return sum(low < quantile < high for quantile in quantiles) / 64

    assert within(long, 10.0, 40.0) > 0.9
    assert within(short, 10.0, 40.0) < 0.1
    assert within(short, 1.0, 4.0) == pytest.approx(0.5, abs=0.1)
