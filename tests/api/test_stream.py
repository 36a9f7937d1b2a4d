"""Streams on bare sockets: disconnects, slow readers, stop strings, admission, failures."""

import contextlib
import json
import logging
import socket
import struct
import time

import pytest

from tenuto_server.api.service import Patience
from tenuto_server.api.stream import event
from tenuto_server.engine.plan import TurnRejected


def read_until(raw: socket.socket, marker: bytes) -> bytes:
    data = b""
    while marker not in data:
        piece = raw.recv(4096)
        assert piece, f"connection ended before {marker!r}: {data[-300:]!r}"
        data += piece
    return data


def read_all(raw: socket.socket) -> bytes:
    data = b""
    while piece := raw.recv(65536):
        data += piece
    return data


def contents(data: bytes) -> str:
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c.get("choices"))


@pytest.fixture
def long_answer(site, tokenizer):
    site.engine.script = lambda turn: tokenizer.encode("word ") * 2000
    site.engine.step_s = 0.005
    return site


def test_headers_tell_what_is_known_at_admission(site):
    _, headers, _ = site.stream(headers={"x-session-id": "s é/1".encode().decode("latin-1")})
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-tenuto-cached-tokens"] == "5"
    assert (
        headers["x-tenuto-cached-device"],
        headers["x-tenuto-cached-host"],
        headers["x-tenuto-cached-disk"],
    ) == tuple("320")
    assert int(headers["x-tenuto-recomputed-cold"]) > 0
    assert headers["x-tenuto-session"].startswith("s %")


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_never_leak_and_end_the_turn(site, tokenizer, wait, stream):
    site.engine.script = lambda turn: tokenizer.encode("one two STOP three") + [5] * 200
    site.engine.step_s = 0.002
    if stream:
        _, _, events = site.stream(stop=["zzz", "o STOP t"])
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        finish, usage = events[-1]["choices"][0]["finish_reason"], None
    else:
        _, _, answer = site.chat(stop="o STOP t")
        text, finish = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        usage = answer["usage"]
    assert (text, finish) == ("one tw", "stop")
    wait(lambda: len(site.engine.stopped) == 1)
    kept = site.engine.stopped[0].keep_tokens
    assert "one tw".startswith(tokenizer.decode(tokenizer.encode("one two STOP three")[:kept]))
    assert usage is None or usage["completion_tokens"] == kept
    assert not site.engine.open


def test_disconnect_cancels_the_turn(long_answer, wait):
    raw = long_answer.open_stream()
    read_until(raw, b'"content":"o')
    assert len(long_answer.engine.open) == 1
    raw.close()
    wait(lambda: not long_answer.engine.open)
    assert long_answer.engine.cancelled == [long_answer.engine.turns[0].request_id]


def test_reset_while_queued_cancels_the_turn(site, wait):
    site.engine.admit_after_s = 60
    raw = site.open_stream()
    wait(lambda: len(site.engine.held) == 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
    raw.close()
    wait(lambda: len(site.engine.cancelled) == 1 and not site.engine.held)


def test_disconnect_during_a_whole_answer_cancels_it(long_answer, wait):
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}]})
    raw = socket.create_connection(("127.0.0.1", long_answer.port))
    raw.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    wait(lambda: len(long_answer.engine.open) == 1)
    raw.close()
    wait(lambda: len(long_answer.engine.cancelled) == 1 and not long_answer.engine.open)


def test_half_closed_socket_frees_the_turn(long_answer, wait):
    raw = long_answer.open_stream()
    read_until(raw, b'"content":"o')
    raw.shutdown(socket.SHUT_WR)
    wait(lambda: len(long_answer.engine.cancelled) == 1 and not long_answer.engine.open)
    read_all(raw)
    assert long_answer.chat("again", max_tokens=3)[0] == 200


def test_half_sent_request_leaves_nothing_behind(site, caplog):
    raw = socket.create_connection(("127.0.0.1", site.port))
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    raw.shutdown(socket.SHUT_WR)
    read_all(raw)
    raw.close()
    assert site.chat()[0] == 200
    assert len(site.engine.turns) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_slow_reader_delays_nobody_and_gets_everything(site, tokenizer, wait):
    text = "0123456789" * 200
    site.engine.script = lambda turn: tokenizer.encode(text)
    site.engine.per_step = 10
    slow = site.open_stream()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wait(lambda: site.engine.turns and not site.engine.open)  # the engine was not held up
    began = time.monotonic()
    assert site.chat()[2]["choices"][0]["message"]["content"] == text
    assert time.monotonic() - began < 5
    assert contents(read_until(slow, b"[DONE]")) == text


