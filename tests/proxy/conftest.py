"""A proxy on a loopback port, in front of the fake server or of a raw socket that a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenuto.fake_server import FakeServer
from tenuto.proxy.commands import connector
from tenuto.proxy.hook_sink import HookSink
from tenuto.proxy.server import ProxyServer
from tenuto.proxy.tracker import Tracker
from tenuto.proxy.upstream import Kind, Upstream

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"in vain: {what}"
        time.sleep(0.005)


class RunningProxy:
    """A proxy in a thread of its own."""

    def __init__(
        self,
        url: str,
        kind: Kind | None = None,
        *,
        one_run: bool = False,
        key: str | None = None,
        normalise: frozenset[str] | None = None,
    ) -> None:
        self.upstream = Upstream(url, kind)
        self.tracker = Tracker(
            connector(self.upstream), carry=self.upstream.kind == "tenuto", one_run=one_run, run_key=key
        )
        self.sink = HookSink(self.tracker, keep_s=300.0, one_run=one_run)
        self.server = ProxyServer(self.upstream, self.tracker, self.sink, normalise)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def settle(self) -> None:
        """Waits until the proxy has done everything that the traffic so far gave it to do, and said what it had to say:
        the next request of a test comes sooner than any agent's."""
        eventually(lambda: all(n.running == 0 for n in list(self.tracker.nodes.values())), "answers read")
        self.call(asyncio.sleep(0))
        for client in list(self.tracker._clients.values()):
            client.hints.flush(5.0)

    def start(self) -> RunningProxy:
        self._thread.start()
        self.call(self.server.start())
        return self

    @property
    def url(self) -> str:
        return self.server.url

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        out = answer.status, answer.read()
        connection.close()
        return out

    def node(self, name: str) -> Any:
        return next(n for n in self.tracker.nodes.values() if n.name == name)

    def close(self) -> None:
        async def quiet() -> None:
            # What a closed server still has to say to its sockets is said before the loop ends.
            await self.server.aclose()
            await asyncio.sleep(0.01)

        self.call(quiet())
        self.tracker.close(300.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENUTO_BASE_URL", "TENUTO_API_KEY", "TENUTO_DISABLED", "TENUTO_HOOK_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENUTO_HISTORY", "off")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture  # needs the raw servers only to be closed before them
def proxies(raw: object) -> Iterator[Callable[..., RunningProxy]]:
    with contextlib.ExitStack() as stack:

        def make(url: str, kind: Kind | None = None, **options: Any) -> RunningProxy:
            proxy = RunningProxy(url, kind, **options).start()
            stack.callback(proxy.close)
            return proxy

        yield make


class RawServer:
    """A server whose every byte the test decides: ``script(connection, number)`` runs for each connection."""

    def __init__(self, script: Callable[[socket.socket, int], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.errors: list[BaseException] = []
        self._script = script
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(20)
            thread = threading.Thread(target=self._run, args=(connection, number), daemon=True)
            self._threads.append(thread)
            thread.start()
            number += 1

    def _run(self, connection: socket.socket, number: int) -> None:
        with connection:
            try:
                self._script(connection, number)
            except OSError:
                return
            except BaseException as error:
                self.errors.append(error)

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join(20)
        assert not self.errors, self.errors


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[socket.socket, int], None]], RawServer]]:
    with contextlib.ExitStack() as stack:

        def make(script: Callable[[socket.socket, int], None]) -> RawServer:
            server = RawServer(script)
            stack.callback(server.close)
            return server

        yield make


def read_request(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one request with a content length; empty when the peer closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b"", b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head, body


def recorded(folder: str) -> list[dict[str, Any]]:
    """The requests of a recorded scenario; skips where the recordings are absent."""
    if not RECORDINGS.is_dir():
        pytest.skip("needs the recordings beside the repository")
    return [json.loads(path.read_text()) for path in sorted((RECORDINGS / folder).glob("[0-9]*.json"))]


def recorded_hooks(folder: str) -> list[dict[str, Any]]:
    if not RECORDINGS.is_dir():
        pytest.skip("needs the recordings beside the repository")
    return [json.loads(line) for line in (RECORDINGS / folder / "hooks.jsonl").read_text().splitlines()]


def headers_of(record: dict[str, Any]) -> dict[str, str]:
    left_out = ("host", "content-length", "accept-encoding", "connection")
    return {name: value for name, value in record["headers"] if name.lower() not in left_out}
