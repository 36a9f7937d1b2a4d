"""Answers of the Messages API, whole and as events. ``MessageShape`` owns which content block of its stream is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto_server.api.answer import Answer
from tenuto_server.api.conversation import Conversation
from tenuto_server.api.diagnostics import messages_diagnostics
from tenuto_server.api.errors import ApiError
from tenuto_server.api.generation import Generation
from tenuto_server.api.messages_request import MessagesRequest, seal
from tenuto_server.api.output import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tenuto_server.api.retain import marked_ttl_s

Json = dict[str, Any]

_HOUR_S = 3600.0


class MessageShape:
    """The events of one streamed answer, in the order that clients insist on: message_start, for each block its start,
    deltas and stop, message_delta with the stop reason and the usage, message_stop."""

    named = True
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    end = b""

    def __init__(self, id: str, model: str, body: MessagesRequest, raw: Mapping[str, Any], talk: Conversation) -> None:
        self._id, self._model, self._body = id, model, body
        self._ttl_s = marked_ttl_s(raw, talk)
        self._index = -1
        self._open: str | None = None
        self._thought: list[str] = []

    # ---- whole ---------------------------------------------------------------------------------------------------

    def whole(self, generation: Generation) -> Json:
        """The answer object of a request that did not ask for a stream."""
        content = _content(generation.answer, self._body)
        reason = {"stop_reason": stop_reason(generation), "stop_sequence": generation.stop_string}
        usage = self._usage(generation)
        return {**self._message(generation, content), **reason, "usage": usage, "tenuto": generation.tenuto()}

    def _message(self, generation: Generation, content: list[Json]) -> Json:
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(generation),
        }
        if self._body.diagnostics is not None:
            message["diagnostics"] = messages_diagnostics(generation, self._body.diagnostics.get("previous_message_id"))
        return message

    def _usage(self, generation: Generation) -> Json:
        """Tokens read from the cache count apart from ``input_tokens``; with cache marks, so do those written to it: all
        that was computed but the last token, which is computed every time."""
        report, prompt = generation.report, generation.prompt_tokens
        read = report.cached_tokens
        written = prompt - read - 1 if self._ttl_s is not None else 0
        hour = self._ttl_s is not None and self._ttl_s >= _HOUR_S
        return {
            "input_tokens": prompt - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if hour else written,
                "ephemeral_1h_input_tokens": written if hour else 0,
            },
            "output_tokens": generation.completion_tokens,
        }

    # ---- events --------------------------------------------------------------------------------------------------

    def first(self, generation: Generation) -> list[Json]:
        """The empty message, with what is known of the cache."""
        return [{"type": "message_start", "message": self._message(generation, [])}, {"type": "ping"}]

    def part(self, generation: Generation, events: list[OutputEvent]) -> list[Json]:
        """Deltas, and the borders of blocks between them."""
        out: list[Json] = []
        for event in events:
            match event:
                case TextDelta(text):
                    out += self._switch("text", {"type": "text", "text": ""})
                    out.append(self._delta({"type": "text_delta", "text": text}))
                case ReasoningDelta(text) if self._body.shows_thinking:
                    out += self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    self._thought.append(text)
                    if not self._body.seals_thinking:
                        out.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case ToolCallStart(_, call_id, name):
                    out += self._close()
                    out += self._switch("tool_use", _tool_use(call_id, name, {}))
                case ToolCallDelta(_, arguments):
                    out.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
                case ToolCallEnd():
                    out += self._close()
        return out

    def last(self, generation: Generation) -> list[Json]:
        """The stop reason with the usage; then the end."""
        delta = {"stop_reason": stop_reason(generation), "stop_sequence": generation.stop_string}
        usage = self._usage(generation)
        end = {"type": "message_delta", "delta": delta, "usage": usage, "tenuto": generation.tenuto()}
        return [*self._close(), end, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> list[Json]:
        """An ``error`` event."""
        return [error.messages_body()]

    def _switch(self, kind: str, block: Json) -> list[Json]:
        if self._open == kind:
            return []
        out = self._close()
        self._index += 1
        self._open = kind
        return [*out, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        out = []
        if self._open == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": seal("".join(self._thought))}))
        self._open = None
        return [*out, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def stop_reason(generation: Generation) -> str:
    """Why the answer ended, in this dialect's words."""
    if generation.finish == "length":
        return "max_tokens"
    if generation.stopped:
        return "stop_sequence"
    return "tool_use" if generation.answer.calls else "end_turn"


def _content(answer: Answer, body: MessagesRequest) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning and body.shows_thinking:
        shown = "" if body.seals_thinking else answer.reasoning
        blocks.append({"type": "thinking", "thinking": shown, "signature": seal(answer.reasoning)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    return blocks + [_tool_use(call.id, call.name, call.parsed()) for call in answer.calls]


def _tool_use(call_id: str, name: str, value: Json) -> Json:
    return {"type": "tool_use", "id": f"toolu_{call_id.removeprefix('call_')}", "name": name, "input": value}
