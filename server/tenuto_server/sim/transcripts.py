"""Readers of the transcripts that coding agents keep in a home folder: Claude Code and Codex. Pure.

Only counts, times, stop reasons and tool names are read; no text leaves this module. Raises ``TraceFileError`` naming file
and line for a row that cannot be understood.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tenuto_server.sim.traces import Child, PauseClass, Request, Session, Trace, TraceFileError, json_lines, what


@dataclass(slots=True)
class _Answer:
    """One model answer: when its input came, when it ended, what it read and wrote."""

    begin_s: float
    end_s: float
    prompt: int
    cached: int
    out: int
    tool: str | None
    calls_tool: bool


@dataclass(slots=True)
class _Thread:
    """What one agent of a transcript has been seen to do."""

    answers: dict[str, _Answer] = field(default_factory=dict)
    input_s: float | None = None
    tool: str | None = None
    total: Any = None


def read_transcript(path: Path) -> Trace:
    """One transcript file; a session of its own, with subagents where they are written into it. A file without answers gives
    a trace without sessions. A last line that is still being written is left out."""
    threads: dict[str, _Thread] = {}
    for number, row in json_lines(path, growing=True):
        try:
            side = str(row.get("agentId") or "side") if row.get("isSidechain") else ""
            thread = threads.setdefault(side, _Thread())
            if row.get("type") == "assistant" and isinstance(row.get("message"), dict):
                _claude_answer(row, thread.answers, thread.input_s)
            elif row.get("type") == "user" and "timestamp" in row:
                thread.input_s = _unix(row["timestamp"])
            elif isinstance(row.get("payload"), dict):
                _codex_row(row, thread)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceFileError(f"{path}:{number}: {what(error)}") from None
    lines = {side: sorted(t.answers.values(), key=lambda a: a.begin_s) for side, t in threads.items() if t.answers}
    if not lines:
        return Trace(path.name, "transcript", ())
    main = lines.pop("", [])
    if not main:  # a subagent's own file
        sessions = tuple(
            Session(f"{path.stem}/{side}", _requests(found), 0, "subagent") for side, found in lines.items()
        )
        return Trace(path.name, "transcript", sessions, tuple(found[0].begin_s for found in lines.values()))
    children = tuple(
        Child(
            max(1, sum(answer.begin_s <= found[0].begin_s for answer in main)),
            Session(f"{path.stem}/{side}", _requests(found), 0, "subagent"),
        )
        for side, found in lines.items()
    )
    session = Session(path.stem, _requests(main), children=children)
    return Trace(path.name, "transcript", (session,), (main[0].begin_s,))


def _claude_answer(row: dict[str, Any], answers: dict[str, _Answer], input_s: float | None) -> None:
    """Claude Code writes one line per content block; lines of one answer share the message id and repeat its usage."""
    message, usage = row["message"], row["message"].get("usage")
    if not usage or row.get("isApiErrorMessage"):
        return
    at_s = _unix(row["timestamp"])
    cached = int(usage.get("cache_read_input_tokens") or 0)
    prompt = int(usage.get("input_tokens") or 0) + int(usage.get("cache_creation_input_tokens") or 0) + cached
    if prompt < 1:
        return
    names = [
        part.get("name")
        for part in message.get("content") or ()
        if isinstance(part, dict) and part.get("type") == "tool_use"
    ]
    known = answers.get(str(message["id"]))
    if known is None:
        begin_s = min(at_s, input_s) if input_s is not None else at_s
        known = answers[str(message["id"])] = _Answer(begin_s, at_s, prompt, cached, 0, None, False)
    known.end_s = max(known.end_s, at_s)
    known.out = max(known.out, int(usage.get("output_tokens") or 0))
    known.calls_tool = known.calls_tool or bool(names) or message.get("stop_reason") == "tool_use"
    known.tool = known.tool or (names[0] if names else None)


def _codex_row(row: dict[str, Any], thread: _Thread) -> None:
    """Codex reports usage after each answer (``token_count``), and again when its limits change; tool calls stand before."""
    payload, kind = row["payload"], row["payload"].get("type")
    if kind in ("user_message", "function_call_output", "custom_tool_call_output"):
        thread.input_s = _unix(row["timestamp"])
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        thread.tool = str(payload.get("name") or kind)
    info = (payload.get("info") or {}) if kind == "token_count" else {}
    usage, total = info.get("last_token_usage"), info.get("total_token_usage")
    if not usage or int(usage["input_tokens"]) < 1 or (total is not None and total == thread.total):
        return
    thread.total = total
    end_s, tool = _unix(row["timestamp"]), thread.tool
    begin_s = min(end_s, thread.input_s) if thread.input_s is not None else end_s
    prompt, cached = int(usage["input_tokens"]), int(usage.get("cached_input_tokens") or 0)
    answer = _Answer(begin_s, end_s, prompt, cached, int(usage["output_tokens"]), tool, tool is not None)
    thread.answers[str(len(thread.answers))] = answer
    thread.tool = None


def _requests(answers: list[_Answer]) -> tuple[Request, ...]:
    """What two prompts share is not recorded: a prompt that has not shrunk is taken to continue the one before it."""
    requests = []
    for i, answer in enumerate(answers):
        before = answers[i - 1] if i else None
        following = answers[i + 1] if i + 1 < len(answers) else None
        shared = 0
        if before is not None:
            shared = before.prompt if answer.prompt >= before.prompt else min(answer.cached, before.prompt)
        pause: PauseClass = "tool" if answer.calls_tool else "human"
        pause_s = max(0.0, following.begin_s - answer.end_s) if following is not None else None
        requests.append(
            Request(
                answer.prompt,
                answer.out,
                min(shared, answer.prompt),
                pause,
                pause_s,
                max(0.0, answer.end_s - answer.begin_s),
                answer.tool,
            )
        )
    return tuple(requests)


def _unix(text: str) -> float:
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
