"""The proxy as a pipe: bytes, timing, connections, failures. Both ends are real sockets."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.client import Client
from tenuto.fake_server import FakeServer
from tenuto.proxy import ahead as proxy_ahead
from tenuto.proxy import server as proxy_server

from .conftest import RawServer, RunningProxy, eventually, headers_of, read_request, recorded

Make = Callable[..., RunningProxy]
Raw = Callable[[Callable[[socket.socket, int], None]], RawServer]

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
ATTRIBUTED = (
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"system":[{"type":"text","text":'
    b'"x-anthropic-billing-header: cc_version=2.1.332.570; cc_entrypoint=sdk-cli;"},{"type":"text","text":"S"}]}'
)


def ok(body: bytes, *headers: bytes) -> bytes:
    head = [b"HTTP/1.1 200 OK", b"Content-Length: " + str(len(body)).encode(), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_a_hosted_service_gets_and_sends_every_byte_as_it_is(proxies: Make, raw: Raw) -> None:
    seen: list[tuple[bytes, bytes]] = []
    squeezed = gzip.compress(b'{"usage": {}}')

    def script(connection: socket.socket, number: int) -> None:
        seen.append(read_request(connection))
        connection.sendall(ok(squeezed, b"Content-Encoding: gzip", b"X-Odd-Case: Yes"))

    proxy = proxies(raw(script).url, "hosted")
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=20)
    sent = {
        "X-Api-Key": "k",
        "Accept-Encoding": "gzip, br",
        "anthropic-Version": "2023-06-01",
        "X-Claude-Code-Session-Id": "s",
    }
    connection.request("POST", "/v1/messages?beta=true", ATTRIBUTED, sent)
    answer = connection.getresponse()
    assert answer.read() == squeezed
    assert dict(answer.getheaders())["X-Odd-Case"] == "Yes"
    connection.close()
    head, body = seen[0]
    assert body == ATTRIBUTED
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/messages?beta=true HTTP/1.1"
    fields = {line.split(b": ")[0] for line in lines[1:]}
    assert fields == {b"Host", b"Content-Length", *(name.encode() for name in sent)}
    assert b"Accept-Encoding: gzip, br" in lines


def test_hosted_gets_no_hints(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url, "hosted")
    assert proxy.post(CHAT, BODY)[0] == 200
    proxy.settle()
    assert fake.hints.seen == []
    assert [r.path for r in fake.requests] == [CHAT]
    assert "x-session-id" not in fake.requests[0].headers


def test_a_server_of_ones_own_gets_no_attribution(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    assert proxy.post("/v1/messages", ATTRIBUTED)[0] == 200
    assert fake.requests[0].body["system"] == [{"type": "text", "text": "S"}]


def test_first_event_arrives_while_the_answer_goes_on(proxies: Make, raw: Raw) -> None:
    go_on = threading.Event()
    first, second = b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"

    def script(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"%x\r\n%s\r\n" % (len(first), first))
        assert go_on.wait(20)
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(second), second))

    proxy = proxies(raw(script).url, "tenuto")
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=20)
    connection.request("POST", CHAT, json.dumps(BODY))
    answer = connection.getresponse()
    assert answer.read1(len(first)) == first
    go_on.set()
    assert answer.read() == second
    connection.close()


def test_connections_are_kept_on_both_sides(proxies: Make, raw: Raw) -> None:
    connections = []

    def script(connection: socket.socket, number: int) -> None:
        connections.append(number)
        while read_request(connection)[0]:
            connection.sendall(ok(b"{}"))

    proxy = proxies(raw(script).url, "tenuto")
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=20)
    for _ in range(5):
        connection.request("POST", CHAT, json.dumps(BODY))
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"{}")
    connection.close()
    assert connections == [0]


def test_a_dead_idle_connection_is_replaced(proxies: Make, raw: Raw) -> None:
    served = []

    def script(connection: socket.socket, number: int) -> None:
        read_request(connection)
        served.append(number)
        connection.sendall(ok(b"{}"))
        if number == 0:  # promises to stay, and hangs up when the next request comes
            connection.recv(1)

    proxy = proxies(raw(script).url, "tenuto")
    assert proxy.post(CHAT, BODY) == (200, b"{}")
    assert proxy.post(CHAT, BODY) == (200, b"{}")
    assert served == [0, 1]


def test_a_client_that_leaves_cancels_the_answer(proxies: Make, raw: Raw) -> None:
    left = threading.Event()

    def script(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        try:
            if connection.recv(1) == b"":
                left.set()
        except ConnectionResetError:
            left.set()

    proxy = proxies(raw(script).url, "tenuto")
    with socket.create_connection(("127.0.0.1", proxy.server.port)) as client:
        data = json.dumps(BODY).encode()
        client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(data)) + data)
        got = b""
        while b"abc" not in got:
            got += client.recv(65536)
    assert left.wait(10)
    eventually(lambda: proxy.server.counts["cancelled"] == 1, "the cancelled answer counted")
    assert [n.pause for n in proxy.tracker.nodes.values()] == [None]  # an abort is no pause


@pytest.mark.parametrize(
    ("path", "reads"),
    [
        (CHAT, lambda body: body["error"]["code"] == "upstream_unreachable"),
        ("/v1/responses", lambda body: body["error"]["type"] == "upstream_unreachable"),
        ("/v1/messages?beta=true", lambda body: (body["type"], body["error"]["type"]) == ("error", "api_error")),
        ("/v1beta/models/m:streamGenerateContent", lambda body: body["error"]["status"] == "UNAVAILABLE"),
    ],
)
def test_an_absent_upstream_is_told_in_the_clients_dialect(proxies: Make, path: str, reads: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = proxies(f"http://127.0.0.1:{port}", "tenuto")
    status, body = proxy.post(path, BODY)
    assert status == 502
    parsed = json.loads(body)
    assert reads(parsed)
    assert f"127.0.0.1:{port}" in parsed["error"]["message"]
    assert "--upstream" in parsed["error"]["message"]


def test_an_answer_that_breaks_off_breaks_off_here_too(proxies: Make, raw: Raw) -> None:
    def script(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")

    proxy = proxies(raw(script).url, "tenuto")
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=20)
    connection.request("POST", CHAT, json.dumps(BODY))
    with pytest.raises(http.client.IncompleteRead):
        connection.getresponse().read()
    connection.close()


def test_a_body_too_big_to_read_passes_all_the_same(proxies: Make, raw: Raw) -> None:
    digests = []

    def script(connection: socket.socket, number: int) -> None:
        digests.append(hashlib.sha256(read_request(connection)[1]).hexdigest())
        connection.sendall(ok(b"{}"))

    body = json.dumps({**BODY, "pad": "p" * (proxy_server.READ_BODY_BYTES_MAX + 100_000)}).encode()
    proxy = proxies(raw(script).url, "tenuto")
    assert proxy.post(CHAT, body) == (200, b"{}")
    assert digests == [hashlib.sha256(body).hexdigest()]


def test_a_body_over_the_limit_is_refused(proxies: Make, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (proxy_ahead, proxy_server):
        monkeypatch.setattr(module, "BODY_BYTES_MAX", 1000)
    proxy = proxies(fake.url)
    status, body = proxy.post("/v1/messages", {**BODY, "pad": "p" * 1000})
    assert status == 413
    assert json.loads(body)["error"]["type"] == "request_too_large"
    assert fake.requests == []


def test_chunked_requests_and_expect(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    data = json.dumps({**BODY, "stream": False}).encode()
    with socket.create_connection(("127.0.0.1", proxy.server.port)) as client:
        client.settimeout(20)
        head = "Host: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\nConnection: close"
        client.sendall(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 100")
        for part in (data[:7], data[7:]):
            client.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        client.sendall(b"0\r\n\r\n")
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200")
    assert fake.requests[0].body == {**BODY, "stream": False}


def test_the_proxys_own_paths(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=20)

    def ask(method: str, path: str, **headers: str) -> tuple[int, bytes]:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    assert ask("HEAD", "/") == (200, b"")
    assert ask("GET", "/v1/responses", Upgrade="websocket")[0] == 426
    status, body = ask("GET", "/_tenuto/status")
    assert status == 200
    assert json.loads(body)["upstream"] == fake.url
    assert ask("GET", "/v1/models")[0] == 200  # everything else is the server's
    assert ask("GET", "/nowhere")[0] == 404
    assert [r.path for r in fake.requests] == []
    connection.close()
    assert proxy.post("/hook/Stop", b"no json") == (200, b"{}")


def test_runs_of_a_shared_proxy_are_told_apart_by_their_url(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    for run in ("one", "two", "one"):
        assert proxy.post(f"/run/{run}{CHAT}", BODY)[0] == 200
        proxy.settle()
    sessions = [r.headers["x-session-id"] for r in fake.chats]
    assert sessions[0] == sessions[2] != sessions[1]
    assert {r.path for r in fake.chats} == {CHAT}


def test_tenants_never_share_a_session(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    for key in ("a", "b", "a"):
        proxy.post(CHAT, BODY, {"authorization": f"Bearer {key}"})
        proxy.settle()
    sessions = [r.headers["x-session-id"] for r in fake.chats]
    assert sessions[0] == sessions[2] != sessions[1]


def test_an_agent_that_speaks_for_itself_is_not_spoken_for(proxies: Make, fake: FakeServer) -> None:
    """Tenuto's own SDK behind the proxy: each of its hints arrives once, and none is added."""
    proxy = proxies(fake.url)
    fake.reply("", ("bash", {"command": "make"}))
    with Client(proxy.url, api_key="k") as tn, tn.session("own", model="m") as session:
        turn = session.chat([{"role": "user", "content": "go"}])
        with session.pause("tool", turn.tool_calls[0]):
            time.sleep(0.15)
        session.chat([{"role": "user", "content": "go"}, turn.message, {"role": "user", "content": "and"}])
        assert tn.hints.flush(5.0)
    proxy.settle()
    fake.hints.wait_for("agent.end")
    assert fake.hints.types() == ["agent.session", "agent.pause", "agent.end"]
    assert not proxy.tracker.nodes


