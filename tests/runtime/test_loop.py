"""EngineLoop around a small engine that generates ``max_tokens`` tokens per turn, one forward each."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from tenuto.wire import Envelope
from tenuto_server.engine.events import (
    CancelTurn,
    Event,
    ForwardDone,
    HintBatch,
    QuerySessions,
    Sampling,
    SubmitTurn,
    TransferDone,
)
from tenuto_server.engine.loop import EngineDead, EngineLoop, InboxFull
from tenuto_server.engine.plan import (
    ForwardPlan,
    ForwardRow,
    HintsDone,
    Output,
    Report,
    SessionsOut,
    StepPlan,
    TokensOut,
    Transfer,
    TurnDone,
    TurnStarted,
)
from tenuto_server.errors import InvariantBroken
from tenuto_server.runtime.null import NullExecutor


class SmallEngine:
    """Each turn owns the block of its number; a failed forward is simply planned again."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.steps: list[int] = []
        self.turns: dict[str, tuple[SubmitTurn, int]] = {}
        self.transfers: list[Transfer] = []
        self.dropped: tuple[int, ...] = ()
        self.wake_ns: int | None = None
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()

    def step(self, now_ns: int, events: Sequence[Event]) -> StepPlan:
        assert self.gate.wait(10)
        self.steps.append(now_ns)
        self.seen.extend(events)
        if self.broken:
            raise InvariantBroken("two owners of one block")
        outputs: list[Output] = []
        for event in events:
            outputs.extend(self.take(event))
        transfers, self.transfers = tuple(self.transfers), []
        dropped, self.dropped = self.dropped, ()
        rows = tuple(
            ForwardRow(seq, 0, turn.tokens, np.array([seq], np.int32), True, turn.sampling)
            for seq, (turn, _) in enumerate(self.turns.values())
        )
        forward = ForwardPlan(len(self.steps), rows) if rows else None
        return StepPlan(forward, transfers, tuple(outputs), self.wake_ns, dropped)

    def take(self, event: Event) -> list[Output]:
        match event:
            case SubmitTurn():
                self.turns[event.request_id] = (event, 0)
                return [TurnStarted(event.request_id, "s", Report())]
            case CancelTurn():
                self.turns.pop(event.request_id, None)
                return [TurnDone(event.request_id, "cancelled", 0, Report())]
            case HintBatch():
                return [HintsDone(event.ticket, ())]
            case QuerySessions():
                return [SessionsOut(event.ticket, ())]
            case ForwardDone(failed=None):
                outputs: list[Output] = []
                for (name, (turn, made)), (_, token) in zip(list(self.turns.items()), event.sampled, strict=False):
                    outputs.append(TokensOut(name, (token,)))
                    self.turns[name] = (turn, made + 1)
                    if made + 1 == turn.sampling.max_tokens:
                        del self.turns[name]
                        outputs.append(TurnDone(name, "length", made + 1, Report()))
                return outputs
        return []

    def metrics(self) -> dict[str, float | dict[str, float]]:
        return {"steps_seen": float(len(self.steps))}


