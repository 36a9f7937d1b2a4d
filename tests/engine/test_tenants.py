"""A tenant's share of the memory is its own, whatever the others do: as a property of the engine, and in a simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.wire import AgentPause, Envelope, Forecast
from tenuto_server.engine.events import HintBatch, Sampling, SubmitTurn
from tenuto_server.sim.formats import read
from tenuto_server.sim.knowledge import parse_tenants
from tenuto_server.sim.study import Setup, simulate
from tenuto_server.sim.workload import steady
from tenuto_server.sim.world import World

DEVICE = 80
"""Blocks; a tenant's share of two is half of them."""


def ask(world: World, tenant: str, name: str, prompt: list[int], return_s: float) -> int:
    """One turn, and a pause that is said to last so long; the tokens of the context that is left."""
    turn = SubmitTurn(f"r{len(world.turns)}", tenant, np.array(prompt, np.int32), Sampling(2), session=name)
    record = world.submit(turn)
    world.run()
    pause = AgentPause(session=name, kind="tool", forecast=Forecast(p50_s=return_s, p90_s=1.5 * return_s))
    world.at(world.now_s, HintBatch(f"h{world.steps}", tenant, Envelope.of([pause])))
    world.run()
    return len(prompt) + len(record.tokens) - 1


def on_device(world: World, tenant: str, name: str) -> int:
    session = world.engine.core.sessions.find(tenant, name)
    assert session is not None
    return world.engine.core.cache.resident_tokens(session.handle).get("device", 0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    quiet=st.lists(st.integers(10, 60), min_size=1, max_size=2),
    flood=st.lists(st.tuples(st.integers(0, 5), st.integers(10, 120)), min_size=4, max_size=16),
    patience=st.floats(1.0, 5000.0),
    seed=st.integers(0, 1000),
)
def test_what_fits_a_share_is_not_lost_to_others(
    kit: SimpleNamespace, quiet: list[int], flood: list[tuple[int, int]], patience: float, seed: int
) -> None:
    """Two contexts of 60 tokens fit 40 blocks of 4. The flood says that it is back in a second, which is worth far more."""
    rng = Random(seed)
    world = kit.world("tenuto", device=DEVICE, host=0, disk=0)
    left = {
        f"q{i}": ask(world, "quiet", f"q{i}", [rng.randrange(kit.vocab) for _ in range(length)], patience)
        for i, length in enumerate(quiet)
    }
    for number, length in flood:
        ask(world, "flood", f"f{number}", [rng.randrange(kit.vocab) for _ in range(length)], 1.0)
    shares = world.engine.core.cache.tiers.shares
    assert {name: on_device(world, "quiet", name) for name in left} == left
    assert shares.over(world.engine.core.owner("quiet")) == 0


def test_what_others_do_not_need_may_be_taken(kit: SimpleNamespace) -> None:
    rng = Random(3)
    world = kit.world("tenuto", device=DEVICE, host=0, disk=0)
    ask(world, "small", "s", [rng.randrange(kit.vocab) for _ in range(20)], 60.0)
    left = [ask(world, "large", f"l{i}", [rng.randrange(kit.vocab) for _ in range(90)], 60.0) for i in range(3)]
    assert [on_device(world, "large", f"l{i}") for i in range(3)] == left  # 70 of 80 blocks


def test_a_flood_leaves_a_quiet_tenant_what_its_half_of_the_memory_would_give() -> None:
    """A tenth of the sessions are one tenant's. Beside the flood it hits nearly as much as alone with half of the memory (a
    device of five contexts, one of which runs, is not divided finely), where plain LRU lets it lose far more."""
    trace, seed = read("synthetic:80:3"), 1
    shared = steady(trace, 30.0, seed, window_s=3600.0, warm_up_s=1800.0)
    setup = Setup("tenuto:end", 0.2, seed, tenants="quiet=1,flood=9")
    names, weights = zip(*parse_tenants(setup.tenants), strict=True)
    mine = tuple(
        thread
        for thread in shared.threads
        if Random(f"{seed}/{thread.name}/tenant").choices(names, weights)[0] == "quiet"
    )
    assert 0 < len(mine) < 0.3 * len(shared.threads)
    half = simulate(trace, replace(setup, capacity_frac=0.1, tenants="quiet=1"), replace(shared, threads=mine))
    both = simulate(trace, setup, shared)["hit_rate_by_tenant"]
    plain = simulate(trace, replace(setup, policy="lru"), shared)["hit_rate_by_tenant"]
    assert both["quiet"] >= half["hit_rate_all"] - 0.03
    assert both["quiet"] >= plain["quiet"] + 0.1
    assert both["flood"] < both["quiet"]
