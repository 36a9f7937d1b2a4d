"""The examples, run as a reader runs them, against the fake server; and kept short enough to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenuto.fake_server import FakeServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, server: FakeServer, *args: str) -> str:
    environment = {**os.environ, "TENUTO_HISTORY": "off"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), "--base-url", server.url, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_short_and_explained(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) < 80
    assert lines[0].startswith('"""')


def test_quickstart() -> None:
    with FakeServer() as server:
        server.reply("Ready.")
        server.reply("It is a poem.")
        output = run("quickstart.py", server)
        assert "assistant: Ready." in output
        assert "assistant: It is a poem." in output
        assert server.hints.types()[0] == "agent.session"
        assert server.hints.types()[-1] == "agent.end"
        first, second = server.chats
        assert second.body["messages"][:2] == first.body["messages"]  # the prefix is kept
        assert "Beautiful is better than ugly" in second.body["messages"][-1]["content"]


def test_coding_agent_follows_its_plan_when_the_model_calls_no_tool() -> None:
    with FakeServer() as server:
        output = run("coding_agent.py", server)
        assert output.count("  $ ") == 3
        assert len(server.chats) == 4
        results = [m["content"] for m in server.chats[-1].body["messages"] if m["role"] == "tool"]
        assert "quickstart.py" in results[0]
        assert int(results[1]) > 0


def test_coding_agent_runs_the_models_own_calls_and_refuses_to_write() -> None:
    with FakeServer() as server:
        server.reply("", ("bash", {"command": "rm -rf examples"}))
        run("coding_agent.py", server, "Clean up")
        results = [m["content"] for m in server.chats[1].body["messages"] if m["role"] == "tool"]
        assert results == ["refused: only cat, grep, head, ls, wc"]
        assert EXAMPLES.exists()


def test_subagents_share_the_parents_prefix() -> None:
    with FakeServer() as server:
        output = run("subagents.py", server)
        assert output.count("tokens were the parent's") == 3
        (fork,) = server.hints.of_type("agent.fork")
        assert fork.count == 3
        assert len(server.hints.of_type("agent.join")) == 3
        parent = server.chats[0].body["messages"]
        children = [r for r in server.chats if r.headers.get("x-parent-session-id")]
        assert len(children) == 3
        assert all(r.body["messages"][: len(parent)] == parent for r in children)


def test_compaction_reuses_the_prompt_for_its_summary() -> None:
    with FakeServer() as server:
        output = run("compaction.py", server, "--think-s", "0.1")
        line = next(text for text in output.splitlines() if text.startswith("summary call"))
        total, cached = (int(word) for word in line.split() if word.isdigit())
        assert cached / total > 0.8
        assert [c.phase for c in server.hints.of_type("agent.compaction")] == ["begin", "commit"]
        assert server.hints.of_type("agent.keepalive")
