"""The engine in the simulator: against an independent LRU, the same every time, intact after every step."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest

from tenuto_server.cache.integrity import check
from tenuto_server.errors import ConfigError
from tenuto_server.sim import study
from tenuto_server.sim.oracle import uses
from tenuto_server.sim.study import Setup, simulate
from tenuto_server.sim.sweep import close_gaps
from tenuto_server.sim.traces import Trace
from tenuto_server.sim.workload import Workload, steady


def block_lru(workload: Workload, unit: int, capacity: int) -> tuple[int, int]:
    """(reusable, missed) blocks of a plain LRU over single blocks: the textbook, without engine, extents or trees.

    Blocks of one prompt were used at the same moment; the deepest counts as the least recent of them.
    """
    memory: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    contexts: dict[int, list[tuple[int, int, int]]] = {}
    reusable = missed = 0
    for number, use in enumerate(uses(workload, unit)):
        before = contexts.get(use.line, [])
        # Only the last block of an unchanged prompt is shared without being reusable.
        prompt = before[: use.reusable] + [(use.line, number, i) for i in range(use.reusable, use.prompt)]
        contexts[use.line] = prompt
        if use.prompt + 2 > capacity:  # refused: more than the device holds
            reusable += use.reusable * use.counts
            missed += use.reusable * use.counts
            continue
        found = sum(block in memory for block in prompt[: use.reusable])
        if use.counts:
            reusable += use.reusable
            missed += use.reusable - found
        for block in reversed(prompt):
            memory.pop(block, None)
            memory[block] = None
        while len(memory) > capacity:
            memory.popitem(last=False)
    return reusable, missed


@pytest.mark.parametrize("frac", [0.2, 0.35, 0.6])
def test_lru_is_the_textbook_lru(synthetic: Trace, small: Workload, frac: float) -> None:
    row = simulate(synthetic, Setup("lru", frac, 5), small)
    reusable, missed = block_lru(small, 64, row["capacity_tokens"] // 64)
    assert row["reusable_tokens"] == reusable * 64
    assert missed > 0
    # The engine frees at least eight blocks at a time, which the textbook does not.
    assert row["missed_tokens"] == pytest.approx(missed * 64, rel=0.01)


def test_everything_fits_and_nothing_is_missed(synthetic: Trace, small: Workload) -> None:
    for policy in ("lru", "tenuto:end+compaction", "oracle"):
        row = simulate(synthetic, Setup(policy, 20.0, 5), small)
        assert row["missed_tokens"] == 0
        assert row["amplification"] == 1.0


def test_the_same_seed_gives_the_same_bytes(synthetic: Trace) -> None:
    def run(seed: int) -> str:
        workload = steady(synthetic, 20.0, seed, window_s=1800.0, warm_up_s=600.0)
        return json.dumps(simulate(synthetic, Setup("tenuto:r2=0.5+end+compaction", 0.3, seed), workload))

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(("policy", "tiers", "timing"), [
    ("tenuto:r2=0.5+end+compaction", ("device",), "none"),
    ("lru", ("device", "host", "disk"), "none"),
    ("tenuto:r2=0.5+end+compaction+fork", ("device", "host", "disk"), "h100-8b"),
])  # fmt: skip
def test_the_cache_is_intact_after_every_step(
    synthetic: Trace, monkeypatch: pytest.MonkeyPatch, policy: str, tiers: tuple[str, ...], timing: str
) -> None:
    checks = 0

    class Checked(study.World):  # type: ignore[misc]
        def advance(self) -> None:
            nonlocal checks
            super().advance()
            if self.steps % (20 if timing == "none" else 200) == 0:
                check(self.engine.core.cache)
                checks += 1

    monkeypatch.setattr(study, "World", Checked)
    workload = steady(synthetic, 20.0, 2, window_s=900.0, warm_up_s=100.0, served=timing != "none")
    row = simulate(synthetic, Setup(policy, 0.25, 2, tiers=tiers, timing=timing, unit=64, host_ratio=1.0), workload)
    assert row["turns"] > 20
    assert checks > 5
    labels = row["misses_by_label"]
    found = sum(row["found_tokens_by_tier"].values())
    assert found + sum(labels.values()) == row["prompt_tokens"], "every prompt token has one source"


def test_looking_changes_nothing(synthetic: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures may be asked for at any moment (the live loop does): the same decisions follow."""
    workload = steady(synthetic, 20.0, 2, window_s=900.0, warm_up_s=100.0, served=True)
    setup = Setup("tenuto:r2=0.5+end", 0.25, 2, tiers=("device", "host"), timing="h100-8b", unit=64, host_ratio=0.5)

    class Watched(study.World):  # type: ignore[misc]
        def advance(self) -> None:
            super().advance()
            self.engine.metrics()

    alone = simulate(synthetic, setup, workload)
    monkeypatch.setattr(study, "World", Watched)
    assert simulate(synthetic, setup, workload) == alone


