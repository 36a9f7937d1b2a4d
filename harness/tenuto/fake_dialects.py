"""The fake server's answers in the other dialects: a Chat Completions answer told as Messages or Responses. No state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Event = tuple[str | None, dict[str, Any]]


def prompt_parts(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], Any]:
    """The messages and the separate system prompt of a body in any dialect."""
    given = body.get("messages", body.get("input")) or []
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [m for m in messages if isinstance(m, Mapping)], body.get("system", body.get("instructions"))


def translated(dialect: str, completion: Mapping[str, Any]) -> tuple[dict[str, Any], list[Event]]:
    """The whole answer and the events of its stream, by dialect (messages or responses)."""
    return _messages(completion) if dialect == "messages" else _responses(completion)


def _messages(completion: Mapping[str, Any]) -> tuple[dict[str, Any], list[Event]]:
    text, calls = _said(completion)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    blocks += [{"type": "tool_use", "id": id, "name": name, "input": json.loads(args)} for id, name, args in calls]
    counted = completion["usage"]
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    usage = {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counted["completion_tokens"],
    }
    stop = "tool_use" if calls else "end_turn"
    base = {"id": f"msg_{completion['id']}", "type": "message", "role": "assistant", "model": completion["model"]}
    whole = {**base, "content": blocks, "stop_reason": stop, "stop_sequence": None, "usage": usage}
    whole["tenuto"] = completion["tenuto"]
    start = {**base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    events: list[Event] = [("message_start", {"type": "message_start", "message": start})]
    for index, block in enumerate(blocks):
        said = block["type"] == "text"
        empty = {"type": "text", "text": ""} if said else {**block, "input": {}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if said
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        )
        for name, extra in (
            ("content_block_start", {"content_block": empty}),
            ("content_block_delta", {"delta": delta}),
            ("content_block_stop", {}),
        ):
            events.append((name, {"type": name, "index": index, **extra}))
    ended = {"stop_reason": stop, "stop_sequence": None}
    events.append(("message_delta", {"type": "message_delta", "delta": ended, "usage": usage}))
    events.append(("message_stop", {"type": "message_stop"}))
    return whole, events


def _responses(completion: Mapping[str, Any]) -> tuple[dict[str, Any], list[Event]]:
    text, calls = _said(completion)
    output: list[dict[str, Any]] = []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": []}
        said = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        output.append({"id": f"msg_{completion['id']}", **said})
    output += [
        {
            "id": f"fc_{id}",
            "type": "function_call",
            "status": "completed",
            "call_id": id,
            "name": name,
            "arguments": args,
        }
        for id, name, args in calls
    ]
    counted = completion["usage"]
    usage = {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": counted["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }
    base = {"id": f"resp_{completion['id']}", "object": "response", "created_at": completion["created"]}
    base |= {"model": completion["model"], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    whole = {**base, "status": "completed", "output": output, "usage": usage, "tenuto": completion["tenuto"]}
    events: list[Event] = [
        ("response.created", {"response": {**base, "status": "in_progress", "output": [], "usage": None}})
    ]
    for index, item in enumerate(output):
        events.append(("response.output_item.added", {"output_index": index, "item": item}))
        if item["type"] == "message":
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append(("response.output_text.delta", {**place, "delta": text, "logprobs": []}))
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    events.append(("response.completed", {"response": whole}))
    return whole, [(name, {"type": name, "sequence_number": n, **body}) for n, (name, body) in enumerate(events)]


def _said(completion: Mapping[str, Any]) -> tuple[str, list[tuple[str, str, str]]]:
    message = completion["choices"][0]["message"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return message.get("content") or "", calls
