"""The world's clock, worked out by hand: when the engine is asked, with and without a thread that forwards keep."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor
from tenuto_server.sim.world import World


def world(*, blocking: bool) -> World:
    engine = Engine(
        EngineConfig(CacheConfig(16, block_tokens=4), policy="lru"),
        make_policy("lru"),
        RootIdentity("world", "", "none", 1, 4, b"0123456789abcdef"),
    )
    return World(engine, NullExecutor(block_tokens=4), forward_s=lambda plan: 1.0, blocking=blocking)


@pytest.mark.parametrize(("blocking", "admitted_s"), [(False, 0.4), (True, 1.0)])
def test_what_happens_during_a_forward(blocking: bool, admitted_s: float) -> None:
    found = world(blocking=blocking)
    turns = [
        found.submit(SubmitTurn(name, "t", np.arange(first, first + 6, dtype=np.int32), Sampling(1)), in_s=in_s)
        for name, first, in_s in (("a", 0, 0.0), ("b", 100, 0.4))
    ]
    found.advance()
    assert found.busy_ns == (1_000_000_000 if blocking else 0)
    assert found.next_ns == int(admitted_s * 1e9)
    found.run()
    # Either way the second forward begins when the first has ended, and takes a second.
    assert [turn.first_token_ns for turn in turns] == [1_000_000_000, 2_000_000_000]
    assert found.steps == (3 if blocking else 4)
    assert found.next_ns is None


def test_a_run_stops_before_a_step_beyond_its_end() -> None:
    found = world(blocking=True)
    turn = SubmitTurn("a", "t", np.arange(6, dtype=np.int32), Sampling(1))
    record = found.submit(turn)
    found.run(until_s=0.5)
    assert (found.now_s, record.first_token_ns) == (0.5, None)
    found.run(until_s=1.5)
    assert (found.now_s, record.first_token_ns) == (1.5, 1_000_000_000)
