"""Hook payloads as clients were seen to send them, read into one vocabulary, and what the proxy makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.client import Client
from tenuto.fake_server import FakeServer, VirtualClock
from tenuto.headers import Identity
from tenuto.proxy.hook_events import HookEvent, read_hook
from tenuto.proxy.hook_sink import HookSink
from tenuto.proxy.node import Node
from tenuto.proxy.tracker import Tracker

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"


def read(folder: str) -> list[HookEvent]:
    if not RECORDINGS.is_dir():
        pytest.skip("needs the recordings beside the repository")
    lines = (RECORDINGS / folder / "hooks.jsonl").read_text().splitlines()
    events = [read_hook(json.loads(line)["stdin"]) for line in lines]
    return [event for event in events if event is not None]


@pytest.mark.parametrize(
    ("folder", "moments"),
    [
        ("claude-code-2.1.197/tool_roundtrip", "session_start prompt tool_start tool_end stop session_end"),
        ("codex-0.171.0/tool_roundtrip", "session_start prompt tool_start tool_end stop session_end"),
        ("qwen-code-0.24.4/tool_roundtrip", "session_start prompt tool_start tool_end stop"),
        ("gemini-cli-0.61.0/tool_roundtrip", "session_start prompt tool_start tool_end stop session_end session_end"),
        (
            "claude-code-2.1.197/subagent_explore_haiku",
            "session_start prompt tool_start subagent_start subagent_stop tool_end stop session_end",
        ),
        # Two summary requests end in a SubagentStop without a type each: no subagent.
        ("claude-code-2.1.332/compact_manual", "session_start compact_start session_start compact_end session_end"),
    ],
)
def test_every_clients_names_for_the_same_moments(folder: str, moments: str) -> None:
    events = read(folder)
    assert [event.moment for event in events] == moments.split()
    assert len({event.session for event in events}) == 1
    tool = next((e for e in events if e.moment == "tool_start"), None)
    if tool is not None and "tool_roundtrip" in folder:
        assert tool.args["command"] == "echo hi"


def test_details_that_differ() -> None:
    (resumed, *_) = read("claude-code-2.1.332/resume_1")
    assert (resumed.source, resumed.gap_s) == ("resume", 2.0)
    stops = [e.waits_for for e in read("claude-code-2.1.332/fork_subagent") if e.moment == "stop"]
    assert stops == ["subagent", "nothing"]
    assert [e.waits_for for e in read("codex-0.171.0/tool_roundtrip") if e.moment == "stop"] == [None]
    stops = [e.waits_for for e in read("qwen-code-0.24.4/subagent_background") if e.moment == "stop"]
    assert stops == ["subagent", "nothing"]
    (call,) = [e.calls for e in read("qwen-code-0.24.4/tool_roundtrip") if e.moment == "tool_start"]
    assert call == ("call_fake000002",)  # the wire's name, not the hook's own


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"hook_event_name": "Stop"},
        {"hook_event_name": 3, "session_id": "s"},
        {"hook_event_name": "Stop", "session_id": ["s"]},
        {"hook_event_name": "PreCompress", "session_id": "s"},
        {"hook_event_name": "Notification", "session_id": "s", "notification_type": "auth_success"},
        {"hook_event_name": "SubagentStop", "session_id": "s", "agent_type": ""},
        {"hook_event_name": "UserPromptSubmit", "session_id": "s", "prompt": ""},
    ],
)
def test_what_says_nothing_of_a_pause(payload: dict[str, Any]) -> None:
    assert read_hook(payload) is None


class Scene:
    """One conversation known to the proxy, a clock, and the hints that reach the server."""

    def __init__(self, fake: FakeServer, clock: VirtualClock) -> None:
        self.fake, self.clock = fake, clock
        self.client = Client(fake.url, api_key="", clock=clock)
        self.tracker = Tracker(lambda key: self.client, one_run=True)
        self.sink = HookSink(self.tracker, keep_s=300.0, one_run=True)
        self.node: Node = self.tracker.make(self.tracker._scope({}, ""), None, Identity("s"), "claude")

    def hook(self, event: str, **payload: Any) -> None:
        self.sink("/hook", json.dumps({"hook_event_name": event, "session_id": "s", **payload}).encode())

    def told(self) -> list[str]:
        self.client.hints.flush(5.0)
        return [
            h.action.TYPE + (f":{h.action.kind}" if h.action.TYPE == "agent.pause" else "")
            for h in self.fake.hints.seen
        ]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENUTO_HISTORY", "off")
    monkeypatch.delenv("TENUTO_DISABLED", raising=False)
    with FakeServer() as fake:
        made = Scene(fake, VirtualClock())
        made.clock.advance(1.0)
        yield made
        made.tracker.close(end=False)
        assert made.tracker.errors == 0


def test_waiting_for_permission_is_no_tool(scene: Scene) -> None:
    scene.node.begin_pause("tool", [("Bash", {"command": "make"})])
    scene.told()
    scene.clock.advance(2.0)
    scene.hook("PermissionRequest", tool_name="Bash")
    assert scene.node.pause is not None
    assert scene.node.pause.kind == "permission"
    scene.clock.advance(60.0)
    scene.hook("PostToolUse", tool_use_id="t1")
    assert scene.told()[-3:] == ["agent.pause:tool", "agent.pause:permission", "agent.resume_soon"]
    before = scene.client.forecaster.predict(scene.node.pause.key).confidence
    scene.node.end_pause()
    assert scene.client.forecaster.predict(scene.node.session.pause("permission").key).confidence > before


def test_a_stop_with_running_tasks_waits_for_them(scene: Scene) -> None:
    running = [{"id": "a1", "type": "subagent", "status": "running"}]
    scene.hook("SubagentStart", agent_id="a1", agent_type="Explore")
    scene.hook("Stop", background_tasks=running)
    assert scene.node.pause is not None
    assert scene.node.pause.kind == "subagent"
    scene.clock.advance(30.0)
    scene.hook("SubagentStop", agent_id="a1", agent_type="Explore", background_tasks=running)
    assert scene.told()[-3:] == ["agent.pause:subagent", "agent.join", "agent.resume_soon"]
    scene.hook("Stop", background_tasks=[{"id": "b", "type": "shell", "status": "running"}])
    assert scene.node.pause.kind == "background"
    scene.hook("Stop", background_tasks=[])
    assert scene.node.pause.kind == "human"


def test_tools_side_by_side_end_with_the_last(scene: Scene) -> None:
    scene.hook("PreToolUse", tool_name="Bash", tool_input={"command": "make"}, tool_use_id="t1")
    scene.hook("PreToolUse", tool_name="Read", tool_input={}, tool_use_id="t2")
    scene.clock.advance(5.0)
    scene.hook("PostToolUse", tool_use_id="t2")
    assert "agent.resume_soon" not in scene.told()
    scene.hook("PostToolUse", tool_use_id="t1")
    assert scene.told()[-1] == "agent.resume_soon"


def test_the_start_of_a_prompt_fetches_ahead(scene: Scene) -> None:
    scene.hook("Stop")
    scene.clock.advance(3600.0)
    scene.hook("UserPromptSubmit", prompt="go on")
    assert scene.told()[-2:] == ["agent.pause:human", "agent.resume_soon"]


def test_a_resume_is_announced_before_its_first_request(scene: Scene) -> None:
    scene.sink(
        "/hook",
        b'{"hook_event_name": "SessionStart", "session_id": "old", "source": "resume", "seconds_since_last_response": 4000}',
    )
    scene.told()
    told = [(h.action.TYPE, h.action.session) for h in scene.fake.hints.seen]
    assert told[-2:] == [("agent.session", "old"), ("agent.resume_soon", "old")]


@pytest.mark.parametrize(("reason", "keep_s"), [("clear", None), ("other", 300.0)])
def test_the_end_of_a_session(scene: Scene, reason: str, keep_s: float | None) -> None:
    scene.hook("SessionEnd", reason=reason)
    scene.hook("SessionEnd", reason=reason)
    assert scene.told()[-1:] == ["agent.end"]
    assert scene.told().count("agent.end") == 1
    assert scene.fake.hints.of_type("agent.end")[0].keep_s == keep_s
    assert not scene.tracker.nodes


def test_compaction_is_told_once_by_hook_and_traffic(scene: Scene) -> None:
    scene.hook("PreCompact", trigger="auto")
    scene.hook("PreCompact", trigger="auto")
    scene.node.compaction_began()
    assert scene.told().count("agent.compaction") == 1


def test_hooks_of_strangers_change_nothing(scene: Scene) -> None:
    scene.sink("/hook", b"\xff")
    scene.sink("/hook", b"[]")
    scene.sink("/hook", json.dumps({"hook_event_name": "Stop", "session_id": "someone else"}).encode())
    assert scene.node.pause is None
