"""Reading traces: the pause recipe by hand, every format, and errors that say where."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tenuto.trace import TraceHeader, TracePause, TraceSession, TraceTurn, write_trace
from tenuto_server.sim.formats import read
from tenuto_server.sim.traces import Request, Trace, TraceFileError

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(t: float, prompt: int, lcp: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "in": prompt, "out": 100, "nb": prompt // 64, "lcp": lcp, "seen": lcp, "think": 4.0, "api": 5.0,
            "i": "R", "stop": "tool_use", "m": "m", **more}  # fmt: skip


def test_pauses_after_unrecorded_answers_come_from_start_times(tmp_path: Path) -> None:
    reqs = [
        row(0, 1000, 0),
        row(9, 2000, 15, api=None, stop="", out=1000),  # its answer: 2.22 + 0.0163 * 1000 = 18.52 s
        row(40, 3000, 31, think=35.0, stop="end_turn", i="T"),  # think counts from the recorded answer: wrong
        row(100, 3200, 46, think=None),
    ]
    trace = read(lines(tmp_path / "a.jsonl", {"id": "s", "block": 64, "reqs": reqs}))
    first, second, third, last = trace.sessions[0].requests
    assert (first.pause, second.pause, third.pause) == ("tool", "tool", "human")
    assert second.pause_s == pytest.approx(40 - 9 - 18.52)
    assert third.pause_s == pytest.approx(100 - 40 - 5.0)
    assert last.pause_s is None
    assert [r.shared for r in trace.sessions[0].requests] == [0, 15 * 64, 31 * 64, 46 * 64]


def test_subagents_hang_at_the_request_that_started_them(tmp_path: Path) -> None:
    sub = {"t": 7, "sub": [row(0, 640, 0), row(3, 700, 10)], "type": "Explore"}
    reqs = [row(0, 1000, 0), sub, row(60, 1100, 15)]
    session = read(lines(tmp_path / "a.jsonl", {"id": "s", "block": 64, "reqs": reqs})).sessions[0]
    assert len(session.requests) == 2
    assert [(child.after, len(child.session.requests), child.session.thread) for child in session.children] == [
        (1, 2, "subagent")
    ]


def test_the_shared_sessions(shared_trace: Trace) -> None:
    """Figures that the trace's own description states."""
    assert len(shared_trace.sessions) == 410
    assert shared_trace.requests == 26_640
    children = [child.session for session in shared_trace.sessions for child in session.children]
    assert (len(children), sum(len(child.requests) for child in children)) == (40, 456)
    pauses = [r for s in shared_trace.sessions for r in s.requests if r.pause_s is not None]
    human = sorted(r.pause_s or 0.0 for r in pauses if r.pause == "human")
    tool = sorted(r.pause_s or 0.0 for r in pauses if r.pause == "tool")
    assert (len(human), len(tool)) == (1_282, 24_948)
    assert human[len(human) // 2] == pytest.approx(182, abs=2)
    assert tool[len(tool) // 2] == pytest.approx(9, abs=1)
    assert tool[int(0.9 * len(tool))] == pytest.approx(81, abs=2)


def test_cache_tester_hashes(tmp_path: Path) -> None:
    requests = [
        {"t": 0, "type": "n", "in": 200, "out": 10, "hash_ids": [1, 2, 3], "stop": "tool_use", "api_time": 2.0, "think_time": 0},
        {"t": 9, "type": "s", "in": 300, "out": 10, "hash_ids": [1, 2, 9, 10], "stop": "end_turn", "api_time": 3.0, "think_time": 7},
    ]  # fmt: skip
    body = {"id": "t1", "hash_id_scope": "local", "tool_tokens": 5, "system_tokens": 6, "requests": requests}
    path = tmp_path / "trace_1.json"
    path.write_text(json.dumps(body, indent=1))
    trace = read(path)
    assert trace.format == "kv-cache-tester"
    assert trace.sessions[0].head == 11
    assert trace.sessions[0].requests == (
        Request(200, 10, 0, "tool", 7.0, 2.0),
        Request(300, 10, 128, "human", None, 3.0),
    )


def test_mooncake_chains_by_shared_blocks(tmp_path: Path) -> None:
    def entry(ms: int, tokens: int, ids: list[int]) -> dict[str, Any]:
        return {"timestamp": ms, "input_length": tokens, "output_length": 100, "hash_ids": ids}

    path = lines(
        tmp_path / "m.jsonl",
        entry(0, 1100, [1, 2, 3]),
        entry(1000, 1024, [50, 51]),
        entry(60_000, 1700, [1, 2, 60, 61]),
        entry(90_000, 1024, [70, 71]),
    )
    trace = read(path)
    assert [len(session.requests) for session in trace.sessions] == [2, 1, 1]
    assert trace.sessions[0].requests[1].shared == 2 * 512
    assert trace.sessions[0].requests[0].pause_s == pytest.approx(60 - 2.22 - 1.63)
    assert trace.starts_s == (0.0, 1.0, 90.0)


def test_azure_requests_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,110,27\n"
    )
    trace = read(path)
    assert [s.requests[0].prompt for s in trace.sessions] == [4808, 110]
    assert trace.starts_s == pytest.approx((0.0, 1.0))


def test_tracelab_rounds() -> None:
    path = SHARED / "tracelab_round_trace.jsonl"
    if not path.exists():
        pytest.skip("the TraceLab example is not beside this checkout (../shared/traces)")
    trace = read(path)
    assert sorted(len(session.requests) for session in trace.sessions) == [9, 10]
    first = next(s for s in trace.sessions if len(s.requests) == 10).requests[0]
    assert (first.prompt, first.out, first.tool) == (32_272, 931, "Bash")


def test_lmcache_prompts_grow_from_one_another() -> None:
    found = sorted(SHARED.glob("miniswe_*.jsonl.gz"))
    if not found:
        pytest.skip("the mini-SWE traces are not beside this checkout (../shared/traces)")
    trace = read(found[0])
    requests = trace.sessions[0].requests
    assert len(requests) > 1
    # Each input is a prefix of the next in every session of this corpus.
    assert all(b.shared == a.prompt for a, b in pairwise(requests))


def test_our_own_recordings(tmp_path: Path) -> None:
    events = [
        TraceSession(0.0, "a"),
        TraceTurn(0.0, "a", 1000, 50, 2.0, tools=("Bash",)),
        TracePause(2.0, "a", "permission", 8.0, tool="Bash"),
        TraceSession(4.0, "b", parent="a"),
        TraceTurn(4.0, "b", 300, 10, 1.0, stop="stop"),
        TraceTurn(10.0, "a", 1200, 50, 2.0, kept_tokens=1050, stop="stop"),
    ]
    write_trace(tmp_path / "r.jsonl.gz", TraceHeader(), events)
    trace = read(tmp_path / "r.jsonl.gz")
    assert trace.format == "tenuto"
    (session,) = trace.sessions
    assert session.requests == (
        Request(1000, 50, 0, "permission", 8.0, 2.0, "Bash"),
        Request(1200, 50, 1000, "human", None, 2.0),
    )
    assert [(c.after, c.session.id) for c in session.children] == [(1, "b")]


def claude(second: int, message: str, part: dict[str, Any], cached: int, new: int, out: int) -> dict[str, Any]:
    usage = {
        "input_tokens": 2,
        "cache_creation_input_tokens": new,
        "cache_read_input_tokens": cached,
        "output_tokens": out,
    }
    return {"type": "assistant", "sessionId": "s", "timestamp": f"2026-01-01T00:00:{second:02d}.000Z",
            "message": {"id": message, "content": [part], "usage": usage}}  # fmt: skip


def user(second: int) -> dict[str, Any]:
    return {
        "type": "user",
        "sessionId": "s",
        "timestamp": f"2026-01-01T00:00:{second:02d}.000Z",
        "message": {"content": "x"},
    }


def test_claude_code_transcripts_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "projects" / "p"
    folder.mkdir(parents=True)
    lines(
        folder / "s.jsonl",
        {"type": "summary", "summary": "private"},
        user(1),
        claude(3, "m1", {"type": "text"}, 0, 998, 7),
        claude(4, "m1", {"type": "tool_use", "name": "Bash"}, 0, 998, 60),
        user(10),
        claude(15, "m2", {"type": "text"}, 1000, 198, 20),
        user(50),
        claude(55, "m3", {"type": "text"}, 1200, 98, 20),
    )
    lines(folder / "empty.jsonl", {"type": "summary", "summary": "nothing happened"})
    (session,) = read(tmp_path / "projects").sessions
    assert session.requests == (
        Request(1000, 60, 0, "tool", 6.0, 3.0, "Bash"),
        Request(1200, 20, 1000, "human", 35.0, 5.0),
        Request(1300, 20, 1200, "human", None, 5.0),
    )


def test_a_home_folder_as_it_is(tmp_path: Path) -> None:
    """Subagents in the file and in files of their own, an index beside them, and a line that is being written."""

    def side(row: dict[str, Any], agent: str) -> dict[str, Any]:
        return {**row, "isSidechain": True, "agentId": agent}

    folder = tmp_path / "p"
    (folder / "s" / "subagents").mkdir(parents=True)
    path = lines(
        folder / "s.jsonl",
        {"type": "file-history-snapshot", "messageId": "x", "snapshot": {}},
        user(1),
        claude(3, "m1", {"type": "tool_use", "name": "Task"}, 0, 998, 60),
        side(user(4), "a1"),
        side(claude(6, "n1", {"type": "tool_use", "name": "Read"}, 0, 298, 10), "a1"),
        side(user(7), "a1"),
        side(claude(9, "n2", {"type": "text"}, 300, 98, 10), "a1"),
        user(10),
        claude(15, "m2", {"type": "text"}, 1000, 198, 20),
    )
    path.write_text(path.read_text() + '{"type": "assistant", "sess')
    lines(
        folder / "s" / "subagents" / "agent-b.jsonl",
        side(user(20), "b"),
        side(claude(22, "k", {"type": "text"}, 0, 48, 5), "b"),
    )
    (folder / "sessions-index.json").write_text(json.dumps({"version": 1, "entries": []}, indent=1))
    lines(folder / "history.jsonl", {"display": "private", "project": "p"})
    own, main = sorted(read(folder).sessions, key=lambda s: s.thread == "main")
    assert main.requests == (
        Request(1000, 60, 0, "tool", 7.0, 2.0, "Task"),
        Request(1200, 20, 1000, "human", None, 5.0),
    )
    ((child),) = main.children
    assert (child.after, child.session.thread) == (1, "subagent")
    assert child.session.requests == (
        Request(300, 10, 0, "tool", 1.0, 2.0, "Read"),
        Request(400, 10, 300, "human", None, 2.0),
    )
    assert own.thread == "subagent"
    assert own.requests == (Request(50, 5, 0, "human", None, 2.0),)
    lines(folder / "damaged.jsonl", user(1), "{broken", user(2))
    with pytest.raises(TraceFileError, match=r"damaged\.jsonl:2: not JSON"):
        read(folder)


def test_codex_transcripts(tmp_path: Path) -> None:
    def event(second: int, **payload: Any) -> dict[str, Any]:
        return {"timestamp": f"2026-01-01T00:00:{second:02d}.000Z", "type": "event_msg", "payload": payload}

    def usage(second: int, prompt: int, cached: int) -> dict[str, Any]:
        last = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": 9}
        info = {"last_token_usage": last, "total_token_usage": {"total_tokens": 10 * prompt}}
        return event(second, type="token_count", info=info)

    path = lines(
        tmp_path / "rollout.jsonl",
        {"timestamp": "2026-01-01T00:00:00.000Z", "type": "session_meta", "payload": {"id": "x"}},
        event(1, type="user_message"),
        event(4, type="function_call", name="exec_command"),
        event(4, type="token_count", info=None),
        usage(5, 800, 0),
        usage(6, 800, 0),  # the same again: only the limits have changed
        event(9, type="function_call_output"),
        usage(12, 900, 800),
    )
    (session,) = read(path).sessions
    assert session.requests == (
        Request(800, 9, 0, "tool", 4.0, 4.0, "exec_command"),
        Request(900, 9, 800, "human", None, 3.0),
    )


GOOD = {"id": "s", "block": 64, "reqs": [row(0, 1000, 0)]}


@pytest.mark.parametrize(("name", "write", "where", "what"), [
    ("a.jsonl", lambda p: lines(p, GOOD, "{broken"), "a.jsonl:2", "not JSON"),
    ("b.jsonl", lambda p: lines(p, GOOD, {"id": "t", "reqs": [{"t": 0, "out": 1}]}), "b.jsonl:2", "'in' is missing"),
    ("c.jsonl", lambda p: lines(p, GOOD, {"id": "t", "reqs": []}), "c.jsonl:2", "without requests"),
    ("d.jsonl", lambda p: lines(p, {"some": "thing"}), "d.jsonl:1", "no known trace format"),
    ("e.jsonl", lambda p: lines(p, "hello"), "e.jsonl:1", "neither JSON"),
    ("f.csv", lambda p: lines(p, "A,B", "1,2"), "f.csv:1", "TIMESTAMP"),
    ("g.csv", lambda p: lines(p, "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9,x,1"), "g.csv:2", "x"),
    ("h.jsonl", lambda p: lines(p, {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]},
                                {"timestamp": 5, "input_length": 600, "hash_ids": [1, 2]}), "h.jsonl:2", "output_length"),
    ("i.jsonl", lambda p: lines(p, {"timestamp": 1, "input": "a", "output": "b", "session_id": "s"},
                                {"timestamp": "x", "input": "a", "output": "b", "session_id": "s"}), "i.jsonl:2", "x"),
    ("j.json", lambda p: lines(p, "{", '"requests": [,', "}"), "j.json:2", "not JSON"),
    ("k.jsonl.gz", lambda p: p.write_bytes(b"not a gzip file"), "k.jsonl.gz:1", "cannot be read"),
    ("l.jsonl", lambda p: lines(p, {"type": "summary"}, {"type": "assistant", "sessionId": "s", "message": {
        "id": "m", "usage": {"input_tokens": 5}}}), "l.jsonl:2", "'timestamp' is missing"),
])  # fmt: skip
def test_errors_name_file_and_line(
    tmp_path: Path, name: str, write: Callable[[Path], object], where: str, what: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(TraceFileError) as caught:
        read(tmp_path / name)
    assert where in str(caught.value)
    assert what in str(caught.value)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(TraceFileError, match="no session"):
        read(tmp_path)
