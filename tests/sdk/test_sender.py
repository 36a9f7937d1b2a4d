"""The hint sender: order, loss, breaker, riding, timers. Deliveries go to a recording function instead of a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tenuto.fake_server import VirtualClock
from tenuto.keepalive import Keepalive
from tenuto.sender import UNANSWERED_MAX, Delivery, HintSender
from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentKeepalive,
    AgentPause,
    AgentSession,
    AnyAction,
    Envelope,
    Receipt,
)


class Wire:
    """What the sender delivered; ``gate`` holds deliveries back, ``status`` or ``error`` make them fail, ``taken`` leaves
    them without an answer."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.attempts = 0
        self.status = 200
        self.taken = False
        self.error: Exception | None = None
        self.outcome = "accepted"
        self.retry_after_s: float | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, envelope: Envelope) -> Delivery:
        self.attempts += 1
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        if self.taken:
            return Delivery(0, taken=True)
        if self.status != 200:
            return Delivery(self.status, retry_after_s=self.retry_after_s)
        self.envelopes.append(envelope)
        receipts = [
            Receipt.model_validate({"action_id": a.action_id, "outcome": self.outcome}) for a in envelope.actions
        ]
        return Delivery(200, tuple(receipts))

    @property
    def actions(self) -> list[Any]:
        return [item.parse() for envelope in self.envelopes for item in envelope.actions]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def make(wire: Wire) -> Iterator[Callable[..., HintSender]]:
    made: list[HintSender] = []

    def build(**options: Any) -> HintSender:
        made.append(HintSender(wire, **options))
        return made[-1]

    yield build
    wire.gate.set()
    for sender in made:
        sender.close()


def pause(session: str = "s", tool: str = "bash") -> AgentPause:
    return AgentPause(session=session, kind="tool", tool=tool)


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.002)


