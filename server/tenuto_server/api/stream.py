"""Server-sent events: an answer as it is written, for readers of any speed. Owns nothing beyond one response.

The headers wait for admission (up to ``head_s``), so that a refusal keeps its status and the ``x-tenuto-*`` headers can
say what was cached. A slow reader blocks only its own response: tokens that come meanwhile are sent as one event, and a
reader that takes nothing for ``stall_s`` is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenuto_server.api.errors import ApiError, encode_json
from tenuto_server.api.generation import Generation, Job
from tenuto_server.api.service import ClientGone, Service

logger = logging.getLogger(__name__)

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Shape(Protocol):
    """How a dialect writes its events."""

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """Events before any text."""

    def text(self, generation: Generation, text: str) -> dict[str, Any]:
        """An event that carries text."""

    def last(self, generation: Generation) -> list[dict[str, Any]]:
        """Events after all text."""


class StreamedAnswer(Response):
    """A response that runs a job and streams it."""

    def __init__(self, service: Service, job: Job, shape: Shape) -> None:
        super().__init__()
        self._service, self._job, self._shape = service, job, shape
        self._head_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                await error.response()(scope, receive, send)
                return
            await self._send(send, _event(error.body()) + _DONE, more=False)

    async def _run(self, generation: Generation, send: Send) -> None:
        patience = self._service.patience
        pending = ""
        deadline = time.monotonic() + patience.head_s
        while not generation.admitted and generation.finish is None and (left := deadline - time.monotonic()) > 0:
            pending += await generation.next(left) or ""
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (_HEADERS | generation.headers()).items()]
        await self._guard(send({"type": "http.response.start", "status": 200, "headers": headers}))
        self._head_sent = True
        await self._send(send, b"".join(map(_event, self._shape.first(generation))))
        while True:
            if pending:
                await self._send(send, _event(self._shape.text(generation, pending)))
            if generation.finish is not None:
                break
            news = await generation.next(patience.ping_s)
            pending = news or ""
            if news is None:
                await self._send(send, b": waiting\n\n")
        await self._send(send, b"".join(map(_event, self._shape.last(generation))) + _DONE, more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        await self._guard(send({"type": "http.response.body", "body": body, "more_body": more}))

    async def _guard(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(self._service.patience.stall_s):
            await sending


_DONE = b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
