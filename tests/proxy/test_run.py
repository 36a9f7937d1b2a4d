"""``tenuto run`` and ``tenuto proxy`` as a user runs them: processes, signals, exit status, what reaches the server."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenuto.fake_server import FakeServer
from tenuto.proxy import commands

from .conftest import RawServer, eventually, read_request

AGENT = """
import json, os, sys, time, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
tools = [{"type": "function", "function": {"name": "bash"}}]
def ask(messages):
    body = json.dumps({"model": os.environ.get("M", "fake"), "messages": messages, "tools": tools}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]
messages = [{"role": "user", "content": "go"}]
said = ask(messages)
time.sleep(1.0)  # long enough for a hint, also where the machine is busy
ask([*messages, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "done"}])
print("agent is done")
sys.exit(7)
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tenuto", *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "TENUTO_HISTORY": "off", **more}


def run(url: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("run", "--upstream", url, *words),
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_agent_runs_and_its_session_is_told_from_open_to_end(fake: FakeServer) -> None:
    fake.reply("", ("bash", {"command": "make test"}))
    done = run(fake.url, "--", sys.executable, "-c", AGENT, TENUTO_API_KEY="secret")
    assert (done.returncode, done.stdout) == (7, "agent is done\n"), done.stderr
    assert done.stderr == ""
    opened, tool, human, end = fake.hints.seen
    assert opened.via == "header"  # it rode on the first request
    assert (tool.action.kind, tool.action.tool, tool.action.program) == ("tool", "bash", "make")
    assert human.action.kind == "human"
    assert end.action.TYPE == "agent.end"
    assert end.action.keep_s == 300.0
    session = opened.action.session
    assert [r.headers["x-session-id"] for r in fake.chats] == [session] * 2
    assert opened.action.attended is False
    assert {r.headers["authorization"] for r in fake.requests} == {"Bearer secret"}  # hints count for the same tenant


def test_the_agents_environment_and_the_users_key(fake: FakeServer) -> None:
    show = "import os; print(os.environ['OPENAI_API_KEY'], os.environ['ANTHROPIC_BASE_URL'], os.environ['TENUTO_HOOK_URL'])"
    done = run(fake.url, "--", sys.executable, "-c", show, OPENAI_API_KEY="sk-of-a-provider")
    key, base, hook = done.stdout.split()
    assert key == "tenuto"
    assert base.startswith("http://127.0.0.1:")
    assert hook == f"{base}/hook"


def test_the_server_may_be_down(tmp_path: Path) -> None:
    done = run("http://127.0.0.1:9", "--", sys.executable, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "does not answer" in done.stderr


def test_a_window_too_small_for_agents_is_said(raw: Callable[..., RawServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        head, _ = read_request(connection)
        models = b'{"data": [{"id": "tiny", "max_model_len": 8192}]}'
        body = models if b"/v1/models" in head else b'{"server": "tenuto"}'
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    server = raw(script)
    done = run(server.url, "--agent", "aider", "--", "true")
    assert done.returncode == 0
    assert "tiny has a window of 8,192 tokens" in done.stderr
    assert run(server.url, "--", "true").stderr == ""  # no agent that is known, no advice


def test_status_of_the_shell(fake: FakeServer) -> None:
    assert run(fake.url, "--", "/no/such/agent").returncode == 127
    assert run(fake.url, "--", "/etc/passwd").returncode == 126
    assert run(fake.url, "--", "sh", "-c", "kill -9 $$").returncode == 137


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--"],
        ["--upstream", "ftp://x", "--", "true"],
        ["--kind", "odd", "--", "true"],
        ["--normalise", "odd", "--", "true"],
    ],
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        commands.run(words)
    assert stopped.value.code == 2
    assert "usage: tenuto run" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 42), (signal.SIGHUP, 42), (signal.SIGINT, 42)])
def test_signals_reach_the_agent(fake: FakeServer, tmp_path: Path, number: signal.Signals, status: int) -> None:
    ready = tmp_path / "ready"
    agent = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(30)\n"
    )
    process = subprocess.Popen(
        command("run", "--upstream", fake.url, "--", sys.executable, "-c", agent),
        env=environment(),
        start_new_session=True,
    )
    try:
        eventually(ready.exists, "the agent's start", 30)
        if number is signal.SIGINT:  # the terminal sends it to the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(30) == status
    finally:
        process.kill()
        process.wait()


def test_print_shows_what_would_be_run(fake: FakeServer) -> None:
    done = run(fake.url, "--print", "--", "codex", "exec", "fix it")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("codex -c 'model_provider=")
    assert "export TENUTO_API_KEY=tenuto" in done.stdout


def test_a_shared_proxy_serves_until_it_is_stopped(fake: FakeServer) -> None:
    process: subprocess.Popen[Any] = subprocess.Popen(
        command("proxy", "--upstream", fake.url, "--port", "0"), env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[2]
        assert line == f"tenuto proxy: {url} -> {fake.url} (tenuto)\n"
        fake.reply("", ("bash", {"command": "x"}))
        agent = subprocess.run(
            [sys.executable, "-c", AGENT],
            env=environment(OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY="k"),
            capture_output=True,
            check=False,
            timeout=30,
        )
        assert agent.returncode == 7
        fake.hints.wait_for("agent.pause", 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert fake.hints.of_type("agent.end") == []  # its clients live on
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_start_is_quick(fake: FakeServer) -> None:
    """In CPU time, which other processes do not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert run(fake.url, "--", "true").returncode == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0
