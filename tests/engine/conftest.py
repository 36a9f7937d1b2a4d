"""Worlds for engine tests: the real engine under virtual time, over an executor whose toy KV shows every wrong byte."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.integrity import check
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import Fault, NullExecutor
from tenuto_server.sim.world import World

BLOCK = 4
IDENTITY = RootIdentity("weights", "", "fp32", 1, BLOCK, b"0123456789abcdef")
VOCAB = 50


def reference(prompt: list[int], count: int, seed: int = 0, temperature: float = 0.0) -> list[int]:
    """Greedy (or seeded) tokens after a prompt, from fresh uncached rows."""
    machine = NullExecutor(block_tokens=BLOCK, vocab=VOCAB)
    tokens, out = list(prompt), []
    for draw in range(count):
        blocks = np.arange(-(-len(tokens) // BLOCK), dtype=np.int32)
        sampling = Sampling(count, temperature=temperature, seed=seed)
        row = ForwardRow(1, 0, np.array(tokens, np.int32), blocks, True, sampling, draw)
        token = machine.run(ForwardPlan(draw, (row,))).sampled[0][1]
        out.append(token)
        tokens.append(token)
    return out


def make_world(
    policy: str,
    fault: Callable[[Transfer], Fault | None] | None = None,
    *,
    device: int = 48,
    host: int = 64,
    disk: int = 64,
    step_tokens: int = 24,
    running: int = 4,
    **settings: float,
) -> World:
    cache = CacheConfig(device, host, disk, BLOCK, 400, 64, 8, 6, transfer_patience_s=0.5)
    config = EngineConfig(
        cache=cache,
        policy=policy,
        max_context_tokens=4096,
        step_tokens_max=step_tokens,
        running_max=running,
        reserve_tokens_max=16,
        prefill_a_s=1e-3,
        prefill_b_s=1e-6,
        host_bytes_per_s=2e4,
        disk_bytes_per_s=5e3,
        block_bytes=64,
        restore_deadline_factor=8.0,
        **{"hint_rate_per_s": 1e6, "hint_burst": 10**6, **settings},
    )
    engine = Engine(config, make_policy(policy), IDENTITY)
    machine = NullExecutor(block_tokens=BLOCK, vocab=VOCAB, fault=fault)
    rate = {"host": 2e4, "disk": 5e3, "device": 1e9}

    def transfer_s(transfer: Transfer) -> float:
        return len(transfer.src_slots) * 64 / min(rate[transfer.src], rate[transfer.dst])

    return World(
        engine,
        machine,
        forward_s=lambda plan: sum(len(row.tokens) for row in plan.rows) * 1e-3 + 1e-3,
        transfer_s=transfer_s,
        after_step=lambda: check(engine.core.cache, deep=True),
    )


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What engine tests build from."""
    return SimpleNamespace(world=make_world, reference=reference, vocab=VOCAB, block=BLOCK)
