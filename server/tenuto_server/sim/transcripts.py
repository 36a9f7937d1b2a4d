"""Readers of the transcripts that coding agents keep in a home folder: Claude Code and Codex. Pure.

Only counts, times, stop reasons and tool names are read; no text leaves this module. Raises ``TraceFileError`` naming file
and line for a row that cannot be understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tenuto_server.sim.traces import PauseClass, Request, Session, Trace, TraceFileError, json_lines, what


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


def read_transcript(path: Path) -> Trace:
    """One transcript file; a session of its own. A file without answers gives a trace without sessions."""
    claude: dict[str, _Answer] = {}
    codex: list[_Answer] = []
    last_input_s: float | None = None
    tool: str | None = None
    for number, row in json_lines(path):
        try:
            if row.get("type") == "assistant" and isinstance(row.get("message"), dict):
                _claude_answer(row, claude, last_input_s)
            elif row.get("type") == "user" and "timestamp" in row:
                last_input_s = _unix(row["timestamp"])
            elif isinstance(row.get("payload"), dict):
                last_input_s, tool = _codex_row(row, codex, last_input_s, tool)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceFileError(f"{path}:{number}: {what(error)}") from None
    answers = sorted(claude.values(), key=lambda answer: answer.begin_s) if claude else codex
    if not answers:
        return Trace(path.name, "transcript", ())
    session = Session(path.stem, _requests(answers))
    return Trace(path.name, "transcript", (session,), (answers[0].begin_s,))


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


def _codex_row(
    row: dict[str, Any], answers: list[_Answer], input_s: float | None, tool: str | None
) -> tuple[float | None, str | None]:
    """Codex reports usage after each answer (``token_count``); its tool calls stand before."""
    payload, kind = row["payload"], row["payload"].get("type")
    if kind in ("user_message", "function_call_output", "custom_tool_call_output"):
        return _unix(row["timestamp"]), tool
    if kind in ("function_call", "custom_tool_call", "local_shell_call"):
        return input_s, str(payload.get("name") or kind)
    usage = (payload.get("info") or {}).get("last_token_usage") if kind == "token_count" else None
    if not usage or int(usage["input_tokens"]) < 1:
        return input_s, tool
    end_s = _unix(row["timestamp"])
    begin_s = min(end_s, input_s) if input_s is not None else end_s
    prompt, cached = int(usage["input_tokens"]), int(usage.get("cached_input_tokens") or 0)
    answers.append(_Answer(begin_s, end_s, prompt, cached, int(usage["output_tokens"]), tool, tool is not None))
    return input_s, None


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
