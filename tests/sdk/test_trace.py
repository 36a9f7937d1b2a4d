"""Traces: round trips, broken files, and what the recorder writes of a live session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenuto
from tenuto.fake_server import FakeServer, VirtualClock
from tenuto.recorder import Recorder
from tenuto.trace import (
    EVENTS,
    TraceCompaction,
    TraceEnd,
    TraceHeader,
    TraceModelSwitch,
    TracePause,
    TraceSession,
    TraceTurn,
    dump_event,
    dump_header,
    parse_event,
    parse_header,
    read_trace,
    write_trace,
)

times = st.floats(0, 1e6, allow_nan=False)
names = st.text(min_size=1, max_size=8)
counts = st.integers(0, 1 << 40)
events = st.one_of(
    st.builds(TraceSession, times, names, st.none() | names, attended=st.booleans(), shared_tokens=st.none() | counts),
    st.builds(
        TraceTurn,
        times,
        names,
        counts,
        counts,
        times,
        kept_tokens=st.none() | counts,
        tools=st.lists(names).map(tuple),
        cached=st.dictionaries(names, counts, max_size=3),
        append=st.none() | st.just([{"role": "user", "content": "\u2028 text"}]),
    ),
    st.builds(TracePause, times, names, names, times, tool=st.none() | names, returned=st.booleans()),
    st.builds(TraceCompaction, times, names, st.sampled_from(["begin", "commit", "abort"])),
    st.builds(TraceModelSwitch, times, names, names, st.none() | times),
    st.builds(TraceEnd, times, names, st.none() | times, st.booleans()),
)


@given(events)
def test_events_survive_the_round_trip(event: Any) -> None:
    line = dump_event(event)
    assert "\n" not in line
    assert parse_event(line) == event


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_files_survive_the_round_trip(tmp_path: Path, name: str) -> None:
    header = TraceHeader(started_unix_s=1.5, model="m", notes="n")
    made = [TraceEnd(9.0, "s"), TraceSession(0.0, "s"), TracePause(2.0, "s", "tool", 3.0)]
    write_trace(tmp_path / name, header, made)
    assert read_trace(tmp_path / name) == (header, sorted(made, key=lambda e: e.t_s))


def test_every_event_type_is_documented() -> None:
    for cls in EVENTS.values():
        assert cls.__doc__
        assert cls.EVENT


def test_newer_writers_stay_readable(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"tenuto_trace": 1, "machine": "x"}\n'
        '{"event": "weather", "t_s": 1}\n\n'
        '{"event": "end", "t_s": 2, "session": "s", "mood": "fine"}\n'
    )
    assert read_trace(path)[1] == [TraceEnd(2, "s")]


def test_line_cut_off_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    whole = dump_header(TraceHeader()) + "\n" + dump_event(TraceEnd(1.0, "s")) + "\n"
    path.write_text(whole + '{"event": "end", "t_')
    assert read_trace(path)[1] == [TraceEnd(1.0, "s")]
    path.write_text(whole + '{"event": "end", "t_\n' + dump_event(TraceEnd(2.0, "s")) + "\n")
    with pytest.raises(tenuto.TraceError, match="line 3: not JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"event": "end", "t_s": 1}', "field 'session' is missing"),
        ('{"event": "end", "t_s": "x", "session": "s"}', "field 't_s' has the wrong type"),
        ('{"event": "end", "t_s": true, "session": "s"}', "field 't_s' has the wrong type"),
        ('{"event": "end", "t_s": 1, "session": null}', "field 'session' has the wrong type"),
        ('{"event": "end", "t_s": 1, "session": "s", "joined": 1}', "field 'joined' has the wrong type"),
    ],
)
def test_broken_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(tenuto.TraceError, match=f"line 4: .*{message}"):
        parse_event(line, 4)


@pytest.mark.parametrize("line", ["", "{}", '{"tenuto_trace": 2}', "nonsense"])
def test_what_is_no_trace(line: str) -> None:
    with pytest.raises(tenuto.TraceError, match="line 1"):
        parse_header(line)


def record(twin: Any, server: FakeServer, path: Path, content: bool) -> list[Any]:
    clock = VirtualClock()
    server.reply("", ("bash", {"command": "make"}))

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("s", model="m", agent="a")) as s:
            messages = [tenuto.system("sys"), tenuto.user("go")]
            turn = await twin.wait(s.chat(messages, temperature=0.0))
            async with twin.enter(s.pause("tool", turn.tool_calls[0])) as gap:
                clock.advance(7.0)
                gap.record_output("built")
            more = [*s.history, tenuto.tool_result(turn.tool_calls[0], "built")]
            await twin.wait(s.chat(more))
            async with twin.enter(s.fork("child")) as child:
                await twin.wait(child.chat([*child.history, tenuto.user("look")]))
            async with twin.enter(s.compaction(expect_tokens=9)) as compaction:
                compaction.commit(messages)
            s.model_switch("n", back_in_s=1.0)
            s.pause("human").start()
            clock.advance(5.0)

    with Recorder(path, content=content, clock=clock) as recorder:
        twin.run(scenario, server.url, recorder=recorder, clock=clock)
        assert recorder.lost == 0
    return read_trace(path)[1]


def test_recorder_writes_what_happened(twin: Any, server: FakeServer, tmp_path: Path) -> None:
    events = record(twin, server, tmp_path / "t.jsonl", content=False)
    by_type = {cls: [e for e in events if isinstance(e, cls)] for cls in EVENTS.values()}
    root, child = by_type[TraceSession]
    assert (root.session, root.agent, root.fork) == ("s", "a", False)
    assert (child.parent, child.fork, child.shared_messages) == ("s", True, 4)
    one, two, three = by_type[TraceTurn]
    assert (one.keep_messages, one.kept_tokens, one.tools, one.stop) == (0, 0, ("bash",), "tool_calls")
    assert (two.keep_messages, two.kept_tokens) == (3, one.prompt_tokens + one.output_tokens)
    assert two.t_s == pytest.approx(7.0)
    assert three.session == child.session
    tool, human = by_type[TracePause]
    assert (tool.kind, tool.tool, tool.program, tool.duration_s, tool.returned) == ("tool", "bash", "make", 7.0, True)
    assert (human.kind, human.duration_s, human.returned) == ("human", 5.0, False)
    assert [c.phase for c in by_type[TraceCompaction]] == ["begin", "commit"]
    assert by_type[TraceModelSwitch][0].model == "n"
    assert [(e.session, e.joined) for e in by_type[TraceEnd]] == [(child.session, True), ("s", False)]
    text = (tmp_path / "t.jsonl").read_text()
    assert "built" not in text  # neither prompts nor outputs without being asked
    assert "sys" not in text


def test_recorder_with_content_can_rebuild_every_prompt(twin: Any, server: FakeServer, tmp_path: Path) -> None:
    events = record(twin, server, tmp_path / "t.jsonl", content=True)
    history: dict[str, list[Any]] = {}
    prompts = []
    for turn in (e for e in events if isinstance(e, TraceTurn)):
        before = history.get(turn.session, [])
        prompts.append([*before[: turn.keep_messages], *(turn.append or [])])
        history[turn.session] = [*prompts[-1], turn.answer]
    assert prompts == [r.body["messages"] for r in server.chats]
    assert [e.output for e in events if isinstance(e, TracePause)] == ["built", None]
    assert next(e for e in events if isinstance(e, TraceTurn)).request == {"temperature": 0.0}


def test_recorder_that_cannot_write_counts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl")
    recorder.close()
    recorder.session("s")
    recorder.end("s", None, False)
    assert recorder.lost == 2
    with pytest.raises(OSError, match="missing"):
        Recorder(tmp_path / "missing" / "t.jsonl")
