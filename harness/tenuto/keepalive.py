"""Keepalive: "the harness is alive and still wants its KV", repeated until a deadline, within a budget.

``Keepalive`` owns its own schedule; it reads no clock and starts no task: the hint sender's worker calls ``tick`` with
the time. It costs no tokens (it is a hint, not a request to the model) and cannot outlive its session.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

MARGIN = 2.5  # each keepalive asks for this many intervals, so that one or two lost ones do not end the lease


class Keepalive:
    """A handle on a running keepalive; stops on ``stop()``, at the end of its ``with`` block, or with the session.

    ``announce(for_s)`` sends one keepalive that covers the next ``for_s`` seconds. ``start_s``, ``for_s``, ``every_s``
    are seconds on the caller's clock; ``budget`` bounds the number of keepalives (None: as many as fit).
    Raises ``ValueError`` for an interval or duration that is not positive and finite.
    """

    def __init__(
        self, announce: Callable[[float], None], *, start_s: float, for_s: float, every_s: float, budget: int | None
    ) -> None:
        if not (math.isfinite(for_s) and for_s > 0 and math.isfinite(every_s) and every_s > 0):
            raise ValueError("keepalive: for_s and every_s must be positive and finite")
        if budget is not None and budget < 1:
            raise ValueError("keepalive: budget must be at least 1")
        self._announce = announce
        self.deadline_s = start_s + for_s
        self.every_s = every_s
        self.sent = 0
        self._left = budget
        self._stopped = False

    @property
    def active(self) -> bool:
        """Whether another keepalive may still be sent."""
        return not self._stopped and self._left != 0

    def tick(self, now_s: float) -> float | None:
        """Sends a keepalive if one is due and returns the time of the next one; None when it is over."""
        if not self.active or now_s >= self.deadline_s:
            self._stopped = True
            return None
        self._announce(min(self.every_s * MARGIN, self.deadline_s - now_s))
        self.sent += 1
        if self._left is not None:
            self._left -= 1
        following = now_s + self.every_s
        if not self.active or following >= self.deadline_s:
            self._stopped = True
            return None
        return following

    def stop(self) -> None:
        """Sends no more keepalives. What was announced runs out by itself."""
        self._stopped = True

    def __enter__(self) -> Keepalive:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Keepalive:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
