"""What arrives in odd pieces: requests behind one another, bodies that grow, stop or stall. Both ends are real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tenuto.proxy import front

from .conftest import RawServer, RunningProxy, eventually, read_request

Make = Callable[..., RunningProxy]
Raw = Callable[[Callable[[socket.socket, int], None]], RawServer]

CHAT = "/v1/chat/completions"


def message(body: bytes, *fields: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


def body_of(size: int, mark: int = 0) -> bytes:
    words = "".join(f"{mark}-{n} " for n in range(size // 8 + 1))[:size]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": words}]}).encode()


class Echo:
    """Keeps what came and answers each request with its number."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, connection: socket.socket, number: int) -> None:
        while (request := read_request(connection))[0]:
            self.bodies.append(request[1])
            text = json.dumps({"n": len(self.bodies)}).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@contextmanager
def client(proxy: RunningProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.server.port), timeout=20) as connection:
        yield connection


def answers(connection: socket.socket, count: int) -> bytes:
    data = b""
    while data.count(b'{"n"') < count or not data.endswith(b"}"):
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return data


# What stands behind a body of any size, in the same write, is the next request.
@pytest.mark.parametrize(
    "sizes", [(10, 10, 10), (100_000, 5, 700_000), (3_000_000, 20, 64 * 1024), (0, 65_400, 65_600)]
)
def test_requests_behind_one_another(proxies: Make, raw: Raw, echo: Echo, sizes: tuple[int, ...]) -> None:
    proxy = proxies(raw(echo).url, "tenuto")
    bodies = [body_of(size, mark) if size else b"" for mark, size in enumerate(sizes)]
    with client(proxy) as connection:
        connection.sendall(b"".join(map(message, bodies)))
        assert answers(connection, len(bodies)).count(b"HTTP/1.1 200") == len(bodies)
    assert echo.bodies == bodies
    assert proxy.tracker.errors == 0


@pytest.mark.parametrize("step", [1, 7, 50_000, 1_000_000])
def test_a_body_in_pieces_of_any_size(proxies: Make, raw: Raw, echo: Echo, step: int) -> None:
    """One that is larger than the room that its length alone earns it, too."""
    proxy = proxies(raw(echo).url, "tenuto")
    body = body_of(max(300, 5 * step))
    assert step < 1_000_000 or len(body) > 2 * front.PROMISED_BYTES_MAX
    data = message(body) + message(body)
    with client(proxy) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), step):
            connection.sendall(data[at : at + step])
        answers(connection, 2)
    assert echo.bodies == [body, body]


@pytest.mark.parametrize("size", [100, 100_000, 1_000_000])
@pytest.mark.parametrize("reads", [True, False])
def test_a_body_that_is_cut_short_goes_nowhere(proxies: Make, raw: Raw, echo: Echo, size: int, reads: bool) -> None:
    proxy = proxies(raw(echo).url, "tenuto")
    with client(proxy) as connection:
        connection.sendall(message(body_of(size))[:-50])
        if reads:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
            assert connection.recv(65536) == b""
    eventually(lambda: not proxy.server._fronts, "the connection's end")
    assert echo.bodies == []
    assert proxy.post(CHAT, body_of(10))[0] == 200


def test_a_client_that_stalls_is_dropped(proxies: Make, raw: Raw, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts, not slowness: who sends a little now and then is waited for."""
    monkeypatch.setattr(front, "BODY_STALL_S", 0.4)
    proxy = proxies(raw(echo).url, "tenuto")
    data = message(body_of(200_000))
    with client(proxy) as connection:
        for at in range(0, len(data), 50_000):
            connection.sendall(data[at : at + 50_000])
            time.sleep(0.2)
        answers(connection, 1)
        connection.sendall(data[:-1])
        assert connection.recv(65536) == b""
    assert len(echo.bodies) == 1
    assert proxy.server.counts["clients_lost"] == 1


def test_what_comes_during_an_answer_waits_within_bounds(
    proxies: Make, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes on sending while its answer is not out is not read beyond a limit, and loses nothing."""
    seen: list[bytes] = []
    fronts: list[front.Front] = []

    class Kept(front.Front):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            fronts.append(self)
            super().connection_made(transport)

    def script(connection: socket.socket, number: int) -> None:
        while (request := read_request(connection))[0]:
            seen.append(request[1])
            time.sleep(0.3 if len(seen) == 1 else 0)
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"n": 1}')

    monkeypatch.setattr(front, "Front", Kept)
    proxy = proxies(raw(script).url, "tenuto")
    bodies = [body_of(400_000, mark) for mark in range(12)]
    data = memoryview(b"".join(map(message, bodies)))
    got, held = b"", 0
    with client(proxy) as connection:
        connection.setblocking(False)
        while got.count(b'{"n"') < len(bodies):
            with suppress(BlockingIOError):
                data = data[connection.send(data) :]
            held = max([held, *(len(one._waiting) for one in fronts)])
            with suppress(BlockingIOError):
                got += connection.recv(65536)
            time.sleep(0.001)
    assert seen == bodies
    assert 400_000 < held <= front.WAITING_BYTES_MAX + 2 * front.READ_BYTES
