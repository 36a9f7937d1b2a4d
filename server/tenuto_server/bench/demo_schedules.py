"""The demonstration's recording under many schedules, in virtual time: does what hints gain depend on the draw of one?

Agents wait for their answers, so a turn that ends a little sooner moves every later meeting of turns in the queue, and the p90
of one pass is that of some few meetings. Here the same prompts, answers and pauses are played again and again, each time
with every pause a little longer or shorter (log-normal, equal in all arms). Engine, policies, SDK sessions and forecasters are
the real ones, the tiers have the demonstration's sizes and limits; only the arithmetic is left out: a token takes what
it took when the recording was made. As in the server, what happens during a forward is heard when it ends.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import tenuto
from tenuto.sender import BATCH_HINTS_MAX, BUDGET_S, Delivery, HintSender
from tenuto.session_core import Services, SessionCore
from tenuto.telemetry import Telemetry
from tenuto.turn import Turn as Answer
from tenuto.turn import TurnUsage
from tenuto.wire import Envelope
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.bench.demo import FRACTIONS, RECORDED, RECORDING
from tenuto_server.bench.demo_arms import Recorded, Sizes, size_tiers
from tenuto_server.bench.demo_recording import (
    CompactionStep,
    PauseStep,
    RecordedSession,
    Recording,
    TurnStep,
    load_recording,
    longest_context,
    mean_live_tokens,
)
from tenuto_server.bench.report import TurnRow, percentile
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.model.load import load_model
from tenuto_server.sim.costs import Machine
from tenuto_server.sim.scripted import ScriptedWorld, TokenArray, Turn

BLOCK = 16
DECODE_S = 0.02
"""A forward of few tokens, on two CPU cores."""
HTTP_S = 0.003
"""From client to engine, or back."""
JITTER = 0.1
"""Standard deviation of a pause's logarithm."""
ARMS = ("lru", "tenuto:none", "tenuto")
PAIRS = (("tenuto", "lru"), ("tenuto", "tenuto:none"))

Process: TypeAlias = Generator["float | Asked | list[Process]", Any, None]


