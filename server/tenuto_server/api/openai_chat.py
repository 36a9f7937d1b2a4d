"""``POST /v1/chat/completions`` in the OpenAI shape. Holds no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tenuto_server.api.carriers import read_riders
from tenuto_server.api.errors import encode_json
from tenuto_server.api.generation import Generation, Job, make_job
from tenuto_server.api.limits import read_json
from tenuto_server.api.schema import ChatRequest, parse
from tenuto_server.api.service import service_of
from tenuto_server.api.stream import StreamedAnswer

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answers a conversation, streamed or whole."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    body = parse(ChatRequest, await read_json(request, service.config.body_bytes_max))
    service.check_model(body.model)
    riders = read_riders(request.headers, body)
    prompt = await service.off_loop(service.prompts.chat, body.messages, body.tools or (), body.chat_template_kwargs)
    tools = bool(body.tools) and body.tool_choice != "none"
    job = make_job(service, request, "chatcmpl", tenant, body, prompt, riders, tools)
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return StreamedAnswer(service, job, ChatShape(job.turn.request_id, service.model.name, usage))
    async with Generation(service, job, request.receive) as generation:
        text = await generation.all_text()
        return Response(
            encode_json(whole_answer(job, service.model.name, generation, text)),
            headers=generation.headers(),
            media_type="application/json",
        )


def whole_answer(job: Job, model: str, generation: Generation, text: str) -> dict[str, Any]:
    """The answer object of a request that did not ask for a stream."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": job.turn.request_id,
        "object": "chat.completion",
        "created": generation.created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": generation.finish}],
        "usage": generation.usage(),
        "tenuto": generation.tenuto(),
    }


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The events of a streamed chat answer. ``usage``: the client asked for the chunk that carries it."""

    id: str
    model: str
    usage: bool

    def _chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": self.model,
            "choices": choices,
        }
        if self.usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    def first(self, generation: Generation) -> list[dict[str, Any]]:
        """The chunk with the role."""
        return [self._chunk(generation, [self._choice({"role": "assistant", "content": ""})])]

    def text(self, generation: Generation, text: str) -> dict[str, Any]:
        """A chunk of content."""
        return self._chunk(generation, [self._choice({"content": text})])

    def last(self, generation: Generation) -> list[dict[str, Any]]:
        """The finish reason, with the ``tenuto`` object; then the usage, if asked for."""
        tenuto = generation.tenuto()
        chunks = [{**self._chunk(generation, [self._choice({}, generation.finish)]), "tenuto": tenuto}]
        if self.usage:
            chunks.append({**self._chunk(generation, []), "usage": generation.usage(), "tenuto": tenuto})
        return chunks
