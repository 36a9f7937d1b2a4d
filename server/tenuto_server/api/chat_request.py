"""Requests of the Chat Completions API: the conversation they hold. Holds no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto_server.api.conversation import (
    Conversation,
    Json,
    Writer,
    custom_tool,
    function_tool,
    given_arguments,
    given_id,
    given_text,
    joined_text,
    read_choice,
)
from tenuto_server.api.errors import bad_request
from tenuto_server.api.readings import Readings, facts
from tenuto_server.api.tools import ToolSpec

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TOOL_RESULTS_ROLES = ("tool", "function")


def from_chat(
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    *,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    response_schema: Json | None = None,
    variables: Mapping[str, Any] | None = None,
    strip: bool = True,
    readings: Readings | None = None,
    scope: str = "",
) -> Conversation:
    """A conversation in the Chat Completions form. ``readings``: what a tenant (``scope``) sent before. Raises 400 naming the
    message or tool."""
    reading = (readings or Readings(0)).read(scope, _Reader(Writer(strip)), messages)
    specs = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    return Conversation(
        **facts(reading, scope),
        tools=specs,
        tool_choice=read_choice(tool_choice, specs),
        parallel_tool_calls=parallel_tool_calls is not False,
        response_schema=response_schema,
        variables=dict(variables or {}),
    )


class _Reader:
    """See ``readings.Reader``: each message is complete in itself."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.basis = writer, b"chat"

    def restart(self, writer: Writer) -> None:
        """Goes on with another writer."""
        self.writer = writer

    def read(self, item: Any, index: int) -> bool:
        """One message. Raises 400."""
        _read_message(self.writer, item, index)
        return True


def _read_message(writer: Writer, message: Any, index: int) -> None:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise bad_request(f"{where}: expected an object", where)
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role: expected one of {', '.join(ROLES)}", f"{where}.role")
    text = joined_text(message.get("content"), f"{where}.content")
    name = message["name"] if isinstance(message.get("name"), str) else None
    if role in _TOOL_RESULTS_ROLES:
        writer.result(given_id(message, "tool_call_id", where), text, index, name)
        return
    if role == "assistant":
        reasoning = next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls: expected an array", f"{where}.tool_calls")
        read = [_read_call(writer, call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        writer.assistant(text, reasoning, read, index)
        return
    writer.text(role, text, index)
    if name and writer.places and writer.places[-1] == index:
        writer.messages[-1]["name"] = name


def _read_call(writer: Writer, call: Any, where: str) -> Json:
    if not isinstance(call, dict):
        raise bad_request(f"{where}: expected an object", where)
    key = _key(call)
    function = call.get(key)
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise bad_request(f"{where}.{key}.name: expected a string", f"{where}.{key}.name")
    if key == "custom":
        arguments: Any = {"input": given_text(function.get("input"), f"{where}.custom.input")}
    else:
        arguments = given_arguments(function.get("arguments"), f"{where}.function.arguments")
    return writer.call(given_id(call, "id", where), name, arguments)


def _key(item: Json) -> str:
    """The field that holds what a tool or a call is; its ``type`` may be missing."""
    return "custom" if item.get("type") == "custom" or ("custom" in item and "function" not in item) else "function"


def _read_tool(tool: Any, where: str) -> ToolSpec:
    if not isinstance(tool, dict):
        raise bad_request(f"{where}: expected an object", where)
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        raise bad_request(f"{where}.type: expected a string", f"{where}.type")
    key = _key(tool)
    inner = tool.get(key)
    if not isinstance(inner, dict):
        raise bad_request(f"{where}.{key}.name: expected a string", f"{where}.{key}.name")
    return (
        custom_tool(inner, f"{where}.custom")
        if key == "custom"
        else function_tool(inner, "parameters", f"{where}.{key}")
    )
