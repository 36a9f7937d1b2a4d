"""A world with virtual time around one engine: events in order, forwards and copies that take as long as they are said to.

Owner of the virtual clock and of what is in flight. Deterministic: the same calls give the same run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import CancelTurn, Event, ForwardDone, SubmitTurn, TransferDone
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


class Machine(Protocol):
    """What executes plans; completions of ``submit`` are collected by ``take_events``."""

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Runs a batch."""
        ...

    def submit(self, transfer: Transfer) -> None:
        """Starts a copy."""
        ...

    def take_events(self) -> list[Event]:
        """What has completed since the last call."""
        ...

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        """Disk slots that hold nothing any more."""
        ...


class Turn:
    """What became of one request."""

    __slots__ = ("done", "first_token_ns", "rejected", "request_id", "started", "submitted_ns", "tokens")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.started: TurnStarted | None = None
        self.done: TurnDone | None = None
        self.rejected: TurnRejected | None = None
        self.submitted_ns = 0
        self.first_token_ns: int | None = None

    @property
    def ended(self) -> bool:
        """No more will come."""
        return self.done is not None or self.rejected is not None


class World:
    """``forward_s(plan)`` and ``transfer_s(transfer)`` say how long things take, ``copy_s(transfer)`` how much of the latter
    its link works on it (all of it, unless given): that is what a machine reports as elapsed. ``after_step`` runs after every step
    (integrity checks). ``at(t, event)`` schedules; ``run()`` runs until nothing is left to happen.

    ``remember`` False: keeps nothing of a turn that has ended (long simulations). ``wakes`` False: the engine is not woken
    for its own timers; they are served at the next event (where nothing takes time, nothing is decided in between).
    ``blocking``: a forward keeps the engine's thread, as in the server: what happens meanwhile is heard when it ends
    (``busy_ns``).
    """

    def __init__(
        self,
        engine: Engine,
        machine: Machine,
        *,
        forward_s: Callable[[ForwardPlan], float] = lambda plan: 0.01,
        transfer_s: Callable[[Transfer], float] = lambda transfer: 0.001,
        copy_s: Callable[[Transfer], float] | None = None,
        after_step: Callable[[], None] = lambda: None,
        remember: bool = True,
        wakes: bool = True,
        blocking: bool = False,
    ) -> None:
        self.engine, self.machine = engine, machine
        self.now_ns: int = 0
        self.turns: dict[str, Turn] = {}
        self.outputs: list[Output] = []
        self.steps = 0
        self._forward_s, self._transfer_s, self._copy_s, self._after_step = forward_s, transfer_s, copy_s, after_step
        self._queue: list[tuple[int, int, Event | None]] = []
        self._listeners: dict[str, Callable[[Turn], None]] = {}
        self._durations: dict[int, tuple[float, float]] = {}
        self._order = 0
        self._open = 0
        self._remember, self._wakes, self._blocking = remember, wakes, blocking
        self.busy_ns = 0
        self._next_wake_ns: int | None = None
        self._soon: list[Event] = []

    def at(self, time_s: float, event: Event | None) -> None:
        """Schedules an event at an absolute time in seconds (not before now); None only wakes the engine."""
        self._at_ns(int(time_s * 1e9), event)

    def soon(self, event: Event) -> None:
        """Hands over an event before anything else that happens from now on. Where the engine is not woken for its own
        timers it need not be woken for this either: nothing is decided until the next event."""
        if self._wakes:
            self._at_ns(self.now_ns, event)
        else:
            self._soon.append(event)

    def _at_ns(self, time_ns: int, event: Event | None) -> None:
        self._order += 1
        heapq.heappush(self._queue, (max(self.now_ns, time_ns), self._order, event))

    def submit(self, turn: SubmitTurn, *, in_s: float = 0.0, then: Callable[[Turn], None] | None = None) -> Turn:
        """Schedules a request ``in_s`` seconds from now; ``then`` is called when it has ended."""
        record = self.turns[turn.request_id] = Turn(turn.request_id)
        self._open += 1
        record.submitted_ns = self.now_ns + int(in_s * 1e9)
        if then is not None:
            self._listeners[turn.request_id] = then
        self._at_ns(record.submitted_ns, turn)
        return record

    def cancel(self, request_id: str, *, in_s: float = 0.0) -> None:
        """Schedules the client's disappearance."""
        self._at_ns(self.now_ns + int(in_s * 1e9), CancelTurn(request_id))

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.now_ns / 1e9

    @property
    def next_ns(self) -> int | None:
        """When the engine takes its next step; None when nothing is scheduled."""
        return max(self._queue[0][0], self.busy_ns) if self._queue else None

    def run(self, *, until_s: float | None = None, steps_max: int = 1_000_000) -> None:
        """Runs until nothing is scheduled (timers of pauses aside) or the time is reached."""
        limit_ns = None if until_s is None else int(until_s * 1e9)
        for _ in range(steps_max):
            next_ns = self.next_ns
            if next_ns is None or (limit_ns is not None and next_ns > limit_ns):
                break
            self.advance()
        else:
            raise RuntimeError(f"the world did not come to rest within {steps_max} steps")
        if limit_ns is not None:
            self.now_ns = max(self.now_ns, limit_ns)

    def advance(self) -> None:
        """One step, at ``next_ns``: something must be scheduled."""
        self.now_ns = max(self._queue[0][0], self.busy_ns)
        events, self._soon = self._soon, []
        while self._queue and self._queue[0][0] <= self.now_ns:
            event = heapq.heappop(self._queue)[2]
            if event is not None:
                events.append(event)
        plan = self.engine.step(self.now_ns, events)
        self.steps += 1
        self._carry_out(plan)
        self._after_step()

    def _carry_out(self, plan: StepPlan) -> None:
        if plan.dropped_disk:
            self.machine.forget_disk(plan.dropped_disk)
        for transfer in plan.transfers:
            took_s = self._transfer_s(transfer)
            self._durations[transfer.id] = took_s, took_s if self._copy_s is None else self._copy_s(transfer)
            self.machine.submit(transfer)
        if plan.forward is not None:
            done = self.machine.run(plan.forward)
            took = int(self._forward_s(plan.forward) * 1e9)
            if took != done.elapsed_ns:
                done = ForwardDone(done.step, done.sampled, took, done.failed, done.drafted)
            self._at_ns(self.now_ns + took, done)
            if self._blocking:
                self.busy_ns = self.now_ns + took
        self.collect(self.machine.take_events())
        for output in plan.outputs:
            self._hear(output)
        if plan.wake_ns is not None and self._open and self._wakes:
            pending = self._next_wake_ns
            if pending is None or pending <= self.now_ns or plan.wake_ns < pending:
                self._next_wake_ns = max(plan.wake_ns, self.now_ns)
                self._at_ns(plan.wake_ns, None)

    def collect(self, events: Iterable[Event]) -> None:
        """Schedules completions, each after the time its copy takes."""
        for event in events:
            if isinstance(event, TransferDone):
                took_s, copied_s = self._durations.pop(event.transfer, (0.0, 0.0))
                event = TransferDone(event.transfer, event.ok, event.bad, int(copied_s * 1e9), event.reason)
                self._at_ns(self.now_ns + int(took_s * 1e9), event)
            else:
                self._at_ns(self.now_ns, event)

    def _hear(self, output: Output) -> None:
        if self._remember:
            self.outputs.append(output)
        turn = self.turns.get(getattr(output, "request_id", ""))
        if turn is None:
            return
        match output:
            case TokensOut():
                turn.tokens.extend(output.tokens)
                if turn.first_token_ns is None:
                    turn.first_token_ns = self.now_ns
                return
            case TurnDone():
                turn.done = output
            case TurnRejected():
                turn.rejected = output
            case _:
                assert isinstance(output, TurnStarted)
                turn.started = output
                return
        self._open -= 1
        if not self._remember:
            del self.turns[turn.request_id]
        if listener := self._listeners.pop(turn.request_id, None):
            listener(turn)
