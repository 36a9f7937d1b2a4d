"""Deadlines that are nearly always lifted before they come: one timer for all of an event loop's, rather than one for each.

A stream sets two for every token it sends (for news, and for its reader), so that what one costs counts. ``Alarm`` owns what
is due and the one timer; it belongs to one event loop and is used on it only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


class Alarm:
    """``set`` and ``lift`` cost no timer as long as some deadline before theirs is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: object, in_s: float, ring: Callable[[], None]) -> None:
        """Calls ``ring`` in ``in_s`` seconds unless ``key`` is lifted, or set again, before."""
        at = self._loop.time() + in_s
        self._due[key] = at, ring
        if self._timer is None or at < self._timer.when():
            self._wait_until(at)

    def lift(self, key: object) -> None:
        """Nothing rings for ``key`` any more."""
        self._due.pop(key, None)

    def _wait_until(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        # A timer of the loop may come a clock's tick early.
        self._timer, now = None, self._loop.time() + 1e-3
        for key in [key for key, (at, _) in self._due.items() if at <= now]:
            _, ring = self._due.pop(key)
            ring()
        first = min((at for at, _ in self._due.values()), default=None)
        if first is not None and (self._timer is None or first < self._timer.when()):
            self._wait_until(first)

    async def within(self, in_s: float, doing: Awaitable[Result]) -> Result:
        """The result of ``doing``; raises ``TimeoutError`` after so long, as ``asyncio.timeout`` does."""
        task = asyncio.current_task()
        assert task is not None
        late, cancelling = False, task.cancelling()

        def ring() -> None:
            nonlocal late
            late = True
            task.cancel()

        self.set(task, in_s, ring)
        try:
            return await doing
        except asyncio.CancelledError:
            if late and task.uncancel() <= cancelling:
                raise TimeoutError from None
            raise
        finally:
            self.lift(task)
