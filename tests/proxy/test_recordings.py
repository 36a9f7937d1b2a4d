"""What the proxy infers from recorded traffic of real clients: tree, pauses, compaction, forks, side calls.

The answers are scripted as they were in the recording: a tool call where the client's next request holds its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tenuto.fake_server import FakeServer

from .conftest import RECORDINGS, RunningProxy, eventually, headers_of, recorded, recorded_hooks

Make = Callable[..., RunningProxy]
BASH = ("Bash", {"command": "echo hi"})
SHELL = ("exec_command", {"cmd": "echo hi"})
AGENT = ("Agent", {"description": "leaf", "subagent_type": "general-purpose"})
FORK = ("Agent", {"description": "leaf", "subagent_type": "fork"})
ECHO = ("bash", {"command": "echo hi"})

# Folder: the tool calls that answer each request, None for text.
SCENARIOS: dict[str, list[tuple[str, dict[str, str]] | None]] = {
    "claude-code-2.1.332/tool_roundtrip": [BASH, None],
    "claude-code-2.1.332/subagent": [AGENT, None, None, None],
    "claude-code-2.1.332/fork_subagent": [FORK, None, None, None],
    "claude-code-2.1.332/fork_subagent_no_attribution": [FORK, None, None, None],
    "claude-code-2.1.332/local_model_name_subagent": [AGENT, None, None, None],
    "claude-code-2.1.197/tool_roundtrip": [None, BASH, None],
    "claude-code-2.1.197/subagent_explore_haiku": [None, AGENT, None, None],
    "claude-code-2.1.197/unknown_model_no_attribution": [None, None],
    "codex-0.171.0/tool_roundtrip": [SHELL, None],
    "codex-0.171.0/subagent_multi_agent_v2": [("spawn_agent", {"task_name": "leaf_task"}), None, None],
    "codex-0.171.0/auto_compact": [SHELL, None] * 3 + [None],
    "opencode-1.18.33/tool_roundtrip_chat": [None, ECHO, None],
    "opencode-1.18.33/subagent_chat": [None, ("task", {"description": "leaf"}), None, None],
    "qwen-code-0.24.4/tool_roundtrip": [("run_shell_command", {"command": "echo hi"}), None],
    "qwen-code-0.24.4/subagent_background": [("agent", {"description": "leaf"}), None, None, None],
    "pi-1.6.0/tool_roundtrip_chat": [ECHO, None],
    "pi-1.6.0/tool_roundtrip_responses": [ECHO, None],
    "aider-0.86.2/one_turn_chat": [None],
    "mini-swe-agent-2.4.6/tool_roundtrip": [ECHO, ECHO],
    "openai-agents-0.24.0/tool_roundtrip_responses": [ECHO, None],
    "pydantic-ai-2.68.0/tool_roundtrip_responses": [ECHO, None],
    "langchain-1.5.2/tool_roundtrip_anthropic": [ECHO, None],
}


def replay(proxy: RunningProxy, fake: FakeServer, folder: str) -> list[str | None]:
    """Sends a scenario in order; the session that the server saw for each request."""
    seen: list[str | None] = []
    for record, call in zip(recorded(folder), SCENARIOS[folder], strict=True):
        if record["method"] != "POST":
            seen.append(None)
            continue
        fake.reply(*(("", call) if call else ("ok",)))
        assert proxy.post(record["path"], record["body"], headers_of(record))[0] == 200
        proxy.settle()
        seen.append(fake.chats[-1].headers["x-session-id"])
    assert proxy.tracker.errors == 0
    return seen


def pauses(proxy: RunningProxy) -> dict[str, str | None]:
    return {n.name: n.pause.kind if n.pause else None for n in proxy.tracker.nodes.values()}


@pytest.mark.parametrize("folder", sorted(SCENARIOS))
def test_the_tree_is_the_recorded_one(proxies: Make, fake: FakeServer, folder: str) -> None:
    proxy = proxies(fake.url)
    seen = replay(proxy, fake, folder)
    index = json.loads((RECORDINGS / "index.json").read_text())
    scenario = next(s for s in index["scenarios"] if s["dir"] == folder)
    if not scenario["tree"]:
        named = {name for name in seen if name is not None}
        children = {n.name for n in proxy.tracker.nodes.values() if n.parent is not None}
        # Without any identity on the wire: one conversation, and the subagent that it spawned.
        assert len(named - children) == 1
        assert len(children) == ("subagent" in folder)
        return
    for name, expected in zip(seen, scenario["requests"], strict=True):
        if name is None:
            continue
        agent, session = expected.get("agent"), expected["session"]
        if agent is None:
            assert name == session
        else:
            assert name in (agent, f"{session}/{agent}")  # opencode's children have names of their own
            assert proxy.node(name).session.parent == session
    expected_nodes = sum(1 + len(root["agents"]) for root in scenario["tree"].values())
    assert len(proxy.tracker.nodes) == expected_nodes


@pytest.mark.parametrize("folder", [f for f, calls in SCENARIOS.items() if "tool_roundtrip" in f])
def test_a_tool_pause_and_then_a_human_one(proxies: Make, fake: FakeServer, folder: str) -> None:
    proxy = proxies(fake.url)
    replay(proxy, fake, folder)
    told = fake.hints.wait_for("agent.pause", 2)
    last = "tool" if "mini-swe" in folder else "human"
    assert [p.kind for p in told] == ["tool", last]
    call = next(call for call in SCENARIOS[folder] if call)
    assert (told[0].tool, told[0].program) == (call[0], "echo")
    assert told[0].forecast.p50_s > 0
    assert len({p.session for p in told}) == 1


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        # Asynchronous: the parent ends its turn while the child runs, and is called back when it has ended.
        ("claude-code-2.1.332/subagent", [("main", "subagent"), ("main", "subagent"), ("main", "human")]),
        (
            "claude-code-2.1.332/local_model_name_subagent",
            [("main", "subagent"), ("main", "subagent"), ("main", "human")],
        ),
        # Synchronous: the child runs inside the parent's tool call.
        ("claude-code-2.1.197/subagent_explore_haiku", [("main", "subagent"), ("main", "human")]),
        ("codex-0.171.0/subagent_multi_agent_v2", [("main", "subagent"), ("main", "human")]),
        ("opencode-1.18.33/subagent_chat", [("main", "subagent"), ("main", "human")]),
        # Of these two the parent's second turn ends after the child's answer: nothing runs any more.
        ("qwen-code-0.24.4/subagent_background", [("main", "subagent"), ("main", "human"), ("main", "human")]),
    ],
)
def test_subagents_and_joins(proxies: Make, fake: FakeServer, folder: str, kinds: list[tuple[str, str]]) -> None:
    proxy = proxies(fake.url)
    replay(proxy, fake, folder)
    child = next(n for n in proxy.tracker.nodes.values() if n.parent is not None)
    main = child.parent
    assert main is not None
    told = [(p.session, p.kind) for p in fake.hints.wait_for("agent.pause", len(kinds))]
    assert told == [(main.name, kind) for _, kind in kinds]
    joins = fake.hints.wait_for("agent.join")
    assert [(j.session, j.child) for j in joins] == [(main.name, child.name)]
    opened = {s.session: s.parent for s in fake.hints.of_type("agent.session")}
    assert opened == {main.name: None, child.name: main.name}
    assert not main.children


def test_a_fork_is_announced_with_all_that_it_shares(proxies: Make, fake: FakeServer) -> None:
    """97 % of a fork's prompt is its parent's, once the attribution line is out: the head and all but the last message."""
    proxy = proxies(fake.url)
    replay(proxy, fake, "claude-code-2.1.332/fork_subagent")
    before, at_start = fake.hints.wait_for("agent.fork", 2)
    assert (before.count, before.child) == (1, None)
    assert at_start.child == next(n.name for n in proxy.tracker.nodes.values() if n.parent is not None)
    assert at_start.shared.messages == 3  # up to the call that spawned it; its result reads differently in the fork
    assert at_start.shared.tokens > 0


def test_a_subagent_that_shares_nothing_is_not_announced_as_a_fork(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    replay(proxy, fake, "claude-code-2.1.332/subagent")
    fake.hints.wait_for("agent.join")
    assert fake.hints.of_type("agent.fork") == []


def test_codex_compacts_three_times(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    replay(proxy, fake, "codex-0.171.0/auto_compact")
    phases = [c.phase for c in fake.hints.wait_for("agent.compaction", 6)]
    assert phases == ["begin", "commit"] * 3
    # The summary's own answer is nobody's pause; a tool known to be quick is announced only if it lasts after all.
    eventually(lambda: fake.hints.of_type("agent.pause")[-1].kind == "human", "the last pause")
    assert {p.kind for p in fake.hints.of_type("agent.pause")[:-1]} == {"tool"}
    assert proxy.node("00000000-0000-4000-8000-000000000072").window.endswith(":3")


def test_claude_code_compacts_across_processes(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    for folder in ("tool_roundtrip", "resume_1", "resume_2"):
        for record in recorded(f"claude-code-2.1.332/{folder}"):
            proxy.post(record["path"], record["body"], headers_of(record))
            proxy.settle()
    assert fake.hints.of_type("agent.compaction") == []
    for folder in ("compact_manual", "after_compact"):
        for record in recorded(f"claude-code-2.1.332/{folder}"):
            proxy.post(record["path"], record["body"], headers_of(record))
            proxy.settle()
    begun, committed = fake.hints.wait_for("agent.compaction", 2)
    assert (begun.phase, committed.phase) == ("begin", "commit")
    # System prompt and tools stay, the conversation goes: 75 % of the new prompt is the old head.
    assert committed.keep.messages == 0
    before = recorded("claude-code-2.1.332/resume_2")[0]["body"]
    head = len(json.dumps([before["system"][1:], before["tools"]], ensure_ascii=False))
    assert committed.keep.tokens == pytest.approx(head / 4, rel=0.1)  # four characters a token, at the fake server
    assert len(proxy.tracker.nodes) == 1


def test_side_calls_are_no_turns(proxies: Make, fake: FakeServer) -> None:
    """opencode asks a small model for a title under the session's name: it opens no pause and switches no model."""
    proxy = proxies(fake.url)
    replay(proxy, fake, "opencode-1.18.33/tool_roundtrip_chat")
    fake.hints.wait_for("agent.pause", 2)
    assert fake.hints.of_type("agent.model_switch") == []
    (node,) = proxy.tracker.nodes.values()
    assert (node.turns, node.model) == (2, "fake-model")