class Collected:
    """A ``deliver`` that lets a test wait for the last output."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ended = threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        if isinstance(output, TurnDone | HintsDone | SessionsOut):
            self.ended.set()

    def wait(self) -> list[Output]:
        assert self.ended.wait(10)
        return self.outputs


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def turn(name: str, count: int = 3) -> SubmitTurn:
    return SubmitTurn(name, "t", np.arange(1, 5, dtype=np.int32), Sampling(max_tokens=count))


@pytest.fixture
def engine():
    return SmallEngine()


@pytest.fixture
def loop(engine):
    loop = EngineLoop(engine, NullExecutor(), inbox_max=4)
    loop.start()
    yield loop
    engine.gate.set()
    assert loop.stop(10)


def test_outputs_reach_their_own_turn_in_order(loop):
    sinks = {name: Collected() for name in "abc"}
    for number, (name, sink) in enumerate(sinks.items()):
        loop.submit(turn(name, number + 1), sink)
    for number, (name, sink) in enumerate(sinks.items()):
        outputs = sink.wait()
        assert {output.request_id for output in outputs} == {name}
        kinds = [type(output) for output in outputs]
        assert kinds == [TurnStarted, *[TokensOut] * (number + 1), TurnDone]
    assert loop.healthy
    assert loop.snapshot()["turns_open"] == 0


def test_requests_are_answered_once_under_their_ticket(loop):
    hints, sessions = Collected(), Collected()
    loop.request(HintBatch("1", "t", Envelope()), hints)
    loop.request(QuerySessions("2", "t"), sessions)
    assert hints.wait() == [HintsDone("1", ())]
    assert sessions.wait() == [SessionsOut("2", ())]


def test_a_full_inbox_refuses_turns_and_requests_but_never_posts(loop, engine):
    engine.gate.clear()
    sink = Collected()
    loop.post(TransferDone(1, ok=True))
    until(lambda: loop.snapshot()["inbox_depth"] == 0)
    for number in range(4):
        loop.submit(turn(f"r{number}", 1), Collected() if number else sink)
        loop.request(QuerySessions(f"q{number}", "t"), lambda output: None)
    with pytest.raises(InboxFull, match="inbox_max 4"):
        loop.submit(turn("one too many"), Collected())
    with pytest.raises(InboxFull):
        loop.request(QuerySessions("one too many", "t"), Collected())
    for number in range(100):
        loop.post(CancelTurn(f"x{number}"))
    assert loop.snapshot()["refused"] == 2
    assert loop.snapshot()["inbox_depth"] == 108
    engine.gate.set()
    sink.wait()
    again = Collected()
    loop.submit(turn("one too many", 1), again)
    again.wait()


def test_one_name_cannot_be_open_twice(loop, engine):
    engine.gate.clear()
    loop.submit(turn("a"), Collected())
    loop.request(QuerySessions("a", "t"), Collected())
    with pytest.raises(ValueError, match="already open"):
        loop.submit(turn("a"), Collected())
    with pytest.raises(ValueError, match="already open"):
        loop.request(QuerySessions("a", "t"), Collected())


def test_a_broken_invariant_ends_every_turn_and_refuses_the_next(loop, engine):
    engine.gate.clear()
    first, query = Collected(), Collected()
    loop.submit(turn("a", 10**6), first)
    loop.request(QuerySessions("q", "t"), query)
    engine.broken = True
    engine.gate.set()
    last = first.wait()[-1]
    assert (last.reason, "two owners" in last.error) == ("error", True)
    assert query.wait() == [SessionsOut("q", ())]
    assert loop.stop(10)
    assert not loop.healthy
    assert "two owners" in loop.snapshot()["dead_reason"]
    with pytest.raises(EngineDead, match="two owners"):
        loop.submit(turn("b"), Collected())
    with pytest.raises(EngineDead):
        loop.request(QuerySessions("q2", "t"), Collected())
    loop.post(CancelTurn("a"))


class Flaky(NullExecutor):
    """Fails its first two forwards."""

    error: Exception = RuntimeError("device hiccup")

    def run(self, plan: ForwardPlan) -> ForwardDone:
        if self._figures["forwards"] < 2:
            self._figures["forwards"] += 1
            raise self.error
        return super().run(plan)


def test_a_failed_forward_is_an_event_and_the_engine_goes_on(engine):
    loop = EngineLoop(engine, Flaky(), inbox_max=4)
    loop.start()
    sink = Collected()
    loop.submit(turn("a", 2), sink)
    assert [type(output) for output in sink.wait()] == [TurnStarted, TokensOut, TokensOut, TurnDone]
    assert loop.snapshot()["forwards_failed"] == 2
    assert [e.failed for e in engine.seen if isinstance(e, ForwardDone)][:2] == ["RuntimeError: device hiccup"] * 2
    assert loop.stop(10)


def test_an_executor_that_finds_our_bug_stops_the_engine(engine):
    executor = Flaky()
    executor.error = InvariantBroken("row without blocks")
    loop = EngineLoop(engine, executor, inbox_max=4)
    loop.start()
    sink = Collected()
    loop.submit(turn("a"), sink)
    assert sink.wait()[-1].reason == "error"
    assert loop.stop(10)


def test_a_failing_deliver_harms_nobody_else(loop):
    def refuse(output: Output) -> None:
        raise OSError("the client is gone")

    loop.submit(turn("a", 2), refuse)
    sink = Collected()
    loop.submit(turn("b", 2), sink)
    assert sink.wait()[-1].reason == "length"
    assert loop.snapshot()["deliver_errors"] >= 1


def test_it_sleeps_until_wake_ns_and_does_not_spin(loop, engine):
    time.sleep(0.05)
    before = len(engine.steps)
    time.sleep(0.1)
    assert len(engine.steps) == before
    engine.wake_ns = time.monotonic_ns() + 100_000_000
    wanted = engine.wake_ns
    loop.post(CancelTurn("nobody"))
    time.sleep(0.25)
    woken = [now for now in engine.steps[before + 1 :] if now >= wanted]
    assert woken
    assert woken[0] - wanted < 80_000_000
    assert len(engine.steps) - before < 500


def test_a_stop_ends_what_is_open(loop):
    sink = Collected()
    loop.submit(turn("a", 10**9), sink)
    assert loop.stop(10)
    assert sink.wait()[-1].reason == "cancelled"
    assert not loop.healthy
    with pytest.raises(EngineDead):
        loop.submit(turn("b"), Collected())


def test_a_stop_before_the_start_answers_too(engine):
    loop = EngineLoop(engine, NullExecutor(), inbox_max=4)
    sink = Collected()
    loop.submit(turn("a"), sink)
    assert loop.stop(1)
    assert sink.wait()[-1].reason == "cancelled"


def test_transfers_and_drops_reach_the_executor_and_completions_come_back(engine):
    executor = NullExecutor()
    loop = EngineLoop(engine, executor, inbox_max=4)
    slots = np.array([0], np.int32)
    engine.transfers = [Transfer(7, "device", "disk", slots, slots, b"h" * 16)]
    loop.start()
    until(lambda: TransferDone(7, ok=True) in engine.seen)
    assert executor.holds("disk", 0) == b"h" * 16
    engine.dropped = (0,)
    loop.post(CancelTurn("nobody"))
    until(lambda: executor.holds("disk", 0) is None)
    assert loop.stop(10)
    snapshot = loop.snapshot()
    assert snapshot["executor"]["transfers_done"] == 1
    assert snapshot["engine"]["steps_seen"] >= 1
    assert snapshot["step_overhead_ns"] > 0
