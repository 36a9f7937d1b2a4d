"""Recordings: read back from traces, and the KV they hold over time, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import tenuto
from tenuto.testing import FakeServer
from tenuto_server.bench.demo_record import RecordingPass
from tenuto_server.bench.demo_recording import (
    CompactionStep,
    PauseStep,
    RecordedSession,
    Recording,
    TurnStep,
    load_recording,
    longest_context,
    mean_live_tokens,
)
from tenuto_server.bench.demo_replay import ReplayPass
from tenuto_server.bench.demo_tools import WorkFolder
from tenuto_server.bench.demo_turns import TurnLog
from tenuto_server.bench.workload import (
    AgentPlan,
    CompactStep,
    ForkStep,
    PersonStep,
    SessionPlan,
    ToolStep,
    WorkloadSettings,
)


def turn(end_s: float, prompt: int, output: int = 0) -> TurnStep:
    return TurnStep(0, (), "", {}, prompt, output, end_s)


def test_live_tokens_by_hand() -> None:
    first = RecordedSession(
        "a", 0.0, None, "one", (turn(2.0, 100), PauseStep("tool", 1.0), turn(6.0, 150), CompactionStep("commit")), 10.0
    )
    second = RecordedSession("b", 4.0, None, "two", (turn(5.0, 300, 20),), 8.0)
    new = {("a", 0): 100, ("a", 1): 50, ("b", 0): 200}
    recording = Recording({"a": first, "b": second})
    # a holds 0 until 2 s, 100 until 6 s, then nothing (compacted); b holds 220 from 5 s to 8 s. One of two agents is at
    # work all the time, from 0 to 10 s: (4 * 100 + 3 * 220) / 10.
    assert mean_live_tokens(recording, new) == pytest.approx(106.0)
    assert longest_context(recording) == 320


def test_the_first_session_of_each_agent_comes_with_its_subagents() -> None:
    def session(name: str, start_s: float, parent: str | None, agent: str) -> RecordedSession:
        return RecordedSession(name, start_s, parent, agent, (), start_s + 1.0)

    every = [
        session("a1", 0.0, None, "a"),
        session("b1", 0.5, None, "b"),
        session("a1/x", 0.7, "a1", "x"),
        session("a2", 2.0, None, "a"),
        session("a2/x", 2.5, "a2", "x"),
    ]
    recording = Recording({one.id: one for one in every})
    assert list(recording.first_of_each().sessions) == ["a1", "b1", "a1/x"]


def test_live_tokens_count_only_while_half_of_the_agents_work() -> None:
    sessions = {
        name: RecordedSession(name, start, None, name, (turn(start, 10),), end)
        for name, start, end in (("a", 0.0, 20.0), ("b", 5.0, 10.0), ("c", 6.0, 10.0))
    }
    new = {(name, 0): 10 for name in sessions}
    # Two or three of three agents are at work from 5 s to 10 s: 20 tokens for 1 s, 30 tokens for 4 s.
    assert mean_live_tokens(Recording(sessions), new) == pytest.approx(28.0)


PLANS = [
    AgentPlan(
        "coder-1",
        0.0,
        (
            SessionPlan(
                "agent-1.1",
                "Find the limit.",
                ("tenuto/sse.py", 1),
                (
                    ToolStep("bash", {"command": "python sizes.py"}),
                    ForkStep((("Where?", ToolStep("read_file", {"path": "tenuto/sse.py", "line": 1, "count": 2})),)),
                    CompactStep(),
                    PersonStep(0.05, "Go on."),
                ),
            ),
            SessionPlan("agent-1.2", "Explain it.", ("tenuto/sse.py", 2), ()),
        ),
    ),
    AgentPlan(
        "coder-2",
        0.05,
        (
            SessionPlan(
                "agent-2.1", "Fix it.", ("tenuto/sse.py", 3), (ToolStep("bash", {"command": "grep -rn abc ."}),)
            ),
        ),
    ),
]
SETTINGS = WorkloadSettings(brief_chars=200, answer_tokens=4, between_s=0.1)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def test_what_was_recorded_is_what_is_replayed(tmp_path: Path, server: FakeServer) -> None:
    folder = WorkFolder(tmp_path / "work", 200)
    recorded_log, replay_log = TurnLog(lambda row: None), None

    async def record() -> None:
        with tenuto.Recorder(tmp_path / "trace.jsonl", content=True) as recorder:
            async with tenuto.connect(
                server.url, forecaster=tenuto.PauseForecaster(tmp_path / "history.json"), recorder=recorder
            ) as client:
                await RecordingPass(client, folder, recorded_log, 4).run(PLANS, SETTINGS)

    with server:
        anyio.run(record)
        recording = load_recording(tmp_path / "trace.jsonl")
        requests = [request for request in server.requests if request.path.endswith("/chat/completions")]
        replay_log = TurnLog(lambda row: None, recorded_log.computed())

        async def replay() -> None:
            async with tenuto.connect(server.url, forecaster=tenuto.PauseForecaster()) as client:
                await ReplayPass(client, recording, replay_log).run()

        anyio.run(replay)
        again = [request for request in server.requests if request.path.endswith("/chat/completions")][len(requests) :]

    def prompts(seen: list) -> dict[str, list]:
        found: dict[str, list] = {}
        for request in seen:
            found.setdefault(request.headers["x-session-id"], []).append(request.body["messages"])
        return found

    assert prompts(again) == prompts(requests)
    # Five turns and the summary, two turns of the subagent, one turn, two turns.
    assert sorted(len(found) for found in prompts(requests).values()) == [1, 2, 2, 6]
    assert [s.id for s in recording.agents["coder-1"]] == ["agent-1.1", "agent-1.2"]
    first, second = recording.agents["coder-1"]
    assert 0.1 <= second.start_s - first.end_s < 1.0
    assert all(request.body["ignore_eos"] and request.body["temperature"] == 0 for request in (*requests, *again))
    after = [(row.session.split("/")[0], row.after) for row in recorded_log.rows]
    assert sorted(after) == sorted((row.session.split("/")[0], row.after) for row in replay_log.rows)
    assert {name for _, name in after} == {"start", "tool", "subagent", "summary", "post-compaction", "human"}
    assert all(row.same for row in replay_log.rows)
    pauses = [step for session in recording.sessions.values() for step in session.steps if isinstance(step, PauseStep)]
    assert {"command": "python sizes.py"} in [pause.arguments for pause in pauses]
    assert next(pause for pause in pauses if pause.kind == "subagent").children == ("agent-1.1/explore-1-1",)
    assert next(pause for pause in pauses if pause.kind == "human").duration_s >= 0.05
    sent = set(server.hints.types())
    assert {"agent.session", "agent.fork", "agent.compaction", "agent.end", "agent.join", "agent.pause"} <= sent
