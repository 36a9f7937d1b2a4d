"""What hook payloads of coding agents say, as one vocabulary. Pure functions and values, no state.

Claude Code, Codex and Qwen Code use nearly the same names and keys; Gemini CLI has other names for the same moments,
OpenHands other keys. Payloads hold prompts and paths: only what is named in ``HookEvent`` is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Moment = Literal[
    "session_start",
    "prompt",
    "tool_start",
    "tool_end",
    "permission",
    "stop",
    "subagent_start",
    "subagent_stop",
    "compact_start",
    "compact_end",
    "session_end",
]

WaitsFor = Literal["subagent", "background", "nothing"]

_MOMENTS: dict[str, Moment] = {
    "SessionStart": "session_start",
    "UserPromptSubmit": "prompt",
    "BeforeAgent": "prompt",
    "PreToolUse": "tool_start",
    "BeforeTool": "tool_start",
    "PostToolUse": "tool_end",
    "PostToolUseFailure": "tool_end",
    "PostToolBatch": "tool_end",
    "AfterTool": "tool_end",
    "PermissionRequest": "permission",
    "Notification": "permission",
    "Stop": "stop",
    "AfterAgent": "stop",
    "SubagentStart": "subagent_start",
    "SubagentStop": "subagent_stop",
    "PreCompact": "compact_start",
    "PostCompact": "compact_end",
    "SessionEnd": "session_end",
}
# Gemini CLI's PreCompress is missing on purpose: it fires at every start, whether or not anything is compressed.
_RUNNING = frozenset({"running", "in_progress", "pending"})


@dataclass(frozen=True, slots=True)
class HookEvent:
    """One moment. ``session``, ``agent``: the client's ids; ``calls``: ids of the tool calls concerned.

    ``waits_for``: at a stop, what still runs: subagent, background, or nothing; None where the client does not say. ``gap_s``: at a resume, seconds
    since the session's last answer, where the client says so.
    """

    moment: Moment
    session: str
    agent: str | None = None
    agent_type: str | None = None
    tool: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    source: str | None = None
    waits_for: WaitsFor | None = None
    gap_s: float | None = None


def read_hook(payload: Mapping[str, Any]) -> HookEvent | None:
    """The event of a payload; None for one that says nothing about a pause, or is not understood."""
    name = payload.get("hook_event_name") or payload.get("event_type")
    moment = _MOMENTS.get(name) if isinstance(name, str) else None
    session = payload.get("session_id")
    if moment is None or not isinstance(session, str) or not session:
        return None
    if name == "Notification" and payload.get("notification_type") != "permission_prompt":
        return None
    if moment == "prompt" and payload.get("prompt") == "":
        return None  # Qwen Code repeats the event, without a prompt, for each continuation after a tool
    if moment == "subagent_stop" and payload.get("agent_type") == "":
        return None  # Claude Code's compaction worker, which is no subagent
    args = payload.get("tool_input")
    gap = payload.get("seconds_since_last_response")
    return HookEvent(
        moment=moment,
        session=session,
        agent=_text(payload, "agent_id"),
        agent_type=_text(payload, "agent_type"),
        tool=_text(payload, "tool_name"),
        args=args if isinstance(args, Mapping) else {},
        calls=_calls(payload),
        source=_text(payload, "source") or _text(payload, "reason"),
        waits_for=_waits_for(payload) if moment == "stop" else None,
        gap_s=float(gap) if isinstance(gap, (int, float)) and gap >= 0 else None,
    )


def _text(payload: Mapping[str, Any], name: str) -> str | None:
    value = payload.get(name)
    return value if isinstance(value, str) and value else None


def _calls(payload: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids as they are on the wire: Qwen Code's ``tool_use_id`` is not, its ``tool_call_id`` is."""
    batch = payload.get("tool_calls")
    entries = [payload, *(batch if isinstance(batch, list) else ())]
    found = [_text(e, "tool_call_id") or _text(e, "tool_use_id") for e in entries if isinstance(e, Mapping)]
    return tuple(id for id in found if id)


def _waits_for(payload: Mapping[str, Any]) -> WaitsFor | None:
    tasks = payload.get("background_tasks")
    if not isinstance(tasks, list):
        return None
    kinds = [
        str(task.get("type") or ("subagent" if task.get("agent_type") else "background"))
        for task in tasks
        if isinstance(task, Mapping) and task.get("status") in _RUNNING
    ]
    if not kinds:
        return "nothing"
    return "subagent" if any("agent" in kind for kind in kinds) else "background"
