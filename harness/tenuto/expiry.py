"""Compacting a large idle session while its prefix is still warm: off unless the harness asks for it.

``CompactBeforeExpiry`` owns whether the present pause may still be used and the summary that is running. Its timer is one
of the hint sender's; everything else happens in the event loop of the session's pauses, so that the agent and the summary
never run at once. The SDK knows no prompts: what to ask and what to keep is the harness's coroutine.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

import anyio.from_thread
import anyio.lowlevel

from tenuto.pause import Compaction

if TYPE_CHECKING:
    from tenuto.session_core import SessionCore
    from tenuto.turn import Turn

LEAD_S_MIN = 5.0
LEAD_SHARE = 0.05  # of a long lease: its summary has more to write
_summarising: contextvars.ContextVar[CompactBeforeExpiry | None] = contextvars.ContextVar(
    "tenuto_summarising", default=None
)
_log = logging.getLogger("tenuto")


class CompactBeforeExpiry:
    """The handle that ``AsyncSession.compact_before_expiry`` returns; ``stop()`` takes the opt-in back.

    ``compacted``: pauses in which a summary was committed. ``failed``: those whose coroutine raised; ``error``: the latest
    of these. Raises ``ValueError`` for a lead that is not positive and finite, and for a negative size.
    """

    def __init__(
        self,
        session: SessionCore,
        summarise: Callable[[Compaction], Awaitable[object]],
        *,
        min_tokens: int,
        lead_s: float | None,
        kinds: Collection[str],
    ) -> None:
        if lead_s is not None and not (math.isfinite(lead_s) and lead_s > 0):
            raise ValueError("compact_before_expiry: lead_s must be positive and finite")
        if min_tokens < 0:
            raise ValueError("compact_before_expiry: min_tokens must not be negative")
        self.compacted = 0
        self.failed = 0
        self.error: Exception | None = None
        self._session = session
        self._summarise = summarise
        self._min_tokens = min_tokens
        self._lead_s = lead_s
        self._kinds = frozenset(kinds)
        self._pauses = 0  # numbers the pauses, so that a timer of an earlier one is known as such
        self._ready = False  # in a pause that has not been used yet
        self._paused = False
        self._stopped = False
        self._token: Any = None
        self._scope: anyio.CancelScope | None = None
        self._summary: Turn | None = None

    def stop(self) -> None:
        """Compacts nothing from now on; a summary that is running is called off."""
        self._stopped = True
        self.resumed()

    # -- called by the session --------------------------------------------------------------------------------------

    def paused(self) -> None:
        """A pause began. One inside another belongs to it."""
        if self._paused or self._stopped:
            return
        with contextlib.suppress(RuntimeError):  # not in an event loop: there is nowhere to run the coroutine
            self._token = anyio.lowlevel.current_token()
            self._paused = self._ready = True
            self._pauses += 1
            self.watch()

    def resumed(self) -> None:
        """The pause is over, or a turn began inside it."""
        if _summarising.get() is self:
            return  # the summary's own turn
        self._paused = self._ready = False
        if self._scope is not None:
            self._scope.cancel()

    def watch(self) -> None:
        """Sets the timer by the lease now known; called again when another lease is granted, on any thread."""
        services, ends_s = self._session.services, self._session.lease_ends_s
        if not self._ready or ends_s is None or services.sender is None:
            return
        left_s = max(0.0, ends_s - services.clock())
        lead_s = self._lead_s if self._lead_s is not None else max(LEAD_S_MIN, LEAD_SHARE * left_s)
        pause = self._pauses

        def due(now_s: float) -> None:
            # A lease that has lapsed promises nothing: its summary could be the very miss that this is to avoid.
            if pause == self._pauses and self._ready and self._session.lease_ends_s == ends_s and now_s < ends_s:
                threading.Thread(target=self._enter_loop, args=(pause,), name="tenuto-compact", daemon=True).start()

        services.sender.schedule(ends_s - min(lead_s, left_s / 2.0), due)

    # -- in the event loop ------------------------------------------------------------------------------------------

    def _enter_loop(self, pause: int) -> None:
        with contextlib.suppress(Exception):  # the loop has ended, and the pause with it
            anyio.from_thread.run(self._in_loop, pause, token=self._token)

    def _wanted(self, pause: int) -> bool:
        session, turn = self._session, self._session.last_turn
        if not self._ready or pause != self._pauses or session.closed or turn is None or turn is self._summary:
            return False
        if any(p.kind not in self._kinds for p in session.open_pauses):
            return False
        return turn.usage.prompt_tokens + turn.usage.completion_tokens >= self._min_tokens

    async def _in_loop(self, pause: int) -> None:
        with contextlib.suppress(anyio.get_cancelled_exc_class()):  # the loop is being shut down; nobody is above
            await self._run(pause)

    async def _run(self, pause: int) -> None:
        if not self._wanted(pause):
            return
        self._ready = False
        _summarising.set(self)  # of this task alone
        with anyio.CancelScope() as scope:
            self._scope = scope
            try:
                async with Compaction(self._session, keep_messages=None, expect_tokens=None, warm=True) as compaction:
                    await self._summarise(compaction)
            except Exception as error:  # the agent is asleep and did not call: it hears of it here and in the log
                self.failed += 1
                self.error = error
                _log.warning("compact_before_expiry: the summary failed: %s: %s", type(error).__name__, error)
            finally:
                self._scope = None
        if compaction.state == "committed":
            self.compacted += 1
            self._summary = self._session.last_turn
        for open_pause in self._session.open_pauses if self._paused else ():
            open_pause.announce_again()  # the summary's request looked like a return
