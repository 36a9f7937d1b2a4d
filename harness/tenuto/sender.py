"""The background hint sender. ``HintSender`` owns the queue, the sequence numbers, the breaker and one worker thread.

The agent's thread or event loop only ever appends to a bounded queue. The worker delivers, without retries, within a
budget of 250 ms for each delivery; when the queue is full the oldest hint goes; every loss is counted. While the server
is away a circuit breaker keeps the worker quiet and probes it with one hint now and then; one that takes hints and is slow
to answer is not away: an engine in a long forward answers when that is done. Sequence numbers are given when a hint
leaves the queue, so that the order of leaving is the order on the wire, whatever was deferred before.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tenuto.wire import AgentCompaction, AnyAction, Envelope, Receipt

QUEUE_HINTS_MAX = 256
BATCH_HINTS_MAX = 64
RIDE_HINTS_MAX = 16
BUDGET_S = 0.25
PROBE_FIRST_S = 1.0
PROBE_LAST_S = 30.0
UNSUPPORTED_S = 300.0
UNANSWERED_MAX = 24
"""A server that takes hints but answers none of so many in a row counts as away. Waiting for them takes 3 s, longer than
any forward should."""
AT_S_MAX = 31 * 86400.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a delivery ended: HTTP status, receipts, and what ``Retry-After`` asked for (seconds). ``taken``: it was sent
    whole, but no answer came within the budget (status 0)."""

    status: int
    receipts: tuple[Receipt, ...] = ()
    retry_after_s: float | None = None
    taken: bool = False


@dataclass(frozen=True, slots=True)
class HintStats:
    """Counts since the client was made. Every hint offered is in exactly one of the first six.

    ``queued``: still waiting. ``sent``: delivered by the worker, whether or not a receipt came in time. ``carried``:
    delivered on a request. ``dropped``: pushed out of the full queue or left at close. ``failed``: a delivery failed or the
    hint was not valid. ``cancelled``: withdrawn before it left. ``receipts``: by outcome. ``reachable``: False while the
    breaker holds hints back.
    """

    queued: int = 0
    sent: int = 0
    carried: int = 0
    dropped: int = 0
    failed: int = 0
    cancelled: int = 0
    receipts: Mapping[str, int] = field(default_factory=dict)
    reachable: bool = True

    @property
    def offered(self) -> int:
        """All hints that the agent gave."""
        return self.queued + self.sent + self.carried + self.dropped + self.failed + self.cancelled


@dataclass(slots=True, eq=False)
class Hint:
    """One queued hint. ``due_s``: not before this time; ``rides``: may leave earlier on a request of its session."""

    action: AnyAction
    made_s: float
    due_s: float
    rides: bool


