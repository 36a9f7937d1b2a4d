"""Client and AsyncClient: connections, retries, hint delivery. The only module of the SDK that imports httpx.

A client owns its connection pools, its hint sender and its services (forecaster, telemetry); sessions borrow them.
Making a client talks to nobody: a server that is down costs nothing until the first request, and a hint never waits.

httpx takes longer to import than all the rest: the hint sender's thread does it, or the first request if that comes first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from pydantic import ValidationError

from tenuto.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    HintRejectedError,
    error_from_response,
    parse_retry_after,
)
from tenuto.forecast import PauseForecaster
from tenuto.prefix import Message
from tenuto.retry import retry_delay
from tenuto.sender import BUDGET_S, Delivery, Hints, HintSender
from tenuto.session import AsyncSession, AsyncTurnStream, Session, TurnStream, as_messages
from tenuto.session_core import PendingTurn, Services, SessionCore
from tenuto.telemetry import Telemetry
from tenuto.turn import Turn, turn_from_completion
from tenuto.wire import AnyAction, Envelope, Receipt, Receipts

if TYPE_CHECKING:
    import httpx

    from tenuto.recorder import Recorder

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
RECEIPT_BYTES_MAX = 1 << 20

S = TypeVar("S", bound=SessionCore)


class ResponseStream:
    """An open streaming answer of either client."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    @property
    def request_id(self) -> str | None:
        """The server's name for the request."""
        value: str | None = self._response.headers.get("x-request-id")
        return value

    def iter_bytes(self) -> Iterator[bytes]:
        """The body as it comes."""
        with _mapped():
            yield from self._response.iter_bytes()

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        with _mapped():
            async for data in self._response.aiter_bytes():
                yield data

    def close(self) -> None:
        """Closes the connection, or returns it to the pool when the body was read to its end."""
        self._response.close()

    async def aclose(self) -> None:
        """Closes the connection, or returns it to the pool when the body was read to its end."""
        await self._response.aclose()


