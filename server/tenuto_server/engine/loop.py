"""The one engine thread. Owns the inbox, the routes from a request to its caller, and the snapshot for /health.

The loop supplies time and events to ``Engine.step`` and carries out the plan: outputs go to their callers, transfers to the
executor's workers, the forward runs on this thread. It decides nothing itself. The engine and the executor are touched by
this thread only, except for ``Executor.health`` and the sink, which are thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tenuto_server.engine.events import Event, ForwardDone, HintBatch, QuerySessions, SubmitTurn
from tenuto_server.engine.plan import (
    FinishReason,
    ForwardPlan,
    HintsDone,
    Output,
    Report,
    SessionsOut,
    StepPlan,
    TokensOut,
    Transfer,
    TurnDone,
    TurnRejected,
    TurnStarted,
)
from tenuto_server.errors import InvariantBroken, TenutoServerError

logger = logging.getLogger(__name__)

Deliver = Callable[[Output], None]

_SNAPSHOT_EVERY_NS = 200_000_000
_SLEEP_MIN_S = 0.0005
"""An engine that asks to be woken in the past must not turn the loop into a spin."""


class InboxFull(TenutoServerError):
    """Too many turns or requests wait for the engine; the caller should retry later (429)."""


class EngineDead(TenutoServerError):
    """The engine stopped, because of a bug or because the server is shutting down; nothing more is accepted (503)."""


class Executor(Protocol):
    """Who carries out plans: torch on real memory, or a deterministic double."""

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Run one forward; blocks the engine thread. An exception means that nothing of it may be trusted."""

    def submit(self, transfer: Transfer) -> None:
        """Start a copy without waiting; its ``TransferDone`` always reaches the sink, from any thread."""

    def set_sink(self, sink: Callable[[Event], None]) -> None:
        """Where ``TransferDone`` and ``TierFailed`` go."""

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        """The blocks in these disk slots were evicted; must not wait for the disk."""

    def health(self) -> dict[str, Any]:
        """Counters and tier states for /health and /metrics; thread-safe."""

    def close(self) -> None:
        """Stop the workers and release files and memory."""


class SteppedEngine(Protocol):
    """What the loop needs of ``Engine``."""

    def step(self, now_ns: int, events: Sequence[Event]) -> StepPlan: ...

    def metrics(self) -> Mapping[str, float | dict[str, float]]: ...


