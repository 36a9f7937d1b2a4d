"""Large requests whose beginning goes upstream while the rest comes in: what arrives is complete, right, and once."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tenuto.proxy import ahead
from tenuto.proxy.ahead import AHEAD_BYTES_MIN

from .conftest import RawServer, RunningProxy, eventually, read_request

Make = Callable[..., RunningProxy]
Raw = Callable[[Callable[[socket.socket, int], None]], RawServer]

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
OK = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"usage": {}}'
LINE = "x-anthropic-billing-header: cc_version=2.1.332.570; cc_entrypoint=sdk-cli;"


class Seen:
    """Takes requests and tells of each what has come so far: (head, body), complete or not."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, bytes]] = []
        self.begun: list[bytes] = []
        self.dropped = 0

    def __call__(self, connection: socket.socket, number: int) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                if not (piece := connection.recv(1 << 16)):
                    return
                data += piece
            head, _, data = data.partition(b"\r\n\r\n")
            fields = (line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:])
            length = next(int(value) for name, value in fields if name == b"content-length")
            self.begun.append(head)
            while len(data) < length:
                if not (piece := connection.recv(1 << 16)):
                    self.dropped += 1
                    return
                data += piece
            self.requests.append((head, data[:length]))
            data = data[length:]
            connection.sendall(OK)

    @property
    def sessions(self) -> list[str]:
        """The session that each complete request named."""
        found = []
        for head, _ in self.requests:
            lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
            found.append({name.lower(): value for name, value in lines.items()}[b"x-session-id"].decode())
        return found


@pytest.fixture(autouse=True)
def _slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body that does not arrive with its head counts as one that takes its time."""
    monkeypatch.setattr(ahead, "PATIENCE_S", 0.0)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def talk(
    turns: int, *, form: str = "chat", words: str = "read a file of this project and say what is in it "
) -> dict[str, Any]:
    """A conversation of about 10 kB a turn."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {words * 200}"} for n in range(turns)]
    tools = [{"type": "function", "function": {"name": "bash"}}]
    body = {"model": "m", "messages": messages}
    return {**body, "system": [{"type": "text", "text": "S"}]} if form == "messages" else {**body, "tools": tools}


def begin(proxy: RunningProxy, data: bytes) -> socket.socket:
    """Sends the head and the first 300 kB of a request."""
    client = socket.create_connection(("127.0.0.1", proxy.server.port), timeout=20)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    client.sendall(head + data[:300_000])
    return client


def sent(seen: Seen) -> list[dict[str, Any]]:
    return [json.loads(body) for _, body in seen.requests]


@pytest.mark.parametrize("named", [True, False])
def test_the_beginning_goes_ahead_and_the_whole_arrives(proxies: Make, raw: Raw, seen: Seen, named: bool) -> None:
    proxy = proxies(raw(seen).url, "tenuto")
    headers = {"X-Session-ID": "s"} if named else {}
    bodies = [talk(turns) for turns in (61, 63, 65, 67)]
    assert len(json.dumps(bodies[0])) > AHEAD_BYTES_MIN
    for body in bodies:
        assert proxy.post(CHAT, body, headers)[0] == 200
        proxy.settle()
    assert sent(seen) == bodies
    assert len(set(seen.sessions)) == 1
    assert proxy.server.counts["went_ahead"] == 3  # the first one's session was not known yet
    assert (seen.dropped, proxy.server.counts["guessed_wrong"], proxy.tracker.errors) == (0, 0, 0)
    (node,) = proxy.tracker.nodes.values()
    assert node.turns == 4


def test_bytes_are_upstream_before_the_client_has_sent_them_all(proxies: Make, raw: Raw, seen: Seen) -> None:
    proxy = proxies(raw(seen).url, "local")  # to whom nothing is told: there is nothing to guess
    data = json.dumps(talk(70)).encode()
    client = begin(proxy, data)
    eventually(lambda: len(seen.begun) == 1, "the head went ahead")
    client.sendall(data[300_000:])
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    client.close()
    assert [body for _, body in seen.requests] == [data]


def test_another_conversation_with_the_same_beginning_is_sent_anew(proxies: Make, raw: Raw, seen: Seen) -> None:
    """Two conversations share 300 kB and differ behind them: each arrives whole, once, under a name of its own."""
    proxy = proxies(raw(seen).url, "tenuto")
    first, other = talk(61), talk(61)
    other["messages"][40:] = talk(25, words="something else altogether that nobody has said before ")["messages"]
    for body in (first, other, {**first, "messages": talk(63)["messages"]}):
        assert proxy.post(CHAT, body)[0] == 200
        proxy.settle()
    assert [len(body["messages"]) for body in sent(seen)] == [61, 65, 63]
    assert seen.sessions[0] == seen.sessions[2] != seen.sessions[1]
    assert proxy.server.counts["guessed_wrong"] >= 1
    eventually(lambda: seen.dropped == proxy.server.counts["guessed_wrong"], "what went ahead wrongly is dropped")
    assert proxy.tracker.errors == 0


def test_a_line_to_be_cut_out_behind_the_beginning(proxies: Make, raw: Raw, seen: Seen) -> None:
    """It shows when most has gone ahead; from then on this session's requests wait until they are whole."""
    proxy = proxies(raw(seen).url, "tenuto")
    for turns in (61, 63, 65):
        body = talk(turns, form="messages")
        if turns > 61:
            body["system"].insert(0, {"type": "text", "text": LINE})
        assert proxy.post(MESSAGES, body, {"X-Claude-Code-Session-Id": "s"})[0] == 200
        proxy.settle()
    assert sent(seen) == [talk(turns, form="messages") for turns in (61, 63, 65)]
    assert proxy.server.counts["went_ahead"] == proxy.server.counts["guessed_wrong"] == 1
    eventually(lambda: seen.dropped == 1, "what went ahead is dropped")


def test_a_client_that_goes_in_the_middle_takes_what_went_ahead_with_it(proxies: Make, raw: Raw, seen: Seen) -> None:
    proxy = proxies(raw(seen).url, "local")
    data = json.dumps(talk(70)).encode()
    client = begin(proxy, data)
    eventually(lambda: len(seen.begun) == 1, "the head went ahead")
    client.close()
    eventually(lambda: seen.dropped == 1, "the upstream's connection is closed")
    assert seen.requests == []
    assert proxy.post(CHAT, talk(3))[0] == 200


def test_an_idle_connection_that_closes_under_the_beginning_is_replaced(proxies: Make, raw: Raw, seen: Seen) -> None:
    """A server closes what was idle just when it is used again: the whole goes over a new connection."""
    gone = threading.Event()

    def script(connection: socket.socket, number: int) -> None:
        if number:
            seen(connection, number)
            return
        assert read_request(connection)[0]
        connection.sendall(OK)
        connection.recv(1)  # the next request has begun
        connection.close()
        gone.set()

    proxy = proxies(raw(script).url, "local")
    assert proxy.post(CHAT, talk(3))[0] == 200
    data = json.dumps(talk(70)).encode()
    client = begin(proxy, data)
    assert gone.wait(20)
    client.sendall(data[300_000:])
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    client.close()
    assert [body for _, body in seen.requests] == [data]
