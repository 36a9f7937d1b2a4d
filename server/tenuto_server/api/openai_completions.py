"""``POST /v1/completions``, ``GET /v1/models``, ``POST /tokenize`` and ``/detokenize``. Holds no state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tenuto_server.api.carriers import read_riders
from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.errors import bad_request, encode_json, invalid
from tenuto_server.api.generation import Generation
from tenuto_server.api.job import make_job
from tenuto_server.api.limits import read_json
from tenuto_server.api.output import OutputEvent, TextDelta
from tenuto_server.api.schema import CompletionRequest, parse
from tenuto_server.api.service import Service, service_of
from tenuto_server.api.stream import DataOnly, StreamedAnswer

router = APIRouter()
Body = TypeVar("Body", "TokenizeRequest", "DetokenizeRequest")


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """A 200 with a JSON body."""
    return Response(encode_json(value), headers=headers, media_type="application/json")


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continues a text or a row of token ids, streamed or whole."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    body = parse(CompletionRequest, await read_json(request, service.config.body_bytes_max))
    service.check_model(body.model)
    given = body.one_prompt()
    riders = read_riders(request.headers, body)
    build = service.prompts.text if isinstance(given, str) else service.prompts.ids
    prompt = await service.off_loop(build, given)
    job = make_job(service, request, "cmpl-", tenant, body, prompt, riders)
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    shape = CompletionShape(job.turn.request_id, service.model.name, usage)
    if body.stream:
        return StreamedAnswer(service, job, shape)
    async with Generation(service, job, request.receive) as generation:
        answer = shape.chunk(generation, (await generation.rest()).text, generation.finish)
        answer |= {"usage": generation.usage(), "tenuto": generation.tenuto()}
        return json_response(answer, generation.headers())


@dataclass(frozen=True, slots=True)
class CompletionShape(DataOnly):
    """The events of a streamed completion. ``usage``: the client asked for the chunk that carries it."""

    id: str
    model: str
    usage: bool

    def chunk(self, generation: Generation, text: str | None, finish: str | None) -> dict[str, Any]:
        """One answer object; ``text`` None: without choices."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        value: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": generation.created,
            "model": self.model,
            "choices": [] if text is None else [choice],
        }
        return {**value, "usage": None} if self.usage else value

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """Nothing: this shape has no opening chunk."""
        return []

    def part(self, generation: Generation, events: list[OutputEvent]) -> list[dict[str, Any]]:
        """A chunk of text."""
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        return [self.chunk(generation, text, None)]

    def last(self, generation: Generation) -> list[dict[str, Any]]:
        """The finish reason, with the ``tenuto`` object; then the usage, if asked for."""
        tenuto = generation.tenuto()
        chunks = [{**self.chunk(generation, "", generation.finish), "tenuto": tenuto}]
        if self.usage:
            chunks.append({**self.chunk(generation, None, None), "usage": generation.usage(), "tenuto": tenuto})
        return chunks


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    service = service_of(request)
    service.keys.tenant(request.headers)
    card = model_card(service)
    ends = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
    return json_response({"object": "list", "data": [card], **ends})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """The card of a model. Raises 404 for another one."""
    service = service_of(request)
    service.keys.tenant(request.headers)
    service.check_model(model)
    return json_response(model_card(service))


def model_card(service: Service) -> dict[str, Any]:
    """The model in the words of both vendors' APIs. ``max_model_len``: the context in tokens, under the name that clients of
    other engines read."""
    return {
        "id": service.model.name,
        "object": "model",
        "type": "model",
        "display_name": service.model.name,
        "created_at": datetime.fromtimestamp(service.model.created, UTC).isoformat(),
        "created": service.model.created,
        "owned_by": "tenuto",
        "max_model_len": service.model.max_context_tokens,
    }


class TokenizeRequest(BaseModel):
    """``prompt`` (plain text) or ``messages`` (through the chat template, with ``tools``)."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Any], Field(min_length=1)] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(BaseModel):
    """``tokens``: ids to turn into text, control tokens included."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The ids a prompt has here, and how many fit."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    body = await _read(request, service, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: give either prompt or messages", "prompt")
    if body.messages is not None:
        talk = from_chat(body.messages, body.tools or (), strip=service.config.strip_attribution)
        prompt = await service.off_loop(service.prompts.conversation, talk, tenant)
    else:
        prompt = await service.off_loop(service.prompts.text, body.prompt)
    tokens = prompt.tokens.tolist()
    return json_response({"count": len(tokens), "max_model_len": service.model.max_context_tokens, "tokens": tokens})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service = service_of(request)
    service.keys.tenant(request.headers)
    body = await _read(request, service, DetokenizeRequest)
    prompt = service.prompts.ids(body.tokens, "tokens")
    return json_response({"prompt": service.model.tokenizer.decode(prompt.tokens.tolist())})


async def _read(request: Request, service: Service, kind: type[Body]) -> Body:
    raw = await read_json(request, service.config.body_bytes_max)
    try:
        body = kind.model_validate(raw)
    except ValidationError as error:
        raise invalid(error) from None
    if body.model is not None:
        service.check_model(body.model)
    return body
