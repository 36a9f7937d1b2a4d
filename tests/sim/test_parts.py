"""The parts that a simulation is made of: forecasts, delivery, steady state, machine times, generated sessions."""

from __future__ import annotations

from math import exp, log
from random import Random
from statistics import fmean, median, pvariance

import numpy as np
import pytest

from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer
from tenuto_server.errors import ConfigError
from tenuto_server.sim.costs import PRESETS, Clockwork
from tenuto_server.sim.generator import generate
from tenuto_server.sim.knowledge import Z90, Delivery, Knowledge, PauseScale, parse_policy
from tenuto_server.sim.traces import Request, Session, Trace
from tenuto_server.sim.workload import arrivals, steady

SCALE = PauseScale({"tool": (2.0, 1.25)})


@pytest.mark.parametrize("r2", [0.1, 0.5, 0.9])
def test_forecasts_explain_their_share_and_state_their_spread(r2: float) -> None:
    rng = Random(1)
    scale = PauseScale({"tool": (7.0, 1.25)})  # far from the one second below which all pauses count as one
    truth = [rng.gauss(7.0, 1.25) for _ in range(20_000)]
    said = [scale.forecast("tool", exp(t), r2, rng) for t in truth]
    errors = [t - log(p50) for t, (p50, _) in zip(truth, said, strict=True)]
    assert 1.0 - pvariance(errors) / pvariance(truth) == pytest.approx(r2, abs=0.02)
    below = fmean(t <= log(p90) for t, (_, p90) in zip(truth, said, strict=True))
    assert below == pytest.approx(0.9, abs=0.02)
    spread = log(said[0][1] / said[0][0]) / Z90
    assert spread == pytest.approx(1.25 * (1 - r2) ** 0.5)


def test_perfect_forecasts_are_the_truth_and_unknown_returns_look_like_any() -> None:
    assert SCALE.forecast("tool", 42.0, 1.0, Random(0)) == pytest.approx((42.0, 42.0))
    looks = [log(SCALE.forecast("tool", None, 1.0, Random(i))[0]) for i in range(2000)]
    assert fmean(looks) == pytest.approx(2.0, abs=0.1)
    assert pvariance(looks) == pytest.approx(1.25**2, rel=0.1)


def test_policy_names() -> None:
    policy, know = parse_policy("tenuto:r2=0.5+end+compaction+fork")
    assert policy is not None
    assert policy.hears_hints
    assert know == Knowledge(0.5, True, True, True)
    assert parse_policy("oracle") == (None, Knowledge())
    silent, know = parse_policy("tenuto:none")
    assert silent is not None
    assert not silent.hears_hints
    assert know == Knowledge()
    with pytest.raises(ConfigError, match="r2=<x>"):
        parse_policy("tenuto:everything")


def test_delivery() -> None:
    rng = Random(0)
    assert Delivery.parse("on").delays_s(rng) == [0.0]
    assert Delivery.parse("off").delays_s(rng) == []
    assert Delivery.parse("late:30").delays_s(rng) == [30.0]
    arrived = sum(len(Delivery.parse("lost:0.3").delays_s(rng)) for _ in range(4000))
    assert arrived / 4000 == pytest.approx(0.7, abs=0.03)
    assert len(Delivery.parse("dup").delays_s(rng)) == 2
    for wrong in ("late", "lost:1.5", "lying:x", "on:1", ""):
        with pytest.raises(ConfigError):
            Delivery.parse(wrong)


def test_steady_state_has_as_many_alive_as_asked_for(synthetic: Trace) -> None:
    found = [steady(synthetic, 20.0, seed, window_s=6 * 3600.0, warm_up_s=3600.0).alive for seed in range(12)]
    assert fmean(found) == pytest.approx(20.0, rel=0.05)


def test_live_kv_is_the_time_average_of_contexts() -> None:
    requests = (
        Request(100, 1, 0, "tool", 10.0, 0.0),
        Request(300, 1, 100, "tool", 30.0, 0.0),
        Request(50, 1, 0, "tool", None, 0.0),
    )
    workload = arrivals(Trace("t", "test", (Session("s", requests),)), 1, served=False)
    # 10 s with 100 tokens, 30 s with 300, and the last request ends it; the window is one second longer.
    assert workload.live_tokens == pytest.approx((10 * 100 + 30 * 300) / 41)
    assert workload.alive == pytest.approx(40 / 41)