class _ClientCore:
    """What both clients share: settings from arguments and environment, hint delivery, sessions by id."""

    def __init__(
        self,
        base_url: str | None,
        *,
        api_key: str | None,
        timeout: float,
        max_retries: int,
        headers: Mapping[str, str] | None,
        forecaster: PauseForecaster | None,
        recorder: Recorder | None,
        strict: bool,
        clock: Callable[[], float],
    ) -> None:
        url = base_url or os.environ.get("TENUTO_BASE_URL") or DEFAULT_BASE_URL
        self.base_url = url.rstrip("/").removesuffix("/v1")
        key = api_key if api_key is not None else os.environ.get("TENUTO_API_KEY")
        self._tls = self.base_url.startswith("https:")  # loading certificates takes longer than all else here
        self.timeout_s = timeout
        self.max_retries = max_retries
        self.strict = strict
        self.hint_budget_s = BUDGET_S  # of one delivery, in the background
        self._headers = {**({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        self._sessions: weakref.WeakValueDictionary[str, SessionCore] = weakref.WeakValueDictionary()
        self._rejected: list[tuple[str, Receipt]] = []
        self._hint_http: httpx.Client | None = None
        enabled = os.environ.get("TENUTO_DISABLED", "").strip().lower() not in ("1", "true", "yes")
        self._opening = threading.Lock()
        sender = HintSender(self._deliver, clock=clock, on_receipt=self._on_receipt) if enabled else None
        if sender is not None:
            sender.schedule(clock(), _import_httpx)
        self.services = Services(
            sender=sender,
            forecaster=forecaster if forecaster is not None else PauseForecaster.open(),
            telemetry=Telemetry(),
            recorder=recorder,
            clock=clock,
        )
        self.hints = Hints(sender)

    @property
    def forecaster(self) -> PauseForecaster:
        """The pause history that this client predicts from and teaches."""
        return self.services.forecaster

    def track(self, session: S) -> S:
        """Has receipts for a session's hints passed on to it."""
        self._sessions[session.id] = session
        return session

    def _deliver(self, envelope: Envelope) -> Delivery:
        """Posts hints; runs on the sender's thread, with its own connection, within the budget."""
        import httpx

        if self._hint_http is None:
            # Half the budget to connect and half to answer: a warm connection has its half to spare.
            self._hint_http = httpx.Client(
                base_url=self.base_url,
                timeout=httpx.Timeout(self.hint_budget_s / 2),
                limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
                trust_env=False,
                verify=self._tls,
            )
        data, deadline = b"", time.monotonic() + self.hint_budget_s
        content = envelope.model_dump_json(exclude_none=True).encode()
        headers = {**self._headers, "content-type": "application/json"}
        try:
            with self._hint_http.stream("POST", "/v1/kv_hints", content=content, headers=headers) as response:
                for piece in response.iter_bytes():
                    data += piece
                    if time.monotonic() > deadline or len(data) > RECEIPT_BYTES_MAX:
                        break  # delivered; only its receipts are lost
        except httpx.ReadTimeout:
            return Delivery(0, taken=True)
        receipts: tuple[Receipt, ...] = ()
        if response.is_success:
            with contextlib.suppress(ValidationError):
                receipts = Receipts.model_validate_json(data).receipts
                self.services.talks_tenuto = True
        return Delivery(response.status_code, receipts, parse_retry_after(response.headers.get("retry-after")))

    def _on_receipt(self, action: AnyAction, receipt: Receipt) -> None:
        if (session := self._sessions.get(action.session)) is not None:
            session.on_receipt(action, receipt)
        if self.strict and receipt.outcome in ("rejected", "missing"):
            self._rejected.append((action.TYPE, receipt))

    def _raise_rejected(self) -> None:
        if self._rejected:
            kind, receipt = self._rejected.pop(0)
            text = f"{kind}: {receipt.outcome}: {receipt.reason or 'no reason given'}"
            raise HintRejectedError(text, action_id=receipt.action_id, outcome=receipt.outcome)

    def _request(self, http: httpx.Client | httpx.AsyncClient, pending: PendingTurn, timeout: float | None) -> Any:
        import httpx

        limit = self.timeout_s if timeout is None else timeout
        return http.build_request(
            "POST",
            "/v1/chat/completions",
            json=pending.body,
            headers=pending.headers,
            timeout=httpx.Timeout(limit, connect=min(CONNECT_TIMEOUT_S, limit)),
        )

    def _learn_model(self, response: httpx.Response) -> None:
        """Has turns that name no model use the first one that the server lists."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            self.services.default_model = str(response.json()["data"][0]["id"])

    def _finish(self, session: SessionCore, pending: PendingTurn, response: httpx.Response) -> Turn:
        duration_s = self.services.clock() - pending.started_s
        body = None
        with contextlib.suppress(ValueError):
            body = response.json()
        if not isinstance(body, dict):
            raise APIError("the answer is not a JSON object", request_id=response.headers.get("x-request-id"))
        turn = turn_from_completion(body, duration_s=duration_s, request_id=response.headers.get("x-request-id"))
        return session.finish_turn(pending, turn)

    def _close_hints(self) -> None:
        if self.services.sender is not None:
            self.services.sender.close(self.hint_budget_s)
        if self._hint_http is not None:
            self._hint_http.close()
        self.services.forecaster.save()


class Client(_ClientCore):
    """A synchronous client; a context manager.

    ``base_url``: with or without ``/v1``; else ``TENUTO_BASE_URL``, else ``http://127.0.0.1:8000``. ``api_key``: else
    ``TENUTO_API_KEY``. ``timeout``: seconds a request may wait for data. ``max_retries``: of requests that failed on
    the way or with a status worth retrying. ``forecaster``: else the user's history. ``recorder``: writes a trace.
    ``strict``: raise ``HintRejectedError`` on the next turn after a rejected hint, for tests. ``TENUTO_DISABLED=1``
    turns every hint off.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        forecaster: PauseForecaster | None = None,
        recorder: Recorder | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            headers=headers,
            forecaster=forecaster,
            recorder=recorder,
            strict=strict,
            clock=clock,
        )
        self._opened: httpx.Client | None = None

    @property
    def _http(self) -> httpx.Client:
        with self._opening:
            if self._opened is None:
                import httpx

                self._opened = httpx.Client(base_url=self.base_url, headers=self._headers, verify=self._tls)
            return self._opened

    def session(
        self,
        name: str | None = None,
        *,
        model: str | None = None,
        agent: str | None = None,
        attended: bool = True,
        parent: str | None = None,
    ) -> Session:
        """Opens a session; ``name`` is its id on the server, the same name resumes it. See ``SessionCore``."""
        id = name or f"tn-{secrets.token_hex(8)}"
        return self.track(Session(self, id, model=model, agent=agent, attended=attended, parent=parent))

    def chat(self, messages: Sequence[Message] | str, *, session: Session | None = None, **params: Any) -> Turn:
        """One turn, in ``session`` or in one of its own that ends with it."""
        if session is not None:
            return session.chat(as_messages(messages), **params)
        with self.session() as own:
            return own.chat(as_messages(messages), **params)

    def chat_stream(self, messages: Sequence[Message] | str, *, session: Session, **params: Any) -> TurnStream:
        """One streamed turn in ``session``."""
        return session.stream(as_messages(messages), **params)

    def complete(self, session: SessionCore, pending: PendingTurn, timeout: float | None) -> Turn:
        """Sends a prepared turn and waits for its answer."""
        try:
            self._prepare(pending)
            response = self._send(self._request(self._http, pending, timeout), stream=False)
            return self._finish(session, pending, response)
        except BaseException as error:
            session.fail_turn(pending, error)
            raise

    def open_stream(self, pending: PendingTurn, timeout: float | None) -> ResponseStream:
        """Sends a prepared turn and returns its answer as a stream."""
        self._prepare(pending)
        return ResponseStream(self._send(self._request(self._http, pending, timeout), stream=True))

    def close(self) -> None:
        """Delivers waiting hints within 250 ms, saves the pause history, closes the connections."""
        self._close_hints()
        if self._opened is not None:
            self._opened.close()

    def _prepare(self, pending: PendingTurn) -> None:
        self._raise_rejected()
        if not pending.body["model"]:
            with contextlib.suppress(APIStatusError):
                self._learn_model(self._send(self._http.build_request("GET", "/v1/models"), stream=False))
            pending.body["model"] = self.services.default_model or "default"

    def _send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        attempt = 0
        while True:
            try:
                with _mapped():
                    response = self._http.send(request, stream=True)
                    if response.status_code >= 400 or not stream:
                        response.read()
                        response.close()
                if response.status_code < 400:
                    return response
                error: APIError = error_from_response(response.status_code, response.headers, response.content)
            except APIConnectionError as caught:
                error = caught
            delay_s = retry_delay(error, attempt, self.max_retries)
            if delay_s is None:
                raise error
            attempt += 1
            time.sleep(delay_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_ClientCore):
    """The asynchronous twin of ``Client``, for asyncio and trio; arguments as there."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        forecaster: PauseForecaster | None = None,
        recorder: Recorder | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            headers=headers,
            forecaster=forecaster,
            recorder=recorder,
            strict=strict,
            clock=clock,
        )
        self._opened: httpx.AsyncClient | None = None

    @property
    def _http(self) -> httpx.AsyncClient:
        with self._opening:
            if self._opened is None:
                import httpx

                self._opened = httpx.AsyncClient(base_url=self.base_url, headers=self._headers, verify=self._tls)
            return self._opened

    def session(
        self,
        name: str | None = None,
        *,
        model: str | None = None,
        agent: str | None = None,
        attended: bool = True,
        parent: str | None = None,
    ) -> AsyncSession:
        """Opens a session; ``name`` is its id on the server, the same name resumes it. See ``SessionCore``."""
        id = name or f"tn-{secrets.token_hex(8)}"
        return self.track(AsyncSession(self, id, model=model, agent=agent, attended=attended, parent=parent))

    async def chat(
        self, messages: Sequence[Message] | str, *, session: AsyncSession | None = None, **params: Any
    ) -> Turn:
        """One turn, in ``session`` or in one of its own that ends with it."""
        if session is not None:
            return await session.chat(as_messages(messages), **params)
        async with self.session() as own:
            return await own.chat(as_messages(messages), **params)

    def chat_stream(
        self, messages: Sequence[Message] | str, *, session: AsyncSession, **params: Any
    ) -> AsyncTurnStream:
        """One streamed turn in ``session``."""
        return session.stream(as_messages(messages), **params)

    async def complete(self, session: SessionCore, pending: PendingTurn, timeout: float | None) -> Turn:
        """Sends a prepared turn and waits for its answer."""
        try:
            await self._prepare(pending)
            response = await self._send(self._request(self._http, pending, timeout), stream=False)
            return self._finish(session, pending, response)
        except BaseException as error:
            session.fail_turn(pending, error)
            raise

    async def open_stream(self, pending: PendingTurn, timeout: float | None) -> ResponseStream:
        """Sends a prepared turn and returns its answer as a stream."""
        await self._prepare(pending)
        return ResponseStream(await self._send(self._request(self._http, pending, timeout), stream=True))

    async def aclose(self) -> None:
        """Delivers waiting hints within 250 ms, saves the pause history, closes the connections."""
        with anyio.CancelScope(shield=True):  # bounded by the 250 ms, and worth them when a task group is cancelled
            await anyio.to_thread.run_sync(self._close_hints)
            if self._opened is not None:
                await self._opened.aclose()

    async def _prepare(self, pending: PendingTurn) -> None:
        self._raise_rejected()
        if not pending.body["model"]:
            with contextlib.suppress(APIStatusError):
                self._learn_model(await self._send(self._http.build_request("GET", "/v1/models"), stream=False))
            pending.body["model"] = self.services.default_model or "default"

    async def _send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        attempt = 0
        while True:
            try:
                with _mapped():
                    response = await self._http.send(request, stream=True)
                    if response.status_code >= 400 or not stream:
                        await response.aread()
                        await response.aclose()
                if response.status_code < 400:
                    return response
                error: APIError = error_from_response(response.status_code, response.headers, response.content)
            except APIConnectionError as caught:
                error = caught
            delay_s = retry_delay(error, attempt, self.max_retries)
            if delay_s is None:
                raise error
            attempt += 1
            await anyio.sleep(delay_s)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def connect(base_url: str | None = None, **options: Any) -> AsyncClient:
    """An ``AsyncClient``: ``async with tenuto.connect() as tn``. Talks to nobody yet. Options as for ``Client``."""
    return AsyncClient(base_url, **options)


def connect_sync(base_url: str | None = None, **options: Any) -> Client:
    """A ``Client``: ``with tenuto.connect_sync() as tn``. Talks to nobody yet. Options as for ``Client``."""
    return Client(base_url, **options)


def _import_httpx(now_s: float) -> None:
    """A timer of the sender: has the library ready for the first request."""
    import httpx  # noqa: F401  (imported for its effect alone)


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise APITimeoutError(f"no answer in time from {_host(error)}: {type(error).__name__}") from error
    except httpx.TransportError as error:
        raise APIConnectionError(f"no connection to {_host(error)}: {error or type(error).__name__}") from error


def _host(error: httpx.TransportError) -> str:
    try:
        return f"{error.request.url.scheme}://{error.request.url.netloc.decode()}"
    except RuntimeError:  # httpx could not tell which request it was
        return "the server"
