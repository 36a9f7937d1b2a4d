"""Reads how a turn ended from a copied answer, in four dialects: Chat Completions, Messages, Responses, Gemini. No state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.sse import DONE, SSEDecoder
from tenuto.turn import TurnBuilder

_PATHS = {"/chat/completions": "chat", "/messages": "messages", "/responses": "responses"}
_CALL_ITEMS = ("function_call", "custom_tool_call")
# What an event of the Messages dialect must contain to say anything about the end; text deltas are not even parsed.
_TELLING = ('"tool_use"', "input_json_delta", '"message_start"', '"message_delta"')


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended: the tools it calls (name and arguments); none of them means that the turn is over.

    ``ids``: the calls' ids, in the same order. ``stop``: the reason in the dialect's own word. ``prompt_tokens``: as the
    server counted, cached ones included; 0 where it did not say.
    """

    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    ids: tuple[str, ...] = ()
    stop: str | None = None
    prompt_tokens: int = 0


def dialect_of(path: str) -> str | None:
    """chat, messages or responses by the request's path; None for any other path."""
    clean = path.partition("?")[0].rstrip("/")
    return next((name for suffix, name in _PATHS.items() if clean.endswith(suffix)), None)


def read_ending(dialect: str, data: bytes, *, streamed: bool) -> Ending | None:
    """How the answer in ``data`` ended; None when it is not complete, an error, or not understood."""
    reader = {"chat": _chat, "messages": _messages, "responses": _responses, "gemini": _gemini}[dialect]
    return reader(data, streamed)


def _events(data: bytes, telling: Sequence[str] = ()) -> Iterator[Mapping[str, Any]]:
    for text in SSEDecoder().feed(data + b"\n\n"):
        if text == DONE or (telling and not any(word in text for word in telling)):
            continue
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
        return Ending(
            tuple((call.name, call.arguments) for call in turn.tool_calls),
            tuple(call.id for call in turn.tool_calls),
            turn.finish_reason,
            turn.usage.prompt_tokens,
        )
    body = json.loads(data)
    choice = next(iter(body.get("choices") or ()), None)
    if choice is None:
        return None
    calls = (choice.get("message") or {}).get("tool_calls") or ()
    functions = [call.get("function") or {} for call in calls]
    return Ending(
        tuple((f.get("name") or "", _arguments(f.get("arguments"))) for f in functions),
        tuple(str(call.get("id") or "") for call in calls),
        choice.get("finish_reason"),
        (body.get("usage") or {}).get("prompt_tokens") or 0,
    )


def _messages(data: bytes, streamed: bool) -> Ending | None:
    if not streamed:
        body = json.loads(data)
        if body.get("stop_reason") is None:
            return None
        blocks = [b for b in body.get("content") or () if b.get("type") == "tool_use"]
        return Ending(
            tuple((b.get("name") or "", _arguments(b.get("input"))) for b in blocks),
            tuple(str(b.get("id") or "") for b in blocks),
            body["stop_reason"],
            _input_tokens(body.get("usage")),
        )
    calls: dict[int, tuple[str, str]] = {}
    inputs: dict[int, str] = {}
    stop: str | None = None
    tokens = 0
    for event in _events(data, _TELLING):
        block = event.get("content_block") or {}
        delta = event.get("delta") or {}
        if block.get("type") == "tool_use":
            calls[event.get("index", 0)] = (block.get("name") or "", str(block.get("id") or ""))
        elif delta.get("type") == "input_json_delta":
            index = event.get("index", 0)
            inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
        elif event.get("type") == "message_start":
            tokens = _input_tokens((event.get("message") or {}).get("usage"))
        elif event.get("type") == "message_delta" and delta.get("stop_reason"):
            stop = delta["stop_reason"]
            tokens = _input_tokens(event.get("usage")) or tokens
    if stop is None:
        return None
    ordered = sorted(calls.items())
    return Ending(
        tuple((name, _arguments(inputs.get(index))) for index, (name, _) in ordered),
        tuple(id for _, (_, id) in ordered),
        stop,
        tokens,
    )


def _responses(data: bytes, streamed: bool) -> Ending | None:
    body: Mapping[str, Any] | None = None
    if streamed:
        for event in _events(data, ('"response.completed"', '"response.incomplete"')):
            if event.get("type") in ("response.completed", "response.incomplete"):
                body = event.get("response")
    else:
        body = json.loads(data)
    if not body or body.get("output") is None:
        return None
    calls = [item for item in body["output"] if item.get("type") in _CALL_ITEMS]
    return Ending(
        tuple((c.get("name") or "", _arguments(c.get("arguments"))) for c in calls),
        tuple(str(c.get("call_id") or "") for c in calls),
        body.get("status"),
        (body.get("usage") or {}).get("input_tokens") or 0,
    )


def _gemini(data: bytes, streamed: bool) -> Ending | None:
    events = list(_events(data)) if streamed else [json.loads(data)]
    calls: list[tuple[str, Mapping[str, Any]]] = []
    stop: str | None = None
    tokens = 0
    for event in events:
        candidate = next(iter(event.get("candidates") or ()), None) or {}
        stop = candidate.get("finishReason") or stop
        tokens = (event.get("usageMetadata") or {}).get("promptTokenCount") or tokens
        for part in (candidate.get("content") or {}).get("parts") or ():
            call = part.get("functionCall") or {}
            if call.get("name"):
                calls.append((call["name"], _arguments(call.get("args"))))
    return Ending(tuple(calls), ("",) * len(calls), stop, tokens) if stop is not None else None


def _input_tokens(usage: Any) -> int:
    """All prompt tokens: this dialect counts cached ones apart."""
    usage = usage or {}
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in names)


def _arguments(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
