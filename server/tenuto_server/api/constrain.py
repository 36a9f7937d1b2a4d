"""What grammar an answer must follow, from tools, ``tool_choice`` and response schema. Holds no state.

The grammar is written as a structural tag, the JSON form that xgrammar compiles: constant markup around JSON schemas. It
exists only where the client asked for certainty: a tool is forced, a tool is strict, or the answer must fit a schema.
Everything else stays free. A tool may always be preceded by reasoning, if the model's template knows it.

``Grammars`` is what the runtime offers; this package must not import it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tenuto_server.api.errors import bad_request, unsupported
from tenuto_server.api.toolformat import ToolFormat
from tenuto_server.api.tools import ToolChoice, ToolSpec, must_call, named_tool
from tenuto_server.errors import TenutoServerError

Json = dict[str, Any]

SOURCE_CHARS_MAX = 256 * 1024
DEPTH_MAX = 64
_SPACE_MAX = 8
"""White space between two JSON tokens: a small model can otherwise write nothing else."""

logger = logging.getLogger(__name__)


class Grammars(Protocol):
    """Compiles grammars and holds turns to them. ``compile`` may take a second and raises ``TenutoServerError``."""

    def compile(self, source: str) -> Any: ...

    def open(self, compiled: Any) -> int: ...

    def close(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """``source``: the structural tag. ``parts``: each schema in it as a tag of its own, and the client's name of the field
    it came in, to tell which one is at fault. ``field``: what asked for the constraint."""

    source: str
    parts: tuple[tuple[str, str], ...]
    field: str
    optional: bool = False


def constraint(
    format: ToolFormat,
    tools: Sequence[ToolSpec] = (),
    choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    response_schema: Json | None = None,
    reasoning: bool = False,
    fields: Sequence[str] = (),
    response_field: str = "response_format",
) -> Constraint | None:
    """The constraint of an answer; None if it is free.

    ``reasoning``: the prompt's end opened it. ``fields``: the client's name of each tool's schema (default:
    ``tools[i].function.parameters``). A strict tool that need not be called is held to its schema where the format marks
    calls (``optional``: without the library it is not); a bare Llama call cannot be told from text in advance. Raises 400
    for a schema that is too large or too deep.
    """
    names = [fields[i] if i < len(fields) else f"tools[{i}].function.parameters" for i in range(len(tools))]
    offered = list(zip(tools, names, strict=True)) if choice != "none" else []
    if (only := named_tool(choice)) is not None:
        offered = [(tool, name) for tool, name in offered if tool.name == only]
    strict = any(tool.strict for tool, _ in offered)
    if must_call(choice) and offered:
        several = parallel and only is None  # a named tool is called once
        body, field, optional = _calls(format, [tool for tool, _ in offered], several), "tool_choice", False
        schemas = [(tool.parameters, name) for tool, name in offered]
    elif response_schema is not None:
        answer = _schema(response_schema)
        body = {"type": "or", "elements": [answer, _calls(format, tools, parallel)]} if offered else answer
        schemas = [(response_schema, response_field), *((tool.parameters, name) for tool, name in offered)]
        field, optional = response_field.partition(".")[0], False
    elif strict and not format.bare:
        tag = _tag(format, [(tool, tool.strict) for tool, _ in offered], array=True)
        body = {
            "type": "triggered_tags",
            "triggers": [format.begin[0]],
            "tags": [tag],
            "stop_after_first": not parallel,
        }
        schemas = [(tool.parameters, name) for tool, name in offered if tool.strict]
        field, optional = "tools", True
    else:
        return None
    for schema, name in schemas:
        check_schema(schema, name)
    source = _source(body if optional else _after_reasoning(format, body, reasoning))
    if len(source) > SOURCE_CHARS_MAX:
        raise bad_request(f"{field}: the schemas have {len(source)} characters, the limit is {SOURCE_CHARS_MAX}", field)
    parts = tuple((_source(_schema(schema)), name) for schema, name in schemas)
    return Constraint(source, parts, field, optional)


def compiled(grammars: Grammars | None, wanted: Constraint) -> Any:
    """The compiled grammar; None for an optional one that cannot be had. Call it off the event loop.

    Raises 400 naming the schema that is at fault, or what asked for it where constrained decoding is not installed.
    """
    try:
        if grammars is None:
            raise TenutoServerError("this model is served without constrained decoding")
        return grammars.compile(wanted.source)
    except TenutoServerError as error:
        fault = _fault(grammars, wanted) if grammars is not None else None
        if fault is not None:
            name, reason = fault
            raise bad_request(f"{name}: not a schema that can be followed: {reason}", name, "invalid_schema") from None
        if wanted.optional:
            logger.info("strict tools are not enforced: %s", error)
            return None
        raise unsupported(wanted.field, str(error)) from None


def check_schema(schema: Any, field: str) -> None:
    """Raises 400 for a schema that is no object or nests deeper than ``DEPTH_MAX``: compilers recurse."""
    if not isinstance(schema, dict):
        raise bad_request(f"{field}: expected a JSON schema object", field, "invalid_schema")
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise bad_request(f"{field}: nests deeper than {DEPTH_MAX} levels", field, "invalid_schema")
        inner: list[Any] = []
        for node in level:
            inner += node.values() if isinstance(node, dict) else node
        level = [node for node in inner if isinstance(node, (dict, list))]


def _fault(grammars: Grammars, wanted: Constraint) -> tuple[str, str] | None:
    """The first schema that does not compile by itself, and why."""
    for source, name in wanted.parts:
        try:
            grammars.compile(source)
        except TenutoServerError as error:
            if getattr(error, "missing", False):
                return None
            return name, str(error)
    return None


def _source(body: Json) -> str:
    return json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False)


def _schema(schema: Json, style: str = "json") -> Json:
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": _SPACE_MAX}


def _calls(format: ToolFormat, tools: Sequence[ToolSpec], parallel: bool) -> Json:
    """One call of any of the tools, or several where that is allowed and the format can say it."""
    array = format.name == "mistral"
    separator = {"llama3": "; ", "mistral": ", ", "mistral-v11": ""}.get(format.name, "\n")
    body: Json = {
        "type": "tags_with_separator",
        "tags": [_tag(format, [(tool, True) for tool in tools], array=False)],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _sequence(_text(f"{format.begin[0]} ["), body, _text("]")) if array else body


def _tag(format: ToolFormat, tools: Sequence[tuple[ToolSpec, bool]], *, array: bool) -> Json:
    """A call of one of the tools as the format writes it; those with True are held to their schema, else to any object.

    One tag with a choice inside rather than a tag for each tool: what they have in common is compiled and masked once.
    ``array``: Mistral's brackets are part of the tag.
    """
    style, names = "json", [json.dumps(tool.name, ensure_ascii=False) for tool, _ in tools]
    match format.name:
        case "qwen3-coder":
            begin, end, style = "<tool_call>\n<function=", "\n</function>\n</tool_call>", "qwen_xml"
            heads = [f"{tool.name}>\n" for tool, _ in tools]
        case "mistral-v11":
            begin, end = format.begin[0], ""
            heads = [f"{tool.name}[ARGS]" for tool, _ in tools]
        case "mistral" | "llama3":
            begin, end = (f'{format.begin[0]} [{{"name": ', "}]") if array else ('{"name": ', "}")
            heads = [f'{name}, "{format.arguments}": ' for name in names]
        case _:
            begin, end = f'{format.begin[0]}\n{{"name": ', f"}}\n{format.end}"
            heads = [f'{name}, "{format.arguments}": ' for name in names]
    choices = [
        _sequence(_text(head), _schema(tool.parameters if held else {"type": "object"}, style))
        for head, (tool, held) in zip(heads, tools, strict=True)
    ]
    content = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _after_reasoning(format: ToolFormat, body: Json, reasoning: bool) -> Json:
    """The body behind the reasoning that the prompt began, or that the model may begin itself."""
    if format.think is None:
        return body
    begin, end = format.think
    thought: Json = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": f"{end}\n\n"}
    if reasoning:
        return _sequence({**thought, "begin": ""}, body)
    return _sequence({"type": "optional", "content": thought}, body)


def _text(value: str) -> Json:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": list(elements)}
