"""Requests of the Messages API: their fields, and the conversation they hold. Holds no state.

Accepted and without effect on the tokens: betas, ``context_management``, efforts, ``service_tier``, ids, cache marks, and
everything unknown. Content that this model cannot read (images, files) is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from tenuto_server.api.conversation import (
    Conversation,
    Json,
    Writer,
    block_text,
    digest_tool,
    function_tool,
    joined_text,
)
from tenuto_server.api.errors import bad_request
from tenuto_server.api.readings import Readings, facts
from tenuto_server.api.schema import GenerationRequest, check_stops
from tenuto_server.api.tools import ToolChoice, ToolSpec

STOP_SEQUENCES_MAX = 16
_SIGNATURE = "tenuto1."


class CountRequest(GenerationRequest):
    """``POST /v1/messages/count_tokens``."""

    messages: Annotated[list[Any], Field(min_length=1)]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    def response_schema(self) -> tuple[Json | None, str]:
        """The JSON schema that the answer must follow (None: any text), and the name of its field. Raises 400."""
        config = self.output_config or {}
        wanted, where = (config.get("format"), "output_config.format")
        if wanted is None:
            wanted, where = self.output_format, "output_format"
        if wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text"):
            return None, f"{where}.schema"
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise bad_request(f"{where}.type: expected json_schema", f"{where}.type")
        schema = wanted.get("schema")
        if not isinstance(schema, dict):
            raise bad_request(f"{where}.schema: expected an object", f"{where}.schema")
        return schema, f"{where}.schema"


class MessagesRequest(CountRequest):
    """``POST /v1/messages``. ``max_tokens`` 0 fills the cache and generates nothing."""

    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)]
    stop_sequences: list[str] | None = None
    diagnostics: dict[str, Any] | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises 400 for too many, empty or overlong ones."""
        return check_stops(tuple(self.stop_sequences or ()), STOP_SEQUENCES_MAX, "stop_sequences")

    @property
    def shows_thinking(self) -> bool:
        """Whether the client wants to see reasoning, if only sealed."""
        return (self.thinking or {}).get("type") in ("enabled", "adaptive")

    @property
    def seals_thinking(self) -> bool:
        """Whether reasoning travels in the block's signature only."""
        return (self.thinking or {}).get("display") == "omitted"


def to_conversation(body: CountRequest, strip: bool, readings: Readings | None = None, scope: str = "") -> Conversation:
    """The conversation of a request. ``readings``: what a tenant (``scope``) sent before. Raises 400 naming the message,
    block or tool."""
    tools = {tool.name: (tool, late) for tool, late in map(_tool, body.tools or (), range(len(body.tools or ())))}
    specs = tuple(tool for tool, late in tools.values() if not late)
    # A reference brings in a tool that is not loaded; where all are, messages are read without looking at them.
    deferred = len(specs) < len(tools)
    reader = _Reader(Writer(strip), {name: tool for name, (tool, _) in tools.items()} if deferred else {})
    reader.system(body.system)
    messages = body.messages
    prefill = _prefill(messages)
    reading = (readings or Readings(0)).read(scope, reader, messages[:-1] if prefill else messages)
    thinking = (body.thinking or {}).get("type")
    choice, parallel = _choice(body.tool_choice, specs)
    schema, schema_field = body.response_schema()
    return Conversation(
        **facts(reading, scope),
        tools=specs,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_schema=schema,
        variables={"enable_thinking": thinking == "enabled"} if thinking in ("enabled", "disabled") else {},
        prefill=prefill,
        tool_field="tools[{}].input_schema",
        response_field=schema_field,
    )


def _prefill(messages: list[Any]) -> str:
    """The text of a last assistant message: the answer goes on from there."""
    last = messages[-1]
    if len(messages) < 2 or not isinstance(last, dict) or last.get("role") != "assistant":
        return ""
    content = last.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(b, dict) and b.get("type") == "text" for b in blocks):
        return ""
    return joined_text(blocks, f"messages[{len(messages) - 1}].content")


def _tool(tool: Any, index: int) -> tuple[ToolSpec, bool]:
    """A tool, and whether it stays out until a ``tool_reference`` brings it in."""
    where = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise bad_request(f"{where}: expected an object", where)
    return function_tool(tool, "input_schema", where), tool.get("defer_loading") is True