def test_delivers_in_order_with_rising_numbers(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    for i in range(20):
        sender.offer(pause(tool=f"t{i}"))
    assert sender.flush(5.0)
    assert [a.tool for a in wire.actions] == [f"t{i}" for i in range(20)]
    numbers = [a.seq for a in wire.actions]
    assert numbers == sorted(set(numbers))
    stats = sender.stats
    assert (stats.sent, stats.queued, stats.offered, stats.reachable) == (20, 0, 20, True)
    assert stats.receipts == {"accepted": 20}


def test_flood_drops_the_oldest_and_counts(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make(capacity=10)
    wire.gate.clear()
    sender.offer(pause(tool="first"))
    eventually(lambda: wire.attempts == 1)
    start = time.perf_counter()
    for i in range(1000):
        sender.offer(pause(tool=f"t{i}"))
    assert time.perf_counter() - start < 1.0  # no offer waits for the delivery that hangs
    assert sender.stats.dropped == 990
    wire.gate.set()
    assert sender.flush(5.0)
    assert [a.tool for a in wire.actions] == ["first", *(f"t{i}" for i in range(990, 1000))]
    assert sender.stats.offered == 1001


def test_failed_delivery_is_lost_not_repeated(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make(probe_first_s=0.05)
    wire.error = ConnectionRefusedError()
    sender.offer(pause())
    eventually(lambda: sender.stats.failed == 1)
    assert not sender.stats.reachable
    wire.error = None
    sender.offer(pause(tool="later"))
    eventually(lambda: sender.stats.sent == 1)
    assert [a.tool for a in wire.actions] == ["later"]
    assert sender.stats.reachable


def test_breaker_stays_quiet_and_probes_with_one_hint(make: Callable[..., HintSender], wire: Wire) -> None:
    clock = VirtualClock()
    sender = make(clock=clock)
    wire.error = TimeoutError()
    sender.offer(pause())
    eventually(lambda: sender.stats.failed == 1)
    for _ in range(50):
        sender.offer(pause())
    time.sleep(0.1)
    assert wire.attempts == 1
    assert not sender.flush(5.0)  # gives up at once: the server is away
    clock.advance(1.3)  # the first probe comes after a second, give or take a fifth
    eventually(lambda: wire.attempts == 2)
    time.sleep(0.05)
    assert wire.attempts == 2
    wire.error = None
    clock.advance(2.5)
    eventually(lambda: sender.stats.sent == 49)  # one lost on the first try, one on the probe
    assert sender.stats.failed == 2
    assert sender.stats.offered == 51
    assert len(wire.envelopes[0].actions) == 1
    # Held back for 3.8 s of the clock, and said so.
    assert wire.actions[0].at_s == pytest.approx(3.8)


def test_a_server_that_is_only_slow_to_answer_is_told_everything(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    wire.taken = True
    for number in range(1, UNANSWERED_MAX):
        sender.offer(pause(tool=f"t{number}"))
        eventually(lambda number=number: sender.stats.sent == number)
    wire.taken = False  # an answer in between: it is there
    sender.offer(pause(tool="answered"))
    eventually(lambda: sender.stats.sent == UNANSWERED_MAX)
    wire.taken = True
    sender.offer(pause(tool="again"))
    eventually(lambda: sender.stats.sent == UNANSWERED_MAX + 1)
    assert sender.stats.reachable
    assert sender.stats.failed == 0


def test_a_server_that_never_answers_is_away_in_the_end(make: Callable[..., HintSender], wire: Wire) -> None:
    clock = VirtualClock()
    sender = make(clock=clock)
    wire.taken = True
    for number in range(1, UNANSWERED_MAX):
        sender.offer(pause())
        eventually(lambda number=number: sender.stats.sent == number)
    sender.offer(pause())
    eventually(lambda: sender.stats.failed == 1)
    assert not sender.stats.reachable
    sender.offer(pause())
    clock.advance(0.7)
    time.sleep(0.05)
    assert wire.attempts == UNANSWERED_MAX
    clock.advance(0.6)  # a probe: silence is no answer
    eventually(lambda: sender.stats.failed == 2)
    wire.taken = False
    sender.offer(pause())
    clock.advance(2.5)
    eventually(lambda: sender.stats.reachable)


@pytest.mark.parametrize(
    ("status", "retry_after_s", "quiet_s", "probes_s"),
    [(404, None, 290.0, 15.0), (429, 20.0, 19.0, 2.0), (503, None, 0.7, 0.6)],
)
def test_statuses_that_hold_back(
    make: Callable[..., HintSender],
    wire: Wire,
    status: int,
    retry_after_s: float | None,
    quiet_s: float,
    probes_s: float,
) -> None:
    clock = VirtualClock()
    sender = make(clock=clock)
    wire.status, wire.retry_after_s = status, retry_after_s
    sender.offer(pause())
    eventually(lambda: sender.stats.failed == 1)
    sender.offer(pause())
    clock.advance(quiet_s)
    time.sleep(0.05)
    assert wire.attempts == 1
    clock.advance(probes_s)
    eventually(lambda: wire.attempts == 2)


def test_a_hint_the_server_dislikes_does_not_open_the_breaker(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    wire.status = 400
    sender.offer(pause())
    eventually(lambda: sender.stats.failed == 1)
    wire.status = 200
    sender.offer(pause())
    assert sender.flush(5.0)
    assert sender.stats.sent == 1


def test_deferred_hint_waits_and_can_be_withdrawn(make: Callable[..., HintSender], wire: Wire) -> None:
    clock = VirtualClock()
    sender = make(clock=clock)
    kept = sender.offer(pause(tool="kept"), delay_s=5.0, rides=False)
    gone = sender.offer(pause(tool="gone"), delay_s=5.0, rides=False)
    clock.advance(4.9)
    time.sleep(0.05)
    assert wire.attempts == 0
    assert sender.cancel(gone)
    clock.advance(0.2)
    eventually(lambda: sender.stats.sent == 1)
    assert [a.tool for a in wire.actions] == ["kept"]
    assert wire.actions[0].at_s == pytest.approx(5.1)
    assert not sender.cancel(kept)
    assert sender.stats.cancelled == 1


def test_a_session_opens_before_it_pauses(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    sender.offer(AgentSession(session="a"), delay_s=60.0)
    sender.offer(AgentSession(session="b"), delay_s=60.0)
    sender.offer(pause("a"))
    eventually(lambda: sender.stats.sent == 2)
    assert [(a.TYPE, a.session) for a in wire.actions] == [("agent.session", "a"), ("agent.pause", "a")]
    assert wire.actions[0].seq < wire.actions[1].seq


def test_hints_ride_on_the_request_of_their_session(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    sender.offer(AgentSession(session="a"), delay_s=60.0)
    sender.offer(AgentSession(session="b"), delay_s=60.0)
    sender.offer(AgentSession(session="p"), delay_s=60.0)
    sender.offer(AgentPause(session="a", kind="tool"), delay_s=60.0, rides=False)
    sender.offer(
        AgentCompaction(session="a", phase="commit", request={"messages": ["the prompt itself"]}), delay_s=60.0
    )
    envelope = sender.take("a", "p")
    assert envelope is not None
    actions: list[AnyAction | None] = [item.parse() for item in envelope.actions]
    assert [a.session for a in actions if a] == ["a", "p", "a"]
    assert "the prompt itself" not in envelope.model_dump_json()
    assert sender.take("a") is None
    assert sender.stats.carried == 3
    sender.record_receipts(envelope, (Receipt(action_id=envelope.actions[0].action_id, outcome="deferred"),))
    assert sender.stats.receipts == {"deferred": 1}
    sender.lose_carried(envelope)
    stats = sender.stats
    assert (stats.carried, stats.failed, stats.queued, stats.offered) == (0, 3, 2, 5)


def test_receipts_reach_the_callback(make: Callable[..., HintSender], wire: Wire) -> None:
    seen: list[tuple[str, str]] = []
    sender = make(on_receipt=lambda action, receipt: seen.append((action.session, receipt.outcome)))
    wire.outcome = "missing"
    sender.offer(AgentEnd(session="x"))
    eventually(lambda: seen == [("x", "missing")])

    def broken(action: AnyAction, receipt: Receipt) -> None:
        raise RuntimeError("a callback of ours fails")

    other = make(on_receipt=broken)
    other.offer(AgentEnd(session="x"))
    other.offer(AgentEnd(session="y"))
    eventually(lambda: other.stats.sent == 2)


def test_close_delivers_what_is_due_and_drops_the_rest(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    sender.offer(AgentEnd(session="now"))
    sender.offer(AgentEnd(session="later"), delay_s=60.0)
    sender.close()
    assert [a.session for a in wire.actions] == ["now"]
    assert sender.offer(AgentEnd(session="too late")) is not None
    stats = sender.stats
    assert (stats.sent, stats.dropped, stats.offered) == (1, 2, 3)
    sender.close()


def test_close_does_not_hang_on_a_hanging_server(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()
    wire.gate.clear()
    sender.offer(AgentEnd(session="x"))
    start = time.perf_counter()
    sender.close(timeout_s=0.1)
    assert time.perf_counter() - start < 1.0


def test_keepalive_repeats_until_its_deadline(make: Callable[..., HintSender], wire: Wire) -> None:
    clock = VirtualClock(0.0)
    sender = make(clock=clock)

    def announce(for_s: float) -> None:
        sender.offer(AgentKeepalive(session="s", for_s=for_s))

    handle = Keepalive(announce, start_s=0.0, for_s=100.0, every_s=30.0, budget=None)
    sender.schedule(0.0, handle.tick)
    for sent in range(1, 5):
        eventually(lambda sent=sent: handle.sent == sent)
        clock.advance(30.0)
    time.sleep(0.05)
    assert not handle.active
    assert sender.flush(5.0)
    # Each covers 2.5 intervals, but never beyond the deadline.
    assert [a.for_s for a in wire.actions] == [75.0, 70.0, 40.0, 10.0]


def test_broken_timer_does_not_stop_the_worker(make: Callable[..., HintSender], wire: Wire) -> None:
    sender = make()

    def broken(now_s: float) -> float | None:
        raise RuntimeError("a timer of ours fails")

    sender.schedule(0.0, broken)
    eventually(lambda: sender.stats.failed == 1)
    sender.offer(AgentEnd(session="x"))
    assert sender.flush(5.0)
    assert sender.stats.sent == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"for_s": 0.0}, "positive"),
        ({"for_s": float("inf")}, "finite"),
        ({"every_s": -1.0}, "positive"),
        ({"budget": 0}, "at least 1"),
    ],
)
def test_keepalive_refuses_nonsense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keepalive(lambda _: None, **{"start_s": 0.0, "for_s": 60.0, "every_s": 30.0, "budget": None, **options})


def test_keepalive_budget_and_stop() -> None:
    said: list[float] = []
    handle = Keepalive(said.append, start_s=0.0, for_s=1000.0, every_s=10.0, budget=2)
    assert handle.tick(0.0) == 10.0
    assert handle.tick(10.0) is None
    assert said == [25.0, 25.0]
    assert not handle.active
    with Keepalive(said.append, start_s=0.0, for_s=1000.0, every_s=10.0, budget=None) as stopped:
        assert stopped.tick(0.0) == 10.0
    assert stopped.tick(10.0) is None
    assert len(said) == 3
