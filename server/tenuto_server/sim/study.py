"""One simulation: the real engine and a policy under virtual time, fed with a workload, measured into one row.

Device alone and no timing is the one-tier study: nothing takes time and a recompute costs one per token. With a machine's
timing, turns queue, decode and wait for copies, and the row tells how long first tokens took.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tenuto_server.cache.extent import TIERS
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.plan import ForwardPlan
from tenuto_server.errors import ConfigError
from tenuto_server.policy import Policy
from tenuto_server.sim import oracle
from tenuto_server.sim.costs import Clockwork, Machine, machine_of
from tenuto_server.sim.harness import Harness, Sent
from tenuto_server.sim.knowledge import Delivery, PauseScale, parse_policy, parse_tenants
from tenuto_server.sim.machine import SimMachine
from tenuto_server.sim.tally import Tally, classes_of
from tenuto_server.sim.traces import Trace
from tenuto_server.sim.workload import WARM_UP_S, WINDOW_S, Workload
from tenuto_server.sim.world import World

_STEPS_MAX = 1 << 40
_CHUNK_TOKENS = 8192
_MOVE_TOKENS = 8192
_COLLECT_EVERY = 200_000
# Without timing nothing takes time, but policies weigh costs: a token costs the same at every position, as many seconds as
# h100-8b takes on average to 32K, and loading it is 19 (host) and 4.6 (disk) times faster.
_TOKEN_S, _HOST_FACTOR, _DISK_FACTOR = 5e-5, 19.0, 4.6


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that one row depends on, the trace aside. ``host_ratio``, ``disk_ratio``: size of those tiers in units of
    the device's. ``shrink``: divisor of the trace's token counts. ``tenants``: whose the
    sessions are (``knowledge.parse_tenants``). ``service`` (without timing): "recorded" keeps requests as far apart as they were recorded, though none
    takes any time; "none" takes the answers' time out."""

    policy: str
    capacity_frac: float
    seed: int
    alive: float = 60.0
    unit: int = 64
    tiers: tuple[str, ...] = ("device",)
    hints: str = "on"
    timing: str = "none"
    service: str = "recorded"
    window_s: float = WINDOW_S
    warm_up_s: float = WARM_UP_S
    host_ratio: float = 4.0
    disk_ratio: float = 16.0
    shrink: float = 1.0
    tenants: str = ""

    @property
    def served(self) -> bool:
        """The workload's timeline contains the answers' recorded time."""
        return self.service == "recorded" or self.timing != "none"

    def check(self) -> None:
        """Raises ``ConfigError`` for anything that cannot be run."""
        policy, _ = parse_policy(self.policy)
        Delivery.parse(self.hints)
        parse_tenants(self.tenants)
        machine_of(self.timing)
        if self.tiers != TIERS[: len(self.tiers)] or not self.tiers:
            raise ConfigError(f"--tiers {','.join(self.tiers)!r}: device, or device,host, or device,host,disk")
        if policy is None and (machine_of(self.timing) is not None or len(self.tiers) > 1):
            raise ConfigError("the oracle is defined for one tier without timing")
        if self.service not in ("recorded", "none"):
            raise ConfigError(f"--service {self.service!r} is none of recorded, none")
        if self.shrink < 1.0:
            raise ConfigError("--shrink must be 1 or more")
        if self.capacity_frac <= 0.0 or self.alive <= 0.0 or self.unit < 1 or self.window_s <= 0.0:
            raise ConfigError("capacity, sessions alive, unit and window must be positive")


def simulate(trace: Trace, setup: Setup, workload: Workload) -> dict[str, Any]:
    """Runs one policy at one capacity on a workload; returns the row."""
    policy, _ = parse_policy(setup.policy)
    capacity = max(8, int(setup.capacity_frac * workload.live_tokens / setup.unit))
    tally = Tally(setup.unit)
    if policy is None:
        extra = _play_oracle(setup, workload, capacity, tally)
    else:
        with _seldom_collected():
            extra = _Run(trace, setup, workload, policy, capacity, tally).row()
    return {
        "policy": setup.policy,
        "capacity_frac": setup.capacity_frac,
        "capacity_tokens": capacity * setup.unit,
        "seed": setup.seed,
        "tiers": ",".join(setup.tiers),
        "timing": setup.timing,
        "service": setup.service,
        "hints": setup.hints,
        "alive": round(workload.alive, 3),
        "live_tokens": round(workload.live_tokens),
        **tally.row(),
        **extra,
    }


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Garbage in cycles is looked for seldom while a run lasts, and never in the trace: a run leaves hardly any, and each look
    costs a walk over everything that is alive."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


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


