"""Hostile WebSockets on ``/v1/responses``, over the real engine and cache: every frame gets an event or the connection a close
code that says why, nobody else notices, and every block comes back."""

import base64
import json
import os
import socket
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto_server.api.service import Patience
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

sync = pytest.importorskip("websockets.sync.client")
exceptions = pytest.importorskip("websockets.exceptions")

IDENTITY = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")
CREATE = {"type": "response.create", "model": "toy", "input": "hi", "store": False, "max_output_tokens": 3}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
LIMIT = 200_000
TEXT, BINARY, PING = 1, 2, 9


def served(make, **settings):
    executor = NullExecutor(vocab=512, tokens_low=40, step_s=0.002)
    config = EngineConfig(CacheConfig(220, 100), policy="tenuto", max_context_tokens=3000, step_tokens_max=64)
    engine = Engine(config, make_policy("tenuto"), IDENTITY)
    return make(engine, executor, context=3000, body_bytes_max=LIMIT, **settings), executor


@pytest.fixture(scope="module")
def live(make_shared_site):
    site, executor = served(make_shared_site)
    yield site
    assert executor.wrong == []


def connect(site, **options):
    return sync.connect(f"ws://127.0.0.1:{site.port}/v1/responses", open_timeout=20, close_timeout=1, **options)


def ask(line, frame=None, **fields):
    """The last event of an answer."""
    line.send(json.dumps({**CREATE, **fields}) if frame is None else frame)
    return last(line)


def last(line):
    while (event := json.loads(line.recv(timeout=20)))["type"] not in LAST:
        pass
    return event


def settled(site):
    """All is given back, and the next client is served."""
    site.settle()
    with connect(site) as line:
        assert ask(line)["type"] in LAST[:2]