def test_a_side_call_in_a_tool_pause_does_not_end_it(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    title, turn, _ = recorded("opencode-1.18.33/tool_roundtrip_chat")
    fake.reply("", ECHO)
    proxy.post(turn["path"], turn["body"], headers_of(turn))
    proxy.settle()
    (node,) = proxy.tracker.nodes.values()
    pause = node.pause
    proxy.post(title["path"], title["body"], headers_of(title))
    proxy.settle()
    assert node.pause is pause is not None


@pytest.mark.parametrize("folder", ["claude-code-2.1.332", "codex-0.171.0", "opencode-1.18.33"])
def test_a_last_word_without_tools_is_a_turn_and_a_title_is_none(proxies: Make, fake: FakeServer, folder: str) -> None:
    """Of a client that is not known: it is a turn where it goes on from the answer, and no turn with the first words alone."""
    proxy = proxies(fake.url)
    scenario = "tool_roundtrip_chat" if "opencode" in folder else "tool_roundtrip"
    *_, first, second = recorded(f"{folder}/{scenario}")
    field = "input" if "input" in first["body"] else "messages"
    fake.reply("", ECHO)
    named = {**headers_of(first), "User-Agent": "an-agent/1.0", "X-Session-ID": "s"}
    proxy.post(first["path"], first["body"], named)
    proxy.settle()
    (node,) = proxy.tracker.nodes.values()
    pause, known = node.pause, node.prompt
    bare = {name: value for name, value in second["body"].items() if name not in ("tools", "tool_choice")}
    title = {**bare, field: [*first["body"][field], {"role": "user", "content": "a title, please"}]}
    proxy.post(first["path"], title, named)
    proxy.settle()
    assert (node.pause, node.prompt, node.turns) == (pause, known, 1)
    proxy.post(second["path"], bare, named)
    proxy.settle()
    assert node.turns == 2
    assert node.pause is not pause is not None
    assert len(proxy.tracker.nodes) == 1


def test_geminis_router_calls_open_no_session(proxies: Make, fake: FakeServer) -> None:
    """The dialect is passed on and read, whatever the server makes of it."""
    proxy = proxies(fake.url)
    for record in recorded("gemini-cli-0.61.0/tool_roundtrip"):
        proxy.post(record["path"], record["body"], headers_of(record))
        proxy.settle()
    assert proxy.tracker.errors == 0
    (node,) = proxy.tracker.nodes.values()
    assert node.model == "gemini-3.1-pro-preview"
    assert node.turns == 2


def test_websocket_is_declined_as_the_client_expects(proxies: Make, fake: FakeServer) -> None:
    handshake = recorded("codex-0.171.0/websocket_prewarm")[0]
    import http.client

    proxy = proxies(fake.url)
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=20)
    connection.request("GET", handshake["path"], headers=headers_of(handshake))
    assert connection.getresponse().status == 426
    connection.close()