def test_an_upstream_behind_tls(
    proxies: Make, fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is checked against the names that the user trusts."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            try:
                with context.wrap_socket(connection, server_side=True) as secured:
                    read_request(secured)
                    secured.sendall(ok(b'{"secure": true}'))
            except OSError:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"https://localhost:{listener.getsockname()[1]}"
    status, body = proxies(url, "tenuto").post(CHAT, BODY)
    assert (status, b"certificate" in body.lower()) == (502, True)  # nobody vouches for it yet
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert proxies(url, "tenuto").post(CHAT, BODY) == (200, b'{"secure": true}')
    thread.join(20)
    listener.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.text("PGOST /HTP1.\r\n:xv", max_size=80).map(str.encode)))
def test_garbage_is_answered_or_dropped_and_nothing_breaks(proxies: Make, fake: FakeServer, data: bytes) -> None:
    proxy = getattr(test_garbage_is_answered_or_dropped_and_nothing_breaks, "proxy", None) or proxies(fake.url)
    test_garbage_is_answered_or_dropped_and_nothing_breaks.proxy = proxy  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", proxy.server.port)) as client:
        client.settimeout(20)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
    assert proxy.post(CHAT, {**BODY, "stream": False})[0] == 200


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["role", "content", "type", "text", "id", "function", "name"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(["messages", "input", "tools", "system", "metadata", "client_metadata", "model", "contents"]),
    st.sampled_from([CHAT, "/v1/messages", "/v1/responses", "/v1beta/models/m:generateContent"]),
)
def test_no_shape_of_a_body_stops_it(proxies: Make, value: Any, field: str, path: str) -> None:
    """Inference may understand nothing, but it fails nothing: the tracker counts no error."""
    from tenuto.proxy.commands import connector
    from tenuto.proxy.tracker import Tracker
    from tenuto.proxy.upstream import Upstream

    tracker = Tracker(connector(Upstream("http://127.0.0.1:9", "hosted")))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], field: value}
    ticket = tracker.open(path, {"x-session-id": "s"}, json.dumps(body).encode())
    assert ticket is not None
    tracker.study(ticket)
    tracker.answered(ticket, b"{}", streamed=False)
    tracker.open(path, {}, json.dumps(body).encode())
    assert tracker.errors == 0
    tracker.close()


def test_recorded_bodies_arrive_as_sent_but_for_the_attribution(proxies: Make, fake: FakeServer) -> None:
    proxy = proxies(fake.url)
    for folder in (
        "claude-code-2.1.332/fork_subagent",
        "qwen-code-0.24.4/tool_roundtrip",
        "codex-0.171.0/tool_roundtrip",
    ):
        for record in recorded(folder):
            assert proxy.post(record["path"], record["body"], headers_of(record))[0] == 200
            got, sent = fake.chats[-1].body, record["body"]
            if "claude" in folder:
                first, *rest = sent["system"]
                assert first["text"].startswith("x-anthropic-billing-header")
                sent = {**sent, "system": rest}
            assert got == sent
