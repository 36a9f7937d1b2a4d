"""What ``attended=false`` gives and takes: agents whom a person watches, beside batch agents that nobody waits for.

    python bench/attended.py                       # both arms in virtual time, a few seeds
    python bench/attended.py --timing h100-8b --watched 24 --batch 48

The engine of the server under virtual time (no model; how long things take is the named machine's), so that the figures do not
depend on what else runs. Watched agents return to a context of theirs with a little that is new and pause between turns;
batch agents send long new prompts almost without a pause. In one arm batch agents say that nobody watches them, in the other
they say nothing; everything else is equal, to the last random number.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field

import numpy as np

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor
from tenuto_server.sim.costs import Clockwork, machine_of
from tenuto_server.sim.world import Turn, World

BLOCK = 16
CONTEXT, NEW, ANSWER = 1500, 200, 60
BATCH_PROMPT, BATCH_ANSWER = 3000, 60
PAUSE_S, BATCH_PAUSE_S = 8.0, 0.2


@dataclass
class Found:
    """Seconds to first token of both kinds, and tokens of prompts and answers that were served, within the time given."""

    watched: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)
    tokens: int = 0
    computed: int = 0


class Scene:
    """One arm: agents over a world, until ``minutes`` of virtual time have passed."""

    def __init__(self, args: argparse.Namespace, seed: int, told: bool) -> None:
        machine = machine_of(args.timing)
        assert machine is not None
        scale = 6.44e-4 / machine.prefill_a_s  # as much load for a machine that is so many times faster
        self._pauses = PAUSE_S / scale, BATCH_PAUSE_S / scale
        self.end_s = args.minutes * 60 / scale
        blocks = (args.watched + args.batch // 2) * (CONTEXT + BATCH_PROMPT) // BLOCK
        config = EngineConfig(
            CacheConfig(blocks, block_tokens=BLOCK),
            prefill_a_s=machine.prefill_a_s,
            prefill_b_s=machine.prefill_b_s,
            block_bytes=BLOCK * machine.kv_bytes,
        )
        identity = RootIdentity("bench", "", "bf16", 1, BLOCK, b"0123456789abcdef")
        engine = Engine(config, make_policy("tenuto"), identity)
        executor = NullExecutor(block_tokens=BLOCK)
        clock = Clockwork(machine, 1, lambda: self.world.now_ns, block_tokens=BLOCK)
        self.world = World(engine, executor, forward_s=clock.forward_s, transfer_s=clock.transfer_s)
        self.found, self._told, self._rng, self._number = Found(), told, random.Random(seed), 0
        for index in range(args.watched):
            self._turn(f"watched-{index}", self._new(CONTEXT), True)
        for index in range(args.batch):
            self._turn(f"batch-{index}", self._new(BATCH_PROMPT), False)
        self.world.run()
        self.found.computed = executor.tokens_computed

    def _new(self, count: int) -> list[int]:
        return [self._rng.randrange(30_000) for _ in range(count)]

    def _turn(self, name: str, prompt: list[int], watched: bool) -> None:
        self._number += 1
        attended = None if watched or not self._told else False
        sampling = Sampling(ANSWER if watched else BATCH_ANSWER)
        turn = SubmitTurn(
            f"{name}-{self._number}", "t", np.array(prompt, np.int32), sampling, session=name, attended=attended
        )
        pause_s = self._pauses[0 if watched else 1] * self._rng.expovariate(1.0)

        def ended(record: Turn) -> None:
            now_s = self.world.now_ns / 1e9
            if now_s > self.end_s:
                return
            assert record.first_token_ns is not None
            times = self.found.watched if watched else self.found.batch
            times.append((record.first_token_ns - record.submitted_ns) / 1e9)
            self.found.tokens += len(prompt) + len(record.tokens)
            again = [*prompt[:CONTEXT], *self._new(NEW)] if watched else self._new(BATCH_PROMPT)
            self._turn(name, again, watched)

        self.world.submit(turn, in_s=pause_s, then=ended)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timing", default="cpu2-smollm2", help="as for tenuto simulate")
    parser.add_argument("--watched", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of virtual time on the CPU preset; less where faster"
    )
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.watched} watched agents, {args.batch} in batch, {args.timing}, {args.seeds} seeds; virtual time")
    print(f"{'batch agents say':22} {'watched p50':>12} {'p90':>8} {'batch p50':>10} {'p90':>8} {'tokens/s':>9}")
    for told in (False, True):
        scenes = [Scene(args, seed, told) for seed in range(args.seeds)]
        watched = [value for scene in scenes for value in scene.found.watched]
        batch = [value for scene in scenes for value in scene.found.batch]
        rate = statistics.mean(scene.found.tokens / scene.end_s for scene in scenes)
        cells = [*_percentiles(watched), *_percentiles(batch)]
        said = "nobody watches" if told else "nothing"
        print(f"{said:22} {cells[0]:>12.3f} {cells[1]:>8.3f} {cells[2]:>10.3f} {cells[3]:>8.3f} {rate:>9.0f}")


def _percentiles(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=10)[-1]


if __name__ == "__main__":
    main()
