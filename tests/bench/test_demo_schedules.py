"""A recording in virtual time: seconds worked out by hand, the same schedule for every arm, hints that arrive."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tenuto_server.bench.demo_arms import Sizes
from tenuto_server.bench.demo_recording import PauseStep, RecordedSession, Recording, TurnStep
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.sim.costs import Machine

ROOT = Path(__file__).resolve().parents[2]
TOKEN_BYTES, SPEED = 100, 1000.0


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_schedules", ROOT / "bench" / "demo_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_schedules"] = module
    spec.loader.exec_module(module)
    return module


def session(name: str, start_s: float) -> RecordedSession:
    turns = [TurnStep(0, ({"role": "user", "content": name},), "", {}, 0, 1, 0.0) for _ in range(2)]
    pause = PauseStep("tool", 2.0, "bash", {"command": "make"})
    return RecordedSession(name, start_s, None, name, (turns[0], pause, turns[1]), start_s + 3.0)


@pytest.fixture
def scene(script: ModuleType) -> object:
    """Two sessions of two turns; prompts of 100 and, behind the answer, 116 tokens; room for all of them."""
    told = {}
    for number, name in enumerate(("a", "b")):
        ids = np.arange(1000 * number, 1000 * number + 116, dtype=np.int32)
        told[name, 0] = script.Told(ids[:100], (int(ids[100]),), "user")
        told[name, 1] = script.Told(ids, (7,), "tool")
    machine = Machine("t", 1 / SPEED, 0.0, script.DECODE_S, TOKEN_BYTES, 1e12, 1e6, 1e6, "by hand")
    config = EngineConfig(CacheConfig(64), prefill_a_s=1 / SPEED, speculate_tokens_max=0, block_bytes=16 * TOKEN_BYTES)
    sizes = Sizes(0, 0, 0, 0, 0, TOKEN_BYTES, SPEED, 0.0, 0)
    recording = Recording({"a": session("a", 0.0), "b": session("b", 0.05)})
    return script.Scene(recording, told, sizes, config, machine)


def playing(script: ModuleType, scene: object, arm: str, number: int, jitter: float) -> Any:
    return script.Playing(scene, arm, lambda what: random.Random(f"{number}/{what}"), jitter, True)


def test_seconds_by_hand(script: ModuleType, scene: object) -> None:
    played = playing(script, scene, "lru", 0, 0.0)
    # Two prompts of 100 tokens, and twice 16 behind what is known: 100 + 116 - 100 each.
    assert played.run() == 232.0
    ttft = {(row.session, row.turn): row.ttft_s for row in played.rows}
    way_s = 2 * script.HTTP_S
    assert ttft["a", 0] == pytest.approx(0.1 + way_s)
    # It comes 50 ms after the other, whose forward keeps the engine for 50 ms more.
    assert ttft["b", 0] == pytest.approx(0.05 + 0.1 + way_s)
    # 16 tokens take no less than a forward of few.
    assert ttft["a", 1] == pytest.approx(script.DECODE_S + way_s)
    assert [row.pause_s for row in played.rows if row.turn] == pytest.approx([2.0, 2.0])
    assert [row.cached for row in played.rows if row.turn] == [{"device": 100}] * 2


def test_a_schedule_is_the_same_for_every_arm_and_differs_from_the_next(script: ModuleType, scene: object) -> None:
    lengths = {}
    for arm, number in (("lru", 1), ("tenuto", 1), ("lru", 2)):
        played = playing(script, scene, arm, number, 0.3)
        played.run()
        lengths[arm, number] = [row.pause_s for row in played.rows if row.turn]
    assert lengths["lru", 1] == pytest.approx(lengths["tenuto", 1])
    assert lengths["lru", 1] != pytest.approx(lengths["lru", 2])


def test_hints_arrive_and_are_counted_as_the_sdk_counts_them(script: ModuleType, scene: object) -> None:
    played = playing(script, scene, "tenuto", 0, 0.0)
    played.run()
    stats = played.sender.stats
    assert (stats.queued, stats.dropped, stats.failed, stats.cancelled) == (0, 0, 0, 0)
    # Of each session: it opens, pauses and ends.
    assert stats.offered == stats.sent + stats.carried == 6
    assert played.world.engine.core.labelled["hints"]["accepted"] == 6
    assert playing(script, scene, "lru", 0, 0.0).sender is None
