"""A live server of the toy model, and another server of known speed, for the benchmarks to measure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tenuto_server.bench.demo_server import ServerProcess

FIRST_S, TOKEN_S = 0.05, 0.02


@pytest.fixture(scope="session")
def toy_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``tenuto serve --model toy``."""
    with ServerProcess(
        ["--model", "toy", "--threads", "1", "--speculate", "0"], tmp_path_factory.mktemp("toy")
    ) as server:
        yield server.url


class Metronome(ThreadingHTTPServer):
    """An OpenAI endpoint whose first token takes FIRST_S and every other TOKEN_S. ``text_only``: refuses token ids."""

    daemon_threads = True
    text_only = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Beat)
        self.prompts: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Beat(BaseHTTPRequestHandler):
    server: Metronome
    protocol_version = "HTTP/1.0"  # the end of the body is the end of the connection

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json({"data": [{"id": "beat", "max_model_len": 4096}]} if self.path == "/v1/models" else {"version": "7"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.prompts.append(body["prompt"])
        if self.server.text_only and not isinstance(body["prompt"], str):
            self._json({"error": "prompt: a string, please"}, 422)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        began = time.perf_counter()
        for number in range(body["max_tokens"]):
            time.sleep(max(0.0, began + FIRST_S + number * TOKEN_S - time.perf_counter()))
            self._event({"choices": [{"text": "la "}]})
        self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def metronome() -> Iterator[Metronome]:
    server = Metronome()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """Where a benchmark may write."""
    return tmp_path / "result.json"
