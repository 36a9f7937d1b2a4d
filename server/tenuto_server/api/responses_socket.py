"""``/v1/responses`` over a WebSocket: one ``response.create`` after the other, each event of an answer in its own frame.

Owns, per connection, the responses that the client does not want stored: it may go on from them while the connection
lives. A request that cannot be answered gets an ``error`` frame and leaves the connection open; so does one too many, while
others wait for their turn, since a connection that is not read would not be seen closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Any

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from tenuto_server.api.errors import ApiError, bad_request, busy, encode_json
from tenuto_server.api.generation import Generation
from tenuto_server.api.limits import header_bytes, headers_too_large, parse_json
from tenuto_server.api.openai_responses import render
from tenuto_server.api.responses_answer import ResponseShape
from tenuto_server.api.responses_request import ResponsesRequest
from tenuto_server.api.responses_store import ResponseStore
from tenuto_server.api.retain import wants_prewarm
from tenuto_server.api.schema import parse
from tenuto_server.api.service import ClientGone, Service
from tenuto_server.api.submit import prepare

logger = logging.getLogger(__name__)

router = APIRouter()

_WAITING_FRAMES_MAX = 4
_NORMAL, _INTERNAL = 1000, 1011
_CLOSE_S = 1.0
_LOCAL_SHARE = 8  # a connection may keep this fraction of what all stored responses may take


@router.websocket("/v1/responses")
async def responses_socket(websocket: WebSocket) -> None:
    """Serves a connection until the client leaves."""
    service: Service = websocket.app.state.service
    try:
        if header_bytes(websocket.scope) > service.config.header_bytes_max:
            raise headers_too_large(service.config.header_bytes_max)
        tenant = service.keys.tenant(websocket.headers)
    except ApiError as error:
        await websocket.send_denial_response(error.response())
        return
    await websocket.accept()
    await _Line(websocket, service, tenant).serve()


class _Line:
    """One connection."""

    def __init__(self, websocket: WebSocket, service: Service, tenant: str) -> None:
        self._websocket, self._service, self._tenant = websocket, service, tenant
        self._frames: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._local = ResponseStore(service.config.stored_responses_bytes // _LOCAL_SHARE)

    async def serve(self) -> None:
        """Answers frame by frame while another task listens, so that a client's leaving ends its turn."""
        reader, code = asyncio.create_task(self._read()), _NORMAL
        try:
            while (frame := await self._frames.get()) is not None:
                try:
                    await self._answer(frame)
                except ApiError as error:
                    await self._refuse(error)
        except (ClientGone, WebSocketDisconnect, TimeoutError):
            pass
        except Exception as error:
            # What a plain request would get as a 500; the close code says that it was not the client's doing.
            code = _INTERNAL
            logger.exception("a request over a WebSocket failed")
            with contextlib.suppress(ClientGone, WebSocketDisconnect, TimeoutError, RuntimeError):
                await self._refuse(ApiError(500, f"internal error ({type(error).__name__})", code="internal_error"))
        finally:
            reader.cancel()
            # It may be closed already, or wait behind what the client does not take.
            with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                await self._service.alarm.within(_CLOSE_S, self._websocket.close(code))

    async def _read(self) -> None:
        try:
            while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
                if self._frames.qsize() < _WAITING_FRAMES_MAX:
                    self._frames.put_nowait(message.get("text") or message.get("bytes") or b"")
                else:
                    told = f"{_WAITING_FRAMES_MAX} requests wait on this connection for their turn already"
                    await self._refuse(busy(told, "too_many_requests_waiting"))
        except (ClientGone, WebSocketDisconnect, TimeoutError):
            pass  # nobody reads the refusals: the same as having left
        finally:
            self._gone.set()
            self._frames.put_nowait(None)

    async def _left(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _refuse(self, error: ApiError) -> None:
        await self._send({"type": "error", "status": error.status, **error.body()})

    async def _send(self, event: dict[str, Any]) -> None:
        if self._gone.is_set():
            raise ClientGone
        sending = self._websocket.send_text(encode_json(event).decode())
        await self._service.alarm.within(self._service.patience.stall_s, sending)

    async def _answer(self, frame: str | bytes) -> None:
        service, tenant = self._service, self._tenant
        scope = self._websocket.scope
        scope["request_id"], scope["arrived"] = f"req_{secrets.token_hex(12)}", time.monotonic()
        raw = await parse_json(frame.encode() if isinstance(frame, str) else frame)
        if raw.pop("type", None) != "response.create":
            raise bad_request("type: expected response.create", "type")
        body = parse(ResponsesRequest, raw)
        service.check_model(body.model)
        history = self._history(body)
        talk, prompt = await service.off_loop(render, service, tenant, body, history, wants_prewarm(raw))
        job = prepare(service, self._websocket, "resp_", tenant, body, raw, talk, prompt)
        store = self._local if body.store is False else service.responses
        keep = (store, tenant, (*history, *body.items()))
        shape = ResponseShape(job.turn.request_id, service.model.name, body, raw, talk.tools, keep)
        async with Generation(service, job, self._left) as generation:
            try:
                await self._stream(generation, shape)
            except ApiError as error:
                for event in shape.failed(error):
                    await self._send(event)

    async def _stream(self, generation: Generation, shape: ResponseShape) -> None:
        for event in shape.first(generation):
            await self._send(event)
        while generation.finish is None:
            for event in shape.part(generation, await generation.next() or []):
                await self._send(event)
        for event in shape.last(generation):
            await self._send(event)

    def _history(self, body: ResponsesRequest) -> tuple[Any, ...]:
        previous = body.previous_response_id
        if previous is None:
            return ()
        try:
            return self._local.get(self._tenant, previous).items
        except ApiError:
            return self._service.responses.get(self._tenant, previous, "previous_response_id").items
