"""What PauseStats learns, checked against the published tables behind its priors, formulas, and known generators."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import pairwise
from math import exp, log
from statistics import mean, median, pstdev

import pytest

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy.calibration import PauseStats
from tenuto_server.policy.distributions import Empirical
from tenuto_server.policy.histogram import BINS, Histogram, bin_edge, bin_of
from tenuto_server.policy.index import mixture
from tenuto_server.policy.pace import next_habit
from tenuto_server.policy.score import Score
from tenuto_server.policy.views import PauseKnowledge

QUICK, SLOW = ("quick",), ("slow",)


def share_below(stats: PauseStats, kind: PauseKind, seconds: float) -> float:
    quantiles = stats.quantiles("t", kind, None)[:64]
    return bisect_right(quantiles, seconds) / len(quantiles)


def test_it_is_pause_knowledge() -> None:
    knowledge: PauseKnowledge = PauseStats()
    assert len(knowledge.quantiles("t", "tool", "Bash")) == 64 + 6


@pytest.mark.parametrize(
    ("kind", "p", "seconds"),
    # KVCT corrected: p50/p75/p90 after tool_use 9/21/81 s, after end_turn 182/717/2280 s; subagents p50 117, p90 263 s.
    [
        ("tool", 0.50, 9.0),
        ("tool", 0.75, 21.0),
        ("tool", 0.90, 81.0),
        ("human", 0.50, 182.0),
        ("human", 0.75, 717.0),
        ("human", 0.90, 2280.0),
        ("subagent", 0.50, 117.0),
        ("subagent", 0.90, 263.0),
    ],
)
def test_priors_match_the_published_quantiles(kind: PauseKind, p: float, seconds: float) -> None:
    quantiles = PauseStats().quantiles("t", kind, None)
    assert quantiles[int(p * 64)] == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(("minutes", "p_end"), [(1, 0.18), (5, 0.28), (15, 0.41), (30, 0.56), (60, 0.75)])
def test_waiting_for_a_person_gets_as_hopeless_as_published(minutes: int, p_end: float) -> None:
    stats = PauseStats()
    curve = mixture(((1.0, stats.p_return("t", "human"), Empirical(stats.quantiles("t", "human", None))),))
    assert curve.p_end(60.0 * minutes) == pytest.approx(p_end, abs=0.03)


def test_a_key_learns_its_own_lengths_and_the_rest_keeps_the_prior() -> None:
    rnd, stats = random.Random(1), PauseStats()
    before = stats.quantiles("t", "human", None)
    for _ in range(400):
        stats.observe("t", "tool", "Bash pytest", exp(rnd.gauss(log(40.0), 0.4)))
    assert stats.quantiles("t", "tool", "Bash pytest")[32] == pytest.approx(40.0, rel=0.1)
    assert stats.quantiles("t", "human", None) == before
    # Another tenant starts from what all tenants together have shown.
    assert 9.0 < stats.quantiles("other", "tool", None)[32] < 45.0


def test_few_observations_move_little() -> None:
    stats = PauseStats()
    before = stats.quantiles("t", "tool", "k")[32]
    stats.observe("t", "tool", "k", 1000.0)
    after = stats.quantiles("t", "tool", "k")
    assert before <= after[32] < 2.0 * before
    # Having outlasted 300 s it lowers every hazard before by 1 in 1 + the level's pseudo-count (20, 10, 5), so the share that
    # does becomes that power of itself; 3.2 % of the prior do (KVCT).
    kept = 20 / 21 * 10 / 11 * 5 / 6
    assert bisect_right(after, 300.0) / 64 == pytest.approx(1.0 - 0.032**kept, abs=0.02)


def test_below_the_tenant_a_level_is_worth_the_pauses_that_five_ends_take() -> None:
    stats = PauseStats()
    for i in range(200):
        if i % 2:
            stats.observe("t", "tool", None, 9.0)
        else:
            stats.observe_censored("t", "tool", 3600.0, "k")
    level = (20 * 0.992 + 100) / (20 + 200)
    tenant = (20 * level + 100) / (20 + 200)
    # Half of the pauses end: ten would bring five ends, twenty are the least. The key saw a hundred, which all ended.
    assert stats.p_return("t", "tool", "k") == pytest.approx(20 * tenant / 120)
    # Where few end, five ends take more pauses than twenty.
    fresh = PauseStats()
    fresh.observe_censored("other", "tool", 3600.0, "k")
    other = 20 * (20 * 0.992 / 21) / 21
    assert fresh.p_return("other", "tool", "k") == pytest.approx((5 / (1 - other)) * other / (5 / (1 - other) + 1))


def test_old_habits_fade() -> None:
    stats = PauseStats()
    for _ in range(1000):
        stats.observe("t", "tool", "k", 1.0)
    for _ in range(500):
        stats.observe("t", "tool", "k", 100.0)
    assert stats.quantiles("t", "tool", "k")[32] == pytest.approx(100.0, rel=0.3)


def test_p_return_by_hand() -> None:
    stats = PauseStats()
    assert stats.p_return("t", "human") == pytest.approx(0.867)
    for _ in range(10):
        stats.observe("t", "human", None, 100.0)
    for _ in range(10):
        stats.observe_censored("t", "human", 50.0)
    level = (20 * 0.867 + 10) / 40
    assert stats.p_return("t", "human") == pytest.approx((20 * level + 10) / 40)
    assert stats.p_return("new", "human") == pytest.approx(level)
    assert stats.p_return("t", "tool") == pytest.approx(0.992)


def test_quantiles_stay_the_same_object_between_refreshes() -> None:
    stats = PauseStats()
    for _ in range(100):
        stats.observe("t", "tool", "k", 5.0)
    seen = []
    for _ in range(60):
        stats.observe("t", "tool", "k", 5.0)
        seen.append(stats.quantiles("t", "tool", "k"))
    # From 100 to 160 observations each of the three levels grows by a tenth about five times.
    assert sum(a is not b for a, b in pairwise(seen)) <= 18


def honest(rnd: random.Random, bias: float = 1.0, overconfidence: float = 1.0) -> tuple[float, Forecast]:
    """A pause with log-sd 1.26 around 9 s and a forecast that explains three quarters of its log-variance."""
    seen = rnd.gauss(log(9.0), 1.26 * 0.75**0.5)
    sigma = 1.26 * 0.25**0.5
    length = exp(rnd.gauss(seen, sigma))
    p50 = exp(seen) * bias
    return length, Forecast(p50_s=p50, p90_s=p50 * exp(1.2816 * sigma / overconfidence))


def taught(n: int, bias: float = 1.0, overconfidence: float = 1.0) -> PauseStats:
    rnd, stats = random.Random(7), PauseStats()
    for _ in range(n):
        length, forecast = honest(rnd, bias, overconfidence)
        stats.observe("t", "tool", "k", length, forecast)
    return stats


def test_unseen_clients_get_the_benefit_of_the_doubt() -> None:
    assert PauseStats().trust("t", "tool", "k") == pytest.approx((0.8, 0.0, 1.0))


def test_an_honest_client_is_believed_as_it_speaks() -> None:
    weight, shift, factor = taught(300).trust("t", "tool", "k")
    assert weight == pytest.approx(0.98)
    assert shift == pytest.approx(0.0, abs=0.25)
    assert factor == pytest.approx(1.0, abs=0.25)


def test_a_biased_client_is_corrected() -> None:
    weight, shift, factor = taught(300, bias=0.1).trust("t", "tool", "k")
    assert shift == pytest.approx(log(10.0), abs=0.3)
    assert factor == pytest.approx(1.0, abs=0.35)
    assert weight > 0.8


def test_an_overconfident_client_is_widened() -> None:
    _, shift, factor = taught(300, overconfidence=3.0).trust("t", "tool", "k")
    assert factor == pytest.approx(3.0, rel=0.3)
    assert shift == pytest.approx(0.0, abs=0.3)


def test_calibrated_forecasts_have_a_flat_transform() -> None:
    pit = taught(3000).metrics()["forecast_pit"]
    assert isinstance(pit, dict)
    # 300 expected in each bin, standard deviation 16.4; the calibration itself adds some.
    assert all(220 < count < 380 for count in pit.values())


def liar(rnd: random.Random) -> Forecast:
    p50 = 10.0 ** rnd.uniform(-2, 4)
    return Forecast(p50_s=p50, p90_s=1.2 * p50, p_return=1.0)


def test_a_liar_is_soon_not_heard_and_cannot_hide_behind_new_keys() -> None:
    rnd, stats = random.Random(3), PauseStats()
    for i in range(30):
        length, _ = honest(rnd)
        stats.observe("t", "tool", f"key {i}", length, liar(rnd))
    assert stats.trust("t", "tool", "key 31")[0] == 0.0
    assert stats.trust("t", "human", None)[0] < 0.1
    assert stats.trust("honest", "tool", "key 31")[0] == pytest.approx(0.8)


def test_trust_comes_back() -> None:
    rnd, stats = random.Random(3), PauseStats()
    for _ in range(50):
        length, _ = honest(rnd)
        stats.observe("t", "tool", "k", length, liar(rnd))
    assert stats.trust("t", "tool", "k")[0] == 0.0
    for _ in range(300):
        length, forecast = honest(rnd)
        stats.observe("t", "tool", "k", length, forecast)
    assert stats.trust("t", "tool", "k")[0] > 0.8


def test_promising_a_return_and_never_returning_costs_trust() -> None:
    stats = PauseStats()
    promise = Forecast(p50_s=9.0, p90_s=90.0, p_return=1.0)
    for _ in range(4):
        stats.observe_censored("t", "human", 100.0, None, promise)
    assert stats.trust("t", "human", None)[0] < 0.1


def test_a_late_forecast_counts_from_when_it_was_given() -> None:
    rnd, stats = random.Random(5), PauseStats()
    for _ in range(200):
        rest = exp(rnd.gauss(log(10.0), 0.3))
        stats.observe("t", "tool", "k", 60.0 + rest, Forecast(p50_s=10.0, p90_s=14.7), 60.0)
    weight, shift, factor = stats.trust("t", "tool", "k")
    assert weight > 0.9
    assert shift == pytest.approx(0.0, abs=0.1)
    assert factor == pytest.approx(1.0, abs=0.2)


def test_a_new_key_inherits_a_good_name_half_way() -> None:
    parent = Score()
    parent.gain, parent.shift = 8.0, 1.0
    child = Score(parent)
    assert child.gain == 2.0
    assert child.shift == 1.0


def test_memory_is_bounded() -> None:
    stats = PauseStats(keys_max=50, tenants_max=20)
    for i in range(500):
        stats.observe(f"tenant {i}", "tool", f"key {i}", 1.0, Forecast(p50_s=1.0))
        stats.observe_censored(f"tenant {i}", "human", 1.0)
    metrics = stats.metrics()
    assert metrics["pause_keys"] == 50
    assert metrics["pause_tenants"] == 20
    # What was forgotten still answers.
    assert len(stats.quantiles("tenant 0", "tool", "key 0")) == 64 + 6


def test_the_same_observations_give_the_same_answers() -> None:
    one, two = taught(200), taught(200)
    assert one.quantiles("t", "tool", "k") == two.quantiles("t", "tool", "k")
    assert one.trust("t", "tool", "k") == two.trust("t", "tool", "k")


def test_histogram_bins() -> None:
    assert bin_of(0.0) == 0
    assert bin_of(1e12) == BINS - 1
    for length in (0.02, 1.0, 9.0, 3600.0):
        assert bin_edge(bin_of(length)) <= length * 1.0000001 < bin_edge(bin_of(length) + 1) * 1.0000002
    histogram = Histogram(1000.0)
    for length in (1e-9, 3.0, 1e12):
        histogram.add(length)
    assert sum(histogram.counts) == pytest.approx(3.0)


def test_a_share_of_a_pause_counts_as_a_share_wherever_it_falls() -> None:
    histogram, rnd, shares = Histogram(cap=1e9), random.Random(6), 0.0
    for _ in range(500):
        share = rnd.random()
        histogram.add(exp(rnd.uniform(-8.0, 18.0)), share)
        shares += share
    assert histogram.total == pytest.approx(shares)
    assert sum(histogram.counts) == pytest.approx(shares)
    assert max(sum(histogram.counts[:3]), sum(histogram.counts[-3:])) < 0.2 * shares


def test_the_scale_of_a_kind_is_that_of_all_its_pauses_whatever_they_brought_back() -> None:
    stats, rnd = PauseStats(), random.Random(7)
    logs = [rnd.gauss(5.0, 2.0) for _ in range(3000)]
    for at in logs:
        stats.observe("t", "human", None, exp(at), intact=1.0 if at < 5.0 else 0.1)
    assert stats.scale("t", "human") == pytest.approx((mean(logs), pstdev(logs)), rel=0.03)


def test_learned_median_is_the_sample_median() -> None:
    rnd, stats = random.Random(11), PauseStats()
    lengths = [rnd.choice((2.0, 30.0)) * exp(rnd.gauss(0.0, 0.2)) for _ in range(199)]
    for length in lengths:
        stats.observe("t", "background", "k", length)
    quantiles = stats.quantiles("t", "background", "k")
    low, high = [x for x in lengths if x < 8], [x for x in lengths if x >= 8]
    # Both modes are kept apart: a median per mode, none in between.
    assert quantiles[16] == pytest.approx(median(low), rel=0.25)
    assert quantiles[48] == pytest.approx(median(high), rel=0.25)


def test_the_tail_is_told_beyond_the_last_per_cent() -> None:
    # Sorted by probability, the 69th length is where 1 - 2 ** -5 / 128 of the prior's tool gaps have come: 99.98 %. Beyond the
    # last published point (99.6 % by 1,800 s) the tail halves with every doubling: 1,800 x .004 x 4,096.
    quantiles = PauseStats().quantiles("t", "tool", None)
    assert list(quantiles) == sorted(quantiles)
    assert quantiles[68] == pytest.approx(1800.0 * 0.004 * 4096.0, rel=0.2)


def test_sessions_differ_by_their_rhythm() -> None:
    stats, rnd = PauseStats(), random.Random(2)
    for _ in range(300):
        stats.observe("t", "tool", None, exp(rnd.gauss(log(3.0), 0.3)), rhythm=QUICK)
        stats.observe("t", "tool", None, exp(rnd.gauss(log(60.0), 0.3)), rhythm=SLOW)
    assert stats.quantiles("t", "tool", None, QUICK)[32] == pytest.approx(3.0, rel=0.15)
    assert stats.quantiles("t", "tool", None, SLOW)[32] == pytest.approx(60.0, rel=0.15)
    # A rhythm never met has what its tenant has: both.
    assert stats.quantiles("t", "tool", None, ("new",)) == stats.quantiles("t", "tool", None)


def test_a_habit_follows_the_recent_pauses() -> None:
    habit = None
    for _ in range(40):
        habit = next_habit(habit, "tool", 9.0 * exp(0.6))
    # The prior's median is 9 s.
    assert habit == pytest.approx(log(9.0) + 0.6, abs=0.01)
    assert next_habit(habit, "tool", 9.0 * exp(2.6)) - habit == pytest.approx(0.2 * 2.0, abs=0.02)  # type: ignore[operator]


def test_a_pause_given_up_that_ends_after_all_counts_as_one_that_ends() -> None:
    stats, plain = PauseStats(), PauseStats()
    for _ in range(30):
        stats.observe_censored("t", "human", 3600.0, rhythm=SLOW)
        stats.observe("t", "human", None, 9000.0, rhythm=SLOW, given_up=True)
        plain.observe("t", "human", None, 9000.0, rhythm=SLOW)
    for rhythm in (None, SLOW):
        assert stats.p_return("t", "human", None, rhythm) == pytest.approx(plain.p_return("t", "human", None, rhythm))


def test_announced_ends_are_believed_as_far_as_they_were_true() -> None:
    stats = PauseStats()
    assert stats.p_return_ended("honest") == pytest.approx(0.05)
    for _ in range(16):
        stats.observe_end("honest", "human", None)
        stats.observe_false_end("liar")
    for _ in range(8):
        stats.observe_end("erring", "human", None)
        stats.observe_false_end("erring")
    assert stats.p_return_ended("honest") == pytest.approx(0.2 / 20)
    # Of the 3.8 true ones that are assumed 9 in 17 are left, of a liar's 1 in 17.
    assert stats.p_return_ended("erring") == pytest.approx(8.2 / (16.2 + 3.8 * 9 / 17))
    assert stats.p_return_ended("liar") == pytest.approx(16.2 / (16.2 + 3.8 / 17))
    # Announced ends say nothing about sessions that fall silent.
    assert stats.p_return("honest", "human") == PauseStats().p_return("honest", "human")


def test_an_end_that_had_counted_as_true_and_was_false_counts_once() -> None:
    stats, plain = PauseStats(), PauseStats()
    for _ in range(10):
        stats.observe_end("t", "human", None)
        stats.observe_false_end("t", proved=True)
        plain.observe_false_end("t")
    assert stats.p_return_ended("t") == plain.p_return_ended("t")


def test_one_compaction_that_did_not_come_is_enough_to_ask_for_better_evidence() -> None:
    stats = PauseStats()
    assert stats.believes_compaction("t")
    stats.observe_compaction("t", came=False)
    assert not stats.believes_compaction("t")
    for _ in range(3):
        stats.observe_compaction("t", came=True)
    assert stats.believes_compaction("t")
    assert stats.believes_compaction("other")
