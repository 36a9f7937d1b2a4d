"""What a request says, in one form for all dialects: chat messages, tools and what the answer must be. Holds no state.

A ``Conversation`` is canonical, so that equal content gives equal tokens whatever form it came in: a string is one text
block; cache marks, item ids and lines that name the client's build stay out; tool calls are numbered in order, since their
ids differ from client to client; tools keep the order in which they came.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto_server.api.digests import Digest, digest_of, extended, root
from tenuto_server.api.errors import bad_request, unsupported
from tenuto_server.api.tools import ToolChoice, ToolSpec

Json = dict[str, Any]

ATTRIBUTION = "x-anthropic-billing-header:"
"""Begins the system line of a coding agent that changes with every session and subagent; it says nothing to a model."""

TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_MEDIA = ("image", "image_url", "input_image", "input_audio", "audio", "video", "input_file", "file", "document")
_MARKS = ("cache_control", "prompt_cache_breakpoint", "citations", "annotations", "id")


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages``: {role, content: str, reasoning_content?, tool_calls?, tool_call_id?, name?} in order; never changed once
    they stand here. ``places``: for each of them its index in the client's own list, None for what stood beside the list.
    ``removed``: what was kept out of the prompt, by name. ``variables``: template arguments. ``prefill``: text with which the
    answer begins. For errors, the client's names of its list (``source``), of tool number ``{}``'s schema (``tool_field``) and
    of the answer's schema (``response_field``). ``digests`` of the messages and ``links`` of their chain, begun with
    ``scope``, where the reader knew them. ``asked_s``, ``marked_s``: see ``readings``."""

    messages: tuple[Json, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_schema: Json | None = None
    places: tuple[int | None, ...] = ()
    removed: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    source: str = "messages"
    tool_field: str = "tools[{}].function.parameters"
    response_field: str = "response_format.json_schema.schema"
    prefill: str = ""
    digests: tuple[Digest, ...] = ()
    links: tuple[Digest, ...] = ()
    scope: str = ""
    asked_s: float | None = None
    marked_s: float | None = None

    @property
    def last_role(self) -> str | None:
        """The role of the client's last message: ``tool`` if it holds a result, whatever text stands beside that."""
        if not self.messages:
            return None
        role, place = self.messages[-1]["role"], self.places[-1]
        for message, at in zip(reversed(self.messages), reversed(self.places), strict=True):
            if at != place or place is None:
                break
            role = "tool" if message["role"] == "tool" else role
        return str(role)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a ``Writer`` had come: messages, calls and removals."""

    messages: int
    calls: int
    removed: int


class Writer:
    """Collects the messages of one conversation. ``strip``: attribution lines stay out."""

    def __init__(self, strip: bool = True) -> None:
        self.messages: list[Json] = []
        self.places: list[int | None] = []
        self.removed: list[str] = []
        self.digests: list[Digest] = []
        self.links: list[Digest] = []
        self._strip = strip
        self._numbers: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._calls: list[tuple[str, str, str]] = []

    def mark(self) -> Mark:
        """Where it stands now."""
        return Mark(len(self.messages), len(self._calls), len(self.removed))

    def resumed(self, mark: Mark) -> Writer:
        """Another one that stands where this one stood at ``mark``, with the same message objects."""
        writer = Writer(self._strip)
        writer.messages, writer.places = self.messages[: mark.messages], self.places[: mark.messages]
        writer.digests, writer.links = self.digests[: mark.messages], self.links[: mark.messages]
        writer.removed, writer._calls = self.removed[: mark.removed], self._calls[: mark.calls]
        for key, number, name in writer._calls:
            writer._numbers[key], writer._names[key] = number, name
        return writer

    def link(self, scope: str) -> None:
        """Digests and links of the messages that have none yet."""
        new = list(map(digest_of, self.messages[len(self.digests) :]))
        self.links += extended(self.links[-1] if self.links else root(scope), new)
        self.digests += new

    def add(self, message: Json, place: int | None) -> None:
        """Appends a message that is canonical already."""
        self.messages.append(message)
        self.places.append(place)

    def text(self, role: str, text: str, place: int | None) -> None:
        """Appends a plain message. An empty system message says nothing and is left out."""
        if role in ("system", "developer"):
            text = self.system_text(text)
            if not text:
                return
        self.add({"role": role, "content": text}, place)

    def system_text(self, text: str) -> str:
        """``text`` without a leading attribution line."""
        if not self._strip or not text.startswith(ATTRIBUTION):
            return text
        if "attribution" not in self.removed:
            self.removed.append("attribution")
        return text.partition("\n")[2]

    def call(self, call_id: Any, name: str, arguments: Any) -> Json:
        """A tool call, numbered in the order of the conversation."""
        number = f"{len(self._numbers) + 1:09d}"  # nine characters: what the strictest known template insists on
        # A call without an id is counted too; its key cannot collide with a client's string.
        key = call_id if isinstance(call_id, str) and call_id else f"\0{number}"
        self._numbers[key], self._names[key] = number, name
        self._calls.append((key, number, name))
        return {"id": number, "type": "function", "function": {"name": name, "arguments": parsed_arguments(arguments)}}

    def result(self, call_id: Any, text: str, place: int | None, name: str | None = None) -> None:
        """Appends a tool's result, tied to its call by number and name."""
        message: Json = {"role": "tool", "content": text}
        if isinstance(call_id, str):
            message["tool_call_id"] = self._numbers.get(call_id, "000000000")
            name = name or self._names.get(call_id)
        if name:
            message["name"] = name
        self.add(message, place)

    def assistant(self, text: str, reasoning: str, calls: Sequence[Json], place: int | None) -> None:
        """Appends an answer."""
        message: Json = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = list(calls)
        self.add(message, place)


def given_arguments(arguments: Any, where: str) -> Any:
    """Arguments as a client may send them back: text, an object, or nothing. Raises 400 naming the field (``where``)."""
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise bad_request(f"{where}: expected a string", where)
    return arguments


def given_text(text: Any, where: str) -> str:
    """What a custom tool was given: text, or nothing. Raises 400 naming the field."""
    if text is not None and not isinstance(text, str):
        raise bad_request(f"{where}: expected a string", where)
    return text or ""


def given_id(item: Json, key: str, where: str) -> str | None:
    """The id that ties a call and its result together. Raises 400 naming the field for what is no text."""
    value = item.get(key)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{where}.{key}: expected a string", f"{where}.{key}")
    return value


def parsed_arguments(arguments: Any) -> Any:
    """Arguments as templates want them: an object; text that is not one stays text."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else arguments
    return {} if arguments is None else arguments


def joined_text(content: Any, where: str, references: Mapping[str, ToolSpec] | None = None) -> str:
    """The text of string, null or block-list content; blocks are joined by a newline. ``references``: tools whose
    definition a ``tool_reference`` block brings in. Raises 400 naming the block."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected a string, null or an array of parts", where)
    return "\n".join(block_text(block, f"{where}[{index}]", references) for index, block in enumerate(content))


