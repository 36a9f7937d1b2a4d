"""A worker thread that copies blocks chunk by chunk. ``Lane`` owns its queue, its thread and each job's progress.

Urgent jobs come first, and a chunk is short, so none waits long behind bulk. Every job is reported exactly once, finished,
failed, cancelled or given up; after that report nothing of it touches memory that the engine owns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from tenuto_server.engine.events import TransferDone
from tenuto_server.engine.plan import Transfer

logger = logging.getLogger(__name__)

_CHUNK_S = 0.01
"""A rate-limited chunk should take about this long, so that the limit is smooth and an urgent job waits little."""
_CREDIT_S = 0.005


@dataclass(eq=False, slots=True)
class Job:
    """One transfer on its way. ``after``: the device work it must follow; ``began_ns``: when its first chunk began, so that
    what is reported as elapsed gives the tier's speed, not the queue's length; ``done``: blocks handled so far; ``lane``: the
    one that has it."""

    transfer: Transfer
    order: int
    after: torch.cuda.Event | None
    began_ns: int = 0
    done: int = 0
    bad: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    reason: str = ""
    touching: bool = False
    cancelled: bool = False
    reported: bool = False
    lane: Lane | None = None

    def __len__(self) -> int:
        return len(self.transfer.src_slots)


class RateLimit:
    """A token bucket in bytes per second; None is no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"a bandwidth must be positive, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def charge(self, count: int) -> float:
        """Take ``count`` bytes; returns the ``time.monotonic`` before which they must not count as moved."""
        if self.bytes_per_s is None:
            return 0.0
        # A little credit, so that late wake-ups do not add up to a lower rate than asked for.
        self._free_at = max(self._free_at, time.monotonic() - _CREDIT_S) + count / self.bytes_per_s
        return self._free_at

    def chunk_blocks(self, block_bytes: int, limit_bytes: int) -> int:
        """How many blocks to move at once: ``limit_bytes``, or less where the rate is low."""
        if self.bytes_per_s is not None:
            limit_bytes = min(limit_bytes, int(self.bytes_per_s * _CHUNK_S))
        return max(1, limit_bytes // block_bytes)


class Lane:
    """``copy(job, first, last)`` moves positions [first, last) and returns those whose source is wrong and those that it
    failed to copy for another reason; ``report`` receives every end.

    ``idle()`` runs on the worker between chunks and before each wait; it returns after how many seconds to run again.
    """

    def __init__(
        self,
        name: str,
        *,
        copy: Callable[[Job, int, int], tuple[list[int], list[int]]],
        report: Callable[[Job, TransferDone], None],
        idle: Callable[[], float | None],
        rate: RateLimit,
        block_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self._copy, self._report, self._idle, self._rate = copy, report, idle, rate
        self._block_bytes = block_bytes
        self.chunk_blocks = rate.chunk_blocks(block_bytes, chunk_bytes)
        self._wake = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._current: Job | None = None
        self._chunk_began = 0.0
        self._stuck = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tenuto-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; while the lane is stuck or closed it is reported failed at once."""
        job.lane = self
        with self._wake:
            if not (self._stuck or self._closed):
                self._jobs[job.transfer.id] = job
                self._wake.notify()
                return
            job.reason = "closed" if self._closed else "the tier does not answer"
        self._finish(job, ok=False)

    def notify(self) -> None:
        """Make the worker run ``idle`` soon."""
        with self._wake:
            self._wake.notify()

    def cancel(self, transfer_id: int, reason: str = "cancelled") -> bool:
        """End a job early. Its report comes at once, or, while its chunk touches the engine's memory, right after."""
        with self._wake:
            job = self._jobs.get(transfer_id)
            if job is None:
                return False
            job.cancelled, job.reason = True, reason
            if job.touching:
                return True
            self._drop(job)
        self._finish(job, ok=False)
        return True

    def following(self, job: Job) -> Job | None:
        """What would be next if ``job`` ended now and nothing else came; None where that is less urgent."""
        with self._wake:
            rest = [other for other in self._jobs.values() if other is not job]
            following = min(rest, key=_turn, default=None)
            return following if following is not None and following.transfer.urgent == job.transfer.urgent else None

    @property
    def waiting(self) -> int:
        """Jobs not reported yet."""
        return len(self._jobs)

    def find_stuck(self, limit_s: float) -> bool:
        """Whether one chunk has now taken over ``limit_s``; from then until it returns, ``submit`` refuses."""
        with self._wake:
            stuck = self._current is not None and not self._stuck and time.monotonic() - self._chunk_began > limit_s
            self._stuck |= stuck
            return stuck

    def fail_all(self, reason: str) -> None:
        """Cancel every job."""
        with self._wake:
            jobs = list(self._jobs)
        for transfer_id in jobs:
            self.cancel(transfer_id, reason)

    @property
    def stuck(self) -> bool:
        return self._stuck

    @contextlib.contextmanager
    def touch(self, job: Job) -> Iterator[bool]:
        """While inside, the engine's memory may be read or written for ``job``; False: it was given up, do not."""
        with self._wake:
            allowed = not job.reported
            job.touching = allowed
        try:
            yield allowed
        finally:
            with self._wake:
                job.touching = False

    def close(self, timeout_s: float) -> bool:
        """Fail what is queued, end after the running chunk; False if that takes over ``timeout_s``."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.fail_all("closed")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.began_ns = job.began_ns or time.perf_counter_ns()
            first, last = job.done, min(job.done + self.chunk_blocks, len(job))
            ready_at = self._rate.charge((last - first) * self._block_bytes)
            try:
                bad, failed = self._copy(job, first, last)
            except Exception as error:
                logger.exception("copying blocks %s to %s failed", job.transfer.src, job.transfer.dst)
                bad, failed = [], list(range(first, last))
                job.reason = f"{type(error).__name__}: {error}"
            self._pause(job, ready_at)
            with self._wake:
                job.bad.extend(bad)
                job.failed.extend(failed)
                job.done = last
                ended = not job.reported and (job.cancelled or last == len(job))
                if ended:
                    self._drop(job)
            if ended:
                self._finish(job, ok=not job.cancelled)

    def _next(self) -> Job | None:
        while True:
            again_s = self._idle()
            with self._wake:
                if self._closed:
                    return None
                if self._jobs:
                    job = min(self._jobs.values(), key=_turn)
                    self._current, self._chunk_began = job, time.monotonic()
                    return job
                self._wake.wait(again_s)

    def _pause(self, job: Job, until: float) -> None:
        with self._wake:
            self._current, self._stuck = None, False  # waiting for the rate limit is not being stuck
            while (left := until - time.monotonic()) > 0 and not (self._closed or job.reported):
                self._wake.wait(left)

    def _drop(self, job: Job) -> None:
        """Under the lock: from here on the job is reported, and nobody else reports it."""
        job.reported = True
        self._jobs.pop(job.transfer.id, None)

    def _finish(self, job: Job, *, ok: bool) -> None:
        bad, failed = tuple(sorted(job.bad)), tuple(sorted(job.failed))
        good = ok and len(bad) + len(failed) < len(job)
        elapsed = time.perf_counter_ns() - job.began_ns if job.began_ns else 0
        reason = job.reason or ("" if good else "no block could be copied")
        self._report(
            job, TransferDone(job.transfer.id, good, bad if ok else (), elapsed, reason, failed=failed if ok else ())
        )


def _turn(job: Job) -> tuple[bool, int]:
    """What goes first: urgent before bulk, then in the order of arrival."""
    return not job.transfer.urgent, job.order
