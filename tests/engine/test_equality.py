"""The equality test at the control plane: whatever was cached, moved, lost, forked or hinted, tokens never differ.

The executor's toy KV makes every sampled token depend on every byte that the block table names, so one stale, foreign or
misplaced block changes the answer. The expected answers come from one uncached row over the whole prompt.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentKeepalive,
    AgentPause,
    AgentResumeSoon,
    AnyAction,
    Envelope,
    Forecast,
    Shared,
)
from tenuto_server.engine.events import HintBatch, Sampling, SubmitTurn
from tenuto_server.engine.plan import Transfer
from tenuto_server.runtime.null import Fault
from tenuto_server.sim.world import World


class Agents:
    """Several agent conversations over one world, each turn checked against the reference."""

    def __init__(self, kit: SimpleNamespace, world: World, seed: int, hints: str) -> None:
        self.kit = kit
        self.world, self.rng, self.hints = world, random.Random(seed), hints
        self.turns = self.seq = 0
        self.checked = 0
        self.system = [self.rng.randrange(self.kit.vocab) for _ in range(self.rng.randrange(3, 40))]

    def start(self, name: str, turns: int, context: list[int] | None = None, parent: str | None = None) -> None:
        context = context or [*self.system, *self.say()]
        self.turn(name, context, turns, parent)

    def say(self) -> list[int]:
        return [self.rng.randrange(self.kit.vocab) for _ in range(self.rng.randrange(1, 20))]

    def turn(self, name: str, prompt: list[int], left: int, parent: str | None = None) -> None:
        rng = self.rng
        self.turns += 1
        count, temperature = rng.randrange(0, 12), rng.choice([0.0, 0.0, 0.8])
        sampling = Sampling(count, temperature=temperature, seed=self.turns)
        request = f"{name}-{self.turns}"
        turn = SubmitTurn(
            request, "t", np.array(prompt, np.int32), sampling, session=None if name == "anon" else name, parent=parent
        )

        def ended(record) -> None:
            assert record.done is not None, record.rejected
            if record.done.reason == "cancelled":
                expected = self.kit.reference(prompt, len(record.tokens), self.seed_of(request), temperature)
            else:
                assert record.done.reason == "length", record.done
                expected = self.kit.reference(prompt, count, self.seed_of(request), temperature)
                assert record.done.completion_tokens == count
            assert record.tokens == expected, f"{request}: tokens differ"
            report = record.done.report
            if record.started is not None:
                assert sum(report.cached.values()) + sum(report.recomputed.values()) == len(prompt)
            self.checked += 1
            if left > 1:
                self.after(name, [*prompt, *record.tokens], left - 1)

        pause = rng.choice([0.0, 0.05, 0.4, 3.0])
        self.world.submit(turn, in_s=pause, then=ended)
        if rng.random() < 0.1:
            self.world.cancel(request, in_s=pause + rng.choice([0.0, 0.01, 0.05]))

    def seed_of(self, request: str) -> int:
        return int(request.rsplit("-", 1)[1])

    def after(self, name: str, context: list[int], left: int) -> None:
        rng = self.rng
        self.hint(name, context)
        kind = rng.random()
        if kind < 0.65:
            context = [*context, *self.say()]
        elif kind < 0.8:  # compaction: system prompt and a summary
            context = [*self.system, *self.say()]
            self.send(
                AgentCompaction(session=name, seq=self.next(), phase="commit", keep=Shared(tokens=len(self.system)))
            )
        elif kind < 0.9:  # the context is edited somewhere
            cut = rng.randrange(1, len(context))
            context = [*context[:cut], *self.say()]
        else:  # subagents start on this prefix
            child = f"{name}.{self.turns}"
            self.send(AgentFork(session=name, seq=self.next(), child=child))
            self.start(child, min(left, 2), [*context, *self.say()], parent=name)
            context = [*context, *self.say()]
        self.turn(name, context, left)

    def next(self) -> int:
        self.seq += 1
        return self.seq

    def hint(self, name: str, context: list[int]) -> None:
        rng = self.rng
        lie = self.hints == "lying"
        forecast = Forecast(p50_s=rng.choice([0.05, 0.4, 3.0]) * (1000 if lie and rng.random() < 0.5 else 1))
        self.send(AgentPause(session=name, seq=self.next(), kind=rng.choice(["tool", "human"]), forecast=forecast))
        if rng.random() < 0.3:
            self.send(AgentKeepalive(session=name, seq=self.next(), for_s=5.0))
        if rng.random() < 0.3:
            self.send(AgentResumeSoon(session=name, seq=self.next(), in_s=0.01))
        if lie and rng.random() < 0.3:
            self.send(AgentEnd(session=name, seq=self.next()))

    def send(self, action: AnyAction) -> None:
        if self.hints == "off" or (self.hints == "lost" and self.rng.random() < 0.4):
            return
        self.world.at(self.world.now_s, HintBatch(f"h{self.seq}", "t", Envelope.of([action])))


def run_agents(kit: SimpleNamespace, world: World, seed: int, hints: str, sessions: int = 4, turns: int = 4) -> Agents:
    agents = Agents(kit, world, seed, hints)
    for index in range(sessions):
        agents.start("anon" if index == 0 else f"s{index}", turns)
    world.run(steps_max=20_000)
    while any(not turn.ended for turn in world.turns.values()) and world.machine.health()["transfers_waiting"]:
        world.machine.close()  # faults end: copies that were stuck report their failure
        world.collect(world.machine.take_events())
        world.run(steps_max=20_000)
    assert agents.checked == agents.turns == len(world.turns), "liveness: every turn ends"
    assert not world.machine.wrong
    cache = world.engine.core.cache
    assert not cache.tables
    assert not cache.private_blocks
    assert cache.tiers.pinned_device_blocks == 0
    return agents


@pytest.mark.parametrize("policy", ["lru", "tenuto:none", "tenuto"])
@pytest.mark.parametrize("hints", ["on", "lost", "lying"])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_never_differ(kit: SimpleNamespace, policy: str, hints: str, seed: int) -> None:
    """Three tiers under pressure, any policy, honest, lost and lying hints."""
    run_agents(kit, kit.world(policy), seed, hints)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    device=st.integers(40, 70),
    host=st.sampled_from([0, 12, 64]),
    disk=st.sampled_from([0, 12, 64]),
    step=st.integers(5, 64),
    policy=st.sampled_from(["lru", "tenuto", "tenuto:none", "ttl:1"]),
)
def test_any_shape(kit: SimpleNamespace, seed: int, device: int, host: int, disk: int, step: int, policy: str) -> None:
    """Any sizes of tiers and steps."""
    run_agents(kit, kit.world(policy, device=device, host=host, disk=disk, step_tokens=step), seed, "on", 3, 3)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([0.1, 0.5, 1.0]), policy=st.sampled_from(["lru", "tenuto"]))
def test_faults(kit: SimpleNamespace, seed: int, rate: float, policy: str) -> None:
    """Safety under faults: copies fail, arrive damaged, or never come back; nothing waits for ever."""
    rng = random.Random(seed)

    def fault(transfer: Transfer) -> Fault | None:
        if rng.random() > rate:
            return None
        kind = rng.choice(["fail", "corrupt", "never"])
        return Fault(kind, (rng.randrange(len(transfer.src_slots)),) if kind == "corrupt" else ())

    world = kit.world(policy, fault)
    run_agents(kit, world, seed, "on", 3, 3)


def test_pool_full_of_retained_blocks_admits_at_once(kit: SimpleNamespace) -> None:
    """S4: with all memory retained, a request of nearly the whole pool is admitted without waiting for any TTL."""
    world = kit.world("tenuto", host=0, disk=0)
    rng = random.Random(3)
    for index in range(6):
        prompt = np.array([rng.randrange(kit.vocab) for _ in range(60)], np.int32)
        world.submit(SubmitTurn(f"r{index}-0", "t", prompt, Sampling(2), session=f"s{index}"))
    world.run()
    big = np.array([rng.randrange(kit.vocab) for _ in range(170)], np.int32)
    turn = world.submit(SubmitTurn("big-1", "t", big, Sampling(4), session="big"))
    world.run()
    assert turn.done is not None
    assert turn.done.report.queue_wait_s == 0.0
    assert turn.tokens == kit.reference(big.tolist(), 4)
    assert world.engine.metrics().get("preemptions_total", 0.0) == 0.0


def test_same_seed_same_journal(kit: SimpleNamespace) -> None:
    """Determinism: two runs of one seed write the same journal."""
    journals = []
    for _ in range(2):
        world = kit.world("tenuto")
        run_agents(kit, world, 11, "on")
        journals.append(list(world.engine.core.journal))
    assert journals[0] == journals[1]
    assert len(journals[0]) > 20
