"""The shadow LRU against hand-played ones, and what its verdict does to decisions."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from tenuto.wire import Forecast
from tenuto_server.policy import PauseStats, make_policy
from tenuto_server.policy.safeguard import FALL, FULL, MARGIN, SESSIONS_MAX, SLACK_TURNS, Safeguard
from tenuto_server.policy.views import PauseView, SystemView

TENUTO, NONE = make_policy("tenuto"), make_policy("tenuto:none")
STATS = PauseStats()


def paused(elapsed_s: float, **more: object) -> PauseView:
    return PauseView("t", "tool", None, elapsed_s, context_tokens=1600)._replace(**more)  # type: ignore[arg-type]


def test_the_shadow_is_lru_by_hand() -> None:
    guard = Safeguard(100)
    guard.turn(1, 60, 0, [0])
    guard.turn(2, 30, 0, [0])
    guard.turn(3, 40, 0, [0])  # 130 in 100: session 1 keeps 30 of 60
    assert guard.lead == 0.0
    guard.turn(1, 60, 60, [60])  # the cache found 60, the shadow 30
    assert guard.lead == pytest.approx((60 - 30) / 60)
    # 30 + 40 + 60 in 100: session 2 lost all its 30, for session 1. Only half of what it shared could be found.
    guard.turn(2, 30, 20, [20])
    keep = 1.0 - 1.0 / 400.0
    assert guard.lead == pytest.approx((30 * keep + 20) / (60 * keep + 20))


def test_what_is_forgotten_makes_room() -> None:
    guard = Safeguard(100)
    guard.turn(1, 60, 0, [0])
    guard.turn(2, 40, 0, [0])
    guard.end(2)
    guard.turn(3, 40, 0, [0])
    guard.turn(1, 60, 60, [0])
    assert guard.lead == pytest.approx(-1.0)


def test_trust_falls_once_the_slack_is_spent_and_comes_back() -> None:
    guard = Safeguard(1000)
    guard.turn(1, 100, 0, [0])
    for i in range(1, 201):
        guard.turn(1, 100, 100, [0])
        # Each turn loses itself less the margin.
        behind = sum(1 for turn in range(1, i + 1) if turn * (1.0 - MARGIN) > SLACK_TURNS)
        assert guard.trust == pytest.approx(max(0.0, FULL - FALL * behind))
    for _ in range(9000):
        guard.turn(1, 100, 100, [100])
    assert guard.trust == FULL


def played(missed: float, by_shadow: float, trusted: bool) -> tuple[float, float]:
    """(mean trust, tokens that only the cache missed in shares of all) over 40,000 turns of sixty sessions. Cache and shadow
    miss whole contexts at random, the cache as often as it is ``trusted``."""
    rng, guard = Random(7), Safeguard(10**9)
    sizes = [int(rng.lognormvariate(11.0, 0.7)) for _ in range(60)]
    for session, size in enumerate(sizes):
        guard.turn(session, size, 0, [0])
    trust = lost = total = 0.0
    for turn in range(40_000):
        size = sizes[turn % 60]
        if rng.random() < by_shadow:
            guard.end(turn % 60)
            lost -= size
        bad = rng.random() < missed * (min(1.0, guard.trust) if trusted else 1.0)
        guard.turn(turn % 60, size, size, [0 if bad else size])
        trust, lost, total = trust + guard.trust, lost + size * bad, total + size
    return trust / 40_000, lost / total


def test_luck_costs_little_trust() -> None:
    """An index that misses 2 % where LRU misses 2.5: so few misses of such large contexts that LRU often leads for a while."""
    trust, lost = played(0.02, 0.025, trusted=False)
    assert lost < 0.0
    assert trust > 0.95 * FULL


@pytest.mark.parametrize("missed", [0.012, 0.02, 0.1, 0.5, 1.0])
def test_a_loss_against_lru_is_bounded(missed: float) -> None:
    """An index that misses what LRU finds, as often as it is trusted: the bound of policy.md section 5."""
    trust, lost = played(missed, 0.0, trusted=True)
    assert trust < FULL
    assert lost <= 0.01


def test_what_lies_on_a_slow_tier_counts_for_what_it_saves() -> None:
    worth = (1.0, 0.9, 0.25)
    guard = Safeguard(100, 300, 700)
    for session in range(7):
        guard.turn(session, 100, 0, (0, 0, 0), worth)
    # 6 is on the shadow's device, 5 and 4 on its host, 3 to 0 on its disk.
    guard.turn(3, 100, 100, (0, 100, 0), worth)  # the cache had it one tier higher
    assert guard.lead == pytest.approx(0.9 - 0.25)
    assert guard.trust == FULL
    # Now 3 is on the device, 6 and 5 on the host, 4 and 2 to 0 on the disk; found 40 higher and 60 not at all.
    guard.turn(5, 100, 100, (40, 0, 0), worth)
    keep = 1.0 - 1.0 / 400.0
    assert guard.lead == pytest.approx((0.65 * keep + 0.4 - 0.9) / (keep + 1.0))


def test_losing_on_the_device_what_the_host_gives_back_at_once_costs_no_trust() -> None:
    guard = Safeguard(100, 300)
    for session in (1, 2, 3) * 100:
        guard.turn(session, 90, 90, (0, 90), (1.0, 0.999))
    assert guard.trust == FULL
    for session in (1, 2, 3) * 100:
        guard.turn(session, 90, 90, (0, 90), (1.0, 0.5))
    assert guard.trust == FULL  # LRU would find them on its host too: three contexts in turn, one fits the device
    for _ in range(300):
        guard.turn(1, 90, 90, (0, 90), (1.0, 0.5))
    assert guard.trust == 0.0  # it would have this one on the device


def test_the_shadow_gives_each_tenant_its_share() -> None:
    guard = Safeguard(100)
    for session in (1, 2):
        guard.turn(session, 25, 0, [0], owner=7)
    for session in range(10, 20):  # 300 tokens of another tenant: it replaces its own
        guard.turn(session, 30, 0, [0], owner=8)
    guard.turn(1, 25, 25, [25], owner=7)
    assert guard.lead == 0.0
    guard.turn(10, 30, 30, [0], owner=8)
    assert guard.lead == 0.0


def test_many_sessions_are_sampled() -> None:
    guard = Safeguard(10 * SESSIONS_MAX)
    for session in range(8 * SESSIONS_MAX):
        guard.turn(session, 1, 0, [0])
    assert len(guard.shadowed) <= SESSIONS_MAX
    # A sampled session still finds what a full LRU would: all of them fit.
    sampled = next(iter(guard.shadowed))
    guard.turn(sampled, 1, 1, [0])
    assert guard.lead == -1.0


def test_without_trust_the_order_is_that_of_last_use(system: SystemView) -> None:
    found = TENUTO.retention(paused(5.0, forecast=Forecast(p50_s=9.0)), STATS, replace(system, trust=0.0))
    assert (found.rate, found.valid_s) == (0.0, inf)


def test_forecasts_lose_their_weight_first(system: SystemView) -> None:
    pause = paused(5.0, forecast=Forecast(p50_s=6.0, p90_s=7.0))
    silent = NONE.retention(pause, STATS, system).rate
    rates = [TENUTO.retention(pause, STATS, replace(system, trust=trust)).rate for trust in (1.0, 1.3, 1.7, 2.0)]
    assert rates[0] == silent
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]


def test_then_the_index_gives_way_to_the_time_since_the_last_use(system: SystemView) -> None:
    half = replace(system, trust=0.5)
    for elapsed_s in (0.0, 8.0, 99.0):
        whole = NONE.retention(paused(elapsed_s), STATS, system).rate
        found = NONE.retention(paused(elapsed_s), STATS, half)
        assert found.rate == pytest.approx((whole / (1.0 + elapsed_s)) ** 0.5)
        assert found.valid_s <= max(0.25 * (1.0 + elapsed_s), 0.1 + 0.05 * elapsed_s) + 1e-9
