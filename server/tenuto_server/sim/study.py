"""One simulation: the real engine and a policy under virtual time, fed with a workload, measured into one row.

``tiers == ("device",)`` without costs is the one-tier study: no service times, a recompute costs one unit per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import Policy
from tenuto_server.sim import oracle
from tenuto_server.sim.harness import Harness, Sent
from tenuto_server.sim.knowledge import Delivery, PauseScale, parse_policy
from tenuto_server.sim.machine import SimMachine
from tenuto_server.sim.tally import Tally, classes_of
from tenuto_server.sim.traces import Trace
from tenuto_server.sim.workload import Workload
from tenuto_server.sim.world import World

# Room for what a run needs beside the contexts themselves.
_SLACK_UNITS = 2
_STEPS_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that one row depends on, the trace aside."""

    policy: str
    capacity_frac: float
    seed: int
    alive: float = 60.0
    unit: int = 64
    tiers: tuple[str, ...] = ("device",)
    hints: str = "on"
    window_s: float = 86400.0
    warm_up_s: float = 14400.0


def capacity_units(setup: Setup, workload: Workload) -> int:
    """Device capacity in units: a fraction of the mean live KV."""
    return max(8, int(setup.capacity_frac * workload.live_tokens / setup.unit))


def simulate(trace: Trace, setup: Setup, workload: Workload) -> dict[str, Any]:
    """Runs one policy at one capacity on a workload; returns the row."""
    policy, _ = parse_policy(setup.policy)
    capacity = capacity_units(setup, workload)
    tally = Tally(setup.unit)
    extra = (
        _play_oracle(setup, workload, capacity, tally)
        if policy is None
        else _run(trace, setup, workload, policy, capacity, tally)
    )
    return {
        "policy": setup.policy,
        "capacity_frac": setup.capacity_frac,
        "capacity_tokens": capacity * setup.unit,
        "seed": setup.seed,
        "hints": setup.hints,
        "alive": round(workload.alive, 3),
        "live_tokens": round(workload.live_tokens),
        **tally.row(),
        **extra,
    }


def _play_oracle(setup: Setup, workload: Workload, capacity: int, tally: Tally) -> dict[str, Any]:
    def hear(use: oracle.Use, found: int) -> None:
        if use.counts:
            tally.add(use.prompt, use.reusable, found, classes_of(use.pause, use.compacted, use.thread))
            tally.labels["capacity"] += use.reusable - found

    requests = oracle.uses(workload, setup.unit)
    oracle.play(requests, capacity, hear)
    bound = Tally(setup.unit)
    oracle.play(
        requests,
        capacity,
        lambda use, found: bound.add(use.prompt, use.reusable, found, ()) if use.counts else None,
        resident=False,
    )
    return {"missed_tokens_unbound": (bound.reusable - bound.found) * setup.unit}


def engine_config(setup: Setup, policy: Policy, capacity: int) -> EngineConfig:
    """The engine of the one-tier study: costs of one per token, so that policies weigh tokens alone."""
    cache = CacheConfig(
        device_blocks=capacity,
        block_tokens=1,
        tombstone_blocks_max=8 * capacity,
        extent_blocks_max=1 << 30,
    )
    return EngineConfig(
        cache=cache,
        policy=policy.name,
        max_context_tokens=1 << 30,
        step_tokens_max=1 << 30,
        running_max=256,
        reserve_tokens_max=1,
        waiting_max=1 << 20,
        hint_rate_per_s=1e9,
        hint_burst=1 << 30,
        journal_entries_max=1000,
        prefill_a_s=1.0,
        prefill_b_s=0.0,
    )


def identity(unit: int) -> RootIdentity:
    """The root of the simulated blocks; nothing is stored, so the secret protects nothing."""
    return RootIdentity("simulated", "", "none", 1, unit, b"simulated-blocks")


def _run(trace: Trace, setup: Setup, workload: Workload, policy: Policy, capacity: int, tally: Tally) -> dict[str, Any]:
    engine = Engine(engine_config(setup, policy, capacity), policy, identity(setup.unit))
    engine.core.costs.follow_queue = False
    world = World(
        engine,
        SimMachine(),
        forward_s=lambda plan: 0.0,
        transfer_s=lambda transfer: 0.0,
        remember=False,
        wakes=False,
    )

    def record(sent: Sent) -> None:
        if sent.sent_s < workload.from_s or not sent.line.primed:
            return
        line, started = sent.line, sent.turn.started
        found = 0
        if started is None:
            tally.refused += 1
        else:
            report = started.report
            found = min(sent.reusable, report.cached_tokens)
            for tier, count in report.cached.items():
                tally.tier_found[tier] += count
            for label, count in report.recomputed.items():
                tally.labels[label] += count
        classes = classes_of(sent.pause, sent.compacted, line.session.thread)
        tally.add(sent.prompt, sent.reusable, found, classes, line.tenant)

    harness = Harness(
        world,
        workload,
        parse_policy(setup.policy)[1],
        Delivery.parse(setup.hints),
        PauseScale.of(trace.sessions),
        setup.unit,
        record,
    )
    harness.start()
    world.run(until_s=workload.to_s, steps_max=_STEPS_MAX)
    figures = engine.metrics()
    return {
        "steps": world.steps,
        "leases_granted": figures.get("leases_granted_total", 0.0),
        "leases_broken": figures.get("leases_broken_total", 0.0),
        "decisions": figures["decisions_total"],
    }
