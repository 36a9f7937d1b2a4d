"""``/v1/responses`` and what belongs to it. Holds no state; stored responses are the service's.

Where no WebSocket library is installed a handshake comes here and is answered with 426, on which clients go on over plain
HTTP (``responses_socket`` serves the others).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tenuto_server.api.clues import Clues
from tenuto_server.api.conversation import Conversation
from tenuto_server.api.errors import ApiError, encode_json
from tenuto_server.api.generation import Generation
from tenuto_server.api.limits import read_json
from tenuto_server.api.messages_request import seal
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.responses_answer import ResponseShape
from tenuto_server.api.responses_request import ResponsesRequest, to_conversation
from tenuto_server.api.retain import wants_prewarm
from tenuto_server.api.schema import parse
from tenuto_server.api.service import Service, service_of
from tenuto_server.api.stream import StreamedAnswer
from tenuto_server.api.submit import prepare

router = APIRouter()

_SUMMARIZE = (
    "Summarize this conversation so that somebody else can carry on from the summary alone: what was asked for, what was "
    "found out and changed (files, commands, results), what is decided, and what is left to do. Reply with the summary only."
)


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Answers a conversation, streamed or whole."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    raw = await read_json(request, service.config.body_bytes_max)
    body = parse(ResponsesRequest, raw)
    service.check_model(body.model)
    history = _history(service, tenant, body)
    talk, prompt = await service.off_loop(render, service, tenant, body, history, wants_prewarm(raw))
    job = prepare(service, request, "resp_", tenant, body, raw, talk, prompt)
    keep = (service.responses, tenant, (*history, *body.items())) if body.store is not False else None
    shape = ResponseShape(job.turn.request_id, service.model.name, body, raw, talk.tools, keep)
    if body.stream:
        return StreamedAnswer(service, job, shape)
    async with Generation(service, job, request.receive) as generation:
        while generation.finish is None:
            shape.part(generation, await generation.next() or [])
        return _json(shape.whole(generation), generation.headers())


def _history(service: Service, tenant: str, body: ResponsesRequest) -> tuple[Any, ...]:
    if body.previous_response_id is None:
        return ()
    return service.responses.get(tenant, body.previous_response_id, "previous_response_id").items


def render(
    service: Service, tenant: str, body: ResponsesRequest, history: tuple[Any, ...], prewarm: bool = False
) -> tuple[Conversation, Prompt]:
    """The conversation of a request behind stored items, and its prompt. ``prewarm``: nobody waits for an answer, and a user
    may be the next to speak."""
    talk = to_conversation(body, history, service.config.strip_attribution, service.prompts.readings, tenant)
    prompt = service.prompts.conversation(talk, tenant)
    return talk, service.prompts.opening(prompt, tenant) if prewarm else prompt


@router.post("/v1/responses/compact")
async def compact(request: Request) -> Response:
    """A shorter conversation in place of a long one: its system messages and a summary, to be sent back as they are. The
    summary is asked for as a continuation of the conversation, so that its prefix is not computed again."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    raw = await read_json(request, service.config.body_bytes_max)
    body = parse(ResponsesRequest, raw)
    service.check_model(body.model)
    history = _history(service, tenant, body)
    items = [*history, *body.items()]
    asked = {"type": "message", "role": "user", "content": _SUMMARIZE}
    longer = body.model_copy(update={"input": [*body.items(), asked], "tool_choice": "none", "text": None})
    talk, prompt = await service.off_loop(render, service, tenant, longer, history)
    job = prepare(service, request, "resp_", tenant, longer, raw, talk, prompt, Clues("compaction"))
    async with Generation(service, job, request.receive) as generation:
        answer = await generation.rest()
        shape = ResponseShape(job.turn.request_id, service.model.name, body, raw, ())
        kept = [
            {"type": "message", **item}
            for item in items
            if isinstance(item, dict) and item.get("role") in ("system", "developer")
        ]
        item_id = job.turn.request_id.replace("resp_", "cmp_")
        item = {"type": "compaction", "id": item_id, "encrypted_content": seal(answer.text)}
        value = {
            "id": job.turn.request_id,
            "object": "response.compaction",
            "created_at": generation.created,
            "output": [*kept, item],
            "usage": shape.response(generation, "completed")["usage"],
            "tenuto": generation.tenuto(),
        }
        return _json(value, generation.headers())


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> Response:
    """How many tokens an input would be."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    raw = await read_json(request, service.config.body_bytes_max)
    body = parse(ResponsesRequest, {"model": service.model.name, **raw})
    _, prompt = await service.off_loop(render, service, tenant, body, _history(service, tenant, body))
    return _json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


@router.get("/v1/responses")
async def websocket(request: Request) -> Response:
    """Tells a client that asks for a WebSocket to use plain HTTP."""
    if request.headers.get("upgrade", "").lower() == "websocket":
        message = "WebSocket is not served here; send the request with POST"
        raise ApiError(426, message, code="websocket_not_supported", headers={"upgrade": "HTTP/1.1"})
    raise ApiError(405, "GET is not allowed on /v1/responses", code="method_not_allowed", headers={"allow": "POST"})


@router.get("/v1/responses/{response_id}")
async def fetch(request: Request, response_id: str) -> Response:
    """A stored response. Raises 404."""
    service = service_of(request)
    return _json(service.responses.get(service.keys.tenant(request.headers), response_id).response)


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    """What a stored response answered, newest first. Raises 404."""
    service = service_of(request)
    stored = service.responses.get(service.keys.tenant(request.headers), response_id)
    data = [
        {"id": f"msg_{index:04d}", **item} if isinstance(item, dict) else item
        for index, item in enumerate(stored.items[: stored.inputs])
    ][::-1]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return _json({"object": "list", "data": data, "has_more": False, **ids})


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forgets a stored response. Raises 404."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    service.responses.get(tenant, response_id)
    service.responses.drop(tenant, response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


def _json(value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), headers=headers, media_type="application/json")
