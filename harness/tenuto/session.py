"""Session and AsyncSession: what an agent touches. The state is ``SessionCore``'s; these add the turns.

Both have the same surface. Hints (``pause``, ``keepalive``, ``join``, ``end`` and so on) are plain calls in both: they
only queue. What waits for the server is awaited in ``AsyncSession``: ``chat`` and ``stream``.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenuto.errors import APIConnectionError
from tenuto.prefix import Message
from tenuto.session_core import PendingTurn, SessionCore
from tenuto.sse import DONE, SSEDecoder, parse_chunk
from tenuto.turn import StreamEvent, ToolCall, Turn, TurnBuilder

if TYPE_CHECKING:
    from tenuto.client import AsyncClient, Client, ResponseStream
    from tenuto.expiry import CompactBeforeExpiry
    from tenuto.pause import Compaction

_current: contextvars.ContextVar[SessionCore | None] = contextvars.ContextVar("tenuto_session", default=None)


def current_session() -> SessionCore | None:
    """The innermost session whose ``with`` block is running in this context."""
    return _current.get()


def system(text: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def tool_result(call: ToolCall | str, result: str) -> dict[str, Any]:
    """The message that answers a tool call (or a tool call's id)."""
    return {"role": "tool", "tool_call_id": call.id if isinstance(call, ToolCall) else call, "content": result}


class _Scope(SessionCore):
    """The ``with`` block of a session: it ends with the block, and is the current session inside."""

    _token: contextvars.Token[SessionCore | None] | None = None

    def _enter(self) -> None:
        self._token = _current.set(self)

    def _exit(self) -> None:
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:  # left in another context than entered, as some test runners do
                _current.set(None)
            self._token = None
        self.end()


class Session(_Scope):
    """A session of a ``Client``; see ``SessionCore`` for its attributes and hints. Leaving its ``with`` block ends it."""

    def __init__(self, client: Client, id: str, **fields: Any) -> None:
        self._client = client
        super().__init__(client.services, id, **fields)

    def chat(self, messages: Sequence[Message], *, timeout: float | None = None, **params: Any) -> Turn:
        """One turn. ``params``: any field of a Chat Completions request (``model``, ``tools``, ``temperature``, ...).

        Raises ``APIError`` and its kin; ``timeout`` in seconds for this request.
        """
        return self._client.complete(self, self.begin_turn(messages, params, stream=False), timeout)

    def stream(self, messages: Sequence[Message], *, timeout: float | None = None, **params: Any) -> TurnStream:
        """One turn, streamed: ``with s.stream(...) as stream: for event in stream: ...``, then ``stream.turn``."""
        return TurnStream(self, self._client, self.begin_turn(messages, params, stream=True), timeout)

    def fork(
        self,
        name: str,
        *,
        when_s: float | None = None,
        model: str | None = None,
        attended: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> Session:
        """A child session that starts on this session's last prompt (``child.history``); ``when_s``: in about so long.

        The child's first request is compared with that prompt: where tools, system or history differ it warns with a
        ``PrefixDivergedWarning`` that names the first difference, or, if ``strict``, raises ``PrefixDivergedError``
        before anything is sent. ``tools``: those the child will send, where known, to be compared already here.
        Leaving the child's ``with`` block ends it and tells this session's KV that the child has joined.
        """
        return self.fan_out([name], when_s=when_s, model=model, attended=attended, tools=tools, strict=strict)[0]

    def fan_out(
        self,
        names: Sequence[str],
        *,
        when_s: float | None = None,
        model: str | None = None,
        attended: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> list[Session]:
        """Several forks announced at once, so that the shared prefix is warmed once."""
        plans = self.plan_forks(names, when_s=when_s, model=model, attended=attended, tools=tools, strict=strict)
        return [self._client.track(Session(self._client, **plan)) for plan in plans]

    def spawn(self, name: str, *, model: str | None = None, attended: bool | None = None) -> Session:
        """A child session that shares nothing with this one but the tree."""
        watched = self.attended if attended is None else attended
        return self._client.session(
            self.child_id(name), model=model or self.model, agent=name, attended=watched, parent=self.id
        )

    def __enter__(self) -> Session:
        self._enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit()


class AsyncSession(_Scope):
    """A session of an ``AsyncClient``: the twin of ``Session``, with ``chat`` and ``stream`` awaited."""

    def __init__(self, client: AsyncClient, id: str, **fields: Any) -> None:
        self._client = client
        super().__init__(client.services, id, **fields)

    async def chat(self, messages: Sequence[Message], *, timeout: float | None = None, **params: Any) -> Turn:
        """One turn; see ``Session.chat``."""
        return await self._client.complete(self, self.begin_turn(messages, params, stream=False), timeout)

    def stream(self, messages: Sequence[Message], *, timeout: float | None = None, **params: Any) -> AsyncTurnStream:
        """One turn, streamed: ``async with s.stream(...) as stream: async for event in stream: ...``."""
        return AsyncTurnStream(self, self._client, self.begin_turn(messages, params, stream=True), timeout)

    def fork(
        self,
        name: str,
        *,
        when_s: float | None = None,
        model: str | None = None,
        attended: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> AsyncSession:
        """A child session that starts on this session's last prompt; see ``Session.fork``."""
        return self.fan_out([name], when_s=when_s, model=model, attended=attended, tools=tools, strict=strict)[0]

    def fan_out(
        self,
        names: Sequence[str],
        *,
        when_s: float | None = None,
        model: str | None = None,
        attended: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> list[AsyncSession]:
        """Several forks announced at once, so that the shared prefix is warmed once."""
        plans = self.plan_forks(names, when_s=when_s, model=model, attended=attended, tools=tools, strict=strict)
        return [self._client.track(AsyncSession(self._client, **plan)) for plan in plans]

    def spawn(self, name: str, *, model: str | None = None, attended: bool | None = None) -> AsyncSession:
        """A child session that shares nothing with this one but the tree."""
        watched = self.attended if attended is None else attended
        return self._client.session(
            self.child_id(name), model=model or self.model, agent=name, attended=watched, parent=self.id
        )

    def compact_before_expiry(
        self,
        summarise: Callable[[Compaction], Awaitable[object]],
        *,
        min_tokens: int,
        lead_s: float | None = None,
        kinds: Collection[str] = ("human",),
    ) -> CompactBeforeExpiry:
        """Has ``summarise`` called in a long pause, before the lease on a large context ends. Off until called.

        ``summarise(compaction)`` asks for the summary with the live prompt plus one message, same tools and parameters,
        so that it is computed from the warm prefix, then calls ``compaction.commit(messages)`` and keeps these messages
        for the next turn. It runs in the session's event loop, at most once a pause, ``lead_s`` seconds before the known
        end of the lease (default: 5 s or 5 % of it, never more than half), where prompt and answer of the last turn have
        ``min_tokens`` or more. It is cancelled when the pause ends. What it raises goes to the log and the returned
        handle. ``kinds``: the pauses it may use; in that of a tool the prompt ends with a call that has no result yet.
        Only here: a sync session has no loop in which a summary could be called off.
        """
        from tenuto.expiry import CompactBeforeExpiry

        if self.expiry is not None:
            self.expiry.stop()
        self.expiry = CompactBeforeExpiry(self, summarise, min_tokens=min_tokens, lead_s=lead_s, kinds=kinds)
        if self.open_pauses:
            self.expiry.paused()
        return self.expiry

    async def __aenter__(self) -> AsyncSession:
        self._enter()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit()


class _StreamCore:
    """The state of one streamed answer: decoder, assembled turn, times."""

    def __init__(self, session: SessionCore, pending: PendingTurn) -> None:
        self._session = session
        self._pending = pending
        self._decoder = SSEDecoder()
        self._builder = TurnBuilder()
        self._clock = session.services.clock
        self._ttft_s: float | None = None
        self._done = False
        self._settled = False
        self._turn: Turn | None = None

    @property
    def turn(self) -> Turn:
        """The turn, complete once the stream has been read to its end; until then what has come so far."""
        if self._turn is not None:
            return self._turn
        return self._builder.build(ttft_s=self._ttft_s, duration_s=self._clock() - self._pending.started_s)

    def _feed(self, data: bytes) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        for text in self._decoder.feed(data):
            if text == DONE:
                self._done = True
                continue
            events.append(self._builder.feed(parse_chunk(text)))
            if self._ttft_s is None and self._builder.first_token_seen:
                self._ttft_s = self._clock() - self._pending.started_s
        return events

    def _complete(self, request_id: str | None) -> None:
        if not self._done:
            raise APIConnectionError("the stream broke off before its end")
        duration_s = self._clock() - self._pending.started_s
        turn = self._builder.build(ttft_s=self._ttft_s, duration_s=duration_s, request_id=request_id)
        self._settled = True
        self._turn = self._session.finish_turn(self._pending, turn)

    def _give_up(self, error: BaseException | None, *, reached: bool) -> None:
        if not self._settled:
            self._settled = True
            self._session.fail_turn(self._pending, error, reached=reached)


class TurnStream(_StreamCore):
    """A streamed turn: iterate for ``StreamEvent``s. Leaving early closes the connection, which stops the server."""

    def __init__(self, session: SessionCore, client: Client, pending: PendingTurn, timeout: float | None) -> None:
        super().__init__(session, pending)
        self._client = client
        self._timeout = timeout
        self._response: ResponseStream | None = None

    def __enter__(self) -> TurnStream:
        try:
            self._response = self._client.open_stream(self._pending, self._timeout)
        except BaseException as error:
            self._give_up(error, reached=False)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up(exc, reached=True)
        if self._response is not None:
            self._response.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        if self._response is None:
            raise RuntimeError("enter the stream first: with session.stream(...) as stream")
        for data in self._response.iter_bytes():
            yield from self._feed(data)
        if not self._settled:
            self._complete(self._response.request_id)


class AsyncTurnStream(_StreamCore):
    """The twin of ``TurnStream`` for ``async with`` and ``async for``."""

    def __init__(self, session: SessionCore, client: AsyncClient, pending: PendingTurn, timeout: float | None) -> None:
        super().__init__(session, pending)
        self._client = client
        self._timeout = timeout
        self._response: ResponseStream | None = None

    async def __aenter__(self) -> AsyncTurnStream:
        try:
            self._response = await self._client.open_stream(self._pending, self._timeout)
        except BaseException as error:
            self._give_up(error, reached=False)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up(exc, reached=True)
        if self._response is not None:
            await self._response.aclose()

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        if self._response is None:
            raise RuntimeError("enter the stream first: async with session.stream(...) as stream")
        async for data in self._response.aiter_bytes():
            for event in self._feed(data):
                yield event
        if not self._settled:
            self._complete(self._response.request_id)


def as_messages(messages: Sequence[Mapping[str, Any]] | str) -> list[Message]:
    """A list of messages; a string becomes one user message."""
    return [user(messages)] if isinstance(messages, str) else list(messages)
