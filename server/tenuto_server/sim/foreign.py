"""Readers of published traces with hashes or counts: kv-cache-tester, Mooncake, TraceLab, Azure. Pure.

What a format does not say is estimated, and how is stated at its reader. All raise ``TraceFileError`` naming file and line.
"""

from __future__ import annotations

import csv
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from tenuto_server.sim.traces import (
    BLOCK_TOKENS,
    PauseClass,
    Request,
    Session,
    Trace,
    TraceFileError,
    json_lines,
    open_text,
    service_s,
    session_of_rows,
    what,
)

MOONCAKE_BLOCK = 512


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix of two lists."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def read_cache_tester(path: Path) -> Trace:
    """One kv-cache-tester session with its per-request block hashes (``hash_ids``, 64 tokens each)."""
    with open_text(path) as file:
        text = file.read()
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TraceFileError(f"{path}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None
    try:
        rows = _reduce(content["requests"])
        session = session_of_rows(str(content.get("id", path.stem)), {**content, "block": BLOCK_TOKENS}, rows)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TraceFileError(f"{path}:1: {what(error)}") from None
    return Trace(path.name, "kv-cache-tester", (session,))


def _reduce(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raw requests as rows of the reduced form: hashes become the length of the prefix shared with the previous request."""
    rows: list[dict[str, Any]] = []
    before: list[int] = []
    for number, raw in enumerate(requests):
        if raw.get("type") == "subagent":
            rows.append({**raw, "sub": _reduce(raw.get("requests", []))})
            continue
        if "in" not in raw:
            raise ValueError(f"request {number}: field 'in' is missing")
        hashes = list(raw.get("hash_ids") or [])
        api = raw.get("api_time")
        rows.append(
            {
                "t": raw["t"],
                "in": raw["in"],
                "out": raw.get("out", 0),
                "lcp": common(before, hashes),
                "think": raw.get("think_time"),
                "api": api,
                "stop": raw.get("stop") or "",
            }
        )
        before = hashes
    return rows


def read_mooncake(path: Path) -> Trace:
    """Mooncake requests (512-token blocks, global ids). There are no sessions: a request continues the request whose whole
    blocks it shares the longest prefix with, if nobody has continued that one yet. All pauses count as ``human``."""
    chains: list[list[tuple[float, int, int, list[int]]]] = []
    ends: dict[int, list[int]] = {}
    for number, row in json_lines(path):
        try:
            at_s, prompt, out = float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"])
            ids = [int(i) for i in row["hash_ids"]]
            if prompt < 1 or not ids:
                raise ValueError(f"a prompt of {prompt} tokens in {len(ids)} blocks")
        except (KeyError, TypeError, ValueError) as error:
            raise TraceFileError(f"{path}:{number}: {what(error)}") from None
        chain = None
        for block in reversed(ids):  # the last block of an earlier prompt that lies deepest in this one
            waiting = ends.get(block)
            if waiting:
                chain = waiting.pop()
                break
        if chain is None:
            chain = len(chains)
            chains.append([])
        chains[chain].append((at_s, prompt, out, ids))
        whole = ids[: prompt // MOONCAKE_BLOCK]
        if whole:
            ends.setdefault(whole[-1], []).append(chain)
    sessions = [_chain(f"m{i}", rows) for i, rows in enumerate(chains)]
    return Trace(path.name, "mooncake", tuple(sessions), tuple(rows[0][0] for rows in chains))


def _chain(name: str, rows: list[tuple[float, int, int, list[int]]]) -> Session:
    requests = []
    for i, (at_s, prompt, out, ids) in enumerate(rows):
        shared = min(prompt, common(rows[i - 1][3], ids) * MOONCAKE_BLOCK) if i else 0
        served = service_s(out)
        pause = max(0.0, rows[i + 1][0] - at_s - served) if i + 1 < len(rows) else None
        requests.append(Request(prompt, out, shared, "human", pause, served))
    return Session(name, tuple(requests))


def read_azure(path: Path) -> Trace:
    """Azure LLM inference 2023 (CSV): arrivals and lengths only, so that every request is a session and nothing is shared."""
    sessions: list[Session] = []
    starts: list[float] = []
    with open_text(path) as file:
        rows = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ())
        if missing:
            raise TraceFileError(f"{path}:1: the columns {', '.join(sorted(missing))} are missing")
        for row in rows:
            try:
                # Seven decimals of a second: one more than a datetime holds.
                starts.append(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp())
                prompt, out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if prompt < 1:
                    raise ValueError(f"a prompt of {prompt} tokens")
            except (TypeError, ValueError) as error:
                raise TraceFileError(f"{path}:{rows.line_num}: {error}") from None
            request = Request(prompt, out, 0, "human", None, service_s(out))
            sessions.append(Session(f"a{len(sessions)}", (request,)))
    first = min(starts, default=0.0)
    return Trace(path.name, "azure", tuple(sessions), tuple(at - first for at in starts))


def read_tracelab(path: Path) -> Trace:
    """TraceLab rounds. Shared tokens are the provider's cached prefix, or, where the provider missed, the previous prompt as
    far as this one is long enough for it. A pause runs from the last output of a round to the first input of the next."""
    rounds: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, row in json_lines(path):
        if "session_id" not in row:
            raise TraceFileError(f"{path}:{number}: field 'session_id' is missing")
        rounds.setdefault(f"{row.get('project', '')}/{row['session_id']}", []).append((number, row))
    sessions, starts = [], []
    for name, found in rounds.items():
        found.sort(key=lambda entry: (int(entry[1].get("round_index", 0)), entry[0]))
        parsed = []
        for number, row in found:
            try:
                parsed.append(_round(row))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise TraceFileError(f"{path}:{number}: {what(error)}") from None
        sessions.append(_tracelab_session(name.strip("/"), parsed))
        starts.append(parsed[0][3])
    first = min(starts, default=0.0)
    return Trace(path.name, "tracelab", tuple(sessions), tuple(at - first for at in starts))


Round = tuple[int, int, int, float, float, bool, str | None]


def _round(row: dict[str, Any]) -> Round:
    """(prompt, cached prefix, output, first input s, last output s, is a tool step, first tool called)."""
    events = row["timing_events"]
    inputs = [_unix(e["timestamp"]) for e in events if e["event_type"] in ("user_message", "tool_result")]
    outputs = [_unix(e["timestamp"]) for e in events if e["event_type"] in ("reasoning", "text", "tool_call")]
    if not inputs and not outputs:
        raise ValueError("a round without timing events")
    begin = max(inputs) if inputs else min(outputs)
    tools = [tool.get("tool_name") for tool in row.get("tools") or ()]
    prompt = int(row["input_tokens_total"])
    if prompt < 1:
        raise ValueError(f"a prompt of {prompt} tokens")
    is_tool = row.get("first_input_event_type") == "tool_result"
    end = max(outputs, default=begin)
    return (
        prompt,
        int(row["prefix_tokens"]),
        int(row["output_tokens"]),
        begin,
        end,
        is_tool,
        tools[0] if tools else None,
    )


def _tracelab_session(name: str, rounds: list[Round]) -> Session:
    requests = []
    for i, (prompt, prefix, out, begin, end, _, tool) in enumerate(rounds):
        before = rounds[i - 1][0] if i else 0
        following = rounds[i + 1] if i + 1 < len(rounds) else None
        pause: PauseClass = "tool" if (following[5] if following else tool is not None) else "human"
        shared = min(prompt, max(prefix, before if prompt >= before else 0)) if i else 0
        pause_s = max(0.0, following[3] - end) if following else None
        requests.append(Request(prompt, out, shared, pause, pause_s, max(0.0, end - begin), tool))
    return Session(name, tuple(requests))


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
