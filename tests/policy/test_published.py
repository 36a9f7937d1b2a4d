"""The published baselines against decisions worked out by hand from their formulas."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy import PauseStats, make_policy
from tenuto_server.policy.published import DEFAULT_PIN_S, TURN_S
from tenuto_server.policy.views import Cycle, ExtentView, History, PauseView, SystemView, TierName

from .conftest import Known

TENS = tuple(10.0 + i / 64 for i in range(64))
"""A tool that takes about ten seconds, always."""


def paused(kind: PauseKind = "tool", elapsed_s: float = 0.0, tokens: int = 2000, **more: object) -> PauseView:
    return PauseView("t", kind, "make", elapsed_s, context_tokens=tokens)._replace(**more)  # type: ignore[arg-type]


def extent(rate: float, last_used_s: float = 100.0, on: tuple[TierName, ...] = ("device",)) -> ExtentView:
    return ExtentView(0, 10, 1, rate, last_used_s, 1, on)


def alone(system: SystemView, waiting: float = 0.0) -> SystemView:
    """Only the device; reload of n tokens = n ms + n^2 / 2 us."""
    return replace(system, tiers=system.tiers[:1], cost=replace(system.cost, waiting=waiting))


def test_continuum_pins_for_the_best_tau(system: SystemView) -> None:
    policy = make_policy("continuum")
    many = Known({"tool": TENS}, seen={("tool", None): History(500), ("tool", "make"): History(101)})
    # 2,000 tokens: 2 + 2 = 4 s to rebuild: not worth 10 s. 6,000: 6 + 18 = 24 s: P = 1 at 10.98 s is the best of all.
    assert policy.retention(paused(), many, alone(system)).rate == 0.0
    found = policy.retention(paused(tokens=6000, elapsed_s=1.0), many, alone(system))
    assert found.valid_s == found.lease_s == pytest.approx(TENS[-1] - 1.0)
    # Two requests in the queue triple what a reload costs: 12 s against at most 10.98.
    assert policy.retention(paused(), many, alone(system, waiting=2.0)).rate > 0.0
    assert policy.retention(paused("human", tokens=6000), many, alone(system)).rate == 0.0


def test_continuum_starts_with_two_seconds_and_with_all_tools(system: SystemView) -> None:
    policy = make_policy("continuum")
    few = Known({"tool": TENS}, seen={("tool", None): History(100)})
    assert policy.retention(paused(tokens=6000), few, alone(system)).lease_s == DEFAULT_PIN_S
    taught = PauseStats()
    for _ in range(200):
        taught.observe("t", "tool", "sleep", 10.0)
    # Never seen "make": the distribution of all tools, whose last quantiles lie beyond 10 s by the prior's weight.
    assert policy.retention(paused(tokens=6000), taught, alone(system)).lease_s > 9.0


def test_of_the_pinned_continuum_sacrifices_the_one_pinned_longest(system: SystemView) -> None:
    policy = make_policy("continuum")
    # Pins end at 100 + 10 = 110, 105 + 2 = 107; an unpinned one goes before both.
    longest, shorter, free = extent(1 / 10.0), extent(1 / 2.0, last_used_s=105.0), extent(0.0, last_used_s=999.0)
    order = [policy.priority(e, "device", system) for e in (free, longest, shorter)]
    assert order == sorted(order)


@pytest.mark.parametrize(("mean_s", "pin_s"), [(0.0, 2.0), (2.0, 2.0), (2.1, 0.0)])
def test_continuum_as_released_knows_two_seconds_or_nothing(mean_s: float, pin_s: float, system: SystemView) -> None:
    policy = make_policy("continuum-released")
    known = Known({}, seen={("tool", "make"): History(3, mean_s)})
    assert policy.retention(paused(), known, alone(system)).lease_s == pin_s
    assert policy.retention(paused("human"), known, alone(system)).lease_s == 0.0
    assert policy.retention(paused(elapsed_s=2.0), known, alone(system)).rate == 0.0


def test_infercept_preserves_until_waiting_wastes_what_a_discard_would(system: SystemView) -> None:
    policy = make_policy("infercept")
    # 2,000 tokens take 4 s; with one other request held up, 8 s.
    assert policy.retention(paused(elapsed_s=1.0), PauseStats(), alone(system)).lease_s == pytest.approx(3.0)
    assert policy.retention(paused(elapsed_s=1.0), PauseStats(), alone(system, 1.0)).lease_s == pytest.approx(7.0)
    assert policy.retention(paused(elapsed_s=4.0), PauseStats(), alone(system)).rate == 0.0
    early, late = extent(0.25, last_used_s=1.0), extent(0.25, last_used_s=2.0)
    assert policy.priority(early, "device", system) > policy.priority(late, "device", system)


def test_infercept_swaps_where_that_wastes_less(system: SystemView) -> None:
    policy = make_policy("infercept")
    # 10 blocks: 160 ms + 12.8 ms to recompute, 2 x 10 ms to swap with host, 2 x 100 ms with disk.
    assert policy.keep_below(extent(0.0), "device", system) == "host"
    assert policy.keep_below(extent(0.0, on=("host",)), "host", system) is None


def test_tokencake_predicts_from_estimate_and_moving_average(system: SystemView) -> None:
    policy = make_policy("tokencake")
    known = Known({}, seen={("tool", "make"): History(5, 99.0, 8.0)})
    told = paused(forecast=Forecast(p50_s=4.0))
    assert policy.retention(paused(), known, system).rate == pytest.approx(1 / 8.0)
    assert policy.retention(told, known, system).rate == pytest.approx(1 / 6.0)
    assert policy.retention(told, Known({}), system).rate == pytest.approx(1 / 4.0)
    assert policy.retention(paused(), Known({}), system).rate == pytest.approx(1.0)
    # 125 blocks load in 125 ms: up 1.25 times that before the predicted return, at least 100 ms.
    assert policy.retention(told, known, system).prefetch_s == pytest.approx(6.0 - 0.15625)


@pytest.mark.parametrize(
    ("stall_s", "free", "waiting", "offloads"),
    [
        # Round trip of 10 blocks: 20 ms.
        (10.0, 100, 1.0, True),  # u = .9: 6 + 1.8 + 2 + 1 + 1
        (10.0, 100, 0.0, False),  # nobody waits
        (0.02, 100, 1.0, False),  # d <= x
        (0.06, 100, 1.0, False),  # m = .04 < max(.05, 2 x)
        (0.08, 900, 1.0, True),  # m = .06: .24 + 0 + 2 + 1 + 1
    ],
)
def test_tokencake_gate(stall_s: float, free: int, waiting: float, offloads: bool, system: SystemView) -> None:
    device = replace(system.tiers[0], free_blocks=free)
    view = replace(system, tiers=(device, *system.tiers[1:]), cost=replace(system.cost, waiting=waiting))
    assert make_policy("tokencake").offload_early(extent(1 / stall_s), view) == offloads


def test_tokencake_without_a_lower_tier_is_lru(system: SystemView) -> None:
    policy = make_policy("tokencake")
    assert not policy.offload_early(extent(0.1), alone(system, 1.0))
    assert policy.priority(extent(0.1, 5.0), "device", system) < policy.priority(extent(0.01, 6.0), "device", system)


def test_kvflow_evicts_the_farthest_step_and_shares_the_nearest(system: SystemView) -> None:
    policy = make_policy("kvflow")

    def rate(kind: PauseKind, **more: object) -> float:
        return policy.retention(paused(kind)._replace(**more), PauseStats(), system).rate  # type: ignore[arg-type]

    kinds: tuple[PauseKind, ...] = ("human", "subagent", "tool")
    farthest_first = [extent(rate(kind), 100.0 - i) for i, kind in enumerate(kinds)]
    soon = extent(rate("human", resume_at_s=5.0), 0.0)
    ended = extent(rate("tool", end_keep_s=0.0), 1e6)
    order = [policy.priority(e, "device", system) for e in (ended, *farthest_first, soon)]
    assert order == sorted(order)
    # Shared by fifteen that wait for a person and one that runs a tool: as near as the tool.
    shared = extent(15 * rate("human") + rate("tool"), 50.0)
    assert policy.priority(shared, "device", system) == policy.priority(extent(rate("tool"), 50.0), "device", system)


def test_mori_ranks_by_idleness(system: SystemView) -> None:
    policy = make_policy("mori")
    # 10 + 20 + 30 + 40 s acting, then 10 s so far; 4 s and the current nominal turn reasoning.
    recent = tuple(Cycle(pause_s, 1.0) for pause_s in (999.0, 10.0, 20.0, 30.0, 40.0))
    found = policy.retention(paused(elapsed_s=10.0, recent=recent), PauseStats(), system)
    assert found.rate == pytest.approx((4.0 + TURN_S) / (4.0 + TURN_S + 110.0))
    busy = policy.retention(paused(elapsed_s=10.0), PauseStats(), system)
    assert policy.priority(extent(found.rate), "device", system) < policy.priority(extent(busy.rate), "device", system)
    assert found.valid_s >= 5.0


def test_gdsf_inflates_by_what_was_evicted(system: SystemView) -> None:
    policy = make_policy("gdsf")
    # 2,000 tokens: 4 s over 125 blocks of 1000 bytes, used 3 times.
    worth = 3 * 4.0 / 125000
    found = policy.retention(paused(turns=3), PauseStats(), system)
    assert found.rate == pytest.approx(worth)
    assert found.valid_s == inf
    device = replace(system.tiers[0], evicted=0.5)
    later = policy.retention(paused(turns=3), PauseStats(), replace(system, tiers=(device, *system.tiers[1:])))
    assert later.rate == pytest.approx(0.5 + worth)
    assert policy.priority(extent(later.rate), "device", system) > policy.priority(extent(found.rate), "device", system)


@pytest.mark.parametrize("name", ["continuum", "continuum-released", "infercept", "tokencake", "kvflow", "mori"])
def test_an_ended_session_goes_first(name: str, system: SystemView) -> None:
    policy = make_policy(name)
    known = Known({"tool": TENS}, seen={("tool", None): History(500), ("tool", "make"): History(500)})
    ended = policy.retention(paused(tokens=6000, end_keep_s=0.0), known, system).rate
    alive = policy.retention(paused(tokens=6000), known, system).rate
    assert ended <= alive


def test_history_is_plain() -> None:
    stats = PauseStats()
    for length_s in (2.0, 4.0, 9.0):
        stats.observe("t", "tool", "make", length_s)
    assert stats.history("t", "tool", "make") == History(3, 5.0, 6.0)  # (2 + 4) / 2 = 3, (3 + 9) / 2 = 6
    assert stats.history("t", "tool", None).n == 3
    assert stats.history("t", "tool", "other") == History()