def test_a_reader_that_takes_nothing_is_cut_off(make_site, tokenizer, wait):
    site = make_site(patience=Patience(stall_s=0.3), context=1 << 20)
    site.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted sockets inherit it
    site.engine.script = lambda turn: tokenizer.encode("a") * 1_000_000
    site.engine.per_step, site.engine.step_s = 100, 0.001
    raw = site.open_stream(max_tokens=1_000_000)
    wait(lambda: len(site.engine.cancelled) == 1)
    assert not site.engine.open
    raw.setblocking(False)  # what was sent before the cut is all there is
    received = b""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while piece := raw.recv(65536):
            received += piece
    assert b"[DONE]" not in received


def test_refusals_keep_their_status_in_streams(site):
    site.engine.reject = TurnRejected("", "too_many_sessions", "tenant has 10 sessions, the limit")
    status, headers, body = site.stream()
    assert (status, body["error"]["code"]) == (429, "too_many_sessions")
    assert int(headers["retry-after"]) >= 1
    site.engine.reject = TurnRejected("", "too_long", "12 tokens exceed 10")
    status, _, body = site.chat()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


def test_a_stream_that_waits_long_starts_without_admission_and_is_kept_alive(make_site):
    site = make_site(patience=Patience(head_s=0.05, ping_s=0.05))
    site.engine.admit_after_s = 0.3
    raw = site.open_stream()
    data = read_until(raw, b"[DONE]")
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"x-tenuto-cached-tokens" not in head
    assert b": waiting" in body
    assert contents(data) == "hello world"


def test_a_refusal_after_the_headers_is_an_event(make_site):
    site = make_site(patience=Patience(head_s=0.05, ping_s=0.05))
    site.engine.admit_after_s = 0.3
    raw = site.open_stream()
    read_until(raw, b": waiting")
    site.engine.crash = True
    assert site.chat()[0] == 503
    data = read_until(raw, b"[DONE]")
    error = next(json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith('data: {"error"'))
    assert error["error"]["code"] == "engine_unavailable"


def test_full_inbox_is_429_with_retry_after(make_site):
    site = make_site(inbox_max=0)
    status, headers, body = site.chat()
    assert (status, body["error"]["code"]) == (429, "inbox_full")
    assert headers["retry-after"] == "1"


def test_dead_engine_is_503(make_site):
    site = make_site()
    site.engine.crash = True
    assert site.chat()[0] == 503
    status, headers, body = site.chat()
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert int(headers["retry-after"]) >= 1
    status, _, body = site.request("GET", "/health")
    assert (status, body["status"]) == (503, "dead")
    assert site.request("POST", "/v1/kv_hints", {"actions": [{"action_id": "1", "action_type": "agent.end"}]})[0] == 503
    assert site.request("GET", "/v1/sessions")[0] == 503


def test_tool_calls_in_the_answer_tell_the_engine_what_pause_begins(site, tokenizer, wait):
    call = 'ok\n<tool_call>\n{"name": "bash", "arguments": {"command": "pytest -q"}}\n</tool_call>'
    site.engine.script = lambda turn: tokenizer.encode(call)
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    site.chat(tools=tools, session_id="s1", max_tokens=500)
    wait(lambda: len(site.engine.pauses) == 1)
    pause = site.engine.pauses[0]
    assert (pause.tenant, pause.session, pause.kind) == ("default", "s1", "tool")
    assert (pause.tool, pause.program) == ("bash", "pytest")
    site.stream(tools=tools, session_id="s2", max_tokens=500)
    wait(lambda: len(site.engine.pauses) == 2)
    site.chat(session_id="s3", max_tokens=500)  # no tools given: the text means nothing
    site.chat(tools=tools, tool_choice="none", session_id="s4", max_tokens=500)
    site.request("GET", "/v1/sessions")  # the engine has seen everything before this was answered
    assert [(p.session, p.kind) for p in site.engine.pauses[2:]] == [("s3", "human"), ("s4", "human")]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_parts_are_framed_as_the_version_of_http_wants(site, tokenizer, version):
    site.engine.script = lambda turn: tokenizer.encode("grün 中文 ") * 20
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as raw:
        raw.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        said, _, rest = read_all(raw).partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in said.lower()) == (version == "1.1")
    if version == "1.1":
        data = b""
        while rest:  # RFC 9112, section 7.1
            size, _, rest = rest.partition(b"\r\n")
            data, end, rest = data + rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
            assert end == b"\r\n"
            assert int(size, 16) or not rest
        rest = data
    assert contents(rest) == "grün 中文 " * 20
    assert rest.endswith(b"data: [DONE]\n\n")


def test_an_event_with_half_a_surrogate_pair_is_written_all_the_same():
    assert event({"a": "x\ud83d"}) == b'data: {"a":"x?"}\n\n'
    assert event({"type": "t", "a": "é"}, named=True) == 'event: t\ndata: {"type":"t","a":"é"}\n\n'.encode()