def handshaken(site, extensions=""):
    """A bare socket behind a handshake."""
    raw = socket.create_connection(("127.0.0.1", site.port), timeout=20)
    site.sockets.append(raw)
    key = base64.b64encode(os.urandom(16)).decode()
    raw.sendall(
        f"GET /v1/responses HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: {key}\r\n{extensions}\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += raw.recv(1)
    assert head.startswith(b"HTTP/1.1 101"), head
    return raw


def frame(opcode, data=b"", *, last=True, mask=True, reserved=0):
    """One frame as RFC 6455, section 5.2 has it, with a mask of zeros."""
    size = len(data)
    short = size if size < 126 else 126 if size < 1 << 16 else 127
    head = struct.pack("!BB", last << 7 | reserved << 4 | opcode, mask << 7 | short)
    head += {126: struct.pack("!H", size & 0xFFFF), 127: struct.pack("!Q", size)}.get(short, b"")
    return head + bytes(4 * mask) + data


def close_code(raw):
    """The code of the close frame with which the server ends; events before it are skipped."""
    while True:
        head = raw.recv(2, socket.MSG_WAITALL)
        assert len(head) == 2, "the connection ended without a close frame"
        size = head[1] & 127
        if size >= 126:
            size = int.from_bytes(raw.recv(2 if size == 126 else 8, socket.MSG_WAITALL))
        data = raw.recv(size, socket.MSG_WAITALL) if size else b""
        if head[0] & 15 == 8:
            return struct.unpack("!H", data[:2])[0]


def deflated(data):
    packer = zlib.compressobj(wbits=-12)
    return (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]


HUGE = b'{"input": "' + b"x" * LIMIT + b'"}'
BROKEN = {
    "text that is no UTF-8": (frame(TEXT, b"\xff\xfe{"), 1007),
    "a frame above the limit": (frame(TEXT, HUGE), 1009),
    "fragments above the limit": (frame(TEXT, HUGE[:-99], last=False) + frame(0, b"y" * 99), 1009),
    "a length of eight exabytes": (struct.pack("!BBQ", 0x81, 0xFF, 1 << 63) + bytes(4), 1009),
    "a frame that promises too much": (struct.pack("!BBQ", 0x81, 0xFF, 1 << 40) + bytes(4), 1009),
    "no mask": (frame(TEXT, b"{}", mask=False), 1002),
    "an opcode that does not exist": (frame(5, b"{}"), 1002),
    "reserved bits": (frame(TEXT, b"{}", reserved=2), 1002),
    "a ping that is too long": (frame(PING, b"x" * 126), 1002),
    "a continuation of nothing": (frame(0, b"{}"), 1002),
    "a new message inside another": (frame(TEXT, b"{", last=False) + frame(TEXT, b"}"), 1002),
    "a close frame with half a code": (frame(8, b"\x03"), 1002),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_frame_closes_the_connection_with_the_code_that_says_why(live, case):
    data, code = BROKEN[case]
    raw = handshaken(live)
    raw.sendall(data)
    assert close_code(raw) == code
    settled(live)


def test_a_broken_frame_in_mid_stream_ends_the_turn(live, wait):
    for data, code in (BROKEN["text that is no UTF-8"], BROKEN["no mask"]):
        raw = handshaken(live)
        raw.sendall(frame(TEXT, json.dumps({**CREATE, "max_output_tokens": 2000}).encode()))
        wait(lambda: live.engine.core.cache.tables)
        raw.sendall(data)
        assert close_code(raw) == code
        settled(live)


def test_a_compression_bomb_is_measured_unpacked(live):
    raw = handshaken(live, "sec-websocket-extensions: permessage-deflate\r\n")
    bomb = deflated(b" " * 50_000_000)
    assert len(bomb) < LIMIT
    raw.sendall(frame(TEXT, bomb, reserved=4))
    assert close_code(raw) == 1009
    settled(live)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=6), c, max_size=3),
    max_leaves=8,
)
FIELDS = [*CREATE, "instructions", "tools", "tool_choice", "previous_response_id", "generate", "metadata", "stream"]
FIELDS += ["client_metadata", "text", "reasoning", "prompt_cache_options", "kv_hints", "session_id", "temperature"]
changed = st.dictionaries(st.sampled_from(FIELDS), junk | st.sampled_from(["\ud800", "<|im_end|>", 1e308]), max_size=3)
frames = st.one_of(
    changed.map(lambda fields: json.dumps({**CREATE, **fields})),
    st.builds(lambda fields, cut: json.dumps({**CREATE, **fields})[:cut], changed, st.integers(0, 120)),
    junk.map(json.dumps),
    st.text(max_size=40),
    st.binary(max_size=40),
    changed.map(lambda fields: json.dumps({**CREATE, **fields}).encode()),
)


@pytest.fixture(scope="module")
def line(live):
    with connect(live) as opened:
        yield opened


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=frames)
def test_every_frame_gets_one_end_and_the_connection_lives(line, sent):
    event = ask(line, sent)
    if event["type"] == "error":
        assert event["status"] in (400, 404), event
        assert event["error"]["message"]
        assert set(event["error"]) == {"message", "type", "param", "code"}


def test_after_all_that_the_connection_serves(live, line):
    assert ask(line)["type"] in LAST[:2]
    settled(live)


@pytest.mark.parametrize("levels", [50, 900, 20_000])
def test_deep_nesting_is_answered_or_refused(line, levels):
    deep = json.dumps({**CREATE, "metadata": "@", "tools": ["@"]}).replace('"@"', "[" * levels + "]" * levels)
    event = ask(line, deep)
    assert event["type"] in LAST[:2] or event["status"] == 400
    assert ask(line)["type"] in LAST[:2]


def test_requests_wait_for_their_turn_and_one_too_many_is_refused(live):
    """Answers come one after the other, each whole before the next begins, in the order of their requests."""
    with connect(live) as line:
        for number in range(12):
            line.send(json.dumps({**CREATE, "metadata": {"number": str(number)}, "max_output_tokens": 60}))
        ends = [last(line) for _ in range(12)]
        refused = [event for event in ends if event["type"] == "error"]
        answered = [int(e["response"]["metadata"]["number"]) for e in ends if e["type"] != "error"]
        assert {(e["status"], e["error"]["code"]) for e in refused} == {(429, "too_many_requests_waiting")}
        assert answered == sorted(answered)
        assert answered[0] == 0
        assert len(answered) >= 5  # one that runs, four that wait
        assert ask(line)["type"] in LAST[:2]
    settled(live)


