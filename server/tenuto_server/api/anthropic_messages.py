"""``POST /v1/messages`` and ``/v1/messages/count_tokens``. Holds no state."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tenuto_server.api.conversation import Conversation
from tenuto_server.api.errors import encode_json
from tenuto_server.api.generation import Generation
from tenuto_server.api.limits import read_json
from tenuto_server.api.messages_answer import MessageShape
from tenuto_server.api.messages_request import CountRequest, MessagesRequest, to_conversation
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.schema import parse
from tenuto_server.api.service import Service, service_of
from tenuto_server.api.stream import StreamedAnswer
from tenuto_server.api.submit import prepare

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Answers a conversation, streamed or whole."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    raw = await read_json(request, service.config.body_bytes_max)
    body = parse(MessagesRequest, raw)
    service.check_model(body.model)
    talk, prompt = await service.off_loop(_render, service, tenant, body)
    job = prepare(service, request, "msg_", tenant, body, raw, talk, prompt)
    shape = MessageShape(job.turn.request_id, service.model.name, body, raw, talk)
    if body.stream:
        return StreamedAnswer(service, job, shape)
    async with Generation(service, job, request.receive) as generation:
        await generation.rest()
        return _json(shape.whole(generation), generation.headers())


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation would be."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    body = parse(CountRequest, await read_json(request, service.config.body_bytes_max))
    service.check_model(body.model)
    _, prompt = await service.off_loop(_render, service, tenant, body)
    return _json({"input_tokens": len(prompt.tokens)})


def _render(service: Service, tenant: str, body: CountRequest) -> tuple[Conversation, Prompt]:
    talk = to_conversation(body, service.config.strip_attribution, service.prompts.readings, tenant)
    return talk, service.prompts.conversation(talk, tenant)


def _json(value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), headers=headers, media_type="application/json")
