"""The simulator's agents in real time: the engine's own thread and a real model, where ``sim.world`` has virtual time.

``LiveWorld`` owns the schedule of what the agents do; they run on the caller's thread only. ``StepLog`` owns what the engine
was given, step by step. Answers are scripted, so that both worlds send the same prompts: the model computes every token and
what it would have said is dropped.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Event, ForwardDone, SubmitTurn
from tenuto_server.engine.loop import EngineLoop
from tenuto_server.engine.plan import (
    ForwardPlan,
    Output,
    StepPlan,
    TokensOut,
    Transfer,
    TurnDone,
    TurnRejected,
    TurnStarted,
)
from tenuto_server.errors import TenutoServerError
from tenuto_server.runtime.executor import TorchExecutor
from tenuto_server.sim.world import Turn

Step = tuple[int, tuple[Event, ...]]
_POLL_S = 0.5


class StepLog:
    """An engine that remembers every call: what ``EngineLoop`` sees in place of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self._engine = engine

    def step(self, now_ns: int, events: Sequence[Event]) -> StepPlan:
        """As ``Engine.step``."""
        self.steps.append((now_ns, tuple(events)))
        return self._engine.step(now_ns, events)

    def metrics(self) -> Mapping[str, float | dict[str, float]]:
        """As ``Engine.metrics``."""
        return self._engine.metrics()


class ScriptedExecutor:
    """A real executor whose answers are given. ``answers``: by sampling seed, the id of an answer's first token, which then
    counts up (as ``SimMachine``). Ids beyond the model's vocabulary are folded into it."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.answers: dict[int, int] = {}
        self._executor = executor
        self._vocabulary = executor.transformer.config.vocab_size
        self.set_sink, self.forget_disk = executor.set_sink, executor.forget_disk
        self.health, self.close = executor.health, executor.close

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Computes everything; says what the script says."""
        rows = tuple(row._replace(tokens=row.tokens % self._vocabulary) for row in plan.rows)
        done = self._executor.run(replace(plan, rows=rows))
        sampled = tuple((row.seq, self.answers[row.sampling.seed] + row.draw) for row in plan.rows if row.sample)
        return replace(done, sampled=sampled)

    def submit(self, transfer: Transfer) -> None:
        """Starts a copy."""
        self._executor.submit(transfer)


class LiveWorld:
    """``submit``, ``at`` and ``soon`` as in ``World``; ``run`` plays until the time is reached or nothing is left."""

    def __init__(self, loop_of: Callable[[Callable[[], int]], EngineLoop]) -> None:
        self._began_ns = time.monotonic_ns()
        self._loop = loop_of(self._clock_ns)
        self._schedule: list[tuple[int, int, Event]] = []
        self._order = 0
        self._turns: dict[str, tuple[Turn, Callable[[Turn], None] | None]] = {}
        self._heard: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()

    def _clock_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    @property
    def now_ns(self) -> int:
        """Real time since the start."""
        return self._clock_ns()

    def at(self, time_s: float, event: Event) -> None:
        """Hands an event to the engine at that time."""
        self._order += 1
        heapq.heappush(self._schedule, (int(time_s * 1e9), self._order, event))

    def soon(self, event: Event) -> None:
        """Hands an event to the engine now."""
        self._loop.post(event)

    def submit(self, turn: SubmitTurn, *, in_s: float = 0.0, then: Callable[[Turn], None] | None = None) -> Turn:
        """Sends a request ``in_s`` seconds from now; ``then`` is called, on the thread of ``run``, when it has ended."""
        record = Turn(turn.request_id)
        self._turns[turn.request_id] = record, then
        self.at(self.now_ns / 1e9 + in_s, turn)
        return record

    def run(self, until_s: float) -> None:
        """Plays. Raises ``TenutoServerError`` when the engine stops by itself."""
        self._loop.start()
        try:
            while (now_ns := self.now_ns) < until_s * 1e9:
                while self._schedule and self._schedule[0][0] <= now_ns:
                    self._send(heapq.heappop(self._schedule)[2])
                due_s = (self._schedule[0][0] - self.now_ns) / 1e9 if self._schedule else _POLL_S
                try:
                    self._hear(*self._heard.get(timeout=max(0.0, min(_POLL_S, due_s))))
                except queue.Empty:
                    if not self._loop.healthy:
                        raise TenutoServerError(f"the engine stopped: {self._loop.snapshot()['dead_reason']}") from None
        finally:
            self._loop.stop(30.0)

    def _send(self, event: Event) -> None:
        if isinstance(event, SubmitTurn):
            self._turns[event.request_id][0].submitted_ns = self.now_ns
            self._loop.submit(event, lambda output: self._heard.put((self._clock_ns(), output)))
        else:
            self._loop.post(event)

    def _hear(self, at_ns: int, output: Output) -> None:
        match output:
            case TurnStarted():
                self._turns[output.request_id][0].started = output
            case TokensOut():
                turn = self._turns[output.request_id][0]
                if turn.first_token_ns is None:
                    turn.first_token_ns = at_ns
            case TurnDone() | TurnRejected():
                turn, then = self._turns.pop(output.request_id)
                if isinstance(output, TurnDone):
                    turn.done = output
                else:
                    turn.rejected = output
                if then is not None:
                    then(turn)