def row(start: int, count: int, draw: int = 0) -> ForwardRow:
    return ForwardRow(1, start, np.zeros(count, np.int32), np.zeros(start + count, np.int32), True, Sampling(4), draw)


def test_forwards_take_what_the_figures_say() -> None:
    machine = PRESETS["h100-8b"]
    clock = Clockwork(machine, 64, lambda: 0)
    # The published averages of this preset: 30K tokens/s when short, 20K on average up to 32K.
    whole = clock.forward_s(ForwardPlan(1, (row(0, 512),)))
    assert 32_768 / whole == pytest.approx(20_000, rel=0.01)
    parts = sum(clock.forward_s(ForwardPlan(1, (row(start, 128),))) for start in range(0, 512, 128))
    assert parts == pytest.approx(whole)
    # 64 decode steps: weights once a step, and the KV of 101 units.
    step = 16e9 / 3.35e12 + 101 * 64 * 131_072 / 3.35e12
    assert clock.forward_s(ForwardPlan(1, (row(100, 1, 3),))) == pytest.approx(64 * step)


@pytest.mark.parametrize(("name", "short", "average", "at"), [
    ("cpu2-smollm2", 1333, 428, 8192), ("h100-32b", 7_700, 5_800, 32_768),
])  # fmt: skip
def test_presets_agree_with_their_sources(name: str, short: float, average: float, at: int) -> None:
    machine = PRESETS[name]
    assert at / (at * machine.prefill_a_s + machine.prefill_b_s * at * at / 2) == pytest.approx(average, rel=0.02)
    assert 512 / (512 * machine.prefill_a_s + machine.prefill_b_s * 512 * 256) == pytest.approx(short, rel=0.02)


def test_copies_share_their_link() -> None:
    machine, now = PRESETS["h100-8b"], [0]
    clock = Clockwork(machine, 64, lambda: now[0])
    slots = np.zeros(100, np.int32)
    one = 100 * 64 * 131_072 / 50e9
    up = Transfer(1, "host", "device", slots, slots, b"")
    assert clock.transfer_s(up) == pytest.approx(one, abs=1e-8)
    assert clock.transfer_s(up) == pytest.approx(2 * one, abs=1e-8)
    assert clock.transfer_s(Transfer(2, "device", "host", slots, slots, b"")) == pytest.approx(one, abs=1e-8)
    assert clock.transfer_s(Transfer(3, "disk", "device", slots, slots, b"")) == pytest.approx(one * 50 / 7, abs=1e-8)
    now[0] = int(1.5 * one * 1e9)
    assert clock.transfer_s(up) == pytest.approx(1.5 * one, abs=1e-6)
    assert clock.copy_s(up) == pytest.approx(one)  # however long it waits


def test_generated_sessions_have_the_published_shape() -> None:
    trace = generate(600, 7)
    assert generate(5, 7).sessions == trace.sessions[:5]
    assert generate(5, 8).sessions != trace.sessions[:5]
    requests = [r for s in trace.sessions for r in s.requests]
    pauses = {
        kind: sorted(r.pause_s for r in requests if r.pause == kind and r.pause_s is not None)
        for kind in ("tool", "human")
    }
    assert median(pauses["tool"]) == pytest.approx(9, rel=0.15)
    assert median(pauses["human"]) == pytest.approx(182, rel=0.2)
    assert pauses["tool"][int(0.9 * len(pauses["tool"]))] == pytest.approx(81, rel=0.2)
    ends = [s.requests[-1] for s in trace.sessions if len(s.requests) < 600]
    turns = sum(r.pause == "human" for r in requests)
    assert len(ends) / turns == pytest.approx(0.133, abs=0.02)
    broken = [
        b for s in trace.sessions for a, b in zip(s.requests, s.requests[1:], strict=False) if b.shared < a.prompt
    ]
    assert 0.01 < len(broken) / len(requests) < 0.05
    assert all(r.shared <= r.prompt for r in requests)
    assert sum(len(s.children) for s in trace.sessions) > 0
