"""What a request says about itself: client, identity, kind. Pure functions over headers and the parsed body, no state.

Fields and markers are those that the clients were seen to send; every one of them is optional.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tenuto.answers import dialect_of
from tenuto.headers import HeaderError, Identity, read_identity
from tenuto.proxy.json_text import parse

RequestKind = Literal["turn", "side", "compaction", "prewarm"]

# First words of user agents. The clients of the second line send tools with every real turn.
_AGENTS = (
    ("claude", "claude-cli/"),
    ("codex", "codex"),
    ("opencode", "opencode/"),
    ("qwen", "QwenCode/"),
    ("gemini", "GeminiCLI"),
    ("pi", "pi/"),
)
ALWAYS_TOOLS = frozenset({"claude", "codex", "opencode", "qwen", "gemini", "pi"})

# How a request for a summary, and the first request after it, begin.
_SUMMARY_OPENING = "CRITICAL: Respond with TEXT ONLY"
_SUMMARY_INSIDE = "CONTEXT CHECKPOINT COMPACTION"
_CONTINUED = ("This session is being continued", "Another language model started")
_TURN_METADATA = "x-codex-turn-metadata"
_WINDOW = "x-codex-window-id"
_DECODED_BYTES_MAX = 32 << 20
_ID_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Content:
    """What the body tells. ``messages``: items of the conversation; ``tools``: names in order, None without a list.

    ``continued``: the conversation opens with the summary of an earlier one.
    """

    kind: RequestKind
    model: str | None
    tools: tuple[str, ...]
    messages: Sequence[Mapping[str, Any]]
    system: Any
    continued: bool


def client_of(headers: Mapping[str, str]) -> str | None:
    """The coding agent that sent a request, by its user agent; None for anything else."""
    agent = headers.get("user-agent", "")
    return next((name for name, start in _AGENTS if agent.startswith(start)), None)


def dialect(path: str) -> str | None:
    """chat, messages, responses or gemini by the path; None for anything that is no generation."""
    clean = path.partition("?")[0]
    if clean.endswith((":generateContent", ":streamGenerateContent")):
        return "gemini"
    return dialect_of(path)


def identity_of_headers(headers: Mapping[str, str]) -> Identity:
    """The session that the headers name; an id that is too long names none."""
    try:
        return read_identity(headers)
    except HeaderError:
        return Identity()


def identity_of_body(body: Mapping[str, Any]) -> Identity:
    """The session that the body names where the headers name none."""
    metadata = body.get("client_metadata")
    if isinstance(metadata, Mapping):
        names = {str(k).replace("_", "-"): v for k, v in metadata.items() if isinstance(v, str)}
        found = identity_of_headers(names)
        if found.session is not None:
            return found
    user = body.get("metadata")
    user = user.get("user_id") if isinstance(user, Mapping) else None
    if isinstance(user, str) and user.startswith("{"):
        parsed = parse(user.encode())
        user = parsed.get("session_id") if isinstance(parsed, Mapping) else None
        if isinstance(user, str) and 0 < len(user) <= _ID_CHARS_MAX:
            return Identity(user)
    for name in ("session_id", "prompt_cache_key"):
        value = body.get(name)
        if isinstance(value, str) and 0 < len(value) <= _ID_CHARS_MAX:
            return Identity(value)
    return Identity()


def window_of(headers: Mapping[str, str]) -> str | None:
    """The client's own number of its context window: another one after each compaction (Codex)."""
    return headers.get(_WINDOW) or None


def parse_body(data: bytes, coding: str = "") -> Mapping[str, Any] | None:
    """The JSON object of a body; None when it is none, or coded in a way that cannot be read here."""
    if coding in ("gzip", "deflate"):
        try:
            inflater = zlib.decompressobj(47)
            data = inflater.decompress(data, _DECODED_BYTES_MAX)
        except zlib.error:
            return None
    elif coding not in ("", "identity"):
        return None
    body = parse(data)
    return body if isinstance(body, dict) else None


def read_content(
    form: str, headers: Mapping[str, str], body: Mapping[str, Any], client: str | None, path: str = ""
) -> Content:
    """Reads a body of the dialect ``form``. Tolerates any shape."""
    items = body.get({"responses": "input", "gemini": "contents"}.get(form, "messages"))
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
    system = body.get({"responses": "instructions", "gemini": "systemInstruction"}.get(form, "system"))
    tools = _tool_names(body.get("tools"))
    model = body.get("model")
    if form == "gemini" and ":" in path:
        model = path.partition(":")[0].rsplit("/", 1)[-1]
    return Content(
        kind=_kind(headers, body, client, messages, tools),
        model=model[:_ID_CHARS_MAX] if isinstance(model, str) and model else None,
        tools=tools,
        messages=messages,
        system=system,
        continued=any(_text(m).lstrip().startswith(_CONTINUED) for m in messages if m.get("role") == "user"),
    )


def _kind(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    client: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: tuple[str, ...],
) -> RequestKind:
    declared = _declared_kind(headers, body)
    last = _text(messages[-1]) if messages and messages[-1].get("role") == "user" else ""
    if declared == "compaction" or last.startswith(_SUMMARY_OPENING) or _SUMMARY_INSIDE in last:
        return "compaction"
    options = body.get("prompt_cache_options")
    prewarms = isinstance(options, Mapping) and options.get("prewarm") is True
    if declared == "prewarm" or body.get("generate") is False or body.get("max_tokens") == 0 or prewarms:
        return "prewarm"
    return "side" if not tools and client in ALWAYS_TOOLS else "turn"


def _declared_kind(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    text = headers.get(_TURN_METADATA)
    metadata = body.get("client_metadata")
    if text is None and isinstance(metadata, Mapping):
        text = metadata.get(_TURN_METADATA)
    parsed = parse(text.encode()) if isinstance(text, str) else None
    kind = parsed.get("request_kind") if isinstance(parsed, Mapping) else None
    return kind if isinstance(kind, str) else None


def _tool_names(tools: Any) -> tuple[str, ...]:
    names: list[str] = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, Mapping):
            continue
        declared = tool.get("functionDeclarations")
        inner = declared if isinstance(declared, list) else [tool.get("function") or tool]
        names += [str(t.get("name") or tool.get("type") or "") for t in inner if isinstance(t, Mapping)]
    return tuple(names)


def _text(message: Mapping[str, Any]) -> str:
    """The first text of a message, in any dialect."""
    content = message.get("content", message.get("parts"))
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else ():
        text = block.get("text") if isinstance(block, Mapping) else None
        if isinstance(text, str):
            return text
    return ""