@pytest.mark.parametrize("way", ["closes", "resets", "says no more", "goes with a queue", "leaves half a frame"])
def test_a_client_that_goes_in_mid_stream_leaves_nothing(live, wait, way):
    raw = handshaken(live)
    request = frame(TEXT, json.dumps({**CREATE, "max_output_tokens": 2000}).encode())
    raw.sendall(request * (12 if way == "goes with a queue" else 1))
    wait(lambda: live.engine.core.cache.tables)
    if way == "closes":
        raw.sendall(frame(8, struct.pack("!H", 1000)))
        assert close_code(raw) == 1000
    elif way == "says no more":
        raw.shutdown(socket.SHUT_WR)
    elif way == "leaves half a frame":
        raw.sendall(request[:20])
        raw.shutdown(socket.SHUT_RDWR)
    else:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
        raw.close()
    settled(live)


def test_half_open_connections_hold_up_nobody(live):
    """They say half of a handshake, half of a frame, or half of a message, and then nothing."""
    silent = [handshaken(live) for _ in range(3)]
    silent[1].sendall(frame(TEXT, json.dumps(CREATE).encode())[:10])
    silent[2].sendall(frame(TEXT, b'{"type"', last=False) + frame(PING, b"here"))
    unmade = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    live.sockets.append(unmade)
    unmade.sendall(b"GET /v1/responses HTTP/1.1\r\nupgrade: websocket\r\n")
    settled(live)
    live.hang_up()
    settled(live)


def test_a_reader_that_takes_nothing_is_cut_off(make_site, wait):
    site, executor = served(make_site, patience=Patience(stall_s=0.3))
    site.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    raw = handshaken(site)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # Each answer repeats this three times: far more than lies in the buffers between.
    wide = {**CREATE, "metadata": {str(n): "x" * 500 for n in range(300)}, "max_output_tokens": 500}
    raw.sendall(frame(TEXT, json.dumps(wide).encode()) * 4)
    wait(lambda: site.engine.core.cache.tables)
    settled(site)
    assert executor.wrong == []


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["x-filler: " + "x" * 8000] * 5, 431),  # above what all headers may have together
        (["x-tenuto-hints: " + "x" * 8192], 431),  # one line above what a handshake takes
        ([f"x-{n}: y" for n in range(130)], 431),
        (["sec-websocket-version: 12"], 400),
        (["sec-websocket-key: short"], 400),
        (["x: \x01"], 400),
    ],
)
def test_a_handshake_that_cannot_be_is_answered(live, lines, status):
    raw = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    live.sockets.append(raw)
    given = "\r\n".join(lines)
    for name, value in (("version", "13"), ("key", "AAAAAAAAAAAAAAAAAAAAAA==")):
        given += f"\r\nsec-websocket-{name}: {value}" * (f"sec-websocket-{name}" not in given)
    raw.sendall(
        f"GET /v1/responses HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n{given}\r\n\r\n".encode()
    )
    answer = b""
    while piece := raw.recv(65536):
        answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    if status == 431:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_another_method_or_path_is_no_handshake(live):
    upgrade = {"upgrade": "websocket", "connection": "upgrade"}
    status, _, answer = live.request("POST", "/v1/responses", {**CREATE}, upgrade)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    with pytest.raises(exceptions.InvalidStatus) as told:
        sync.connect(f"ws://127.0.0.1:{live.port}/v1/nothing", open_timeout=20)
    assert told.value.response.status_code == 403


def test_an_error_of_the_servers_own_is_told_and_closes_with_1011(make_site, caplog):
    site, _ = served(make_site)
    site.service.traffic.arrive = None  # as a bug in it would be: the first request that gets so far fails
    with connect(site) as line:
        event = ask(line)
        assert (event["type"], event["status"], event["error"]["code"]) == ("error", 500, "internal_error")
        with pytest.raises(exceptions.ConnectionClosedError) as closed:
            line.recv(timeout=20)
    assert closed.value.rcvd.code == 1011
    assert "a request over a WebSocket failed" in caplog.text
