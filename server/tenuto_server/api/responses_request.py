"""Requests of the Responses API: their fields, and the conversation they hold. Holds no state.

What surrounds a turn in this dialect is brought back to one answer and its results: reasoning, message and calls that stand
together are one assistant message. Tools that run on a vendor's servers are left out; items of kinds that this server does
not know stand in the prompt as their own JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from tenuto_server.api.conversation import (
    Conversation,
    Json,
    Writer,
    custom_tool,
    dump,
    function_tool,
    given_arguments,
    given_id,
    given_text,
    joined_text,
    read_choice,
)
from tenuto_server.api.errors import bad_request, unsupported
from tenuto_server.api.messages_request import open_seal
from tenuto_server.api.readings import Readings, facts
from tenuto_server.api.schema import GenerationRequest
from tenuto_server.api.tools import ToolSpec

SUMMARY_INTRODUCTION = "Summary of the conversation so far:\n"
_MARKS = ("id", "status", "cache_control", "prompt_cache_breakpoint", "encrypted_content")
_SILENT = ("item_reference", "configuration_update")


class ResponsesRequest(GenerationRequest):
    """``POST /v1/responses``."""

    input: str | list[Any] | None = None
    instructions: str | list[Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def limit(self) -> int | None:
        """``max_output_tokens``."""
        return self.max_output_tokens

    def refuse_unsupported(self) -> None:
        """See ``GenerationRequest``."""
        super().refuse_unsupported()
        if self.background:
            raise unsupported("background", "only answers that are waited for are supported")
        if self.input is None and self.previous_response_id is None:
            raise bad_request("input: missing", "input", "missing_required_parameter")

    def items(self) -> list[Any]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    def response_schema(self) -> Json | None:
        """The JSON schema that the answer must follow. Raises 400."""
        form = (self.text or {}).get("format")
        if form is None:
            return None
        if not isinstance(form, dict):
            raise bad_request("text.format: expected an object", "text.format")
        kind = form.get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind != "json_schema":
            raise bad_request("text.format.type: expected text, json_object or json_schema", "text.format.type")
        if not isinstance(schema := form.get("schema"), dict):
            raise bad_request("text.format.schema: a json_schema needs an object", "text.format.schema")
        return schema


def to_conversation(
    body: ResponsesRequest, history: Sequence[Any], strip: bool, readings: Readings | None = None, scope: str = ""
) -> Conversation:
    """The conversation of a request behind the stored items ``history``. ``readings``: what a tenant (``scope``) sent before.
    Raises 400 naming the item or tool."""
    tools = tuple(spec for index, tool in enumerate(body.tools or ()) for spec in _tools(tool, f"tools[{index}]"))
    reader = _Reader(Writer(strip), len(history))
    if body.instructions is not None:
        for text in _instructions(body.instructions):
            reader.writer.text("system", text, None)
    reading = (readings or Readings(0)).read(scope, reader, [*history, *body.items()])
    writer = reader.closed()
    if not writer.messages:
        raise bad_request("input: has no message; give at least one", "input")
    writer.link(scope)
    told = facts(reading, scope)
    behind = len(history)  # the writer counted from the beginning of what is stored
    places = tuple(None if place is None or place < behind else place - behind for place in writer.places)
    told |= {"messages": tuple(writer.messages), "places": places}
    told |= {"digests": tuple(writer.digests), "links": tuple(writer.links)}
    return Conversation(
        **told,
        tools=tools,
        tool_choice=read_choice(_qualified_choice(body.tool_choice, tools), tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_schema=body.response_schema(),
        source="input",
        tool_field="tools[{}].parameters",
        response_field="text.format.schema",
    )


def _instructions(value: str | list[Any]) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [joined_text(item.get("content") if isinstance(item, dict) else item, "instructions") for item in value]


def _tools(tool: Any, where: str) -> list[ToolSpec]:
    """The functions that one entry of the tool list stands for."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type: expected a string", f"{where}.type")
    if kind == "function":
        return [] if tool.get("defer_loading") is True else [function_tool(tool, "parameters", where)]
    if kind == "custom":
        return [custom_tool(tool, where)]
    if kind == "namespace":
        inner, name = tool.get("tools"), tool.get("name")
        if not isinstance(name, str):
            raise bad_request(f"{where}.name: a namespace needs a string", f"{where}.name")
        if not isinstance(inner, list):
            raise bad_request(f"{where}.tools: a namespace needs an array", f"{where}.tools")
        specs = [spec for index, each in enumerate(inner) for spec in _tools(each, f"{where}.tools[{index}]")]
        return [replace(spec, name=qualified(name, spec.name), namespace=name) for spec in specs]
    return []