def engine_config(setup: Setup, policy: Policy, capacity: int, machine: Machine | None) -> EngineConfig:
    """The engine's settings in units: one simulated token is ``unit`` tokens and a block of its own."""
    unit = setup.unit
    chunk = max(1, _MOVE_TOKENS // unit)
    cache = CacheConfig(
        device_blocks=capacity,
        host_blocks=int(capacity * setup.host_ratio) if "host" in setup.tiers else 0,
        disk_blocks=int(capacity * setup.disk_ratio) if "disk" in setup.tiers else 0,
        block_tokens=1,
        tombstone_blocks_max=8 * capacity,
        extent_blocks_max=1 << 30,
        transfer_blocks_max=chunk,
        transfers_inflight_max=64,
        transfer_patience_s=30.0,
    )
    return EngineConfig(
        cache=cache,
        policy=policy.name,
        max_context_tokens=1 << 30,
        step_tokens_max=max(1, _CHUNK_TOKENS // unit) if machine else 1 << 30,
        running_max=256,
        reserve_tokens_max=64 if machine else 1,
        waiting_max=1 << 20,
        hint_rate_per_s=1e9,
        hint_burst=1 << 30,
        journal_entries_max=1000,
        prefill_a_s=(machine.prefill_a_s if machine else _TOKEN_S) * unit,
        prefill_b_s=machine.prefill_b_s * unit * unit if machine else 0.0,
        host_bytes_per_s=machine.host_bps if machine else _HOST_FACTOR / (_TOKEN_S * unit),
        disk_bytes_per_s=machine.disk_bps if machine else _DISK_FACTOR / (_TOKEN_S * unit),
        block_bytes=machine.kv_bytes * unit if machine else 1,
    )


def identity(unit: int) -> RootIdentity:
    """The root of the simulated blocks; nothing is stored, so the secret protects nothing."""
    return RootIdentity("simulated", "", "none", 1, unit, b"simulated-blocks")


class _Run:
    """One engine at work; owns the time it has held what on which tier."""

    def __init__(
        self, trace: Trace, setup: Setup, workload: Workload, policy: Policy, capacity: int, tally: Tally
    ) -> None:
        self._setup, self._workload, self._tally = setup, workload, tally
        timing = machine_of(setup.timing)
        self._timed = timing is not None
        self._engine = Engine(engine_config(setup, policy, capacity, timing), policy, identity(setup.unit))
        self._engine.core.costs.follow_queue = self._timed
        clockwork = Clockwork(timing, setup.unit, lambda: self._world.now_ns) if timing else None
        machine = SimMachine()
        self._world = World(
            self._engine,
            machine,
            forward_s=self._busy(clockwork.forward_s) if clockwork else lambda plan: 0.0,
            transfer_s=clockwork.transfer_s if clockwork else lambda transfer: 0.0,
            copy_s=clockwork.copy_s if clockwork else None,
            after_step=self._after_step,
            remember=False,
            wakes=self._timed or len(setup.tiers) > 1,
        )
        self._held = [0.0, 0.0, 0.0]
        self._busy_s = 0.0
        self._then_ns = 0
        self._harness = Harness(
            self._world,
            machine,
            workload,
            parse_policy(setup.policy)[1],
            Delivery.parse(setup.hints),
            self._scale(trace),
            setup.unit,
            self._record,
            answers=self._timed,
            tenants=parse_tenants(setup.tenants),
        )

    def _scale(self, trace: Trace) -> PauseScale:
        """What forecasts are drawn from; nothing where nobody forecasts."""
        told = parse_policy(self._setup.policy)[1].r2 is not None
        return PauseScale.of(trace.sessions if told else (), served=self._workload.served and not self._timed)

    def _busy(self, forward_s: Callable[[ForwardPlan], float]) -> Callable[[ForwardPlan], float]:
        """``forward_s``, with what the window's forwards take added up."""

        def measured(plan: ForwardPlan) -> float:
            took_s = forward_s(plan)
            if self._world.now_ns >= self._workload.from_s * 1e9:
                self._busy_s += took_s
            return took_s

        return measured

    def _after_step(self) -> None:
        now_ns, cache = self._world.now_ns, self._engine.core.cache
        if now_ns >= self._workload.from_s * 1e9:
            passed_s = (now_ns - max(self._then_ns, int(self._workload.from_s * 1e9))) / 1e9
            for tier in range(len(self._setup.tiers)):
                self._held[tier] += passed_s * cache.used_blocks(tier)
        self._then_ns = now_ns

    def _record(self, sent: Sent) -> None:
        if sent.sent_s < self._workload.from_s or not sent.line.primed:
            return
        tally, turn = self._tally, sent.turn
        classes = classes_of(sent.pause, sent.compacted, sent.line.session.thread)
        if turn.started is None:
            tally.refused += 1
            if not self._timed:  # the oracle cannot serve them either, and counts them
                tally.add(sent.prompt, sent.reusable, 0, classes, sent.line.tenant)
            return
        # The first report says what was there, the last one what of it was loaded after all.
        report = turn.started.report
        used = turn.done.report.cached_tokens if turn.done is not None else report.cached_tokens
        found = min(sent.reusable, report.cached_tokens)
        for tier, count in report.cached.items():
            tally.tier_found[tier] += count
        for label, count in report.recomputed.items():
            tally.labels[label] += count
        instead = max(0, found - min(sent.reusable, used))
        tally.add(sent.prompt, sent.reusable, found, classes, sent.line.tenant, instead)
        if self._timed and turn.first_token_ns is not None:
            waited_s = (turn.first_token_ns - turn.submitted_ns) / 1e9
            for name in (*classes, "all"):
                tally.ttft_s[name].append(waited_s)

    def row(self) -> dict[str, Any]:
        """Runs to the end of the window; returns what the engine counted."""
        self._harness.start()
        self._world.run(until_s=self._workload.to_s, steps_max=_STEPS_MAX)
        figures, unit = self._engine.metrics(), self._setup.unit
        row: dict[str, Any] = {
            "steps": self._world.steps,
            "decisions": figures["decisions_total"],
            "leases_granted": figures.get("leases_granted_total", 0.0),
            "leases_broken": figures.get("leases_broken_total", 0.0),
        }
        if len(self._setup.tiers) > 1:
            moved = figures.get("transferred_blocks_total", {})
            assert isinstance(moved, dict)
            row["moved_tokens"] = {name: int(count) * unit for name, count in sorted(moved.items())}
            row["prefetches"] = figures.get("prefetches_total", {})
        held = {tier: round(held * unit) for tier, held in zip(self._setup.tiers, self._held, strict=False)}
        row["held_token_s"] = held
        machine = machine_of(self._setup.timing)
        if machine is not None:
            row["busy_s"] = round(self._busy_s, 3)
            row["held_byte_s"] = {tier: amount * machine.kv_bytes for tier, amount in held.items()}
        return row
