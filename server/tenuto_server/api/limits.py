"""What a request may cost before anyone has looked at it: header bytes, body bytes, decompressed bytes.

Owns no state between requests. ``Limits`` is plain ASGI, so it sees chunked bodies as they come; ``HttpProtocol`` gives the
refusals that happen below ASGI the same error shape.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import zlib
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import h11
import pydantic_core
import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tenuto_server.api.errors import ApiError, bad_request, encode_json

PART_WRITER = "tenuto.part_writer"
"""The ASGI extension under which a streamed answer finds a ``PartWriter``."""
HINT_BODY_BYTES_MAX = 256 * 2**10
_HINT_PATHS = ("/v1/kv_hints",)
_ZSTD_WINDOW_MAX = 8 * 2**20
_PARSE_INLINE_BYTES = 64 * 2**10
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A client that is still sending when we close would see a reset instead of the answer, so the rest of a body that is too
# long is read and thrown away, within these bounds.
_DISCARD_BYTES_MAX = 64 * 2**20
_DISCARD_S_MAX = 10.0
# The WebSocket library's own limits; of a line, what stands between name and value does not count here.
_HANDSHAKE_LINE, _HANDSHAKE_LINES = 8188, 128


class Limits:
    """ASGI middleware: 431 above ``header_bytes_max``, 413 above ``body_bytes_max``; names every request, and reports
    (path, status) of every answer to ``count``.

    The request id is in ``scope["request_id"]`` and in the answer's ``x-request-id``; ``scope["arrived"]`` is the time of
    arrival (monotonic seconds).
    """

    def __init__(
        self, app: ASGIApp, *, header_bytes_max: int, body_bytes_max: int, count: Callable[[str, int], None]
    ) -> None:
        self._app, self._header_bytes_max, self._body_bytes_max = app, header_bytes_max, body_bytes_max
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope["request_id"], scope["arrived"] = request_id, time.monotonic()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["x-request-id"] = headers["request-id"] = request_id
            await send(message)

        if header_bytes(scope) > self._header_bytes_max:
            error = headers_too_large(self._header_bytes_max)
            await error.response(scope["path"], request_id)(scope, receive, send_named)
            return
        limit = min(self._body_bytes_max, HINT_BODY_BYTES_MAX) if scope["path"] in _HINT_PATHS else self._body_bytes_max
        counted = _CountedBody(receive, limit)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            await counted.discard()
            await body_too_large(limit).response(scope["path"], request_id)(scope, receive, send_named)
            return
        await self._app(scope, counted, send_named)


def header_bytes(scope: Scope) -> int:
    """What a request's head weighs: its headers, path and query."""
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
    return size + len(scope.get("query_string") or b"")


class _CountedBody:
    """``receive`` that refuses to hand out more than ``limit`` body bytes."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit, self._seen = receive, limit, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                if message.get("more_body"):
                    await self.discard()
                raise body_too_large(self._limit)
        return message

    async def discard(self) -> None:
        seen, deadline = 0, time.monotonic() + _DISCARD_S_MAX
        while seen < _DISCARD_BYTES_MAX and time.monotonic() < deadline:
            with anyio.move_on_after(_DISCARD_S_MAX):
                message = await self._receive()
                seen += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


def body_too_large(limit: int) -> ApiError:
    """413 that names the limit."""
    return ApiError(413, f"body: larger than the limit of {limit} bytes", param="body", code="body_too_large")


def headers_too_large(limit: int) -> ApiError:
    """431 that names the limit."""
    return ApiError(
        431, f"headers: larger than the limit of {limit} bytes together", param="headers", code="headers_too_large"
    )


async def read_json(request: Request, body_bytes_max: int) -> dict[str, Any]:
    """The request's JSON object. Raises 400 (malformed, not an object, too deep), 413, 415."""
    raw = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raw = await anyio.to_thread.run_sync(_decompress, raw, encoding, body_bytes_max)
    return await parse_json(raw)


