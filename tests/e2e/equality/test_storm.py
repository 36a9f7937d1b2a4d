"""Many agents at once over three tiers that are too small for them, on the toy model: no token may differ, whatever is hinted.

The cases of ``test_paths`` meet here in any order: restores under way while blocks are evicted, forks of what is half on disk,
compactions beside preemptions. Virtual time makes a failure repeatable.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentPause,
    AgentResumeSoon,
    AnyAction,
    Envelope,
    Forecast,
    Shared,
)
from tenuto_server.engine.events import HintBatch

SESSIONS, TURNS = 7, 4
BLOCKS_SYSTEM = 3


class Storm:
    """Agents that talk over one ``Lab``. ``delivery``: on, lost (two in five hints never arrive), lying, or off."""

    def __init__(self, lab: Any, seed: int, delivery: str) -> None:
        self.lab, self.rng, self.delivery = lab, random.Random(seed), delivery
        self.system = self.say(16 * BLOCKS_SYSTEM + 5)
        self.seq = self.answered = 0
        self.open: set[str] = set()

    def say(self, most: int) -> list[int]:
        return [self.rng.randrange(3, 512) for _ in range(self.rng.randint(most // 3, most))]

    def turn(self, name: str, prompt: list[int], left: int, parent: str | None = None) -> None:
        count = self.rng.choice([1, 5, 20])
        self.open.add(name)

        def ended(record: Any) -> None:
            assert record.done is not None, record.rejected
            self.lab.verdict.same(prompt, record.tokens, count)
            self.answered += 1
            self.open.discard(name)
            if left > 1:
                self.next(name, [*prompt, *record.tokens], left - 1)

        pause_s = self.rng.choice([0.0, 0.05, 0.5, 3.0])
        self.lab.submit(name, prompt, count, parent=parent, then=ended, in_s=pause_s)

    def next(self, name: str, context: list[int], left: int) -> None:
        lie = self.delivery == "lying"
        median_s = self.rng.choice([0.05, 0.5, 3.0]) * (1000 if lie and self.rng.random() < 0.5 else 1)
        self.hint(AgentPause(session=name, kind="tool", forecast=Forecast(p50_s=median_s)))
        if lie and self.rng.random() < 0.3:
            self.hint(AgentEnd(session=name))
        if self.rng.random() < 0.2:
            self.hint(AgentResumeSoon(session=name, in_s=0.02))
        what = self.rng.random()
        if what < 0.15:
            self.hint(AgentCompaction(session=name, phase="commit", keep=Shared(tokens=len(self.system))))
            context = self.system
        elif what < 0.3:
            context = context[: self.rng.randrange(1, len(context))]
        elif what < 0.45:
            child = f"{name}.{left}"
            self.hint(AgentFork(session=name, child=child))
            self.turn(child, [*context, *self.say(30)], 1, parent=name)
        self.turn(name, [*context, *self.say(40)], left)

    def hint(self, action: AnyAction) -> None:
        self.seq += 1
        if self.delivery == "off" or (self.delivery == "lost" and self.rng.random() < 0.4):
            return
        action = action.model_copy(update={"seq": self.seq})
        self.lab.world.at(self.lab.world.now_s, HintBatch(f"s{self.seq}", "t", Envelope.of([action])))


@pytest.mark.parametrize(
    ("policy", "delivery"),
    [("lru", "off"), ("tenuto:none", "off"), ("tenuto", "on"), ("tenuto", "lost"), ("tenuto", "lying")],
)
def test_no_token_differs(labs: Any, kit: Any, load: Any, tmp_path: Any, policy: str, delivery: str) -> None:
    model = load("toy", "fp32", True)
    verdict = kit.Verdict(kit.Reference(model))
    loaded = 0.0
    for seed in range(3):
        lab = labs(
            verdict,
            model,
            tmp_path / str(seed),
            policy=policy,
            device=28,
            host=24,
            disk=60,
            copy_s={"host": 0.003, "disk": 0.02},
            running_max=4,
            reserve_tokens_max=8,
            hint_rate_per_s=1e6,
            hint_burst=10**6,
        )
        storm = Storm(lab, seed, delivery)
        for number in range(SESSIONS):
            storm.turn(f"s{number}", [*storm.system, *storm.say(90)], TURNS)
        lab.world.run(steps_max=50_000)
        assert not storm.open, f"seed {seed}"
        assert storm.answered == len(lab.world.turns) >= SESSIONS * TURNS
        assert lab.count("cached_tokens_total") > 0
        assert lab.count("evicted_blocks_total") > 0
        moved = lab.engine.metrics()["transferred_blocks_total"]
        loaded += moved.get("host>device", 0) + moved.get("disk>device", 0)
    assert loaded > 0, "nothing ever came back from a lower tier: this was no test of restores"
