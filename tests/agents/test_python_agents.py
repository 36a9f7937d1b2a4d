"""mini-swe-agent, aider, OpenHands and LiteLLM against ``tenuto serve``, each from its own environment: unchanged through
``tenuto run``, and with their adapters where there are any."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import tenuto

from .conftest import HERE, RUN_S, Server, python_agent, run_agent

pytestmark = pytest.mark.slow
HARNESS = Path(tenuto.__file__).resolve().parents[1]


def run_script(python: Path, script: str, work: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One of the scripts beside this file, run by an agent's own interpreter, with the SDK at hand."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("OPENAI", "LLM_", "TENUTO", "MSWEA", "LITELLM"))}
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TENUTO_HISTORY": "off", "PYTHONPATH": str(HARNESS)}
    return subprocess.run(
        [str(python), str(HERE / script)],
        env={**kept, **offline, "HOME": str(work), "MSWEA_GLOBAL_CONFIG_DIR": str(work / "config"), **env},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


@pytest.mark.agent("mini")
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


@pytest.mark.agent("aider")
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


@pytest.mark.agent("openhands")
def test_openhands(server: Server, tmp_path: Path) -> None:
    """Headless by its SDK: it names its session itself, and its last call is an answer, not a tool that runs."""
    python = python_agent("openhands")
    before = set(server.tree())
    words = ["--agent", "openhands", "--", str(python), str(HERE / "openhands_agent.py")]
    done = run_agent(server, words, tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert (done.returncode, done.stdout.strip()) == (0, "finished"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (root,) = [view for id, view in server.tree().items() if id not in before]
    assert (root["agent"], root["state"], root["turns"]) == ("openhands", "ended", 2)
    assert not root["id"].startswith("agent-")
    assert server.pauses(root["id"]) == ["tool"]
    assert sum(root["last"]["cached"].values()) >= 0.9 * root["last"]["prompt_tokens"]


@pytest.mark.agent("openhands")
def test_openhands_with_its_adapter(server: Server, tmp_path: Path) -> None:
    python = python_agent("openhands")
    before = set(server.tree())
    llm = {"LLM_BASE_URL": f"{server.url}/v1", "LLM_API_KEY": "k", "LLM_MODEL": "openai/scripted"}
    done = run_script(python, "openhands_agent.py", tmp_path, ADAPTER="1", **llm)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["open ['human']", "finished"]), (
        done.stdout + done.stderr
    )
    (root,) = [view for id, view in server.tree().items() if id not in before]
    assert (root["agent"], root["state"], root["turns"]) == ("openhands", "ended", 2)
    assert server.pauses(root["id"]) == ["tool"]


@pytest.mark.agent("mini")
def test_mini_swe_agent_with_its_adapter(server: Server, tmp_path: Path) -> None:
    python = python_agent("mini").parent / "python"
    done = run_script(python, "mini_agent.py", tmp_path, URL=server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Submitted" in done.stdout
    root = server.tree()["mini-as-a-library"]
    assert (root["state"], root["turns"]) == ("ended", 2)
    assert server.pauses(root["id"]) == ["tool"]


@pytest.mark.agent("mini")
def test_litellm(server: Server, tmp_path: Path) -> None:
    """As the agents above use it; mini-swe-agent's environment brings it."""
    python = python_agent("mini").parent / "python"
    before = set(server.tree())
    done = run_script(python, "litellm_agent.py", tmp_path, URL=server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [["All green.", "ok"]] * 2  # whole and streamed
    roots = [view for id, view in server.tree().items() if id not in before]
    assert [root["turns"] for root in roots] == [3, 3]
    for root in roots:
        assert server.pauses(root["id"]) == ["tool", "human"]
        assert set(root["last"]["recomputed"]) <= {"cold"}