class EngineLoop:
    """Runs an engine and an executor on one thread.

    ``inbox_max``: turns (and, counted apart, requests) that may wait for the engine; beyond it ``InboxFull``. Outputs are
    handed to their ``deliver`` on the engine thread, so a ``deliver`` must only pass them on. The executor is not closed.
    ``at_rest`` is called on the engine thread whenever there is nothing to compute and nothing to take in; it must be quick.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        executor: Executor,
        *,
        inbox_max: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        at_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._inbox_max = inbox_max
        self._clock_ns = clock_ns
        self._at_rest = at_rest
        self._wake = threading.Condition()
        self._inbox: deque[Event] = deque()
        self._turns_waiting = 0
        self._requests_waiting = 0
        self._turns: dict[str, Deliver] = {}
        self._tickets: dict[str, tuple[HintBatch | QuerySessions, Deliver]] = {}
        self._stopping = False
        self._dead: str | None = None
        self._counts = dict.fromkeys(
            ("steps", "forwards", "forwards_failed", "forward_ns", "refused", "deliver_errors"), 0
        )
        self._overhead_ns = 0.0
        self._overhead_max_ns = 0
        self._engine_metrics: dict[str, Any] = {}
        self._published_ns = 0
        self._thread = threading.Thread(target=self._run, name="tenuto-engine", daemon=True)
        executor.set_sink(self.post)

    # Callers' side: any thread.

    def start(self) -> None:
        """Start the engine thread; once only."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the current step; open requests get ``TurnDone``. False if the thread is still busy after ``timeout_s``."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._end("the server is stopping", failed=False)
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """True while the engine thread serves."""
        return self._dead is None and self._thread.is_alive()

    def submit(self, turn: SubmitTurn, deliver: Deliver) -> None:
        """Queue a turn. Raises ``InboxFull``, ``EngineDead``, or ``ValueError`` for a ``request_id`` in use."""
        with self._wake:
            self._check_open(self._turns_waiting, "turns")
            if turn.request_id in self._turns:
                raise ValueError(f"request_id {turn.request_id!r} is already open")
            self._turns[turn.request_id] = deliver
            self._turns_waiting += 1
            self._inbox.append(turn)
            self._wake.notify()

    def request(self, event: HintBatch | QuerySessions, deliver: Deliver) -> None:
        """Queue something that is answered once, under its ticket. Raises as ``submit`` does."""
        with self._wake:
            self._check_open(self._requests_waiting, "requests")
            if event.ticket in self._tickets:
                raise ValueError(f"ticket {event.ticket!r} is already open")
            self._tickets[event.ticket] = (event, deliver)
            self._requests_waiting += 1
            self._inbox.append(event)
            self._wake.notify()

    def post(self, event: Event) -> None:
        """Queue an event that is never refused (stops, cancellations, completions). Dropped once the engine is dead."""
        with self._wake:
            if self._dead is None:
                self._inbox.append(event)
                self._wake.notify()

    def snapshot(self) -> dict[str, Any]:
        """What /health and /metrics show. Times in nanoseconds; ``engine`` is at most 0.2 s of stepping old."""
        with self._wake:
            figures: dict[str, Any] = {
                "dead_reason": self._dead,
                "inbox_depth": len(self._inbox),
                "turns_waiting": self._turns_waiting,
                "turns_open": len(self._turns),
                "step_overhead_ns": self._overhead_ns,
                "step_overhead_max_ns": self._overhead_max_ns,
                **self._counts,
                "engine": self._engine_metrics,
            }
        return {"healthy": self.healthy, **figures, "executor": self._executor.health()}

    def _check_open(self, waiting: int, what: str) -> None:
        if self._dead is not None or self._stopping:
            raise EngineDead(f"the engine does not accept {what}: {self._dead or 'the server is stopping'}")
        if waiting >= self._inbox_max:
            self._counts["refused"] += 1
            raise InboxFull(f"{waiting} {what} already wait for the engine (inbox_max {self._inbox_max}); retry later")

    # The engine thread.

    def _run(self) -> None:
        # Finally rather than except: whatever ends this thread, callers must hear of it.
        reason, failed = "the engine thread ended unexpectedly", True
        try:
            self._serve()
            reason, failed = "the server is stopping", False
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the engine stopped: %s", reason)
        finally:
            self._end(reason, failed=failed)

    def _serve(self) -> None:
        done: ForwardDone | None = None
        wake_ns: int | None = self._clock_ns()
        idle = False
        while True:
            events = self._collect(done, wake_ns, idle)
            if events is None:
                return
            began = time.perf_counter_ns()
            plan = self._engine.step(self._clock_ns(), events)
            self._carry_out(plan)
            self._account(time.perf_counter_ns() - began)
            idle = plan.forward is None and not events
            wake_ns = plan.wake_ns
            done = self._forward(plan.forward) if plan.forward is not None else None

    def _collect(self, done: ForwardDone | None, wake_ns: int | None, idle: bool) -> list[Event] | None:
        """The next step's events; waits for one, or for ``wake_ns``, unless a forward just ended. None: stop."""
        if done is None and (not self._inbox or self._stale()):
            self._publish()
        if done is None and not self._inbox:
            self._at_rest()
        with self._wake:
            while not (self._inbox or self._stopping or done is not None):
                wait_s = None if wake_ns is None else (wake_ns - self._clock_ns()) / 1e9
                if idle and wait_s is not None:
                    wait_s = max(wait_s, _SLEEP_MIN_S)
                if wait_s is not None and wait_s <= 0:
                    break
                self._wake.wait(wait_s)
                idle = False
            if self._stopping:
                return None
            events: list[Event] = [] if done is None else [done]
            events.extend(self._inbox)
            self._inbox.clear()
            self._turns_waiting = self._requests_waiting = 0
            return events

    def _carry_out(self, plan: StepPlan) -> None:
        # Forget first: a transfer of this plan may reuse a dropped slot. Transfers before the forward: they overlap it.
        if plan.dropped_disk:
            self._executor.forget_disk(plan.dropped_disk)
        for transfer in plan.transfers:
            self._executor.submit(transfer)
        for output in plan.outputs:
            self._route(output)

    def _forward(self, plan: ForwardPlan) -> ForwardDone:
        began = time.perf_counter_ns()
        try:
            done = self._executor.run(plan)
        except InvariantBroken:
            raise
        except Exception as error:
            logger.exception("forward of step %d failed", plan.step)
            elapsed = time.perf_counter_ns() - began
            done = ForwardDone(plan.step, (), elapsed, failed=f"{type(error).__name__}: {error}")
        self._counts["forwards"] += 1
        self._counts["forwards_failed"] += done.failed is not None
        self._counts["forward_ns"] += time.perf_counter_ns() - began
        if self._stale():
            self._publish()
        return done

    def _route(self, output: Output) -> None:
        deliver: Deliver | None
        with self._wake:
            match output:
                case TurnDone() | TurnRejected():
                    deliver = self._turns.pop(output.request_id, None)
                case TurnStarted() | TokensOut():
                    deliver = self._turns.get(output.request_id)
                case HintsDone() | SessionsOut():
                    entry = self._tickets.pop(output.ticket, None)
                    deliver = entry[1] if entry else None
        if deliver is None:
            return
        try:
            deliver(output)
        except Exception:
            # A caller's bug must not stop the others' turns.
            self._counts["deliver_errors"] += 1
            logger.exception("delivering %s failed", type(output).__name__)

    def _account(self, overhead_ns: int) -> None:
        self._counts["steps"] += 1
        self._overhead_ns += (overhead_ns - self._overhead_ns) / min(self._counts["steps"], 100)
        self._overhead_max_ns = max(self._overhead_max_ns, overhead_ns)

    def _stale(self) -> bool:
        return time.perf_counter_ns() - self._published_ns > _SNAPSHOT_EVERY_NS

    def _publish(self) -> None:
        metrics = dict(self._engine.metrics())
        with self._wake:
            self._engine_metrics = metrics
        self._published_ns = time.perf_counter_ns()

    def _end(self, reason: str, *, failed: bool) -> None:
        """Refuse what comes and answer what is open, so that no caller waits for ever."""
        with self._wake:
            self._dead = reason
            turns, tickets = list(self._turns), list(self._tickets.items())
            self._inbox.clear()
            self._turns_waiting = self._requests_waiting = 0
        for request_id in turns:
            finish: FinishReason = "error" if failed else "cancelled"
            self._route(TurnDone(request_id, finish, 0, Report(), error=reason))
        for ticket, (event, _) in tickets:
            self._route(HintsDone(ticket, ()) if isinstance(event, HintBatch) else SessionsOut(ticket, ()))
