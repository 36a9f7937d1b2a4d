"""Pause and Compaction: the two context managers of a session, usable with ``with`` and ``async with`` alike.

Each owns its own state; neither waits for anything, so entering and leaving costs microseconds.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from tenuto.errors import TenutoError
from tenuto.forecast import PauseForecast
from tenuto.pause_key import PauseKey
from tenuto.prefix import Message, fingerprint, shared_messages
from tenuto.sender import Hint
from tenuto.wire import AgentCompaction, AgentPause, AgentPauseUpdate, AgentResumeSoon, Forecast, PauseKind, Shared

if TYPE_CHECKING:
    from tenuto.session_core import SessionCore

# A pause that should be over before the server could act on the hint is announced only if it lasts after all.
SHORT_PAUSE_S = 0.25
SHORT_PAUSE_DEFER_S = 0.5
# A longer prompt is not sent ahead: hints are small, and the next turn brings it anyway.
WARM_CHARS_MAX = 128 * 1024
_KINDS = frozenset(get_args(PauseKind))


class Pause:
    """A gap in a session, from entry to exit.

    ``key``: what it is filed under. ``forecast``: what is expected of it (remaining seconds at the time it was made, which
    is when it is first needed: where hints are turned off, only if somebody asks). ``duration_s``: its length once it is
    over. Leaving by an exception counts as an end like any other, except for cancellation and interrupts, which say nothing
    about the tool.
    """

    def __init__(
        self,
        session: SessionCore,
        kind: str,
        *,
        name: str | None,
        command: str | Sequence[str] | None,
        args: Mapping[str, Any] | None,
        forecast: PauseForecast | float | None,
    ) -> None:
        self.kind: str = kind if kind in _KINDS else "unknown"
        self.key: PauseKey = PauseKey.of(self.kind, name, command=command, arguments=args)
        self.duration_s: float | None = None
        self.output: str | None = None
        self._session = session
        self._given = forecast
        self._forecast: PauseForecast | None = None
        self._started_s = 0.0
        self._hints: list[Hint] = []
        self._span: Any = None

    @property
    def forecast(self) -> PauseForecast:
        """What is expected of the pause."""
        if self._forecast is None:
            self._forecast = self._expect(self._given)
        return self._forecast

    @property
    def elapsed_s(self) -> float:
        """Seconds since entry; the whole length once it is over."""
        return self.duration_s if self.duration_s is not None else self._session.services.clock() - self._started_s

    def progress(self, fraction: float | None = None, *, eta_s: float | None = None) -> None:
        """Sharper knowledge while it runs: the ``fraction`` done (0..1), or the seconds it will still take.

        From a fraction q the remaining time is elapsed (1 - q) / q, as if work were even; the spread narrows with q.
        """
        if self.duration_s is not None:
            return
        update = self._from_progress(fraction, eta_s)
        if update is None and fraction is None:
            return
        self._forecast = update or self._forecast
        self._withdraw(AgentPauseUpdate)
        self._send(
            AgentPauseUpdate,
            forecast=None if update is None else _wire(update),
            progress=None if fraction is None else min(1.0, max(0.0, fraction)),
        )

    def resume_soon(self, in_s: float = 0.0) -> None:
        """It is about to end and the next turn to come, in about ``in_s`` seconds."""
        self._send(AgentResumeSoon, in_s=in_s)

    def record_output(self, output: str) -> None:
        """Keeps the tool's output for the trace, where the client records content."""
        self.output = output

    def abandon(self) -> None:
        """The session ends inside this pause: it never returned."""
        if self.duration_s is None and self in self._session.open_pauses:
            self._close(returned=False, learn=True)

    def start(self) -> Pause:
        """Begins the pause, for code that cannot use a ``with`` block."""
        session = self._session
        others = [p for p in session.open_pauses if p.duration_s is None]
        self._started_s = session.services.clock()
        session.open_pauses.append(self)
        if session.expiry is not None:
            session.expiry.paused()
        self._span = session.services.telemetry.start(
            "tool", self.key.tool or self.kind, {"conversation": session.id, "tool_name": self.key.tool}, session.span
        )
        if session.services.sender is None:
            return self  # nobody hears of it
        expected = self.forecast
        if others:
            # Tools that run side by side make one pause, which lasts as long as the longest of them.
            expected = max([expected, *(p.remaining() for p in others)], key=lambda f: f.p50_s)
        if others and all(p.kind == self.kind for p in others):
            self._send(AgentPauseUpdate, forecast=_wire(expected))
            return self
        self._announce(expected, SHORT_PAUSE_DEFER_S if expected.p90_s < SHORT_PAUSE_S else 0.0)
        return self

    def announce_again(self) -> None:
        """A request that was none of the agent's went out meanwhile: the pause goes on."""
        if self.duration_s is None:
            self._announce(self.remaining(), 0.0)

    def remaining(self) -> PauseForecast:
        """The forecast of the time still to come, given the time elapsed."""
        return self._session.services.forecaster.predict(self.key, elapsed_s=self.elapsed_s, session=self._session.id)

    def _close(self, *, returned: bool, learn: bool) -> None:
        session = self._session
        duration = max(0.0, session.services.clock() - self._started_s)
        self.duration_s = duration
        with contextlib.suppress(ValueError):
            session.open_pauses.remove(self)
        if session.expiry is not None and not session.open_pauses:
            session.expiry.resumed()
        self._withdraw(AgentPause, AgentPauseUpdate)  # news of a pause that is over is no news
        services = session.services
        # What was expected before this pause taught anything, where anybody is told of it.
        told = services.recorder is not None or services.telemetry.recording(self._span)
        expected = self.forecast if told else None
        if learn and returned:
            session.learn_pause(lambda f: f.observe(self.key, duration, session=session.id))
        elif learn:
            session.learn_pause(lambda f: f.observe_no_return(self.kind))
        services.telemetry.pause(self._span, self.kind, None if expected is None else expected.p50_s, duration)
        if services.recorder is not None and expected is not None:
            services.recorder.pause(
                session.id,
                self._started_s,
                kind=self.kind,
                duration_s=round(duration, 6),
                tool=self.key.tool,
                program=self.key.program,
                p50_s=round(expected.p50_s, 6),
                p90_s=round(expected.p90_s, 6),
                returned=returned,
                output=self.output,
            )

    def stop(self, *, learn: bool = True) -> None:
        """Ends the pause; a second call does nothing. ``learn=False``: its length says nothing about the tool."""
        if self.duration_s is None and self in self._session.open_pauses:
            self._close(returned=True, learn=learn)

    def _announce(self, expected: PauseForecast, delay_s: float) -> None:
        key = self.key
        self._send(
            AgentPause,
            delay_s=delay_s,
            kind=self.kind,
            tool=key.tool,
            program=key.program,
            forecast=_wire(expected),
        )

    def _send(self, action: Any, /, *, delay_s: float = 0.0, **payload: Any) -> None:
        hint = self._session.emit(action, delay_s=delay_s, rides=False, **payload)
        if hint is not None:
            self._hints.append(hint)

    def _withdraw(self, *kinds: type[AgentPause] | type[AgentPauseUpdate]) -> None:
        sender = self._session.services.sender
        for hint in self._hints if sender is not None else ():
            if sender is not None and isinstance(hint.action, kinds):
                sender.cancel(hint)
        self._hints = [h for h in self._hints if not isinstance(h.action, kinds)]

    def _expect(self, given: PauseForecast | float | None) -> PauseForecast:
        if isinstance(given, PauseForecast):
            return given
        session = self._session
        learned = session.services.forecaster.predict(self.key, session=session.id)
        if given is not None and math.isfinite(given) and given >= 0:
            spread = learned.p90_s / max(learned.p50_s, 1e-3)
            # The caller's number is taken as the median; the spread is halved (in logs), since the caller knows more.
            return PauseForecast(given, given * max(1.0, math.sqrt(spread)), learned.p_return, 0.5)
        return learned

    def _from_progress(self, fraction: float | None, eta_s: float | None) -> PauseForecast | None:
        if eta_s is not None and math.isfinite(eta_s) and eta_s >= 0:
            return PauseForecast(eta_s, 2.0 * eta_s, self.forecast.p_return, 0.8)
        if fraction is not None and 0.0 < fraction <= 1.0:
            left = self.elapsed_s * (1.0 - fraction) / fraction
            return PauseForecast(left, left * (1.0 + 2.0 * (1.0 - fraction)), self.forecast.p_return, fraction)
        return None

    def __enter__(self) -> Pause:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(learn=exc_type is None or issubclass(exc_type, Exception))

    async def __aenter__(self) -> Pause:
        return self.start()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(learn=exc_type is None or issubclass(exc_type, Exception))


