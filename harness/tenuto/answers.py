"""Reads how a turn ended from a copied answer, in three dialects: Chat Completions, Messages, Responses. No state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.prefix import Fingerprint, fingerprint
from tenuto.sse import DONE, SSEDecoder
from tenuto.turn import TurnBuilder

_PATHS = {"/chat/completions": "chat", "/messages": "messages", "/responses": "responses"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended: the tools it calls (name and arguments); none of them means that the turn is over."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...]


def dialect_of(path: str) -> str | None:
    """chat, messages or responses by the request's path; None for any other path."""
    clean = path.partition("?")[0].rstrip("/")
    return next((name for suffix, name in _PATHS.items() if clean.endswith(suffix)), None)


def prompt_of(dialect: str, body: Mapping[str, Any]) -> Fingerprint:
    """The prompt of a request, tools left out: what names a conversation is what was said in it."""
    if dialect == "responses":
        given = body.get("input") or []
        items: Sequence[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return fingerprint([i for i in items if isinstance(i, Mapping)], system=body.get("instructions"))
    messages = [m for m in body.get("messages") or [] if isinstance(m, Mapping)]
    return fingerprint(messages, system=body.get("system") if dialect == "messages" else None)


def read_ending(dialect: str, data: bytes, *, streamed: bool) -> Ending | None:
    """How the answer in ``data`` ended; None when it is not complete, an error, or not understood."""
    if dialect == "chat":
        return _chat(data, streamed)
    if dialect == "messages":
        return _messages(data, streamed)
    return _responses(data, streamed)


def _events(data: bytes) -> Iterator[Mapping[str, Any]]:
    for text in SSEDecoder().feed(data + b"\n\n"):
        if text != DONE:
            event = json.loads(text)
            if isinstance(event, dict):
                yield event


def _chat(data: bytes, streamed: bool) -> Ending | None:
    if streamed:
        builder = TurnBuilder()
        for chunk in _events(data):
            builder.feed(chunk)
        turn = builder.build(ttft_s=None, duration_s=0.0)
        if turn.finish_reason is None:
            return None
        return Ending(tuple((call.name, call.arguments) for call in turn.tool_calls))
    choice = next(iter(json.loads(data).get("choices") or ()), None)
    if choice is None:
        return None
    calls = (choice.get("message") or {}).get("tool_calls") or ()
    functions = [call.get("function") or {} for call in calls]
    return Ending(tuple((f.get("name") or "", _arguments(f.get("arguments"))) for f in functions))


def _messages(data: bytes, streamed: bool) -> Ending | None:
    if not streamed:
        body = json.loads(data)
        if body.get("stop_reason") is None:
            return None
        blocks = [b for b in body.get("content") or () if b.get("type") == "tool_use"]
        return Ending(tuple((b.get("name") or "", _arguments(b.get("input"))) for b in blocks))
    names: dict[int, str] = {}
    inputs: dict[int, str] = {}
    stopped = False
    for event in _events(data):
        block = event.get("content_block") or {}
        delta = event.get("delta") or {}
        if block.get("type") == "tool_use":
            names[event.get("index", 0)] = block.get("name") or ""
        elif delta.get("type") == "input_json_delta":
            index = event.get("index", 0)
            inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
        elif event.get("type") == "message_delta" and delta.get("stop_reason"):
            stopped = True
    if not stopped:
        return None
    return Ending(tuple((name, _arguments(inputs.get(index))) for index, name in sorted(names.items())))


def _responses(data: bytes, streamed: bool) -> Ending | None:
    body: Mapping[str, Any] | None = None
    if streamed:
        for event in _events(data):
            if event.get("type") in ("response.completed", "response.incomplete"):
                body = event.get("response")
    else:
        body = json.loads(data)
    if not body or body.get("output") is None:
        return None
    calls = [item for item in body["output"] if item.get("type") in ("function_call", "custom_tool_call")]
    return Ending(tuple((c.get("name") or "", _arguments(c.get("arguments"))) for c in calls))


def _arguments(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
