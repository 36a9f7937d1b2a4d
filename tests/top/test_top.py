"""``tenuto top``: what it shows of a server's sessions, in any terminal and without a server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from tenuto import top
from tenuto.wire import SessionView

SESSIONS: list[dict[str, Any]] = [
    {
        "id": "child",
        "parent": "main",
        "agent": "Explore",
        "state": "running",
        "context_tokens": 4000,
        "resident": {"device": 4000},
    },
    {
        "id": "main",
        "state": "paused",
        "pause_kind": "subagent",
        "pause_age_s": 75.0,
        "context_tokens": 10_000,
        "resident": {"device": 2500, "host": 7500},
        "lease": {"until_s": 300.0, "tier": "host", "tokens": 10_000},
        "last": {
            "prompt_tokens": 10_000,
            "cached": {"device": 6000, "host": 2000},
            "recomputed": {"mutation": 1500, "cold": 500},
            "divergence": {"token": 8000, "tokens_lost": 1500, "message": 3, "part": "message"},
        },
    },
    {
        "id": "orphan",
        "parent": "long gone",
        "state": "ended",
        "lease": {"until_s": 240.0, "tier": "device", "tokens": 9},
    },
]
HEALTH = {"status": "ok", "model": "toy", "problems": []}


class Server:
    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/health": (200, HEALTH),
            "/v1/sessions": (200, {"object": "list", "data": SESSIONS}),
        }
        answers = self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answers[self.path]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("TENUTO_API_KEY", raising=False)
    running = Server()
    yield running
    running.close()


def screen(snapshot: top.Snapshot, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(top.render(snapshot, width))
    return out.getvalue()


def test_the_tree_and_what_is_known_of_each_session(server: Server) -> None:
    text = screen(top.look(server.url), 160)
    head, columns, main, child, orphan = text.splitlines()
    assert "toy  ok  3 sessions (1 running, 1 paused)" in head
    assert columns.split()[:3] == ["session", "state", "pause"]
    assert main.startswith("main ")
    for shown in (
        "paused",
        "subagent",
        "1m15s",
        "host 5m00s",
        "device 25% host 75%",
        "80%",
        "10,000",
        "mutation 1,500 @ message 3",
    ):
        assert shown in main
    assert child.startswith("└ child")
    # Who has ended holds no promise for a next turn; what it asked to be kept is told as that.
    assert "kept 4m00s" in orphan
    assert "device" not in orphan
    assert "Explore" in child
    assert orphan.startswith("orphan")


@pytest.mark.parametrize("width", [20, 39, 60, 80, 200])
def test_every_terminal_is_wide_enough(server: Server, width: int) -> None:
    lines = screen(top.look(server.url), width).splitlines()
    assert len(lines) == 5
    assert all(len(line) <= width for line in lines)


def test_no_sessions(server: Server) -> None:
    server.answers["/v1/sessions"] = (200, {"data": []})
    assert "no sessions yet" in screen(top.look(server.url), 80)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((401, {}), "needs TENUTO_API_KEY"),
        ((404, {}), "answers 404"),
        ((200, b"<html>"), "does not answer"),
        ((200, []), "no JSON object"),
    ],
)
def test_odd_servers(server: Server, answer: tuple[int, Any], problem: str) -> None:
    server.answers["/v1/sessions"] = answer
    assert problem in (top.look(server.url).problem or "")


def test_a_server_that_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once", "--url", "127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert top.main(["--once", "--json", "--url", "127.0.0.1:9"]) == 1
    assert "does not answer" in json.loads(capsys.readouterr().out)["problem"]


def test_json_for_scripts(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once", "--json", "--url", f"{server.url}/v1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(row["session"], row["depth"]) for row in facts["rows"]] == [("main", 0), ("child", 1), ("orphan", 0)]
    assert facts["health"]["model"] == "toy"
    assert facts["sessions"][1]["last"]["cached"] == {"device": 6000, "host": 2000}


def test_a_circle_of_parents_is_shown_once() -> None:
    views = [SessionView(id="a", parent="b"), SessionView(id="b", parent="a"), SessionView(id="c", parent="c")]
    assert sorted(row.cells["session"] for row in top.rows(views)) == ["a", "b", "c"]


def test_a_newer_servers_sessions_are_left_out_not_fatal(server: Server) -> None:
    server.answers["/v1/sessions"] = (200, {"data": [{"id": "x", "state": "levitating"}, {"id": "y", "novel": 1}]})
    assert [view.id for view in top.look(server.url).sessions] == ["y"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (-1.0, "over"), (0.25, "0.2s"), (42.0, "42s"), (185.0, "3m05s"), (7800.0, "2h10m"), (4e5, "4d")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert top.duration(seconds) == text


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        top.main(["--json"])
    assert stopped.value.code == 2
    assert "--once" in capsys.readouterr().err


def test_live_until_interrupted(server: Server) -> None:
    """In a terminal of its own: it redraws, and ends on Ctrl-C with the shell's status for it."""
    main, side = os.openpty()
    command = [sys.executable, "-m", "tenuto", "top", "--url", server.url, "--every", "0.1"]
    process = subprocess.Popen(
        command,
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm"},
        # Whoever runs the tests in the background of a shell may have Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(side)
    try:
        seen = b""
        while seen.count(b"orphan") < 3:  # drawn three times
            seen += os.read(main, 65536)
        process.send_signal(signal.SIGINT)
        # Read on until it has closed its side: what nobody reads fills the terminal, and its last words would wait.
        with contextlib.suppress(OSError):
            while more := os.read(main, 65536):
                seen += more
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert b"Traceback" not in seen