@dataclass(frozen=True, slots=True)
class Told:
    """What a recorded turn is in tokens."""

    prompt: TokenArray
    answer: tuple[int, ...]
    last_role: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a process waits for."""

    told: Told
    session: str
    parent: str | None
    hints: Envelope | None


@dataclass(frozen=True, slots=True)
class Scene:
    """What all schedules of a recording share."""

    recording: Recording
    told: dict[tuple[str, int], Told]
    sizes: Sizes
    config: EngineConfig
    machine: Machine


class VirtualSender(HintSender):
    """The SDK's sender without its thread: one delivery at a time, each as long as the engine takes to answer it or as the SDK's
    budget lets it. ``waits`` False: as if every answer came at once."""

    def __init__(self, scene: Playing, waits: bool) -> None:
        super().__init__(lambda envelope: self._outcome, clock=lambda: scene.now_ns / 1e9)
        self._scene, self._waits, self._until_ns, self._set_ns = scene, waits, 0, -1
        self._outcome = Delivery(200)

    def _wake(self) -> None:
        due = min((max(hint.due_s, self._blocked_until_s) for hint in self._queue), default=None)
        if due is not None:
            at_ns = max(self._scene.now_ns, self._until_ns, math.ceil(due * 1e9) + 1)
            if not self._scene.now_ns <= self._set_ns <= at_ns:
                self._set_ns = at_ns
                self._scene.at(at_ns, self._pump)

    def _pump(self) -> None:
        self._set_ns = -1
        now_ns = self._scene.now_ns
        if now_ns >= max(self._until_ns, self._blocked_until_s * 1e9):
            batch = self._due(now_ns / 1e9)[: 1 if self._failures else BATCH_HINTS_MAX]
            for hint in batch:
                self._queue.remove(hint)
            if batch:
                self._start(Envelope.of([self._stamp(hint) for hint in batch]))
        self._wake()

    def _start(self, envelope: Envelope) -> None:
        now_ns, limit_ns = self._scene.now_ns, int(BUDGET_S / 2 * 1e9)
        took_ns = max(self._scene.world.busy_ns - now_ns, int(HTTP_S * 1e9)) if self._waits else 0
        self._scene.world.hint(now_ns / 1e9 + HTTP_S, envelope)
        self._outcome = Delivery(0, taken=True) if took_ns > limit_ns else Delivery(200)
        self._until_ns = now_ns + min(limit_ns, took_ns)
        self._scene.at(self._until_ns, lambda: self._end(envelope))

    def _end(self, envelope: Envelope) -> None:
        self._send(envelope)
        self._wake()


class Playing:
    """One arm under one schedule. Owns the agents' timers; ``rows`` is what they saw."""

    def __init__(
        self, scene: Scene, arm: str, rng_of: Callable[[str], random.Random], jitter: float, wait: bool
    ) -> None:
        self._scene, self._jitter, self._rng_of = scene, jitter, rng_of
        self.world = ScriptedWorld(scene.config, arm, scene.machine)
        self.sender = VirtualSender(self, wait) if arm == "tenuto" else None
        self._services = Services(
            self.sender, tenuto.PauseForecaster(), Telemetry(), clock=lambda: self.now_ns / 1e9, default_model="m"
        )
        self.rows: list[TurnRow] = []
        self.started_s: dict[tuple[str, int], float] = {}
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    # ---- time ----------------------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self.world.now_ns

    def at(self, at_ns: int, call: Callable[[], None]) -> None:
        """Has something done on the agents' side."""
        self._order += 1
        heapq.heappush(self._timers, (max(at_ns, self.now_ns), self._order, call))

    def run(self) -> float:
        """Plays to the end; tokens prefilled."""
        for sessions in self._scene.recording.agents.values():
            self._go(self._agent(sessions), None, lambda: None)
        world = self.world
        while True:
            next_ns = world.next_ns
            if self._timers and (next_ns is None or self._timers[0][0] <= next_ns):
                at_ns, _, call = heapq.heappop(self._timers)
                world.now_ns = max(world.now_ns, at_ns)
                call()
            elif next_ns is not None:
                world.advance()
            else:
                return world.prefilled

    def _go(self, process: Process, value: Any, then: Callable[[], None]) -> None:
        """Runs a process until it waits for something."""
        try:
            wanted = process.send(value)
        except StopIteration:
            then()
            return
        match wanted:
            case float():
                self.at(self.now_ns + int(wanted * 1e9), lambda: self._go(process, None, then))
            case Asked():
                self._ask(wanted, lambda turn: self._go(process, turn, then))
            case list():
                self._all(wanted, lambda: self._go(process, None, then))

    def _all(self, processes: list[Process], then: Callable[[], None]) -> None:
        left = len(processes)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for process in processes:
            self._go(process, None, ended)

    def _ask(self, asked: Asked, then: Callable[[Turn], None]) -> None:
        back_ns = int(HTTP_S * 1e9)
        self.world.ask(
            asked.told.prompt,
            asked.told.answer,
            session=asked.session,
            parent=asked.parent,
            last_role=asked.told.last_role,
            hints=asked.hints,
            in_s=HTTP_S,
            then=lambda turn: self.at(self.now_ns + back_ns, lambda: then(turn)),
        )

    # ---- agents, as in the demonstration's replay ----------------------------------------------------------------

    def _jittered(self, seconds: float, what: str) -> float:
        return max(0.0, seconds) * math.exp(self._rng_of(what).gauss(0.0, self._jitter))

    def _agent(self, sessions: Sequence[RecordedSession]) -> Process:
        ended_s = 0.0
        for recorded in sessions:
            yield self._jittered(recorded.start_s - ended_s, f"{recorded.id}/start")
            session = SessionCore(self._services, recorded.id, agent=recorded.agent)
            yield from self._play(session, recorded, "start")
            session.end()
            ended_s = recorded.end_s

    def _play(self, session: SessionCore, recorded: RecordedSession, after: str) -> Process:
        messages: list[dict[str, Any]] = []
        pause_s: float | None = None
        compaction: tenuto.Compaction | None = None
        number = 0
        for position, step in enumerate(recorded.steps):
            match step:
                case TurnStep():
                    messages = [*messages[: step.keep], *step.append]
                    summary = compaction is not None
                    yield from self._turn(
                        session, number, messages, step, "summary" if summary else after, None if summary else pause_s
                    )
                    messages, number = [*messages, {"role": "assistant", "content": step.answer}], number + 1
                case PauseStep():
                    began_ns = self.now_ns
                    yield from self._pause(session, step, position)
                    after, pause_s = step.kind, (self.now_ns - began_ns) / 1e9
                case CompactionStep("begin"):
                    compaction = session.compaction(keep_messages=1, warm=False).__enter__()
                case CompactionStep("commit") if compaction is not None:
                    compaction.commit(recorded.compacted(position, messages))
                    after, pause_s, compaction = "post-compaction", None, None
                case _:
                    pass

    def _pause(self, session: SessionCore, step: PauseStep, position: int) -> Process:
        if not step.children:
            with session.pause(step.kind, name=step.tool, args=step.arguments):
                yield self._jittered(step.duration_s, f"{session.id}/{position}")
            return
        children = [self._scene.recording.sessions[name] for name in step.children]
        plans = session.plan_forks([c.agent or c.id for c in children], when_s=None, model=None, attended=None)
        with session.pause(step.kind):
            yield [
                self._subagent(SessionCore(self._services, **plan), child)
                for plan, child in zip(plans, children, strict=True)
            ]

    def _subagent(self, session: SessionCore, recorded: RecordedSession) -> Process:
        yield from self._play(session, recorded, "subagent")
        session.end()

    def _turn(
        self,
        session: SessionCore,
        number: int,
        messages: list[dict[str, Any]],
        step: TurnStep,
        after: str,
        pause_s: float | None,
    ) -> Process:
        told = self._scene.told[session.id, number]
        pending = session.begin_turn(messages, step.request, stream=True)
        asked_ns = self.now_ns
        done: Turn = yield Asked(told, session.id, session.parent, pending.envelope)
        assert done.done is not None, done.rejected
        assert done.first_token_ns is not None
        report = done.done.report
        answer = {"role": "assistant", "content": step.answer}
        usage = TurnUsage(len(told.prompt), len(told.answer), report.cached_tokens)
        session.finish_turn(pending, Answer(answer, (), "length", usage, None, 0.0))
        self.started_s[session.id, number] = asked_ns / 1e9
        self.rows.append(
            TurnRow(
                session.id,
                number,
                after,
                pause_s,
                len(told.prompt),
                0,
                {str(tier): count for tier, count in report.cached.items()},
                {label: count for label, count in report.recomputed.items() if label != "cold"},
                (done.first_token_ns - asked_ns) / 1e9 + HTTP_S,
                report.queue_wait_s,
                report.restore_wait_s,
            )
        )


