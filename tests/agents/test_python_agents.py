"""mini-swe-agent and aider, headless through ``tenuto run`` against ``tenuto serve``, each from its own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Server, python_agent, run_agent

pytestmark = pytest.mark.slow


def test_mini_swe_agent(server: Server, tmp_path: Path) -> None:
    """Its commands are tool calls; the script's last answer submits, as the agent's own protocol asks for."""
    program = python_agent("mini")
    before = set(server.tree())
    words = [
        str(program),
        "-t",
        "make a mini round trip",
        "-y",
        "--exit-immediately",
        "-o",
        str(tmp_path / "trajectory.json"),
    ]
    done = run_agent(server, words, tmp_path, MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path / "config"), COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (root,) = [view for id, view in server.tree().items() if id not in before]
    assert root["id"].startswith("agent-")  # it names itself nowhere
    assert root["state"] == "ended"
    assert root["turns"] >= 2
    assert sum(root["last"]["cached"].values()) >= 0.8 * root["last"]["prompt_tokens"]
    assert server.pauses(root["id"])[0] == "tool"


def test_aider(server: Server, tmp_path: Path) -> None:
    """No tools, no identity: one conversation all the same."""
    program = python_agent("aider")
    before = set(server.tree())
    words = [
        str(program),
        "--message",
        "say hello",
        "--yes-always",
        "--no-check-update",
        "--no-git",
        "--no-show-release-notes",
    ]
    done = run_agent(server, words, tmp_path, AIDER_ANALYTICS="false", COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout
    assert "Traceback" not in done.stderr
    (root,) = [view for id, view in server.tree().items() if id not in before]
    assert root["state"] == "ended"