async def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises 400 (malformed, not an object, too deep)."""
    # A long body would hold up every stream of this process for as long as it takes to parse.
    if len(raw) <= _PARSE_INLINE_BYTES:
        value = read_value(raw)
    else:
        value = await anyio.to_thread.run_sync(read_value, raw)
    if not isinstance(value, dict):
        raise bad_request(f"body: expected a JSON object, got {_json_type(value)}", "body", "invalid_json")
    return value


def read_value(raw: bytes) -> Any:
    """A JSON value. Raises 400."""
    try:
        # Twice as fast. What it refuses (half of a surrogate pair, encodings but UTF-8, deep nesting) is read the long way.
        return pydantic_core.from_json(raw, cache_strings="keys")
    except ValueError:
        pass
    try:
        value = json.loads(raw)
        if _SURROGATE.search(raw):
            # Half of a pair is no character: it would fail wherever text is encoded later, so it becomes "?" here.
            value = json.loads(encode_json(value))
        return value
    except RecursionError:
        raise bad_request("body: JSON is nested too deeply", "body", "invalid_json") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise bad_request(f"body: malformed JSON ({error.msg} at {where})", "body", "invalid_json") from None
    except ValueError:  # not UTF-8, or a number of thousands of digits
        raise bad_request("body: malformed JSON", "body", "invalid_json") from None


def _decompress(raw: bytes, encoding: str, limit: int) -> bytes:
    if encoding == "zstd":
        return _decompress_zstd(raw, limit)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        message = f"content-encoding: {encoding[:32]!r} is not supported; send identity, gzip, deflate or zstd"
        raise ApiError(415, message, param="content-encoding", code="unsupported_encoding")
    decoder = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, told apart by the header
    try:
        body = decoder.decompress(raw, limit + 1)
    except zlib.error:
        raise bad_request(f"body: not valid {encoding}", "body", "invalid_encoding") from None
    if len(body) > limit:
        raise body_too_large(limit)
    if not decoder.eof:
        raise bad_request(f"body: truncated {encoding}", "body", "invalid_encoding")
    return body


def _decompress_zstd(raw: bytes, limit: int) -> bytes:
    try:
        # A frame may state its size or not; reading in pieces bounds what is unpacked either way.
        with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX).stream_reader(raw) as reader:
            body = reader.read(limit + 1)
    except zstandard.ZstdError:
        raise bad_request("body: not valid zstd", "body", "invalid_encoding") from None
    if len(body) > limit:
        raise body_too_large(limit)
    return body


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class PartWriter:
    """Sends parts of a body whose head has gone out without a ``content-length``, in one call each: through all layers a part
    costs half as much as everything else that is done for a token."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol

    def ready(self) -> bool:
        """False where the reader is behind or gone, or no head was sent: then a part goes the long way, which waits."""
        protocol = self._protocol
        cycle = protocol.cycle
        started = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        return started and not protocol.flow.write_paused

    def write(self, data: bytes) -> None:
        """A part that is not empty, when ``ready``, as a chunk (RFC 9112, section 7.1)."""
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class HttpProtocol(H11Protocol):
    """uvicorn's protocol with its one plain-text refusal (a request that is not HTTP, or whose headers never end) in the
    error shape of everything else, and a short way for the parts of a body (``PartWriter``)."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        app: Any = self.app

        async def with_writer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
                scope.setdefault("extensions", {})[PART_WRITER] = PartWriter(self)
            await app(scope, receive, send)

        self.app = with_writer

    def send_400_response(self, msg: str) -> None:
        """Answers and closes. ``msg`` is uvicorn's own wording."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is already on its way: nothing sensible can be added to it
            return
        limit = self.config.h11_max_incomplete_event_size or 0
        self._refuse(
            headers_too_large(limit) if len(self.conn.trailing_data[0]) > limit else bad_request(msg, code="http")
        )

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hands the connection over to the WebSocket protocol, which says nothing at all about a head that it cannot read
        (a line above 8 KiB, more than 128 of them, another method than GET): that is answered here."""
        super().handle_websocket_upgrade(event)
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            longest = max(len(name) + len(value) for name, value in event.headers)
            if longest > _HANDSHAKE_LINE or len(event.headers) > _HANDSHAKE_LINES:
                message = (
                    f"headers: a WebSocket's handshake takes {_HANDSHAKE_LINES} of up to {_HANDSHAKE_LINE} bytes each"
                )
                self._refuse(ApiError(431, message, param="headers", code="headers_too_large"))
            else:
                self._refuse(bad_request("this is no WebSocket handshake", code="http"))

    def _refuse(self, error: ApiError) -> None:
        body = encode_json(error.body())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
