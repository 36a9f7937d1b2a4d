"""What the engine itself costs: a decision about one of many paused sessions, and a step of 64 decoding turns.

``python bench/engine_cost.py [--sessions 100,1000,10000,100000] [--running 64]``. The real engine over a device too small
for all contexts; whatever it plans succeeds at once, so that nothing but the control plane is measured. Figures are CPU
time of the thread in microseconds, less the cost of reading the clock: other processes do not count.

A *decision* is one step with one event about one paused session: what the server reads off an answer (``inferred``), or a
harness's forecast (``hint``: parsing the envelope and its receipt included). A *timer* is one evaluation that fell due. A
*step* takes the tokens of 64 decoding turns and plans the next batch of as many rows, each with a context of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "harness"), str(ROOT / "server")]

import numpy as np  # noqa: E402

from tenuto.wire import AgentPause, Envelope, Forecast, PauseKind  # noqa: E402
from tenuto_server.cache.identity import RootIdentity  # noqa: E402
from tenuto_server.config import CacheConfig, EngineConfig  # noqa: E402
from tenuto_server.engine.engine import Engine  # noqa: E402
from tenuto_server.engine.events import Event, ForwardDone, HintBatch, PauseInferred, Sampling, SubmitTurn  # noqa: E402
from tenuto_server.engine.plan import ForwardPlan, StepPlan  # noqa: E402
from tenuto_server.policy import make_policy  # noqa: E402

SECOND_NS = 1_000_000_000
BLOCK_TOKENS = 16
PAUSED_BLOCKS, RUNNING_BLOCKS = 8, 128
"""Contexts of paused and of running sessions."""
DEVICE_SHARE = 0.9
"""Of all contexts so much fits the device: decisions meet prices, and steps evict."""
TENANTS = 5
PAUSES: tuple[tuple[PauseKind, str | None], ...] = (
    ("tool", "bash"),
    ("tool", "read"),
    ("tool", "edit"),
    ("human", None),
)


class Rig:
    """An engine with ``sessions`` paused at random times; ``running`` further turns may decode beside them."""

    def __init__(self, sessions: int, running: int) -> None:
        self.rnd = random.Random(1)
        self.now_ns = 0
        self.flying: ForwardPlan | None = None
        self.names = [(f"tenant {i % TENANTS}", f"s{i}") for i in range(sessions)]
        blocks = int(DEVICE_SHARE * sessions * PAUSED_BLOCKS) + 2 * running * RUNNING_BLOCKS
        config = EngineConfig(
            cache=CacheConfig(device_blocks=blocks, block_tokens=BLOCK_TOKENS),
            running_max=running,
            step_tokens_max=8192,
            sessions_per_tenant_max=sessions + running,
            hint_rate_per_s=1e9,
            hint_burst=1 << 30,
            journal_entries_max=1000,
        )
        self.engine = Engine(
            config, make_policy("tenuto"), RootIdentity("bench", "", "none", 1, BLOCK_TOKENS, bytes(16))
        )
        self._ids = 0
        for first in range(0, sessions, running):
            for tenant, name in self.names[first : first + running]:
                self.now_ns += int(self.rnd.expovariate(sessions / 600.0) * SECOND_NS)
                self.step([self.turn(tenant, name, PAUSED_BLOCKS * BLOCK_TOKENS - 8, 1)])
            self.rest()
            self.step([self.inferred(*pair) for pair in self.names[first : first + running]])

    def turn(self, tenant: str, name: str, prompt: int, answer: int) -> SubmitTurn:
        """A request whose prompt nobody shares."""
        self._ids += prompt
        tokens = np.arange(self._ids, self._ids + prompt, dtype=np.int32)
        return SubmitTurn(f"r{self._ids}", tenant, tokens, Sampling(answer, ignore_eos=True), session=name)

    def inferred(self, tenant: str, name: str) -> PauseInferred:
        """What a server reads off the answer."""
        kind, tool = self.rnd.choice(PAUSES)
        return PauseInferred(tenant, name, kind, tool)

    def hint(self, tenant: str, name: str, number: int) -> HintBatch:
        """A harness's forecast of the pause."""
        p50_s = math.exp(self.rnd.gauss(math.log(10.0), 1.2))
        said = Forecast(p50_s=p50_s, p90_s=3.0 * p50_s)
        pause = AgentPause(session=name, seq=number, kind="tool", tool="bash", forecast=said)
        return HintBatch(f"h{number}", tenant, Envelope.of([pause]))

    def step(self, events: Sequence[Event]) -> StepPlan:
        """One step at the present time; the forward it plans stays in flight."""
        plan = self.engine.step(self.now_ns, events)
        self.flying = plan.forward or self.flying
        return plan

    def done(self) -> list[Event]:
        """The forward in flight has come back."""
        plan, self.flying = self.flying, None
        return [ForwardDone(plan.step, tuple((row.seq, 7) for row in plan.rows if row.sample))] if plan else []

    def rest(self) -> None:
        """Runs until no turn is left."""
        while self.flying is not None:
            self.step(self.done())