def _choice(choice: Mapping[str, Any] | None, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, bool]:
    if choice is None:
        return "auto", True
    kind, parallel = choice.get("type"), choice.get("disable_parallel_tool_use") is not True
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        name = choice.get("name")
        if not any(tool.name == name for tool in tools):
            raise bad_request(f"tool_choice.name: {str(name)[:64]!r} is not among the tools", "tool_choice.name")
        return str(name), parallel
    if kind == "any" and not tools:
        raise bad_request("tool_choice.type: any, but there are no tools", "tool_choice.type")
    if not isinstance(kind, str) or kind not in choices:
        raise bad_request("tool_choice.type: expected auto, any, none or tool", "tool_choice.type")
    return choices[kind], parallel


class _Reader:
    """Takes the messages apart: one of theirs can hold several results and texts."""

    def __init__(self, writer: Writer, tools: Mapping[str, ToolSpec]) -> None:
        self.writer, self._tools = writer, tools
        self.basis = b"messages" + b"".join(map(digest_tool, tools.values()))

    def restart(self, writer: Writer) -> None:
        """Goes on with another writer."""
        self.writer = writer

    def system(self, system: Any) -> None:
        """The system text beside the messages."""
        if isinstance(system, list):
            texts = (block_text(block, f"system[{index}]") for index, block in enumerate(system))
            system = "\n".join(kept for text in texts if (kept := self.writer.system_text(text)))
        if system:
            self.writer.text("system", system, None)

    def read(self, message: Any, index: int) -> bool:
        """One message; it is complete in itself. Raises 400."""
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise bad_request(f"{where}: expected an object", where)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role: expected user, assistant or system", f"{where}.role")
        if role == "system":
            self.writer.text("system", joined_text(content, f"{where}.content", self._tools), index)
            return True
        if content is None or isinstance(content, str):
            blocks: Any = [{"type": "text", "text": content or ""}]
        else:
            blocks = content
        if not isinstance(blocks, list):
            raise bad_request(f"{where}.content: expected a string or an array of blocks", f"{where}.content")
        if role == "assistant":
            self._assistant(blocks, index)
        else:
            self._user(blocks, index)
        return True

    def _user(self, blocks: list[Any], index: int) -> None:
        texts: list[str] = []
        said = False
        for at, block in enumerate(blocks):
            where = f"messages[{index}].content[{at}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind.endswith("tool_result"):
                if not isinstance(call_id := block.get("tool_use_id"), str):
                    raise bad_request(f"{where}.tool_use_id: expected a string", f"{where}.tool_use_id")
                if texts:
                    self.writer.text("user", "\n".join(texts), index)
                    texts = []
                text = joined_text(block.get("content"), f"{where}.content", self._tools)
                self.writer.result(call_id, text, index)
                said = True
            else:
                texts.append(block_text(block, where, self._tools))
        if texts or not said:
            self.writer.text("user", "\n".join(texts), index)

    def _assistant(self, blocks: list[Any], index: int) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[Json] = []
        for at, block in enumerate(blocks):
            where = f"messages[{index}].content[{at}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
                name = block.get("name")
                if not isinstance(name, str) or not name:
                    raise bad_request(f"{where}.name: expected a string", f"{where}.name")
                value = block.get("input")
                if value is not None and not isinstance(value, dict):
                    raise bad_request(f"{where}.input: expected an object", f"{where}.input")
                calls.append(self.writer.call(block.get("id"), name, value))
            elif kind == "thinking":
                reasoning.append(_thought(block, where))
            elif kind != "redacted_thinking":
                texts.append(block_text(block, where, self._tools))
        self.writer.assistant("\n".join(texts), "\n".join(filter(None, reasoning)), calls, index)


def _thought(block: Json, where: str) -> str:
    text, signature = block.get("thinking"), block.get("signature")
    if text is not None and not isinstance(text, str):
        raise bad_request(f"{where}.thinking: expected a string", f"{where}.thinking")
    if text:
        return text
    return open_seal(signature) if isinstance(signature, str) else ""


def seal(text: str) -> str:
    """Reasoning as an opaque string that clients carry back unread."""
    return _SIGNATURE + base64.urlsafe_b64encode(json.dumps(text).encode()).decode()


def open_seal(sealed: str) -> str:
    """The text of ``seal``; nothing for what another server sealed."""
    if not sealed.startswith(_SIGNATURE):
        return ""
    try:
        text = json.loads(base64.urlsafe_b64decode(sealed.removeprefix(_SIGNATURE)))
    except (ValueError, binascii.Error, RecursionError):
        return ""
    return text if isinstance(text, str) else ""
