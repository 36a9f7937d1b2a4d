"""Server-sent events: an answer as it is written, for readers of any speed. Owns nothing beyond one response.

The headers wait for admission (up to ``head_s``), so that a refusal keeps its status and the ``x-tenuto-*`` headers can
say what was cached. A slow reader blocks only its own response: tokens that come meanwhile are sent as one event, and a
reader that takes nothing for ``stall_s`` is cut off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import Any, Protocol

import pydantic_core
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenuto_server.api.errors import ApiError, encode_json
from tenuto_server.api.generation import Generation
from tenuto_server.api.job import Job
from tenuto_server.api.limits import PART_WRITER, PartWriter
from tenuto_server.api.output import OutputEvent
from tenuto_server.api.service import ClientGone, Service

logger = logging.getLogger(__name__)

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Shape(Protocol):
    """How a dialect writes its events.

    ``named``: every event carries its ``type`` as the event's name. ``ping``: sent when nothing has happened for a while;
    ``end``: sent last.
    """

    @property
    def named(self) -> bool:
        """See above."""

    @property
    def ping(self) -> bytes:
        """See above."""

    @property
    def end(self) -> bytes:
        """See above."""

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """Events before the answer."""

    def part(self, generation: Generation, events: list[OutputEvent]) -> list[dict[str, Any]]:
        """Events for a piece of the answer."""

    def last(self, generation: Generation) -> list[dict[str, Any]]:
        """Events after the answer."""

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """Events that end a stream which cannot go on."""


class DataOnly:
    """What the older OpenAI dialects share: events without names, and a last line that is no event."""

    named = False
    ping = b": waiting\n\n"
    end = b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """The refusal in place of the rest."""
        return [error.body()]


class StreamedAnswer(Response):
    """A response that runs a job and streams it."""

    def __init__(self, service: Service, job: Job, shape: Shape) -> None:
        super().__init__()
        self._service, self._job, self._shape = service, job, shape
        self._head_sent = False
        self._writer: PartWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get("extensions", {}).get(PART_WRITER)
        try:
            async with Generation(self._service, self._job, receive) as generation:
                await self._run(generation, send)
        except ClientGone:
            logger.debug("client left during a stream")
        except TimeoutError:
            # Returning without the last body part makes the server close the connection.
            logger.warning("stream cut off: its reader took nothing for %.0f s", self._service.patience.stall_s)
        except ApiError as error:
            if not self._head_sent:
                await error.response(scope["path"], scope["request_id"])(scope, receive, send)
                return
            await self._send(send, self._events(self._shape.failed(error)) + self._shape.end, more=False)

    async def _run(self, generation: Generation, send: Send) -> None:
        patience, shape = self._service.patience, self._shape
        pending: list[OutputEvent] = []
        deadline = time.monotonic() + patience.head_s
        while not generation.admitted and generation.finish is None and (left := deadline - time.monotonic()) > 0:
            pending += await generation.next(left) or ()
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (_HEADERS | generation.headers()).items()]
        await self._guard(send({"type": "http.response.start", "status": 200, "headers": headers}))
        self._head_sent = True
        await self._send(send, self._events(shape.first(generation)))
        if (writer := self._writer) is not None:

            def relay(events: list[OutputEvent]) -> None:
                if body := self._events(shape.part(generation, events)):
                    writer.write(body)

            generation.relay(relay, writer.ready)
        while True:
            if pending:
                await self._send(send, self._events(shape.part(generation, pending)))
            if generation.finish is not None:
                break
            news = await generation.next(patience.ping_s)
            pending = news or []
            if news is None:
                await self._send(send, shape.ping)
        await self._send(send, self._events(shape.last(generation)) + shape.end, more=False)

    def _events(self, values: list[dict[str, Any]]) -> bytes:
        return b"".join(event(value, self._shape.named) for value in values)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        if more and not body:
            return
        await self._guard(send({"type": "http.response.body", "body": body, "more_body": more}))

    async def _guard(self, sending: Awaitable[None]) -> None:
        await self._service.alarm.within(self._service.patience.stall_s, sending)


def event(value: dict[str, Any], named: bool = False) -> bytes:
    """One server-sent event."""
    try:
        data = pydantic_core.to_json(value)  # several times as fast, for every token
    except ValueError:  # half of a surrogate pair
        data = encode_json(value)
    if named:
        return b"event: %b\ndata: %b\n\n" % (str(value["type"]).encode(), data)
    return b"data: %b\n\n" % data
