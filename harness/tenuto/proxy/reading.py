"""What a request says about itself: client, identity, kind. Pure functions over headers and the parsed body, no state.

Fields and markers are those that the clients were seen to send; every one of them is optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tenuto.answers import dialect_of
from tenuto.headers import HeaderError, Identity, read_identity
from tenuto.proxy.bodies import Reading
from tenuto.proxy.chains import first_text
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

# How a request for a summary begins.
_SUMMARY_OPENING = "CRITICAL: Respond with TEXT ONLY"
_SUMMARY_INSIDE = "CONTEXT CHECKPOINT COMPACTION"
_TURN_METADATA = "x-codex-turn-metadata"
_WINDOW = "x-codex-window-id"
_ID_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Content:
    """What the body tells. ``tools``: names in order; ``continued``: the conversation opens with the summary of an earlier
    one."""

    kind: RequestKind
    model: str | None
    tools: tuple[str, ...]
    system: Any
    continued: bool


def client_of(headers: Mapping[str, str]) -> str | None:
    """The coding agent that sent a request, by what it calls itself; None for anything else."""
    agent = headers.get("user-agent", "")
    found = next((name for name, start in _AGENTS if agent.startswith(start)), None)
    return "openhands" if found is None and headers.get("x-title") == "OpenHands" else found


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


def read_content(reading: Reading, headers: Mapping[str, str], client: str | None, path: str = "") -> Content:
    """What a body tells, in any dialect. Tolerates any shape."""
    form, body, items = reading.form, reading.frame, reading.items
    tools = _tool_names(body.get("tools"))
    model = body.get("model")
    if form == "gemini" and ":" in path:
        model = path.partition(":")[0].rsplit("/", 1)[-1]
    return Content(
        kind=_kind(headers, body, client, items.last, tools),
        model=model[:_ID_CHARS_MAX] if isinstance(model, str) and model else None,
        tools=tools,
        system=body.get({"responses": "instructions", "gemini": "systemInstruction"}.get(form, "system")),
        continued=items.opened is not None,
    )


def _kind(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    client: str | None,
    message: Mapping[str, Any] | None,
    tools: tuple[str, ...],
) -> RequestKind:
    declared = _declared_kind(headers, body)
    last = first_text(message) if message is not None and message.get("role") == "user" else ""
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
