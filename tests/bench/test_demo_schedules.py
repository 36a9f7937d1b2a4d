"""A recording in virtual time: seconds worked out by hand, the same schedule for every arm, hints that arrive."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tenuto_server.bench import demo_schedules as schedules
from tenuto_server.bench.demo_arms import Sizes
from tenuto_server.bench.demo_recording import PauseStep, RecordedSession, Recording, TurnStep
from tenuto_server.bench.report_table import schedule_lines
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.sim.costs import Machine

TOKEN_BYTES, SPEED = 100, 1000.0


def session(name: str, start_s: float) -> RecordedSession:
    turns = [TurnStep(0, ({"role": "user", "content": name},), "", {}, 0, 1, 0.0) for _ in range(2)]
    pause = PauseStep("tool", 2.0, "bash", {"command": "make"})
    return RecordedSession(name, start_s, None, name, (turns[0], pause, turns[1]), start_s + 3.0)


@pytest.fixture
def scene() -> schedules.Scene:
    """Two sessions of two turns; prompts of 100 and, behind the answer, 116 tokens; room for all of them."""
    told = {}
    for number, name in enumerate(("a", "b")):
        ids = np.arange(1000 * number, 1000 * number + 116, dtype=np.int32)
        told[name, 0] = schedules.Told(ids[:100], (int(ids[100]),), "user")
        told[name, 1] = schedules.Told(ids, (7,), "tool")
    machine = Machine("t", 1 / SPEED, 0.0, schedules.DECODE_S, TOKEN_BYTES, 1e12, 1e6, 1e6, "by hand")
    config = EngineConfig(CacheConfig(64), prefill_a_s=1 / SPEED, speculate_tokens_max=0, block_bytes=16 * TOKEN_BYTES)
    sizes = Sizes(0, 0, 0, 0, 0, TOKEN_BYTES, SPEED, 0.0, 0)
    recording = Recording({"a": session("a", 0.0), "b": session("b", 0.05)})
    return schedules.Scene(recording, told, sizes, config, machine)


def playing(scene: schedules.Scene, arm: str, number: int, jitter: float) -> Any:
    return schedules.Playing(scene, arm, lambda what: random.Random(f"{number}/{what}"), jitter, True)


def test_seconds_by_hand(scene: schedules.Scene) -> None:
    played = playing(scene, "lru", 0, 0.0)
    # Two prompts of 100 tokens, and twice 16 behind what is known: 100 + 116 - 100 each.
    assert played.run() == 232.0
    ttft = {(row.session, row.turn): row.ttft_s for row in played.rows}
    way_s = 2 * schedules.HTTP_S
    assert ttft["a", 0] == pytest.approx(0.1 + way_s)
    # It comes 50 ms after the other, whose forward keeps the engine for 50 ms more.
    assert ttft["b", 0] == pytest.approx(0.05 + 0.1 + way_s)
    # 16 tokens take no less than a forward of few.
    assert ttft["a", 1] == pytest.approx(schedules.DECODE_S + way_s)
    assert [row.pause_s for row in played.rows if row.turn] == pytest.approx([2.0, 2.0])
    assert [row.cached for row in played.rows if row.turn] == [{"device": 100}] * 2


def test_a_schedule_is_the_same_for_every_arm_and_differs_from_the_next(scene: schedules.Scene) -> None:
    lengths = {}
    for arm, number in (("lru", 1), ("tenuto", 1), ("lru", 2)):
        played = playing(scene, arm, number, 0.3)
        played.run()
        lengths[arm, number] = [row.pause_s for row in played.rows if row.turn]
    assert lengths["lru", 1] == pytest.approx(lengths["tenuto", 1])
    assert lengths["lru", 1] != pytest.approx(lengths["lru", 2])


def test_hints_arrive_and_are_counted_as_the_sdk_counts_them(scene: schedules.Scene) -> None:
    played = playing(scene, "tenuto", 0, 0.0)
    played.run()
    stats = played.sender.stats
    assert (stats.queued, stats.dropped, stats.failed, stats.cancelled) == (0, 0, 0, 0)
    # Of each session: it opens, pauses and ends.
    assert stats.offered == stats.sent + stats.carried == 6
    assert played.world.engine.core.labelled["hints"]["accepted"] == 6
    assert playing(scene, "lru", 0, 0.0).sender is None


def test_ratios_are_of_the_same_schedule_and_of_all_turns_as_one() -> None:
    def played(*ttft_s: float, prefilled: float) -> schedules.Pass:
        return schedules.Pass(ttft_s, tuple(0.0 for _ in ttft_s), prefilled)

    slow = [played(1.0, 3.0, prefilled=100.0), played(2.0, 4.0, prefilled=200.0)]
    fast = [played(0.5, 1.5, prefilled=50.0), played(4.0, 8.0, prefilled=150.0)]
    compared = schedules.compare({"lru": slow, "tenuto:none": slow, "tenuto": fast})
    ratios = compared["tenuto / lru"]
    assert ratios["prefilled"] == [0.5, 0.75]
    assert ratios["ttft_mean"] == pytest.approx([0.5, 2.0])
    # Two values a and b: a + 0.9 (b - a). Of four in order the one at 2.7: the third and 0.7 of the way to the fourth.
    assert ratios["ttft_p90"] == pytest.approx([1.4 / 2.8, 7.6 / 3.8])
    assert ratios["pooled_p90"] == pytest.approx((4.0 + 0.7 * 4.0) / (3.0 + 0.7))
    assert "below 1 in 50%" in schedule_lines(compared)[0]
    assert schedules.figures({"tenuto": fast})["tenuto"]["prefilled"] == 100.0
