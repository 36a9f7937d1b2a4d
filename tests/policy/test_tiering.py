"""Tiering against hand calculations and brute force. Machine of conftest: 16 tokens, 1000 bytes a block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto_server.policy import tiering
from tenuto_server.policy.views import CostView, ExtentView, SystemView, TierName, TierView

from .conftest import SYSTEM


def extent(
    start: int = 0, blocks: int = 10, rate: float = 0.01, last_used_s: float = 0.0, **more: object
) -> ExtentView:
    return ExtentView(start, blocks, 1, rate, last_used_s, 3, ("device",))._replace(**more)  # type: ignore[arg-type]


def change(system: SystemView, tier: TierName, **more: object) -> SystemView:
    tiers = tuple(replace(v, **more) if v.tier == tier else v for v in system.tiers)  # type: ignore[arg-type]
    return replace(system, tiers=tiers)


def test_recompute_by_hand(system: SystemView) -> None:
    # 160 tokens from 1000: 160 * (1 ms + 1 us * 1080), and half a turn waiting for it.
    cost = replace(system.cost, waiting=0.5)
    assert tiering.recompute_s(1000, 10, cost) == pytest.approx(160 * 0.00208 * 1.5)
    # The same as adding up its tokens.
    tokens = sum(0.001 + 1e-6 * (x + 0.5) for x in range(1000, 1160))
    assert tiering.recompute_s(1000, 10, cost) == pytest.approx(tokens * 1.5)


def test_saved_seconds_by_hand(system: SystemView) -> None:
    # Recompute 0.173 s; host loads in 0.01 s, disk in 0.1 s; all have room.
    assert tiering.saved_s(extent(), "device", system) == pytest.approx(0.01)
    assert tiering.saved_s(extent(), "host", system) == pytest.approx(0.09)
    assert tiering.saved_s(extent(), "disk", system) == pytest.approx(160 * 0.00108 - 0.1)


def test_what_the_next_tier_refuses_falls_further(system: SystemView) -> None:
    dear = change(system, "host", free_blocks=0, price=1.0)
    assert tiering.saved_s(extent(), "device", dear) == pytest.approx(0.1)
    # Already there: its copy stays.
    assert tiering.saved_s(extent(on=("device", "host")), "device", dear) == pytest.approx(0.01)
    nowhere = change(dear, "disk", free_blocks=0, price=1.0)
    assert tiering.saved_s(extent(), "device", nowhere) == pytest.approx(160 * 0.00108)
    # Cheap enough a price lets it in: on the host it is worth 0.01 / s * 0.09 s / 10,000 bytes.
    index = 0.01 * 0.09 / 10_000
    assert tiering.saved_s(extent(), "device", change(dear, "host", price=index * 0.99)) == pytest.approx(0.01)
    assert tiering.saved_s(extent(), "device", change(dear, "host", price=index * 1.01)) == pytest.approx(0.1)


def test_all_tiers_at_once_agree_with_one_by_one(system: SystemView) -> None:
    for changed in (
        system,
        change(system, "host", free_blocks=0, price=1.0),
        change(system, "host", load_s_per_block=1.0),
    ):
        one_by_one = [tiering.saved_s(extent(), view.tier, changed) for view in changed.tiers]
        assert tiering.saved_by_tier(extent(), changed) == pytest.approx(one_by_one)


def test_a_tier_slower_than_recompute_saves_nothing(system: SystemView) -> None:
    slow = change(change(system, "host", load_s_per_block=1.0), "disk", load_s_per_block=1.0)
    assert tiering.saved_s(extent(), "host", slow) == 0.0
    assert tiering.saved_s(extent(), "device", slow) == pytest.approx(160 * 0.00108)
    assert tiering.keep_below(extent(), "device", slow) is None


def test_late_blocks_are_dearer_without_lower_tiers(system: SystemView) -> None:
    alone = replace(system, tiers=system.tiers[:1])
    assert tiering.index_of(extent(start=50_000), "device", alone) > tiering.index_of(extent(start=0), "device", alone)


def test_priority_by_hand(system: SystemView) -> None:
    assert tiering.index_of(extent(), "device", system) == pytest.approx(0.01 * 0.01 / 10_000)


@given(st.floats(0.0, 1e8), st.floats(0.0, 1e8), st.floats(1e-9, 10.0))
def test_unwanted_extents_go_first_and_by_last_use(one: float, other: float, rate: float) -> None:
    unwanted = [tiering.index_of(extent(rate=0.0, last_used_s=t), "device", SYSTEM) for t in (one, other)]
    wanted = tiering.index_of(extent(rate=rate), "device", SYSTEM)
    assert max(unwanted) < wanted
    if abs(one - other) > 1e-3:
        assert (unwanted[0] < unwanted[1]) == (one < other)


@given(st.integers(1, 4000), st.integers(0, 100_000), st.floats(1e-9, 10.0), st.floats(1.0, 10.0))
def test_a_likelier_return_never_lowers_the_priority(blocks: int, start: int, rate: float, factor: float) -> None:
    low = tiering.index_of(extent(start, blocks, rate), "host", SYSTEM)
    assert 0.0 <= low <= tiering.index_of(extent(start, blocks, rate * factor), "host", SYSTEM) * (1 + 1e-9)


def test_keep_below(system: SystemView) -> None:
    assert tiering.keep_below(extent(), "device", system) == "host"
    assert tiering.keep_below(extent(on=("device", "host")), "device", system) is None
    full_host = change(system, "host", free_blocks=0, price=1.0)
    assert tiering.keep_below(extent(), "device", full_host) == "disk"
    assert tiering.keep_below(extent(on=("host",)), "host", system) == "disk"
    assert tiering.keep_below(extent(on=("disk",)), "disk", system) is None
    none = change(system, "host", capacity_blocks=0, free_blocks=0)
    assert tiering.keep_below(extent(), "device", none) == "disk"


def test_nobody_expected_back_means_no_copy_unless_shared(system: SystemView) -> None:
    assert tiering.keep_below(extent(rate=0.0, users=1), "device", system) is None
    assert tiering.keep_below(extent(rate=0.0, users=2), "device", system) == "host"
    full = change(change(system, "host", free_blocks=0), "disk", free_blocks=0)
    assert tiering.keep_below(extent(rate=0.0, users=2), "device", full) is None


def test_a_second_copy_goes_before_the_only_one_and_after_what_nobody_wants(system: SystemView) -> None:
    only, second = extent(on=("host",)), extent(on=("device", "host"))
    # The only copy saves 0.1 - 0.01 s against loading from disk, for 0.01 returns a second to 10,000 bytes.
    assert tiering.index_of(only, "host", system) == pytest.approx(0.01 * 0.09 / 10_000)
    assert tiering.index_of(second, "host", system) == 0.0
    assert tiering.index_of(extent(rate=1e6, on=("host", "disk")), "disk", system) == 0.0
    assert tiering.index_of(extent(rate=0.0, last_used_s=1e9, on=("device", "host")), "host", system) < 0.0
    # One to be made as the device's goes will be the only one; the faster of two spares loading.
    assert tiering.index_of(extent(on=()), "host", system) == pytest.approx(tiering.index_of(only, "host", system))
    assert tiering.index_of(second, "device", system) == pytest.approx(0.01 * 0.01 / 10_000)


def test_the_spill_filter(system: SystemView) -> None:
    no_host = replace(system, tiers=(system.tiers[0], system.tiers[2]))
    assert tiering.keep_below(extent(uses=1, rate=1e-6), "device", no_host) is None
    assert tiering.keep_below(extent(uses=2, rate=1e-6), "device", no_host) == "disk"
    assert tiering.keep_below(extent(uses=1, rate=1e-3), "device", no_host) == "disk"


def test_offload_early(system: SystemView) -> None:
    index = tiering.index_of(extent(), "device", system)
    full = change(system, "device", free_blocks=0, price=index)
    assert tiering.offload_early(extent(), full)
    # Safe from eviction, already copied, back before the round trip, or unwanted below: no.
    assert not tiering.offload_early(extent(), change(full, "device", price=index / 10))
    assert not tiering.offload_early(extent(on=("device", "host")), full)
    assert not tiering.offload_early(extent(rate=60.0), change(full, "device", price=1.0))
    assert not tiering.offload_early(extent(rate=0.0), full)
    refuse = change(change(full, "host", free_blocks=0, price=1.0), "disk", free_blocks=0, price=1.0)
    assert not tiering.offload_early(extent(), refuse)


def test_no_offload_while_there_is_room(system: SystemView) -> None:
    assert not tiering.offload_early(extent(), change(system, "device", free_blocks=500))
    assert tiering.offload_early(extent(), change(system, "device", free_blocks=50))


def machine(a: float, b: float, load: float, overhead: float) -> SystemView:
    return SystemView(
        (TierView("device", 10, 10, 0.0, 0.0), TierView("host", 10, 10, 0.0, load)),
        CostView(a, b, 0.0, 16, 1000, overhead),
    )


def finished(s: int, start: int, blocks: int, a: float, b: float, load: float, overhead: float) -> float:
    compute = sum(a + b * (x + 0.5) for x in range(start, start + 16 * s)) + overhead if s else 0.0
    return max(compute, (blocks - s) * load)


@given(
    st.integers(0, 5000),
    st.integers(1, 60),
    st.floats(1e-6, 1e-2),
    st.floats(0.0, 1e-6),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.05),
)
def test_the_split_is_the_best_there_is(
    start: int, blocks: int, a: float, b: float, load: float, overhead: float
) -> None:
    found = tiering.split(start, blocks, "host", machine(a, b, load, overhead))
    assert 0 <= found <= blocks
    times = [finished(s, start, blocks, a, b, load, overhead) for s in range(blocks + 1)]
    assert times[found] <= min(times) * (1 + 1e-6) + 1e-12


def test_split_by_hand() -> None:
    # A block computes in 16 ms and loads in 48 ms: of 8, six are computed (96 ms) while two load (96 ms).
    assert tiering.split(0, 8, "host", machine(0.001, 0.0, 0.048, 0.0)) == 6
    # Loading all 8 takes 8 ms, less than computing one.
    assert tiering.split(0, 8, "host", machine(0.001, 0.0, 0.001, 0.0)) == 0
    assert tiering.split(0, 8, "host", machine(0.001, 0.0, 1e9, 0.0)) == 8
    assert tiering.split(0, 0, "host", machine(0.001, 0.0, 1.0, 0.0)) == 0
    assert tiering.split(0, 8, "disk", machine(0.001, 0.0, 1.0, 0.0)) == 8


def test_without_trust_everything_goes_down_a_tier_as_under_lru(system: SystemView) -> None:
    """Rates are all 0 then: without this, what was used once would be dropped beside an empty disk."""
    once = ExtentView(0, 4, 1, 0.0, 5.0, 1)
    distrusted = replace(system, trust=0.0)
    assert tiering.keep_below(once, "device", system) is None
    assert tiering.keep_below(once, "device", distrusted) == "host"
    assert tiering.keep_below(once, "host", distrusted) == "disk"
    assert tiering.keep_below(once._replace(on=("device", "host")), "device", distrusted) is None


def test_a_restore_is_not_split_where_computing_holds_up_more_than_it_saves(system: SystemView) -> None:
    """A block takes 16 ms to compute, 10 ms to load from disk: with two others waiting, computing it costs them 32 ms."""
    busy = replace(system, cost=replace(system.cost, waiting=3.0))
    alone = replace(system, cost=replace(system.cost, waiting=1.0))
    assert tiering.split(0, 50, "disk", alone) == tiering.split(0, 50, "disk", system) > 0
    assert tiering.split(0, 50, "disk", busy) == 0
