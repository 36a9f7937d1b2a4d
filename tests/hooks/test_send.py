"""The command hook: quick, quiet, and never a failure, whatever is or is not at the other end."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tenuto import hook_send
from tenuto.hooks import send_command

PAYLOAD = json.dumps({"hook_event_name": "Stop", "session_id": "s", "last_assistant_message": "x" * 200_000}).encode()


class Sink:
    """Takes one request and answers it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/hook"
        self.got = b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while data := connection.recv(65536):
                self.got += data
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        self._listener.close()

    def join(self) -> bytes:
        self._thread.join(20)
        return self.got


def run(url: str, payload: bytes = PAYLOAD, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", "-S", hook_send.__file__, url]
    return subprocess.run(command, input=payload, capture_output=True, timeout=30, check=False, env=env)


def test_the_payload_arrives_unread() -> None:
    sink = Sink()
    done = run(sink.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    head, _, body = sink.join().partition(b"\r\n\r\n")
    assert body == PAYLOAD
    assert head.startswith(b"POST /hook HTTP/1.1\r\n")
    assert f"Content-Length: {len(PAYLOAD)}".encode() in head


def test_the_run_that_started_the_agent_comes_first() -> None:
    sink = Sink()
    run("http://127.0.0.1:9/hook", TENUTO_HOOK_URL=sink.url)
    assert sink.join().endswith(PAYLOAD)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/hook", "http://10.0.0.1:80/hook", "nonsense", "", "http://127.0.0.1:x/"]
)
def test_nobody_there_is_no_failure(url: str) -> None:
    done = run(url, b"{}")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_payloads_go_to_this_machine_only() -> None:
    assert hook_send.send("http://192.0.2.1:80/hook", b"{}") is False


def test_a_listener_that_never_answers_costs_little() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        began = time.perf_counter()
        with pytest.raises(TimeoutError):
            hook_send.send(f"http://127.0.0.1:{listener.getsockname()[1]}/hook", b"{}")
        assert time.perf_counter() - began < 5 * hook_send.TIMEOUT_S + 1.0


def test_it_costs_less_than_40_ms_of_cpu() -> None:
    """The best of several runs, in CPU time of the child: user and system, from exec to exit."""
    spent = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("http://127.0.0.1:9/hook", b"{}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < 0.040, spent


def test_the_command_line_is_one_that_shells_take() -> None:
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {send_command('http://127.0.0.1:4040/hook')}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert words[0] == sys.executable
    assert words[1:3] == ["-I", "-S"]
    assert Path(words[3]).is_file()


def test_it_imports_next_to_nothing() -> None:
    code = f"import sys, runpy; runpy.run_path({hook_send.__file__!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"json", "urllib", "http", "ssl", "pydantic", "tenuto", "asyncio"} & set(loaded.split())