def block_text(block: Any, where: str, references: Mapping[str, ToolSpec] | None = None) -> str:
    """The text of one content block. Media are refused; what is unknown stands in the prompt as its own JSON."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        raise bad_request(f"{where}: expected an object", where)
    kind = block.get("type", "text")
    text = block.get("refusal") if kind == "refusal" else block.get("text")
    if isinstance(text, str):
        return text
    if kind in TEXT_PARTS or kind == "refusal":
        raise bad_request(f"{where}.text: expected a string", f"{where}.text")
    if kind == "document" and isinstance(source := block.get("source"), dict) and source.get("type") == "text":
        return str(source.get("data", ""))
    if kind in _MEDIA:
        raise unsupported(f"{where}.type", f"{kind} content; this model reads text only")
    if kind == "tool_reference" and references and (tool := references.get(str(block.get("tool_name")))) is not None:
        return dump(tool.schema()["function"], where)
    return dump({key: value for key, value in block.items() if key not in _MARKS}, where)


def dump(value: Any, where: str) -> str:
    """Compact JSON. Raises 400 for what is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise bad_request(f"{where}: nested too deeply", where) from None


def digest_tool(tool: ToolSpec) -> Digest:
    """A tool in 16 bytes."""
    text = dump([tool.name, tool.description, tool.parameters], "tools")
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def function_tool(function: Json, schema_key: str, where: str, namespace: str | None = None) -> ToolSpec:
    """A tool from its name, description and schema. Raises 400 naming the field."""
    name, description, schema = function.get("name"), function.get("description"), function.get(schema_key)
    if not isinstance(name, str) or not name:
        raise bad_request(f"{where}.name: expected a string", f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise bad_request(f"{where}.description: expected a string", f"{where}.description")
    if schema is not None and not isinstance(schema, dict):
        raise bad_request(f"{where}.{schema_key}: expected a JSON schema object", f"{where}.{schema_key}")
    return ToolSpec(
        name,
        description or "",
        schema if schema is not None else {"type": "object", "properties": {}},
        function.get("strict") is True,
        namespace=namespace,
    )


def custom_tool(tool: Json, where: str) -> ToolSpec:
    """A tool that takes free text: to the model, a function with the one argument ``input``."""
    schema: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    plain = function_tool({**tool, "parameters": schema, "strict": False}, "parameters", where)
    return ToolSpec(plain.name, plain.description, plain.parameters, custom=True)


def read_choice(choice: Any, tools: Sequence[ToolSpec], where: str = "tool_choice") -> ToolChoice:
    """A ``tool_choice`` of the OpenAI dialects. Raises 400 for a tool that is not in the list."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise bad_request(f"{where}: required, but there are no tools", where)
        return choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        inner = choice.get(kind) if isinstance(kind, str) and isinstance(choice.get(kind), dict) else choice
        if kind == "allowed_tools" and isinstance(inner, dict):
            # The list itself must not change with it, or the prefix would: only the mode is honoured.
            return read_choice(inner.get("mode", "auto"), tools, where)
        name = inner.get("name") if isinstance(inner, dict) else None
        if kind in ("function", "custom") and isinstance(name, str):
            if all(tool.name != name for tool in tools):
                raise bad_request(f"{where}: {name[:64]!r} is not among the tools", where)
            return name
        if kind in ("auto", "none", "required"):
            return read_choice(kind, tools, where)
    raise bad_request(f"{where}: expected auto, none, required or a tool", where)