@pytest.mark.parametrize(
    "folder",
    [
        "claude-code-2.1.332/subagent",
        "claude-code-2.1.332/fork_subagent",
        "claude-code-2.1.197/subagent_explore_haiku",
        "codex-0.171.0/subagent_multi_agent_v2",
        "codex-0.171.0/auto_compact",
        "qwen-code-0.24.4/subagent_background",
        "qwen-code-0.24.4/tool_roundtrip",
    ],
)
def test_hooks_and_traffic_together_tell_everything_once(proxies: Make, fake: FakeServer, folder: str) -> None:
    """Requests and hooks in their recorded order: the same tree, no join or pause told twice, nothing misunderstood."""
    proxy = proxies(fake.url, one_run=True)
    events: list[tuple[float, str, Any]] = [
        (record["t_rel_s"], "request", (record, call))
        for record, call in zip(recorded(folder), SCENARIOS[folder], strict=True)
        if record["method"] == "POST"
    ]
    events += [(hook["t_rel_s"], "hook", hook) for hook in recorded_hooks(folder)]
    ids: dict[str, str] = {}
    for _, what, value in sorted(events, key=lambda e: e[0]):
        if what == "request":
            record, call = value
            fake.reply(*(("", call) if call else ("ok",)))
            proxy.post(record["path"], record["body"], headers_of(record))
            proxy.settle()
            for node in proxy.tracker.nodes.values():
                ids.update(dict.fromkeys(node.outstanding, node.name))
        else:
            payload = dict(value["stdin"])
            if payload.get("tool_call_id") and ids:
                payload["tool_call_id"] = list(ids)[-1]  # the fake server gave the call another name
            assert proxy.post(f"/hook/{value['event']}", payload) == (200, b"{}")
            proxy.settle()
    assert proxy.tracker.errors == 0
    assert proxy.sink.seen["tool_start"] >= 1
    children = {h.child for h in fake.hints.of_type("agent.join")}
    joins = [h.child for h in fake.hints.of_type("agent.join")]
    assert sorted(joins) == sorted(children)
    assert len(children) == ("subagent" in folder)
    ended = [h.session for h in fake.hints.of_type("agent.end")]
    assert len(ended) == len(set(ended))