class HintSender:
    """Delivers hints in the background.

    ``deliver`` posts an envelope within the budget and returns how it went, or raises; it is called on the worker
    thread only. ``on_receipt(action, receipt)`` is called for each receipt. ``clock`` gives seconds; with another clock
    than ``time.monotonic`` the worker looks at it every 10 ms, so that a test can move it.
    """

    def __init__(
        self,
        deliver: Callable[[Envelope], Delivery],
        *,
        capacity: int = QUEUE_HINTS_MAX,
        clock: Callable[[], float] = time.monotonic,
        on_receipt: Callable[[AnyAction, Receipt], None] | None = None,
        probe_first_s: float = PROBE_FIRST_S,
    ) -> None:
        self._deliver = deliver
        self._capacity = capacity
        self._clock = clock
        self._poll_s = None if clock is time.monotonic else 0.01
        self._on_receipt = on_receipt
        self._probe_first_s = probe_first_s
        self._changed = threading.Condition()
        self._queue: deque[Hint] = deque()
        self._timers: list[tuple[float, int, Callable[[float], float | None]]] = []
        self._order = itertools.count()
        self._counts: Counter[str] = Counter()
        self._receipts: Counter[str] = Counter()
        self._failures = 0
        self._unanswered = 0
        self._blocked_until_s = float("-inf")
        self._in_flight = 0
        self._seq = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def stats(self) -> HintStats:
        """A snapshot of the counts."""
        with self._changed:
            return HintStats(
                queued=len(self._queue) + self._in_flight,
                sent=self._counts["sent"],
                carried=self._counts["carried"],
                dropped=self._counts["dropped"],
                failed=self._counts["failed"],
                cancelled=self._counts["cancelled"],
                receipts=dict(self._receipts),
                reachable=self._failures == 0,
            )

    def offer(self, action: AnyAction, *, delay_s: float = 0.0, rides: bool = True) -> Hint:
        """Queues a hint to leave after ``delay_s``; never blocks, never raises. A full queue loses its oldest hint."""
        now = self._clock()
        hint = Hint(action, now, now + delay_s, rides)
        with self._changed:
            if self._closed:
                self._counts["dropped"] += 1
                return hint
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self._counts["dropped"] += 1
            self._queue.append(hint)
            self._wake()
        return hint

    def count_invalid(self) -> None:
        """Counts a hint that could not even be built."""
        with self._changed:
            self._counts["failed"] += 1

    def cancel(self, hint: Hint) -> bool:
        """Withdraws a hint that has not left yet; False when it is too late."""
        with self._changed:
            if hint not in self._queue:
                return False
            self._queue.remove(hint)
            self._counts["cancelled"] += 1
            return True

    def schedule(self, at_s: float, call: Callable[[float], float | None]) -> None:
        """Has the worker call ``call(now)`` at ``at_s``, and again at whatever time it returns, until it returns None."""
        with self._changed:
            if not self._closed:
                heapq.heappush(self._timers, (at_s, next(self._order), call))
                self._wake()

    def take(self, *sessions: str | None) -> Envelope | None:
        """Removes these sessions' waiting hints to ride on a request; None when there are none.

        The text of a prompt to warm stays behind: the request that carries the hint is that prompt.
        """
        with self._changed:
            riding = [h for h in self._queue if h.rides and h.action.session in sessions][:RIDE_HINTS_MAX]
            if not riding:
                return None
            for hint in riding:
                self._queue.remove(hint)
            self._counts["carried"] += len(riding)
            actions = [self._stamp(hint) for hint in riding]
        return Envelope.of(
            a.model_copy(update={"request": None}) if isinstance(a, AgentCompaction) else a for a in actions
        )

    def record_receipts(self, envelope: Envelope, receipts: tuple[Receipt, ...]) -> None:
        """Counts receipts and passes them on to their sessions."""
        by_id = {item.action_id: item for item in envelope.actions}
        for receipt in receipts:
            item = by_id.get(receipt.action_id)
            with self._changed:
                self._receipts[receipt.outcome] += 1
            with contextlib.suppress(Exception):  # runs in the agent's thread too, where hints never raise
                action = item.parse() if item is not None else None
                if action is not None and self._on_receipt is not None:
                    self._on_receipt(action, receipt)

    def lose_carried(self, envelope: Envelope) -> None:
        """Counts the hints of a request that failed as failed."""
        with self._changed:
            self._counts["carried"] -= len(envelope.actions)
            self._counts["failed"] += len(envelope.actions)

    def flush(self, timeout_s: float = BUDGET_S) -> bool:
        """Waits until every due hint has left, at most ``timeout_s``; at once when the server is away."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while self._in_flight or self._due(self._clock()):
                left = give_up - time.monotonic()
                if left <= 0 or self._failures or not self._thread_alive():
                    return False
                self._changed.wait(min(left, 0.05))
            return True

    def close(self, timeout_s: float = BUDGET_S) -> None:
        """Sends what is due, stops the worker, counts the rest as dropped; takes ``timeout_s`` at most."""
        give_up = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._timers.clear()
            self._counts["dropped"] += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.01, give_up - time.monotonic()))

    # -- the worker -------------------------------------------------------------------------------------------------

    def _thread_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wake(self) -> None:
        if not self._thread_alive():  # first hint, or a forked process that inherited the object without its thread
            self._thread = threading.Thread(target=self._run, name="tenuto-hints", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                calls, batch = self._next_work()
                if self._closed and not batch:
                    return
                actions = [self._stamp(hint) for hint in batch]
                self._in_flight = len(batch)
            for call in calls:
                self._run_timer(call)
            if batch:
                self._send(Envelope.of(actions))
                with self._changed:
                    self._in_flight = 0
                    self._changed.notify_all()

    def _next_work(self) -> tuple[list[Callable[[float], float | None]], list[Hint]]:
        """Waits for due timers or hints; returns them, the hints removed from the queue."""
        while not self._closed:
            now = self._clock()
            calls = []
            while self._timers and self._timers[0][0] <= now:
                calls.append(heapq.heappop(self._timers)[2])
            batch: list[Hint] = []
            if now >= self._blocked_until_s:
                # After a failure one hint is enough to see whether the server is back.
                batch = self._due(now)[: 1 if self._failures else BATCH_HINTS_MAX]
            if calls or batch:
                for hint in batch:
                    self._queue.remove(hint)
                return calls, batch
            self._changed.wait(self._wait_s(now))
        return [], []

    def _due(self, now: float) -> list[Hint]:
        # With the first due hint of a session goes whatever it waited with, so that a session opens before it pauses.
        sessions = {hint.action.session for hint in self._queue if hint.due_s <= now}
        return [h for h in self._queue if h.due_s <= now or (h.rides and h.action.session in sessions)]

    def _wait_s(self, now: float) -> float | None:
        moments = [max(hint.due_s, self._blocked_until_s) for hint in self._queue]
        if self._timers:
            moments.append(self._timers[0][0])
        if not moments:
            return None
        wait = max(0.0, min(moments) - now)
        return wait if self._poll_s is None else min(wait, self._poll_s)

    def _stamp(self, hint: Hint) -> AnyAction:
        # Wall time as the base keeps numbers rising when a session is resumed by a new process.
        self._seq = max(self._seq + 1, int(time.time() * 100))
        at_s = min(max(0.0, self._clock() - hint.made_s), AT_S_MAX)
        return hint.action.model_copy(update={"seq": self._seq, "at_s": round(at_s, 3)})

    def _run_timer(self, call: Callable[[float], float | None]) -> None:
        try:
            following = call(self._clock())
        except Exception:  # a broken timer must not end the worker
            following = None
            self.count_invalid()
        if following is not None:
            self.schedule(following, call)

    def _send(self, envelope: Envelope) -> None:
        try:
            delivery = self._deliver(envelope)
        except Exception:  # whatever went wrong on the way, the agent must not notice
            delivery = Delivery(status=0)
        accepted = 200 <= delivery.status < 300
        with self._changed:
            self._unanswered = self._unanswered + 1 if delivery.taken else 0
            busy = delivery.taken and not self._failures and self._unanswered < UNANSWERED_MAX
            self._counts["sent" if accepted or busy else "failed"] += len(envelope.actions)
            if not busy:
                self._breaker(delivery)
        if accepted:
            self.record_receipts(envelope, delivery.receipts)

    def _breaker(self, delivery: Delivery) -> None:
        now = self._clock()
        if 200 <= delivery.status < 300 or delivery.status in (400, 413, 422):
            self._failures = 0  # the server is there; a hint it did not like is only that hint's loss
            return
        self._failures += 1
        wait = min(self._probe_first_s * 2.0 ** (self._failures - 1), PROBE_LAST_S) * random.uniform(0.8, 1.2)
        if delivery.status in (404, 405, 501):
            wait = UNSUPPORTED_S  # some other server: it will hardly learn hints soon
        elif delivery.status == 429 and delivery.retry_after_s is not None:
            wait = min(delivery.retry_after_s, UNSUPPORTED_S)
        self._blocked_until_s = now + wait


class Hints:
    """The hint side of a client: counts, and waiting for delivery in tests."""

    def __init__(self, sender: HintSender | None) -> None:
        self._sender = sender

    @property
    def enabled(self) -> bool:
        """False under ``TENUTO_DISABLED=1``."""
        return self._sender is not None

    @property
    def stats(self) -> HintStats:
        """Counts since the client was made."""
        return self._sender.stats if self._sender is not None else HintStats()

    def flush(self, timeout_s: float = BUDGET_S) -> bool:
        """Waits until the hints given so far have left; False when they have not within ``timeout_s``."""
        return self._sender.flush(timeout_s) if self._sender is not None else True