def read(
    folder: Path,
    model: str,
    tokens_per_s: float | None = None,
    fractions: tuple[float, float, float] = FRACTIONS,
) -> Scene:
    """A kept recording, in tokens. ``tokens_per_s``: prefill at another speed than the recording's. ``fractions``: device, host
    and disk KV over the mean live KV. Raises ``TraceError`` or ``OSError``."""
    recorded, _ = Recorded.load(folder / RECORDED)
    recorded = replace(recorded, prefill_tokens_per_s=tokens_per_s or recorded.prefill_tokens_per_s)
    recording = load_recording(folder / RECORDING)
    live = mean_live_tokens(recording, recorded.new_tokens)
    sizes = size_tiers(recorded, live, longest_context(recording), fractions)
    block = BLOCK * sizes.token_bytes
    speed = sizes.prefill_tokens_per_s
    machine = Machine(
        "recorded",
        1 / speed,
        0.0,
        DECODE_S,
        sizes.token_bytes,
        1e12,
        float(sizes.host_bandwidth),
        float(sizes.disk_bandwidth),
        "the recording's own pass",
    )
    config = EngineConfig(
        CacheConfig(sizes.device_bytes // block, sizes.host_bytes // block, sizes.disk_bytes // block, BLOCK),
        prefill_a_s=1 / speed,
        prefill_b_s=0.0,
        step_overhead_s=DECODE_S,
        speculate_tokens_max=0,
        host_bytes_per_s=machine.host_bps,
        disk_bytes_per_s=machine.disk_bps,
        block_bytes=block,
    )
    return Scene(recording, tokens(recording, model), sizes, config, machine)


def tokens(recording: Recording, model: str) -> dict[tuple[str, int], Told]:
    """Prompts and answers of all turns as the server makes them, by session and number."""
    loaded = load_model(model)
    builder, found = PromptBuilder(loaded.tokenizer, loaded.chat), {}
    for session in recording.sessions.values():
        messages: list[dict[str, Any]] = []
        turns = [step for step in session.steps if isinstance(step, TurnStep)]
        for number, step in enumerate(turns):
            messages = [*messages[: step.keep], *step.append]
            prompt = builder.chat(messages, step.request.get("tools") or ())
            said = [*loaded.tokenizer.encode(step.answer), *[0] * step.output_tokens][: step.output_tokens]
            builder.remember_answer(prompt, {"role": "assistant", "content": step.answer}, said)
            found[session.id, number] = Told(np.asarray(prompt.tokens, np.int32), tuple(said), prompt.last_role)
            messages = [*messages, {"role": "assistant", "content": step.answer}]
    return found


@dataclass(frozen=True, slots=True)
class Pass:
    """One arm under one schedule: seconds to first token and in the queue of the turns after pauses, and tokens prefilled."""

    ttft_s: tuple[float, ...]
    queue_s: tuple[float, ...]
    prefilled: float

    @property
    def p90_s(self) -> float:
        """Of the time to first token."""
        return percentile(self.ttft_s, 0.9)


def play(scene: Scene, arm: str, number: int, jitter: float, *, patient: bool = False) -> Pass:
    """Schedule ``number``; 0 is the recorded one. The same number is the same schedule for every arm."""
    playing = Playing(
        scene, arm, lambda what: random.Random(f"{number}/{what}"), jitter if number else 0.0, not patient
    )
    prefilled = playing.run()
    rows = [row for row in playing.rows if row.pause_s is not None]
    return Pass(tuple(row.ttft_s for row in rows), tuple(row.queue_wait_s for row in rows), prefilled)


def play_all(scene: Scene, count: int, jitter: float, *, patient: bool = False) -> Iterator[tuple[str, Pass]]:
    """``count`` schedules of every arm, an arm at a time within each."""
    for number in range(count):
        for arm in ARMS:
            yield arm, play(scene, arm, number, jitter, patient=patient)


def compare(passes: Mapping[str, Sequence[Pass]]) -> dict[str, dict[str, Any]]:
    """The ratios of ``PAIRS``: of every schedule, and of the p90 of all its turns taken as one."""
    found = {}
    for arm, base in PAIRS:
        pairs = list(zip(passes[arm], passes[base], strict=True))
        pooled = [percentile([v for one in passes[a] for v in one.ttft_s], 0.9) for a in (arm, base)]
        found[f"{arm} / {base}"] = {
            "prefilled": [one.prefilled / other.prefilled for one, other in pairs],
            "ttft_mean": [statistics.mean(one.ttft_s) / statistics.mean(other.ttft_s) for one, other in pairs],
            "ttft_p90": [one.p90_s / other.p90_s for one, other in pairs],
            "pooled_p90": pooled[0] / pooled[1],
        }
    return found


def figures(passes: Mapping[str, Sequence[Pass]]) -> dict[str, dict[str, float]]:
    """Of every arm over all schedules: tokens prefilled, and seconds to first token and in the queue."""
    found = {}
    for arm, played in passes.items():
        ttft = [value for one in played for value in one.ttft_s]
        found[arm] = {
            "prefilled": statistics.mean(one.prefilled for one in played),
            "ttft_mean_s": statistics.mean(ttft),
            "ttft_p50_s": percentile(ttft, 0.5),
            "ttft_p90_s": percentile(ttft, 0.9),
            "queue_mean_s": statistics.mean(value for one in played for value in one.queue_s),
        }
    return found
