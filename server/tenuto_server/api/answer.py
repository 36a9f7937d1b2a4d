"""An answer as it grows: visible text, reasoning, tool calls. ``Answer`` owns those of one generation."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tenuto_server.api.conversation import Json, parsed_arguments
from tenuto_server.api.output import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart


@dataclass(slots=True)
class Call:
    """One tool call. ``arguments``: JSON text."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The JSON text so far."""
        return "".join(self.parts)

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object; empty when the model wrote something else."""
        value = parsed_arguments(self.arguments)
        return value if isinstance(value, dict) else {}


class Answer:
    """Collects the events of one answer."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []

    def take(self, events: Iterable[OutputEvent]) -> None:
        """Adds what was decided."""
        for event in events:
            match event:
                case TextDelta(text):
                    self._text.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case ToolCallDelta(index, arguments):
                    self.calls[index].parts.append(arguments)

    @property
    def text(self) -> str:
        """The visible text so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def message(self) -> Json:
        """The answer as the canonical message that a client sends back."""
        message: Json = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": parsed_arguments(call.arguments)}} for call in self.calls
            ]
        return message


# The one argument of a custom tool, as far as it came: whole characters and escapes only.
_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*)')
_HALF_PAIR = re.compile("[\ud800-\udbff]$")


def is_whole(arguments: str) -> bool:
    """Whether the JSON text of a call's arguments came to its end."""
    return isinstance(parsed_arguments(arguments), dict)


def free_text(arguments: str) -> str:
    """What a custom tool gets: the one string argument, as far as it came, or what the model wrote instead of it."""
    value = parsed_arguments(arguments)
    if isinstance(value, dict):
        text = value.get("input")
        return text if isinstance(text, str) else json.dumps(value, ensure_ascii=False)
    if '{"input":"'.startswith("".join(arguments.split())):
        return ""
    came = _INPUT.match(arguments)
    return arguments if came is None else _HALF_PAIR.sub("", json.loads(f'"{came[1]}"', strict=False))


def program_of(arguments: Any) -> str | None:
    """The program that a shell-like call would run: what the server keys its own pause history by."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    command = arguments.get("command", arguments.get("cmd"))
    if isinstance(command, str):
        try:
            parts: list[Any] = shlex.split(command[:4096])
        except ValueError:  # quotes that do not close
            parts = command.split()
    else:
        parts = command if isinstance(command, list) else []
    words = [word for word in parts if isinstance(word, str) and not re.fullmatch(r"[A-Za-z_]\w*=.*", word)]
    return words[0].rsplit("/", 1)[-1][:256] or None if words else None