class Compaction:
    """The replacement of a session's prefix, from entry to ``commit``.

    Inside, ask for the summary with the live prompt plus one message (``session.history`` is that prompt with the last
    answer), so that it costs only the new message; then ``commit`` the messages that the next turn will start with.
    """

    def __init__(
        self, session: SessionCore, *, keep_messages: int | None, expect_tokens: int | None, warm: bool
    ) -> None:
        self.state = "new"
        self._session = session
        self._keep_messages = keep_messages
        self._expect_tokens = expect_tokens
        self._warm = warm

    def commit(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """The next turns start with ``messages``. ``tools``: those of the next turn, where they are to be warmed too.

        Raises ``TenutoError`` when the compaction is not running.
        """
        if self.state != "begun":
            raise TenutoError(f"compaction: cannot commit, it is {self.state}")
        session = self._session
        tools = tools if tools is not None else session.last_tools
        kept = self._keep_messages
        if session.prefix is not None:
            lead = len(messages) - len(fingerprint(messages).messages)
            kept = lead + shared_messages(session.prefix, fingerprint(messages, tools))
        request: dict[str, Any] | None = None
        if self._warm:
            request = {"model": session.model, "messages": list(messages), "tools": list(tools) if tools else None}
            request = {name: value for name, value in request.items() if value is not None}
            if len(json.dumps(request, default=str)) > WARM_CHARS_MAX:
                request = None
        self._emit("commit", kept, request)

    def abort(self) -> None:
        """The old prefix stays in use."""
        if self.state == "begun":
            self._emit("abort", None, None)

    def _emit(self, phase: str, keep_messages: int | None, request: dict[str, Any] | None) -> None:
        self.state = {"begin": "begun", "commit": "committed", "abort": "aborted"}[phase]
        keep = Shared(messages=keep_messages) if keep_messages is not None else None
        expect = self._expect_tokens if phase != "abort" else None
        self._session.emit(AgentCompaction, phase=phase, keep=keep, expect_tokens=expect, request=request)
        if self._session.services.recorder is not None:
            self._session.services.recorder.compaction(
                self._session.id, phase, keep_messages=keep_messages, expect_tokens=expect
            )

    def __enter__(self) -> Compaction:
        self._emit("begin", self._keep_messages, None)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    async def __aenter__(self) -> Compaction:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _wire(forecast: PauseForecast) -> Forecast | None:
    with contextlib.suppress(ValueError):
        return Forecast(**forecast.as_dict())
    return None
