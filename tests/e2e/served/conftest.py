"""Real ``tenuto serve`` processes on loopback sockets: started, asked, killed and started again.

``Server`` owns one life of one process. It ends by pid, and whatever a test does, no process outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

START_S_MAX = 180.0
ANSWER_S_MAX = 120.0
STOP_S_MAX = 30.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Waits for something that the server brings about."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"in vain: {what}"
        time.sleep(0.02)


def _obey_permissions() -> None:
    """In the child of a root process, before it becomes the server: gives up CAP_DAC_OVERRIDE for what it executes."""
    if ctypes.CDLL(None).prctl(24, 1, 0, 0, 0):
        os._exit(77)


class Server:
    """``options``: of ``tenuto serve``. The model is the toy, in fp32 and batch-invariant, unless they say otherwise.
    ``bound``: permissions of files hold for it even where the tests run as root."""

    def __init__(self, folder: Path, *options: str, bound: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file, self._log = folder / "port", folder / "log"
        self._port_file.unlink(missing_ok=True)
        model = [] if "--model" in options else ["--model", "toy", "--dtype", "fp32", "--invariant", "--threads", "1"]
        command = [sys.executable, "-m", "tenuto", "serve", "--port", "0", "--port-file", str(self._port_file)]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *model, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_obey_permissions if bound and not os.geteuid() else None,
            )
        self.model = options[options.index("--model") + 1] if "--model" in options else "toy"
        self.port = 0

    def ready(self) -> Server:
        """Waits until it serves."""
        eventually(self._announced, "the server's start", START_S_MAX)
        self.port = int(self._port_file.read_text())
        return self

    def _announced(self) -> bool:
        assert self.process.poll() is None, self.log
        return self._port_file.exists()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        self.process.kill()
        self.process.wait(STOP_S_MAX)

    def stop(self) -> int:
        """SIGTERM, as a service manager does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return self.process.returncode

    # ---- asking --------------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """(status, headers in lower case, JSON or bytes)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S_MAX)
        with contextlib.closing(connection):
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            data = answer.read()
            plain = {name.lower(): value for name, value in answer.getheaders()}
            is_json = plain.get("content-type", "").startswith("application/json")
            return answer.status, plain, json.loads(data) if is_json else data

    def complete(self, prompt: str | list[int], count: int, **fields: Any) -> dict[str, Any]:
        """A greedy completion of ``count`` tokens: ``text``, and ``cached`` and ``recomputed`` of its cache report."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        status, _, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == count
        return {"text": answer["choices"][0]["text"], **answer["tenuto"]}

    @contextlib.contextmanager
    def stream(self, prompt: str | list[int], count: int, **fields: Any) -> Iterator[Iterator[str]]:
        """A greedy completion as it comes: an iterator of pieces of text, which ends early when the server does."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S_MAX)
        with contextlib.closing(connection):
            raw = json.dumps({**body, "stream": True})
            connection.request("POST", "/v1/completions", raw, {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield self._pieces(answer)

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[str]:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0].get("text"):
                        yield choices[0]["text"]

    def figures(self) -> dict[str, dict[tuple[str, ...], float]]:
        """/metrics: name -> label values -> value."""
        status, _, text = self.request("GET", "/metrics")
        assert status == 200
        families = text_string_to_metric_families(text.decode())
        return {
            f.name: {tuple(s.labels.values()): s.value for s in f.samples if "_created" not in s.name} for f in families
        }

    def figure(self, name: str, label: str | None = None) -> float:
        """One number of /metrics: of a label, or the sum over all; 0 for what has not been counted yet."""
        values = self.figures().get(name, {})
        return sum(v for labels, v in values.items() if label is None or label in labels)

    def health(self) -> dict[str, Any]:
        answer = self.request("GET", "/health")[2]
        assert isinstance(answer, dict)
        return answer

    def at_rest(self) -> None:
        """Nothing runs and nothing is held: no block pinned, none private, no turn, no copy."""
        names = (
            "device_blocks_pinned",
            "device_blocks_private",
            "turns_running",
            "turns_waiting",
            "transfers_inflight",
        )

        def held() -> dict[str, float]:
            return {name: value for name in names if (value := self.figure(f"tenuto_{name}"))}

        eventually(lambda: not held(), f"the server to come to rest; it still holds {held()}")

    def raw(self, data: bytes) -> bytes:
        """Bytes on a bare socket; everything that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S_MAX) as bare:
            bare.sendall(data)
            got = b""
            with contextlib.suppress(OSError):
                while piece := bare.recv(65536):
                    got += piece
            return got


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers and waits for them; none outlives the test."""
    lives: list[Server] = []

    def start(*options: str, wait: bool = True, bound: bool = False) -> Server:
        server = Server(tmp_path / "process", *options, bound=bound)
        lives.append(server)
        return server.ready() if wait else server

    yield start
    for server in lives:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One toy server for all tests that leave it as they found it; its memory holds everything they ask."""
    options = ("--max-body", "64KiB", "--max-header", "16KiB", "--max-context", "4096", "--host-bytes", "16MiB")
    server = Server(tmp_path_factory.mktemp("plain"), *options, "--device-bytes", "32MiB")
    try:
        yield server.ready()
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """Pause histories of the SDK stay out of the user's home."""
    before = os.environ.get("TENUTO_HISTORY")
    os.environ["TENUTO_HISTORY"] = "off"
    yield
    if before is None:
        del os.environ["TENUTO_HISTORY"]
    else:
        os.environ["TENUTO_HISTORY"] = before


@pytest.fixture(scope="session")
def server_class() -> type[Server]:
    return Server


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """What tests need beside a server."""
    return SimpleNamespace(eventually=eventually)
