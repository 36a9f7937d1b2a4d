"""``wrap(OpenAI())``: hints for an agent that keeps its own SDK. ``_Watch`` owns what one wrapped client's traffic tells.

The wrapped client's HTTP client is rebuilt around its own transport, so retries, streaming, timeouts, proxies and types
stay the SDK's. It may be built on httpx or on httpx2: the library is looked up from the object, never imported by name.
Everything here runs inside a guard that swallows and counts exceptions; nothing waits for the network.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from tenuto.answers import dialect_of, read_ending
from tenuto.client import Client
from tenuto.headers import HeaderError, encode_hints, write_identity
from tenuto.pause import Pause
from tenuto.proxy.bodies import Bodies, Reading
from tenuto.proxy.chains import prompt_of
from tenuto.session import Session, current_session
from tenuto.session_core import SessionCore

T = TypeVar("T")

SESSIONS_MAX = 256
COPY_BYTES_MAX = 8 << 20

_log = logging.getLogger("tenuto")


def wrap(client: T, *, session: str = "auto", tenuto: Client | None = None) -> T:
    """Returns the same kind of client (``OpenAI``, ``AsyncOpenAI``, ``Anthropic``, ``AsyncAnthropic``), sending hints.

    ``session``: the id of the one session that all calls belong to; ``auto``: the session whose ``with`` block is
    running, else one for each conversation, told apart by their growing prompts. ``tenuto``: the client that sends the
    hints; by default one for the wrapped client's own server and key, closed with the wrapped client. Raises
    ``TypeError`` when ``client`` is not built on httpx or httpx2. A library whose inside has changed leaves the client
    unwrapped, with one warning in the log.
    """
    inner: Any = getattr(client, "_client", None)
    lib = _http_library(inner)
    if not (hasattr(inner, "_transport") and hasattr(inner, "_mounts") and hasattr(client, "with_options")):
        _log.warning("tenuto.wrap: %s has an unknown structure and stays unwrapped", type(client).__name__)
        return client
    own = tenuto is None
    if tenuto is None:
        key = getattr(client, "api_key", None)
        tenuto = Client(str(inner.base_url), api_key=key if isinstance(key, str) and key else None)
    watch = _Watch(tenuto, session, closes=own)
    is_async = isinstance(inner, lib.AsyncClient)
    transport = (_async_transport if is_async else _sync_transport)(lib, watch, inner)
    http = (lib.AsyncClient if is_async else lib.Client)(
        transport=transport(inner._transport),
        mounts={pattern: mount and transport(mount) for pattern, mount in inner._mounts.items()},
        base_url=inner.base_url,
        timeout=inner.timeout,
        headers=inner.headers,
        cookies=inner.cookies,
        auth=inner.auth,
        event_hooks=inner.event_hooks,
        follow_redirects=inner.follow_redirects,
        max_redirects=inner.max_redirects,
        trust_env=False,  # the environment was read when the inner client was made
    )
    wrapped: T = client.with_options(http_client=http)
    return wrapped


def _http_library(inner: Any) -> Any:
    for base in type(inner).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return importlib.import_module(root)
    raise TypeError(f"tenuto.wrap: {type(inner).__name__} is not built on httpx or httpx2")


class _Conversations:
    """Tells conversations apart: a prompt that extends a conversation's latest prompt belongs to it. This runs in the
    agent's own call, so of a body that has grown only what is new is read."""

    def __init__(self) -> None:
        self._latest: OrderedDict[int, Session] = OrderedDict()
        self._bodies = Bodies(SESSIONS_MAX)

    def find(self, dialect: str, content: bytes, *, retry: bool, make: Callable[[str | None], Session]) -> Session:
        """The session of a request. Raises ``ValueError`` for a body that is no JSON object."""
        reading = self._bodies.read("", dialect, content)
        if reading is None:
            raise ValueError("the body is no JSON object")
        chain = _chain(reading)
        for position in range(len(chain) - (0 if retry else 1) - 1, -1, -1):
            known = self._latest.pop(chain[position], None)
            if known is not None:
                return self._keep(known, chain, reading)
        model = reading.frame.get("model")
        return self._keep(make(model if isinstance(model, str) else None), chain, reading)

    def _keep(self, session: Session, chain: list[int], reading: Reading) -> Session:
        if chain:
            self._latest[chain[-1]] = session
            self._bodies.keep("", session.id, reading)
        while len(self._latest) > SESSIONS_MAX:
            gone = self._latest.popitem(last=False)[1]
            self._bodies.drop("", gone.id)
            gone.end()
        return session


def _chain(reading: Reading) -> list[int]:
    """A digest for each beginning of a conversation; tools are left out: what was said names it."""
    state = prompt_of(reading.items, (), reading.frame.get("instructions") or reading.frame.get("system")).head
    chain = []
    for digest in reading.items.digests:
        state = hash((state, digest))
        chain.append(state)
    return chain


