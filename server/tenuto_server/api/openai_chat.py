"""``POST /v1/chat/completions`` in the OpenAI shape. Holds no state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tenuto_server.api.answer import free_text
from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.conversation import Conversation
from tenuto_server.api.errors import encode_json
from tenuto_server.api.generation import Generation
from tenuto_server.api.job import Job
from tenuto_server.api.limits import read_json
from tenuto_server.api.output import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.schema import ChatRequest, parse
from tenuto_server.api.service import Service, service_of
from tenuto_server.api.stream import DataOnly, StreamedAnswer
from tenuto_server.api.submit import prepare

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answers a conversation, streamed or whole."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    raw = await read_json(request, service.config.body_bytes_max)
    body = parse(ChatRequest, raw)
    service.check_model(body.model)
    talk, prompt = await service.off_loop(_render, service, tenant, body)
    job = prepare(service, request, "chatcmpl-", tenant, body, raw, talk, prompt)
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        shape = ChatShape(job.turn.request_id, service.model.name, usage, _custom(talk))
        return StreamedAnswer(service, job, shape)
    async with Generation(service, job, request.receive) as generation:
        await generation.rest()
        return Response(
            encode_json(whole_answer(job, service.model.name, generation)),
            headers=generation.headers(),
            media_type="application/json",
        )


def _render(service: Service, tenant: str, body: ChatRequest) -> tuple[Conversation, Prompt]:
    talk = from_chat(
        body.messages,
        body.tools or (),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_schema=body.response_schema(),
        variables=body.chat_template_kwargs,
        strip=service.config.strip_attribution,
        readings=service.prompts.readings,
        scope=tenant,
    )
    return talk, service.prompts.conversation(talk, tenant)


def whole_answer(job: Job, model: str, generation: Generation) -> dict[str, Any]:
    """The answer object of a request that did not ask for a stream."""
    answer = generation.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        custom = _custom(job.talk)
        message["tool_calls"] = [
            {"id": call.id, **_called(call.name, call.arguments, call.name in custom)} for call in answer.calls
        ]
    return {
        "id": job.turn.request_id,
        "object": "chat.completion",
        "created": generation.created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(generation)}],
        "usage": generation.usage(),
        "tenuto": generation.tenuto(),
    }


def _custom(talk: Conversation | None) -> frozenset[str]:
    """The names of the tools that take free text."""
    return frozenset(tool.name for tool in talk.tools if tool.custom) if talk is not None else frozenset()


def _called(name: str, arguments: str, custom: bool) -> dict[str, Any]:
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": free_text(arguments)}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(generation: Generation) -> str | None:
    return "tool_calls" if generation.answer.calls and generation.finish == "stop" else generation.finish


@dataclass(frozen=True, slots=True)
class ChatShape(DataOnly):
    """The events of a streamed chat answer. ``usage``: the client asked for the chunk that carries it. ``custom``: the tools
    that take free text, which is known when their call is complete (``held``)."""

    id: str
    model: str
    usage: bool
    custom: frozenset[str] = frozenset()
    held: dict[int, list[str]] = field(default_factory=dict)

    def _delta(self, event: OutputEvent) -> dict[str, Any] | None:
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case ToolCallStart(index, call_id, name):
                if name in self.custom:
                    self.held[index] = []
                return {"tool_calls": [{"index": index, "id": call_id, **_called(name, "", name in self.custom)}]}
            case ToolCallDelta(index, arguments) if index in self.held:
                self.held[index].append(arguments)
            case ToolCallDelta(index, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
            case ToolCallEnd(index) if index in self.held:
                text = free_text("".join(self.held.pop(index)))
                return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
        return None

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

    def part(self, generation: Generation, events: list[OutputEvent]) -> list[dict[str, Any]]:
        """Chunks of content, reasoning and tool calls."""
        deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        return [self._chunk(generation, [self._choice(delta)]) for delta in deltas]

    def last(self, generation: Generation) -> list[dict[str, Any]]:
        """The finish reason, with the ``tenuto`` object; then the usage, if asked for."""
        tenuto = generation.tenuto()
        chunks = [{**self._chunk(generation, [self._choice({}, _finish(generation))]), "tenuto": tenuto}]
        if self.usage:
            chunks.append({**self._chunk(generation, []), "usage": generation.usage(), "tenuto": tenuto})
        return chunks