def test_copies_come_to_rest(synthetic: Trace) -> None:
    """Prefetches and offloads do not chase each other while nothing runs: copied tokens stay within some of the used."""
    workload = steady(synthetic, 30.0, 2, window_s=900.0, warm_up_s=300.0, served=True)
    setup = Setup(
        "tenuto:r2=0.5+end+compaction", 0.3, 2, tiers=("device", "host", "disk"), timing="h100-8b", host_ratio=1.0
    )
    row = simulate(synthetic, setup, workload)
    assert sum(row["moved_tokens"].values()) < 5 * row["prompt_tokens"]


def test_lower_tiers_catch_what_the_device_loses(synthetic: Trace, small: Workload) -> None:
    alone = simulate(synthetic, Setup("lru", 0.2, 5), small)
    tiers = simulate(synthetic, Setup("lru", 0.2, 5, tiers=("device", "host")), small)
    assert tiers["missed_tokens"] < 0.5 * alone["missed_tokens"]
    assert tiers["found_tokens_by_tier"]["host"] > 0
    assert tiers["moved_tokens"]["host>device"] > 0


def test_hints_change_nothing_where_the_policy_takes_none(synthetic: Trace, small: Workload) -> None:
    rows = [simulate(synthetic, Setup("lru", 0.3, 5, hints=hints), small) for hints in ("on", "off", "lying")]
    assert len({row["missed_tokens"] for row in rows}) == 1


def test_ends_are_worth_something_and_losing_all_of_them_is_as_good_as_none(synthetic: Trace, small: Workload) -> None:
    def missed(policy: str, hints: str) -> int:
        return int(simulate(synthetic, Setup(policy, 0.3, 5, hints=hints), small)["missed_tokens"])

    nothing = missed("tenuto:none", "on")
    assert missed("tenuto:end+compaction", "on") < nothing
    assert missed("tenuto:end+compaction", "lost:1") == missed("tenuto:end+compaction", "off")
    for faults in ("late:30", "lost:0.3", "dup", "reorder"):
        assert missed("tenuto:end+compaction", faults) > 0


def test_gap_closed_is_the_share_of_avoidable_misses() -> None:
    def row(policy: str, missed: int) -> dict[str, object]:
        return {"policy": policy, "capacity_frac": 0.2, "seed": 1, "missed_tokens": missed}

    rows = [row("lru", 100), row("oracle", 20), row("x", 40)]
    close_gaps(rows)
    assert [r["gap_closed"] for r in rows] == [0.0, 1.0, 0.75]
    alone = [row("lru", 100), row("x", 40)]
    close_gaps(alone)
    assert [r["gap_closed"] for r in alone] == [None, None]


@pytest.mark.parametrize("wrong", [
    {"policy": "lfu"},
    {"policy": "tenuto:r3=1"},
    {"policy": "tenuto:r2=2"},
    {"hints": "maybe"},
    {"hints": "lost:2"},
    {"tiers": ("host",)},
    {"timing": "abacus"},
    {"policy": "oracle", "tiers": ("device", "host")},
    {"capacity_frac": 0.0},
])  # fmt: skip
def test_what_cannot_be_run_is_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Setup(**{"policy": "lru", "capacity_frac": 0.2, "seed": 1, **wrong}).check()  # type: ignore[arg-type]


def test_a_busy_link_is_not_taken_for_a_slow_one(synthetic: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies report is their link's speed, not their wait: what a load costs stays as it is on that machine."""
    seen = []

    class Watched(study._Run):
        def row(self) -> dict[str, object]:
            row = super().row()
            seen.append(self._engine.core.costs.bytes_per_s)
            return row

    monkeypatch.setattr(study, "_Run", Watched)
    workload = steady(synthetic, 20.0, 2, window_s=1800.0, warm_up_s=600.0)
    setup = Setup("lru", 0.2, 2, tiers=("device", "host", "disk"), timing="h100-8b", host_ratio=2.0, disk_ratio=4.0)
    row = simulate(synthetic, setup, workload)
    assert row["moved_tokens"]["host>device"] > 10 * row["capacity_tokens"]
    assert seen[0][1:] == [pytest.approx(50e9, rel=0.01), pytest.approx(7e9, rel=0.01)]
    # Everything that was computed has its row: new, missed, or there and computed nevertheless.
    assert row["prefilled_tokens"] == row["fresh_tokens"] + row["missed_tokens"] + row["instead_tokens"]
    assert 0.0 < row["busy_s"] < 1800.0
    assert row["ttft_s"]["all"]["n"] == sum(t["n"] for name, t in row["ttft_s"].items() if name in ("tool", "human"))