class _Watch:
    """Sees requests and answers of one wrapped client and keeps the pause that is open in each session."""

    def __init__(self, tenuto: Client, session: str, *, closes: bool) -> None:
        self.errors = 0
        self._tenuto = tenuto
        self._fixed = session if session != "auto" else None
        self._closes = closes
        self._lock = threading.Lock()
        self._conversations = _Conversations()
        self._named: Session | None = None
        self._pauses: dict[str, Pause] = {}

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception:  # hints fail open: whatever is wrong here, the user's call goes on
            self.errors += 1
            return None

    def request(self, request: Any) -> _Exchange | None:
        dialect = dialect_of(request.url.path) if request.method == "POST" else None
        if dialect is None:
            return None
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        with self._lock:
            session = self._session(dialect, request.content, retry)
            pause = self._pauses.pop(session.id, None)
        if pause is not None:
            pause.stop()
        for name, value in write_identity(session.id, session.parent).items():
            request.headers.setdefault(name, value)
        request.headers["accept-encoding"] = "identity"  # the copy is read as it comes
        self._carry(session, request)
        return _Exchange(self, session, dialect)

    def ended(self, session: SessionCore, dialect: str, data: bytes, streamed: bool) -> None:
        ending = read_ending(dialect, data, streamed=streamed)
        if ending is None or session.closed:
            return  # aborted or not understood: the server keeps the prefix on its own evidence
        name, args = ending.calls[0] if ending.calls else (None, None)
        pause = session.pause("tool" if ending.calls else "human", name=name, args=args)
        with self._lock:
            self._pauses[session.id] = pause
        pause.start()

    def close(self) -> None:
        if self._closes:
            self._tenuto.close()

    def _session(self, dialect: str, content: bytes, retry: bool) -> SessionCore:
        # Where the session is known, a long conversation is not even parsed: this runs in the agent's own call.
        running = current_session()
        if running is not None and not running.closed:
            return running
        if self._named is not None:
            return self._named
        if self._fixed is not None:
            self._named = self._tenuto.session(self._fixed, model=json.loads(content).get("model"))
            return self._named
        return self._conversations.find(dialect, content, retry=retry, make=self._open)

    def _open(self, model: str | None) -> Session:
        return self._tenuto.session(model=model)

    def _carry(self, session: SessionCore, request: Any) -> None:
        sender = session.services.sender
        envelope = sender.take(session.id) if sender is not None else None
        if sender is None or envelope is None:
            return
        try:
            request.headers["x-tenuto-hints"] = encode_hints(envelope)
        except HeaderError:
            sender.lose_carried(envelope)


class _Exchange:
    """One request and the copy of its answer."""

    def __init__(self, watch: _Watch, session: SessionCore, dialect: str) -> None:
        self._watch = watch
        self._session = session
        self._dialect = dialect
        self._copy: list[bytes] = []
        self._size = 0
        self._streamed = False
        self._ok = False

    def response(self, response: Any) -> None:
        self._ok = response.status_code < 400
        self._streamed = "text/event-stream" in response.headers.get("content-type", "")

    def chunk(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= COPY_BYTES_MAX:
            self._copy.append(bytes(data))

    def end(self) -> None:
        if self._ok and self._size <= COPY_BYTES_MAX:
            self._ok = False  # close may be called twice
            self._watch.ended(self._session, self._dialect, b"".join(self._copy), self._streamed)


def _sync_transport(lib: Any, watch: _Watch, inner: Any) -> Any:
    class Tee(lib.SyncByteStream):
        def __init__(self, stream: Any, exchange: _Exchange) -> None:
            self._stream, self._exchange = stream, exchange

        def __iter__(self) -> Iterator[bytes]:
            for data in self._stream:
                watch.guard(self._exchange.chunk, data)
                yield data

        def close(self) -> None:
            try:
                self._stream.close()
            finally:
                watch.guard(self._exchange.end)

    class HintTransport(lib.BaseTransport):
        # ``owner`` keeps the SDK's HTTP client alive: it closes the shared transport when it is collected.
        def __init__(self, transport: Any) -> None:
            self._transport, self._owner = transport, inner

        def handle_request(self, request: Any) -> Any:
            exchange = watch.guard(watch.request, request)
            response = self._transport.handle_request(request)
            if exchange is not None:
                watch.guard(exchange.response, response)
                response.stream = Tee(response.stream, exchange)
            return response

        def close(self) -> None:
            watch.guard(watch.close)
            self._transport.close()

    return HintTransport


def _async_transport(lib: Any, watch: _Watch, inner: Any) -> Any:
    class AsyncTee(lib.AsyncByteStream):
        def __init__(self, stream: Any, exchange: _Exchange) -> None:
            self._stream, self._exchange = stream, exchange

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for data in self._stream:
                watch.guard(self._exchange.chunk, data)
                yield data

        async def aclose(self) -> None:
            try:
                await self._stream.aclose()
            finally:
                watch.guard(self._exchange.end)

    class AsyncHintTransport(lib.AsyncBaseTransport):
        def __init__(self, transport: Any) -> None:
            self._transport, self._owner = transport, inner

        async def handle_async_request(self, request: Any) -> Any:
            exchange = watch.guard(watch.request, request)
            response = await self._transport.handle_async_request(request)
            if exchange is not None:
                watch.guard(exchange.response, response)
                response.stream = AsyncTee(response.stream, exchange)
            return response

        async def aclose(self) -> None:
            import anyio.to_thread

            await anyio.to_thread.run_sync(lambda: watch.guard(watch.close))
            await self._transport.aclose()

    return AsyncHintTransport