def qualified(namespace: Any, name: str) -> str:
    """A tool's name as the model sees it."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _qualified_choice(choice: Any, tools: Sequence[ToolSpec]) -> Any:
    """A choice of a tool by its own name, where that tool stands in a namespace or runs elsewhere."""
    if isinstance(choice, dict) and isinstance(name := choice.get("name"), str):
        found = next((t.name for t in tools if t.name in (name, qualified(t.namespace, name))), name)
        return {**choice, "name": found}
    kind = choice.get("type") if isinstance(choice, dict) else None
    hosted = isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools", "auto", "none", "required")
    return "auto" if hosted else choice


class _Reader:
    """Collects what belongs to one answer until something else follows."""

    def __init__(self, writer: Writer, stored: int = 0) -> None:
        self.writer, self._stored, self.basis = writer, stored, b"responses"
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Json] = []
        self._place: int | None = None
        self._open = False

    def restart(self, writer: Writer) -> None:
        """Goes on with another writer."""
        self.writer = writer
        self._text, self._reasoning, self._calls, self._open = [], [], [], False

    def read(self, item: Any, index: int) -> bool:
        """One item, the stored ones first; False while the answer that it belongs to may go on. Raises 400."""
        stored = index < self._stored
        self._item(item, "previous_response_id" if stored else f"input[{index - self._stored}]", index)
        return not self._open

    def closed(self) -> Writer:
        """The writer with everything that was read; what is still open is written to a copy, since it may go on."""
        if not self._open:
            return self.writer
        reader = _Reader(self.writer.resumed(self.writer.mark()))
        reader._text, reader._reasoning, reader._calls = self._text, self._reasoning, self._calls
        reader._open, reader._place = True, self._place
        reader.flush()
        return reader.writer

    def _item(self, item: Any, where: str, place: int | None) -> None:
        if not isinstance(item, dict):
            raise bad_request(f"{where}: expected an object", where)
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str):
            raise bad_request(f"{where}.type: expected a string", f"{where}.type")
        if kind == "message":
            self._message(item, where, place)
        elif kind == "reasoning":
            self._answer(place, reasoning=_thought(item))
        elif kind.endswith("_call") and kind != "web_search_call":
            self._call(item, kind, where, place)
        elif kind.endswith("_output"):
            self.flush()
            output = item.get("output")
            text = output if isinstance(output, str) else _output_text(output, f"{where}.output")
            self.writer.result(given_id(item, "call_id", where), text, place)
        elif kind == "compaction":
            self.flush()
            if summary := open_seal(str(item.get("encrypted_content"))):
                self.writer.text("user", SUMMARY_INTRODUCTION + summary, place)
        elif kind not in _SILENT:
            self.flush()
            content = item.get("content")
            plain = {key: value for key, value in item.items() if key not in _MARKS}
            text = joined_text(content, f"{where}.content") if isinstance(content, list) else dump(plain, where)
            self.writer.text("user", text, place)

    def _message(self, item: Json, where: str, place: int | None) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            message = f"{where}.role: expected user, assistant, system or developer"
            raise bad_request(message, f"{where}.role")
        text = joined_text(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._answer(place, text=text)
        else:
            self.flush()
            self.writer.text(role, text, place)

    def _call(self, item: Json, kind: str, where: str, place: int | None) -> None:
        name = item.get("name", kind.removesuffix("_call"))
        if not isinstance(name, str) or not name:
            raise bad_request(f"{where}.name: expected a string", f"{where}.name")
        if kind == "custom_tool_call":
            arguments: Any = {"input": given_text(item.get("input"), f"{where}.input")}
        elif "arguments" in item:
            arguments = given_arguments(item["arguments"], f"{where}.arguments")
        else:
            arguments = item.get("action", item.get("operation"))
        self._answer(place)
        call_id = given_id(item, "call_id" if "call_id" in item else "id", where)
        self._calls.append(self.writer.call(call_id, qualified(item.get("namespace"), name), arguments))

    def _answer(self, place: int | None, text: str = "", reasoning: str = "") -> None:
        """More of an answer; text or reasoning behind calls begins the next one."""
        if self._calls and (text or reasoning):
            self.flush()
        if not self._open:
            self._open, self._place = True, place
        self._text += [text] if text else []
        self._reasoning += [reasoning] if reasoning else []

    def flush(self) -> None:
        """The answer is complete."""
        if self._open:
            self.writer.assistant("\n".join(self._text), "\n".join(self._reasoning), self._calls, self._place)
        self._text, self._reasoning, self._calls, self._open = [], [], [], False


def _output_text(output: Any, where: str) -> str:
    return joined_text(output, where) if isinstance(output, list) or output is None else dump(output, where)


def _thought(item: Json) -> str:
    """Reasoning as its text, as what this server sealed, or as its summary."""
    for parts in (item.get("content"), item.get("encrypted_content"), item.get("summary")):
        if isinstance(parts, str):
            text = open_seal(parts)
        elif isinstance(parts, list):
            text = "\n".join(
                part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        else:
            text = ""
        if text:
            return text
    return ""
