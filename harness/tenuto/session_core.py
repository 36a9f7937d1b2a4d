"""What sync and async sessions share: identity, hints, usage, the life of a turn. No input, output or waiting here.

``SessionCore`` owns the state of one session; ``Services`` is what its client lends it. Every hint goes through
``SessionCore.emit``, which never raises and never blocks.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tenuto.errors import PrefixDivergedError, PrefixDivergedWarning, SessionClosedError
from tenuto.forecast import PauseForecaster
from tenuto.headers import HeaderError, encode_hints, write_identity
from tenuto.keepalive import Keepalive
from tenuto.pause import Compaction, Pause
from tenuto.prefix import DivergenceReport, Fingerprint, Message, divergence, fingerprint
from tenuto.sender import Hint, HintSender
from tenuto.telemetry import Telemetry
from tenuto.turn import Miss, ToolCall, Turn
from tenuto.wire import (
    AgentEnd,
    AgentFork,
    AgentJoin,
    AgentKeepalive,
    AgentModelSwitch,
    AgentResumeSoon,
    AgentSession,
    AnyAction,
    Envelope,
    Lease,
    Receipt,
    Shared,
)

if TYPE_CHECKING:
    from tenuto.expiry import CompactBeforeExpiry
    from tenuto.recorder import Recorder

OPEN_DELAY_S = 0.02  # an opening or fork hint waits this long for the first request to carry it
ID_CHARS_MAX = 256
SAVE_EVERY = 32


@dataclass(slots=True)
class Services:
    """What a client lends to its sessions. ``sender`` is None when hints are disabled."""

    sender: HintSender | None
    forecaster: PauseForecaster
    telemetry: Telemetry
    recorder: Recorder | None = None
    clock: Callable[[], float] = time.monotonic
    default_model: str = ""  # asked of the server when the first turn names none
    talks_tenuto: bool = False  # an answer or receipt of this server proved that it knows the protocol


@dataclass(slots=True)
class SessionUsage:
    """Token counts over all turns of a session. ``misses``: recomputed tokens by label."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0, "recompute": 0})
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def cache_hit_ratio(self) -> float:
        """Share of prompt tokens that were not computed again; 0 before the first turn."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, turn: Turn) -> None:
        """Adds one turn."""
        self.turns += 1
        self.prompt_tokens += turn.usage.prompt_tokens
        self.completion_tokens += turn.usage.completion_tokens
        self.cached_tokens += turn.usage.cached_tokens
        for tier, tokens in turn.usage.by_tier.items():
            self.by_tier[tier] = self.by_tier.get(tier, 0) + tokens
        for miss in turn.usage.misses:
            self.misses[miss.label] = self.misses.get(miss.label, 0) + miss.tokens


@dataclass(slots=True)
class PendingTurn:
    """A request on its way: what to send, and what is needed when its answer comes."""

    messages: list[Message]
    body: dict[str, Any]
    headers: dict[str, str]
    envelope: Envelope | None
    prompt: Fingerprint
    started_s: float
    span: Any


class SessionCore:
    """One agent conversation. Made by ``client.session()``; see ``Session`` and ``AsyncSession`` for the turns.

    ``id``: sent as ``X-Session-ID``. ``model``: default of the turns. ``usage``: sums over the turns. ``last_turn``,
    ``last_miss``: of the latest answer. ``lease``: the latest that the server granted; ``lease_ends_s``: when it ends, on the
    client's clock. ``divergence``: where the last
    prompt stopped extending the one before it (a fork's first prompt: its parent's), as seen from here; None when it
    extended it.
    """

    def __init__(
        self,
        services: Services,
        id: str,
        *,
        model: str | None = None,
        agent: str | None = None,
        attended: bool = True,
        parent: str | None = None,
        forked_from: SessionCore | None = None,
        strict: bool = False,
    ) -> None:
        self.id = id[:ID_CHARS_MAX]
        self.parent = parent
        self.model = model
        self.agent = agent
        self.attended = attended
        self.usage = SessionUsage()
        self.last_turn: Turn | None = None
        self.last_miss: Miss | None = None
        self.lease: Lease | None = None
        self.lease_ends_s: float | None = None
        self.expiry: CompactBeforeExpiry | None = None
        self.divergence: DivergenceReport | None = None
        self.history: list[Message] = list(forked_from.prompt) if forked_from is not None else []
        self.prompt: list[Message] = list(self.history)
        self.closed = False
        self.services = services
        self.open_pauses: list[Pause] = []
        self._forked_from = forked_from
        self._starts_on: Fingerprint | None = forked_from.prefix if forked_from is not None else None
        self._strict = strict
        self.prefix: Fingerprint | None = None
        self.last_tools: Sequence[Mapping[str, Any]] | None = None
        self._keepalives: list[Keepalive] = []
        self._children = 0
        parent_span: Any = forked_from.span if forked_from is not None else None
        attributes = {"conversation": self.id, "agent": agent, "request_model": model}
        self.span: Any = services.telemetry.start("session", agent, attributes, parent_span)
        self.emit(AgentSession, delay_s=OPEN_DELAY_S, parent=parent, agent=agent, model=model, attended=attended)
        if services.recorder is not None:
            shared = {} if forked_from is None else forked_from.shared_size()
            services.recorder.session(
                self.id,
                parent=parent,
                agent=agent,
                model=model,
                attended=attended,
                fork=forked_from is not None,
                **shared,
            )

    # -- hints ------------------------------------------------------------------------------------------------------

    def emit(
        self, action: Callable[..., AnyAction], /, *, delay_s: float = 0.0, rides: bool = True, **payload: Any
    ) -> Hint | None:
        """Queues one hint; None when hints are disabled or the payload is not valid. Never raises, never blocks."""
        sender = self.services.sender
        if sender is None:
            return None
        try:
            built = action(session=self.id, **payload)
        except ValueError:  # pydantic's ValidationError: a name too long, a number out of range
            sender.count_invalid()
            return None
        return sender.offer(built, delay_s=delay_s, rides=rides)

    def pause(
        self,
        kind: str = "tool",
        call: ToolCall | None = None,
        *,
        name: str | None = None,
        command: str | Sequence[str] | None = None,
        args: Mapping[str, Any] | None = None,
        forecast: Any = None,
    ) -> Pause:
        """A pause as a context manager, ``with`` or ``async with``: a tool runs, a person thinks, a subagent works.

        ``kind``: tool, human, subagent, permission or background. The tool is described by a ``ToolCall`` of the last
        turn, or by ``name`` with the shell ``command`` or the call's ``args``. ``forecast``: seconds or a
        ``PauseForecast``; by default predicted from this machine's history of the same tool and command.
        """
        if call is not None:
            name, args = name or call.name, args or call.arguments
        return Pause(self, kind, name=name, command=command, args=args, forecast=forecast)

    def keepalive(self, for_s: float, *, every_s: float = 30.0, budget: int | None = None) -> Keepalive:
        """Says every ``every_s`` seconds that the session still wants its KV, for ``for_s`` seconds at most.

        Sent in the background; stops with the returned handle, after ``budget`` hints, or with the session.
        """
        now = self.services.clock()

        def announce(covered_s: float) -> None:
            self.emit(AgentKeepalive, for_s=covered_s)

        handle = Keepalive(announce, start_s=now, for_s=for_s, every_s=every_s, budget=budget)
        self._keepalives = [k for k in self._keepalives if k.active] + [handle]
        if self.services.sender is not None:
            self.services.sender.schedule(now, handle.tick)
        return handle

    def resume_soon(self, in_s: float = 0.0) -> None:
        """The next turn comes in about ``in_s`` seconds."""
        self.emit(AgentResumeSoon, in_s=in_s)

    def compaction(
        self, *, keep_messages: int | None = None, expect_tokens: int | None = None, warm: bool = True
    ) -> Compaction:
        """A compaction as a context manager: begins on entry; ``commit(messages)`` inside, else it is aborted.

        ``keep_messages``: leading messages that will stay as they are. ``expect_tokens``: size of the new prompt.
        ``warm``: send the new prompt on commit, so that the server can compute it before the next turn.
        """
        return Compaction(self, keep_messages=keep_messages, expect_tokens=expect_tokens, warm=warm)

    def model_switch(self, model: str, *, back_in_s: float | None = None) -> None:
        """The next turns use ``model``; ``back_in_s``: when the present one is expected back."""
        self.emit(AgentModelSwitch, model=model, back_in_s=back_in_s)
        self.model = model
        if self.services.recorder is not None:
            self.services.recorder.model_switch(self.id, model, back_in_s)

    def join(self, child: str | SessionCore, *, keep: bool = False) -> None:
        """A subagent ended; ``keep``: its own suffix is still worth something. Leaving a fork's context does this."""
        self.emit(AgentJoin, child=child.id if isinstance(child, SessionCore) else child, keep=keep)

    def end(self, keep_s: float | None = None) -> None:
        """The session is over; ``keep_s``: keep its KV this long for a possible resume. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self.expiry is not None:
            self.expiry.stop()
        for keepalive in self._keepalives:
            keepalive.stop()
        for pause in list(self.open_pauses):
            pause.abandon()
        self.emit(AgentEnd, keep_s=keep_s)
        if self._forked_from is not None:
            self._forked_from.join(self)
        if self.services.recorder is not None:
            self.services.recorder.end(self.id, keep_s, self._forked_from is not None)
        self.services.telemetry.finish(self.span, {"input_tokens": self.usage.prompt_tokens})

    def announce_forks(self, children: Sequence[str], *, when_s: float | None = None) -> None:
        """Says that these child sessions are about to start on this session's last prompt."""
        shared = None
        if self.prefix is not None:
            size = self.shared_size()
            shared = Shared(
                messages=size["shared_messages"], tokens=size["shared_tokens"], fingerprint=self.prefix.digest
            )
        self.emit(
            AgentFork,
            delay_s=OPEN_DELAY_S,
            children=tuple(children),
            count=len(children),
            shared=shared,
            when_s=when_s,
        )

    def plan_forks(
        self,
        names: Sequence[str],
        *,
        when_s: float | None,
        model: str | None,
        attended: bool | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> list[dict[str, Any]]:
        """Announces forks and returns the fields to make each child session with."""
        if self.prefix is None:
            if strict:
                raise PrefixDivergedError(f"session {self.id!r} has had no turn yet: there is no prompt to fork")
        elif tools is not None:
            planned = replace(self.prefix, tools=fingerprint((), tools).tools)
            self._tell(divergence(self.prefix, planned), f"a fork of session {self.id!r}", strict)
        ids = [self.child_id(name) for name in names]
        self.announce_forks(ids, when_s=when_s)
        common = {
            "model": model or self.model,
            "attended": self.attended if attended is None else attended,
            "parent": self.id,
            "forked_from": self,
            "strict": strict,
        }
        return [{"id": id, "agent": name, **common} for id, name in zip(ids, names, strict=True)]

    def shared_size(self) -> dict[str, int | None]:
        """What a fork shares with this session: messages and tokens of its last prompt."""
        tokens = self.last_turn.usage.prompt_tokens if self.last_turn is not None else None
        return {"shared_messages": len(self.prompt), "shared_tokens": tokens}

    def child_id(self, name: str) -> str:
        """A fresh id for a child of this session."""
        self._children += 1
        return f"{self.id[: ID_CHARS_MAX - 80]}/{name[:64]}-{self._children}"

    # -- turns ------------------------------------------------------------------------------------------------------

    def begin_turn(self, messages: Sequence[Message], params: Mapping[str, Any], *, stream: bool) -> PendingTurn:
        """Prepares a request: body, headers, waiting hints. Raises ``SessionClosedError`` after ``end()``."""
        if self.closed:
            raise SessionClosedError(f"session {self.id!r} has ended")
        if self.expiry is not None:
            self.expiry.resumed()
        services = self.services
        given = dict(params)
        headers = {**write_identity(self.id, self.parent), **(given.pop("extra_headers", None) or {})}
        body: dict[str, Any] = {
            "model": given.pop("model", None) or self.model or services.default_model,
            "messages": messages,
        }
        body.update({name: value for name, value in given.items() if value is not None})
        if stream:
            body["stream"] = True
            body.setdefault("stream_options", {"include_usage": True})
        prompt = fingerprint(messages, body.get("tools"))
        before = self.prefix or self._starts_on
        self.divergence = divergence(before, prompt) if before is not None else None
        if self._starts_on is not None:
            self._tell(self.divergence, f"session {self.id!r}", self._strict)
            self._starts_on = None
        span = services.telemetry.start(
            "chat", body["model"], {"conversation": self.id, "request_model": body["model"] or None}, self.span
        )
        headers.update(services.telemetry.headers(span))
        # The parent's fork must not arrive after the child's first request, so the child carries its parent's hints too.
        envelope = services.sender.take(self.id, self.parent) if services.sender is not None else None
        if envelope is not None and not self._attach(envelope, body, headers):
            envelope = None
        return PendingTurn(list(messages), body, headers, envelope, prompt, services.clock(), span)

    @staticmethod
    def _tell(report: DivergenceReport | None, who: str, strict: bool) -> None:
        """Warns of a fork that differs, at the agent's own line, or raises ``PrefixDivergedError`` if ``strict``."""
        if report is None:
            return
        text = f"{who} does not start on the prompt it was forked from: {report}"
        if strict:
            raise PrefixDivergedError(text)
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "tenuto":
            frame, level = frame.f_back, level + 1
        warnings.warn(text, PrefixDivergedWarning, stacklevel=level)

    def finish_turn(self, pending: PendingTurn, turn: Turn) -> Turn:
        """Takes in an answer."""
        services = self.services
        report = turn.usage.report
        if report is not None:
            services.talks_tenuto = True
            self._hold(report.lease)
            if pending.envelope is not None and services.sender is not None:
                services.sender.record_receipts(pending.envelope, report.receipts)
        self.prefix = pending.prompt
        self.last_tools = pending.body.get("tools")
        self.prompt = pending.messages
        self.history = [*pending.messages, turn.message]
        self.last_turn = turn
        self.last_miss = turn.usage.misses[0] if turn.usage.misses else None
        self.usage.add(turn)
        services.telemetry.turn(pending.span, turn)
        if services.recorder is not None:
            services.recorder.turn(self.id, turn, pending.messages, pending.body, pending.started_s)
        return turn

    def fail_turn(self, pending: PendingTurn, error: BaseException | None, *, reached: bool = False) -> None:
        """A request failed or was given up. ``reached``: the server had begun to answer, so it has the hints."""
        if pending.envelope is not None and self.services.sender is not None and not reached:
            self.services.sender.lose_carried(pending.envelope)
        self.services.telemetry.finish(pending.span, {}, error)

    def on_receipt(self, action: AnyAction, receipt: Receipt) -> None:
        """A receipt for one of this session's hints; called on the sender's thread."""
        if receipt.lease is not None:
            self._hold(receipt.lease)

    def _hold(self, lease: Lease | None) -> None:
        self.lease = lease
        self.lease_ends_s = None if lease is None else self.services.clock() + lease.until_s
        if self.expiry is not None:
            self.expiry.watch()

    def learn_pause(self, call: Callable[[PauseForecaster], None]) -> None:
        """Teaches the forecaster and now and then has the worker save its history."""
        forecaster = self.services.forecaster
        with contextlib.suppress(Exception):  # a forecast is advice: its failure is no reason to stop an agent
            call(forecaster)
            if forecaster.unsaved >= SAVE_EVERY and self.services.sender is not None:
                self.services.sender.schedule(self.services.clock(), self._save_history)

    def _save_history(self, now_s: float) -> None:
        self.services.forecaster.save()

    def _attach(self, envelope: Envelope, body: dict[str, Any], headers: dict[str, str]) -> bool:
        # A server that has not shown that it knows the protocol may refuse unknown body fields; headers are harmless.
        if self.services.talks_tenuto:
            body["kv_hints"] = envelope.model_dump(mode="json", exclude_none=True)
            return True
        try:
            headers["x-tenuto-hints"] = encode_hints(envelope)
            return True
        except HeaderError:
            if self.services.sender is not None:
                self.services.sender.lose_carried(envelope)
            return False