def measured(call: Callable[[], object]) -> float:
    """Microseconds of CPU time that a call takes."""
    began = time.thread_time_ns()
    call()
    taken = time.thread_time_ns() - began
    return (taken - CLOCK_NS) / 1e3


def _clock_ns() -> float:
    return sorted(-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(2001))[1000]


CLOCK_NS = _clock_ns()


def summary(name: str, sessions: int, taken: list[float]) -> str:
    """One line of the table."""
    taken.sort()
    return f"{name:12}{sessions:>10,}{taken[len(taken) // 2]:>12.1f}{taken[len(taken) * 99 // 100]:>12.1f}"


def decisions(rig: Rig, count: int) -> dict[str, list[float]]:
    """Times of single decisions, at one moment so that no other falls due meanwhile; then of the timers of half a minute."""
    chosen = [rig.rnd.choice(rig.names) for _ in range(count)]
    rig.step([])  # what is due is served before
    inferred = [rig.inferred(*pair) for pair in chosen]
    hints = [rig.hint(*pair, number) for number, pair in enumerate(chosen, 1)]
    taken = {
        "inferred": [measured(partial(rig.step, [event])) for event in inferred],
        "hint": [measured(partial(rig.step, [event])) for event in hints],
        "timer": [],
    }
    journal = rig.engine.core.journal
    until_ns = rig.now_ns + 30 * SECOND_NS
    while len(taken["timer"]) < count:
        wake_ns = rig.step([]).wake_ns
        if wake_ns is None or wake_ns > until_ns:
            break
        rig.now_ns, before = wake_ns, journal.count
        took = measured(partial(rig.step, []))
        due = journal.count - before
        taken["timer"] += [took / due] * due
    return taken


def steps(rig: Rig, running: int, count: int) -> list[float]:
    """Times of steps with ``running`` turns decoding."""
    for number in range(running):
        rig.step(
            [rig.turn(f"tenant {number % TENANTS}", f"run {number}", RUNNING_BLOCKS * BLOCK_TOKENS, count + running)]
        )
    taken = []
    while len(taken) < count:
        events = rig.done()
        rig.now_ns += SECOND_NS // 100
        full = rig.engine.core.counters["decode_tokens"]
        took = measured(partial(rig.step, events))
        if rig.engine.core.counters["decode_tokens"] - full == running:
            taken.append(took)
    return taken


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="100,1000,10000,100000")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--count", type=int, default=2000, help="events of each kind (default %(default)s)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}; microseconds of CPU time")
    print(f"{'':12}{'sessions':>10}{'median':>12}{'p99':>12}", flush=True)
    for sessions in (int(text) for text in args.sessions.split(",")):
        rig = Rig(sessions, args.running)
        gc.freeze()
        for name, taken in decisions(rig, args.count).items():
            if taken:
                print(summary(name, sessions, taken), flush=True)
        print(summary(f"step of {args.running}", sessions, steps(rig, args.running, args.count // 4)), flush=True)


if __name__ == "__main__":
    main()
