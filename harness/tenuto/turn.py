"""What a turn returned: message, tool calls, usage with the server's cache report. Values and one stream assembler.

``TurnBuilder`` owns the state of one streamed answer; everything else here is frozen. No input or output happens here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tenuto.wire import CacheReport, Divergence, Lease, MissLabel


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an answer. ``arguments``: decoded; empty when ``raw_arguments`` is not a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw_arguments: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens that had been computed before and were computed again. ``where``: for mutations, the first difference."""

    label: MissLabel
    tokens: int
    where: Divergence | None = None


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Token counts of one answer. ``report`` is the server's own account; None from a server that gives none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    report: CacheReport | None = None

    @property
    def by_tier(self) -> dict[str, int]:
        """Prompt tokens by where they came from: device, host, disk, and recompute for all that were prefilled."""
        tiers: dict[str, int] = {"device": 0, "host": 0, "disk": 0}
        for tier, tokens in self.report.cached.items() if self.report is not None else ():
            tiers[tier] = tokens
        return {**tiers, "recompute": self.prompt_tokens - self.cached_tokens}

    @property
    def misses(self) -> tuple[Miss, ...]:
        """Retention, capacity and mutation misses, the largest first. Tokens never seen before are no miss."""
        if self.report is None:
            return ()
        found = [
            Miss(label, tokens, self.report.divergence if label == "mutation" else None)
            for label, tokens in self.report.recomputed.items()
            if label != "cold" and tokens > 0
        ]
        return tuple(sorted(found, key=lambda miss: -miss.tokens))

    @property
    def lease(self) -> Lease | None:
        """The lease held when the answer ended."""
        return self.report.lease if self.report is not None else None


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.

    ``message``: the assistant message, ready to be appended to the history. ``ttft_s``: seconds to the first token, as
    measured here when streamed, else as the server reports it. ``duration_s``: seconds from request to end of answer.
    ``raw``: the completion object (for a stream, its last chunk).
    """

    message: dict[str, Any]
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    usage: TurnUsage
    ttft_s: float | None
    duration_s: float
    model: str | None = None
    id: str | None = None
    request_id: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The text of the answer; empty when it has none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One chunk of a streamed answer. ``text``: the piece of text it brings, often empty. ``chunk``: as received."""

    text: str
    chunk: Mapping[str, Any] = field(repr=False)


class TurnBuilder:
    """Assembles a Turn from chunks of ``chat.completion.chunk`` objects. Malformed chunks are ignored."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage: Mapping[str, Any] = {}
        self._report: Any = None
        self._finish: str | None = None
        self._last: Mapping[str, Any] = {}
        self.first_token_seen = False

    def feed(self, chunk: Mapping[str, Any]) -> StreamEvent:
        """Adds one chunk and returns it as an event."""
        self._last = chunk
        usage = chunk.get("usage")
        if isinstance(usage, Mapping):
            self._usage = usage
        self._report = chunk.get("tenuto") or self._report
        choice = next(iter(chunk.get("choices") or ()), None)
        if not isinstance(choice, Mapping):
            return StreamEvent("", chunk)
        self._finish = choice.get("finish_reason") or self._finish
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        if text:
            self._content.append(text)
        reasoning = delta.get("reasoning_content") or ""
        if reasoning:
            self._reasoning.append(reasoning)
        for part in delta.get("tool_calls") or ():
            self._merge_call(part)
        self.first_token_seen |= bool(text or reasoning or delta.get("tool_calls"))
        return StreamEvent(text, chunk)

    def build(self, *, ttft_s: float | None, duration_s: float, request_id: str | None = None) -> Turn:
        """The turn assembled so far; also valid after a stream that broke off."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        elif message["content"] is None:
            message["content"] = ""
        body = {
            **self._last,
            "choices": [{"message": message, "finish_reason": self._finish}],
            "usage": self._usage,
            "tenuto": self._report,
        }
        return turn_from_completion(body, ttft_s=ttft_s, duration_s=duration_s, request_id=request_id)

    def _merge_call(self, part: Mapping[str, Any]) -> None:
        index = part.get("index", len(self._calls))
        call = self._calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def turn_from_completion(
    body: Mapping[str, Any], *, ttft_s: float | None = None, duration_s: float, request_id: str | None = None
) -> Turn:
    """Reads a ``chat.completion`` object. Missing fields become empty ones: other servers leave much out."""
    choice = next(iter(body.get("choices") or ()), None) or {}
    message = dict(choice.get("message") or {"role": "assistant", "content": ""})
    usage = _usage(body)
    if ttft_s is None and usage.report is not None:
        ttft_s = usage.report.ttft_s
    return Turn(
        message=message,
        tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason"),
        usage=usage,
        ttft_s=ttft_s,
        duration_s=duration_s,
        model=body.get("model"),
        id=body.get("id"),
        request_id=request_id,
        raw=body,
    )


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or {}
    raw = function.get("arguments") or ""
    try:
        arguments = json.loads(raw) if raw else {}
    except ValueError:
        arguments = {}
    return ToolCall(
        id=str(call.get("id") or ""),
        name=str(function.get("name") or ""),
        arguments=arguments if isinstance(arguments, dict) else {},
        raw_arguments=raw,
    )


def _usage(body: Mapping[str, Any]) -> TurnUsage:
    usage = body.get("usage") or {}
    report = _report(body.get("tenuto") or usage.get("tenuto"))
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    if cached is None:
        cached = report.cached_tokens if report is not None else 0
    return TurnUsage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=cached,
        report=report,
    )


def _report(value: Any) -> CacheReport | None:
    try:
        return CacheReport.model_validate(value) if value else None
    except ValidationError:
        return None
