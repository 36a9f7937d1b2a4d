"""Answers of the Responses API, whole and as events. ``ResponseShape`` owns the output items of one answer and the number
of its last event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto_server.api.answer import free_text, is_whole
from tenuto_server.api.diagnostics import responses_diagnostics
from tenuto_server.api.errors import ApiError
from tenuto_server.api.generation import Generation
from tenuto_server.api.messages_request import seal
from tenuto_server.api.output import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tenuto_server.api.responses_request import ResponsesRequest
from tenuto_server.api.responses_store import ResponseStore
from tenuto_server.api.tools import ToolSpec

Json = dict[str, Any]

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "temperature",
    "text",
    "top_p",
    "truncation",
    "user",
)


class ResponseShape:
    """The events of one streamed answer: created, in_progress, for each item its addition, deltas and completion, and the
    whole response at the end. ``store``: where it is kept, with the ``items`` before it; None: nowhere."""

    named = True
    ping = b": waiting\n\n"
    end = b""

    def __init__(
        self,
        id: str,
        model: str,
        body: ResponsesRequest,
        raw: Mapping[str, Any],
        tools: Sequence[ToolSpec],
        keep: tuple[ResponseStore, str, tuple[Any, ...]] | None = None,
    ) -> None:
        self._id, self._model, self._body, self._raw, self._keep = id, model, body, raw, keep
        self._tools = {tool.name: tool for tool in tools}
        self._sealed = "reasoning.encrypted_content" in (body.include or ())
        self._number = -1
        self.output: list[Json] = []
        self._text: list[str] = []

    # ---- the response object ---------------------------------------------------------------------------------------

    def response(self, generation: Generation, status: str, error: ApiError | None = None) -> Json:
        """The response as it is now."""
        raw, cut = self._raw, status == "incomplete"
        done = status not in ("in_progress", "queued")
        response: Json = {
            "id": self._id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None if error is None else {"code": error.code or "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._model,
            "output": list(self.output) if done else [],
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "tool_choice": raw.get("tool_choice") or "auto",
            "tools": raw.get("tools") or [],
            "store": self._body.store is not False,
            "usage": self._usage(generation) if done else None,
        }
        response |= {name: raw.get(name) for name in _ECHOED}
        if done and error is None:
            response["tenuto"] = generation.tenuto()
            previous = (self._body.prompt_cache_options or {}).get("comparison_response_id")
            if (told := responses_diagnostics(generation, previous)) is not None:
                response["prompt_cache_diagnostics"] = told
        return response

    def _usage(self, generation: Generation) -> Json:
        prompt, cached, out = generation.prompt_tokens, generation.report.cached_tokens, generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
            "output_tokens": out,
            "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens()},
            "total_tokens": prompt + out,
        }

    def whole(self, generation: Generation) -> Json:
        """The complete response, kept where that was asked for. Every event must have been taken before."""
        self._close(cut=generation.finish == "length")
        response = self.response(generation, "incomplete" if generation.finish == "length" else "completed")
        if self._keep is not None:
            store, tenant, items = self._keep
            store.put(tenant, response, (*items, *self.output), len(items))
        return response

    # ---- events ----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def first(self, generation: Generation) -> list[Json]:
        """The response before anything is in it."""
        empty = self.response(generation, "in_progress")
        return [self._event("created", response=empty), self._event("in_progress", response=empty)]

    def part(self, generation: Generation, events: list[OutputEvent]) -> list[Json]:
        """Deltas, and the borders of items between them."""
        out: list[Json] = []
        for event in events:
            match event:
                case TextDelta(text):
                    out += self._open_as("message")
                    out.append(self._delta("output_text", text, content_index=0, logprobs=[]))
                case ReasoningDelta(text):
                    out += self._open_as("reasoning")
                    out.append(self._delta("reasoning_text", text, content_index=0))
                case ToolCallStart(_, call_id, name):
                    out += self._close()
                    out += self._begin(self._call(call_id, name))
                case ToolCallDelta(_, arguments):
                    self._text.append(arguments)
                    if self.output[-1]["type"] == "function_call":
                        out.append(self._item_event("function_call_arguments.delta", delta=arguments))
                case ToolCallEnd():
                    # Nothing follows a call that the limit cut off.
                    cut = generation.finish == "length" and event is events[-1] and not is_whole("".join(self._text))
                    out += self._close(cut)
        return out

    def last(self, generation: Generation) -> list[Json]:
        """The end of the last item and the whole response."""
        out = self._close(cut=generation.finish == "length")
        response = self.whole(generation)
        return [*out, self._event(response["status"], response=response)]

    def failed(self, error: ApiError) -> list[Json]:
        """``response.failed``, with what had been said."""
        fields = {"code": error.code or "server_error", "message": error.message}
        response = {
            "id": self._id,
            "object": "response",
            "created_at": 0,
            "status": "failed",
            "error": fields,
            "model": self._model,
            "output": self.output,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        }
        return [self._event("failed", response=response)]

    # ---- items -----------------------------------------------------------------------------------------------------

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id.removeprefix('resp_')}{len(self.output):02d}"

    def _call(self, call_id: str, name: str) -> Json:
        spec = self._tools.get(name)
        if spec is not None and spec.custom:
            return {
                "type": "custom_tool_call",
                "id": self._new_id("ctc"),
                "call_id": call_id,
                "name": name,
                "input": "",
            }
        item = {
            "type": "function_call",
            "id": self._new_id("fc"),
            "call_id": call_id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        if spec is not None and spec.namespace is not None:
            item |= {"name": name.removeprefix(f"{spec.namespace}__"), "namespace": spec.namespace}
        return item

    def _open_as(self, kind: str) -> list[Json]:
        if self.output and self.output[-1]["type"] == kind and self.output[-1]["status"] == "in_progress":
            return []
        out = self._close()
        if kind == "message":
            item: Json = {
                "type": kind,
                "id": self._new_id("msg"),
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "id": self._new_id("rs"), "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        out += self._begin(item)
        return [*out, self._item_event("content_part.added", content_index=0, part=part)]

    def _begin(self, item: Json) -> list[Json]:
        self.output.append(item)
        self._text = []
        return [self._event("output_item.added", output_index=len(self.output) - 1, item=dict(item))]

    def _item_event(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _delta(self, kind: str, text: str, **fields: Any) -> Json:
        self._text.append(text)
        return self._item_event(f"{kind}.delta", delta=text, **fields)

    def _close(self, cut: bool = False) -> list[Json]:
        """Completes the open item, if there is one. ``cut``: as far as it came."""
        if not self.output or self.output[-1].get("status", "in_progress") != "in_progress":
            return []
        item, text = self.output[-1], "".join(self._text)
        item["status"] = "incomplete" if cut else "completed"
        out: list[Json] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            out.append(self._item_event("function_call_arguments.done", arguments=text, name=item["name"]))
        elif item["type"] == "custom_tool_call":
            item["input"] = free_text(text)
            out.append(self._item_event("custom_tool_call_input.delta", delta=item["input"]))
            out.append(self._item_event("custom_tool_call_input.done", input=item["input"]))
        else:
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            part: Json = {"type": kind, "text": text}
            more: Json = {}
            if kind == "output_text":
                part, more = {**part, "annotations": [], "logprobs": []}, {"logprobs": []}
            elif self._sealed:
                item["encrypted_content"] = seal(text)
            item["content"] = [part]
            out.append(self._item_event(f"{kind}.done", content_index=0, text=text, **more))
            out.append(self._item_event("content_part.done", content_index=0, part=part))
        return [*out, self._event("output_item.done", output_index=len(self.output) - 1, item=dict(item))]
