"""Takes out of a request what changes from session to session and means nothing to the model. Bytes in, bytes out; no state.

A hosted service gets every byte as the client sent it, unless the user asks for more. The attribution line is cut out of the
bytes, so that everything else stays as it was; another order of tools has the body written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tenuto.proxy.bodies import Body
from tenuto.proxy.json_text import parse

# The line with which Claude Code begins its system text: its version, hex digits of the first user text, a digest that may
# differ in every request (``cch=``), a mark in subagents. Translators put it at the head of a system message. Inside a JSON
# string its quotes would be escaped, so the patterns can only match structure.
_MARK = b"x-anthropic-billing-header:"
_SYSTEM = rb'((?:"system"|"role"\s*:\s*"(?:system|developer)"\s*,\s*"content")\s*:\s*'
_BLOCK = re.compile(
    _SYSTEM + rb'\[\s*)\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*"x-anthropic-billing-header:[^"\\]*"'
    rb'(?:\s*,\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null))?\s*\}\s*,?\s*'
)
_LINE = re.compile(
    _SYSTEM + rb'(?:\[\s*\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*)?")x-anthropic-billing-header:[^"\\]*(?:\\n)*'
)
_HEAD_BYTES = 64 * 1024
# Breakpoints of a provider's cache mean a place in the list.
_PLACED = ("cache_control", "prompt_cache_breakpoint")

PARTS = frozenset({"attribution", "tools"})


def parts_of(text: str) -> frozenset[str]:
    """``attribution,tools``, ``all`` or ``none`` as a set. Raises ``ValueError`` for anything else."""
    words = {word.strip() for word in text.split(",")}
    named = PARTS if words == {"all"} else frozenset() if words == {"none"} else frozenset(words)
    if not named <= PARTS:
        raise ValueError(f"not attribution, tools, all or none: {text!r}")
    return named


def normalised(form: str, body: Body, parts: frozenset[str]) -> Body:
    """The body in the dialect ``form`` without what ``parts`` names; the same object where nothing has to change."""
    if "attribution" in parts:
        # In other dialects the system text is the first message, in this one it may follow the messages.
        body = strip_attribution(body, None if form == "messages" else _HEAD_BYTES)
    return sort_tools(body) if "tools" in parts else body


def strip_attribution(body: Body, within: int | None = None) -> Body:
    """The body without its attribution line; the same object when there is none, or none in its first bytes."""
    if body.find(_MARK, 0, within) < 0:
        return body
    cut, found = _BLOCK.subn(rb"\1", body, count=1)
    return cut if found else _LINE.sub(rb"\1", body, count=1)


def sort_tools(body: Body) -> Body:
    """The body with its tools in the order of their names, for clients whose order changes from run to run."""
    value = parse(body)
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(tools, list) or any(not isinstance(t, Mapping) or any(p in t for p in _PLACED) for t in tools):
        return body
    ordered = sorted(tools, key=_name)
    if ordered == tools:
        return body
    try:
        text = json.dumps({**value, "tools": ordered}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode()
    except (ValueError, RecursionError):  # a number or a character that JSON cannot say: as it came, then
        return body


def _name(tool: Mapping[str, Any]) -> tuple[str, str]:
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return str(named.get("name") or ""), str(tool.get("type") or "")
