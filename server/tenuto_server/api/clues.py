"""What one request says about itself beside its prompt, in the words of known clients. Holds no state."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tenuto_server.api.conversation import Conversation
from tenuto_server.api.retain import wants_prewarm

Kind = Literal["turn", "side", "compaction", "prewarm"]

SPAWNS = frozenset(
    {"agent", "task", "spawn_agent", "dispatch_agent", "subagent", "delegate", "new_task", "sessions_spawn"}
)
"""Tools, by ``bare_name``, that start a subagent."""
WAITS = frozenset({"wait_agent", "wait_for_agent", "taskoutput", "agentoutput"})
"""Tools that wait for one."""
ASKS = frozenset(
    {"askuserquestion", "exitplanmode", "request_user_input", "ask_followup_question", "ask_user", "question"}
)
"""Tools that a person must answer."""

_SUMMARY_REQUESTS = ("CRITICAL: Respond with TEXT ONLY", "CONTEXT CHECKPOINT COMPACTION")
_SUMMARY_BEGINNINGS = ("This session is being continued", "Another language model started")
# First words of the user agents of coding agents whose every turn has tools, unless their user takes all of them away.
_ALWAYS_TOOLS = ("claude-cli/", "codex", "opencode/", "QwenCode/", "GeminiCLI", "pi/")
# What a call for a title, a topic or a line of summary says first, in any client's words.
_TITLES = re.compile(
    r"\btitle generator\b|\b(?:generat|creat|writ|giv|suggest|extract|detect|summari[sz]|analy[sz])\w*\b[^.\n]{0,80}"
    r"\b(?:titles?|topics?|subject line)\b|\bsummari[sz]e\b[^.\n]{0,80}\b\d+ (?:characters|words)\b",
    re.IGNORECASE,
)
_TITLE_HEAD_CHARS = 300
_TURN_METADATA = "x-codex-turn-metadata"
_WINDOW = "x-codex-window-id"


@dataclass(frozen=True, slots=True)
class Clues:
    """``window``: the number of the context window, which grows with each compaction. ``continues_summary``: the
    conversation begins with a summary of an older one. ``agent``: the name or type of the subagent that speaks. ``opening``:
    nothing was answered yet. ``toolless``: no tools, from a client whose turns have some. ``titles``: no tools, and the words
    of a call for a title."""

    kind: Kind = "turn"
    window: int | None = None
    continues_summary: bool = False
    agent: str | None = None
    opening: bool = False
    toolless: bool = False
    titles: bool = False


def read_clues(headers: Mapping[str, str], raw: Mapping[str, Any], talk: Conversation, prewarm: bool) -> Clues:
    """The clues of a request. ``prewarm``: it asks for no answer."""
    body = raw.get("client_metadata")
    told = {
        **(body if isinstance(body, dict) else {}),
        **{k: headers[k] for k in (_TURN_METADATA, _WINDOW) if k in headers},
    }
    metadata = _object(told.get(_TURN_METADATA))
    users = [message["content"] for message in talk.messages if message["role"] == "user"]
    kind: Kind = "turn"
    if prewarm or wants_prewarm(raw) or metadata.get("request_kind") == "prewarm":
        kind = "prewarm"
    elif metadata.get("request_kind") == "compaction" or (users and _asks_for_summary(users[-1])):
        kind = "compaction"
    return Clues(
        kind,
        _window(told.get(_WINDOW)),
        any(text.lstrip().startswith(_SUMMARY_BEGINNINGS) for text in users),
        _agent(headers, metadata),
        opening=all(message["role"] != "assistant" for message in talk.messages),
        toolless=not talk.tools and headers.get("user-agent", "").startswith(_ALWAYS_TOOLS),
        titles=not talk.tools and bool(talk.messages) and _asks_for_title(talk.messages[0]["content"]),
    )


def bare_name(tool: str) -> str:
    """A tool's name without the namespace that clients put before it, in lower case."""
    return tool.rsplit("__", 1)[-1].rsplit(".", 1)[-1].lower()


def _asks_for_summary(text: str) -> bool:
    head = text[:4096]
    return head.lstrip().startswith(_SUMMARY_REQUESTS[0]) or _SUMMARY_REQUESTS[1] in head


def _asks_for_title(text: str) -> bool:
    return _TITLES.search(text[:_TITLE_HEAD_CHARS]) is not None


def _window(value: Any) -> int | None:
    number = value.rpartition(":")[2] if isinstance(value, str) else ""
    return int(number) if number.isdecimal() and len(number) < 10 else None


def _agent(headers: Mapping[str, str], metadata: Mapping[str, Any]) -> str | None:
    for value in (headers.get("x-openai-subagent"), metadata.get("agent_name"), headers.get("x-claude-code-agent-id")):
        if isinstance(value, str) and value.strip() and value != "/root":
            return value.strip()[:256]
    return None


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}
