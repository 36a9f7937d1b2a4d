"""Clients that stop in every phase of a request, over the real engine and cache: every block comes back.

The executor does no arithmetic and notices every wrong block; it takes its time over a step, so that each phase can be met.
"""

import json
import socket

import pytest

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

IDENTITY = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")
PATHS = ["/v1/messages", "/v1/responses", "/v1/chat/completions"]
CONTEXT = 3000


@pytest.fixture(scope="module")
def live(make_shared_site):
    executor = NullExecutor(vocab=512, tokens_low=40, step_s=0.004)
    config = EngineConfig(CacheConfig(220, 100), policy="tenuto", max_context_tokens=CONTEXT, step_tokens_max=64)
    site = make_shared_site(
        Engine(config, make_policy("tenuto"), IDENTITY), executor, context=CONTEXT, body_bytes_max=300_000
    )
    yield site
    assert executor.wrong == []


def body(path, text="hello " * 40, limit=400, **fields):
    if path == "/v1/responses":
        return {"model": "toy", "input": text, "max_output_tokens": limit, "store": False, **fields}
    return {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": limit, **fields}


def connect(site, path, data, length=None):
    raw = socket.create_connection(("127.0.0.1", site.port), timeout=20)
    site.sockets.append(raw)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data) if length is None else length}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return raw


def figure(site, name):
    lines = site.request("GET", "/metrics")[2].decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"tenuto_{name} "))


@pytest.mark.parametrize("path", PATHS)
def test_leaving_in_any_phase_gives_everything_back(live, wait, path):
    data = json.dumps(body(path, stream=True)).encode()
    connect(live, path, data[:20], len(data)).close()  # in the middle of its body
    connect(live, path, data).close()  # at once behind it
    waiting = [connect(live, path, json.dumps(body(path, f"{n} " * 300, 1500, stream=True)).encode()) for n in range(6)]
    wait(lambda: figure(live, "turns_running") >= 1)
    for raw in waiting[::2]:  # some run, some wait for their blocks
        raw.close()
    read = waiting[1]
    read.recv(64)
    read.close()  # in the middle of its answer
    for raw in waiting[3::2]:
        raw.shutdown(socket.SHUT_RDWR)
    live.settle()
    # The longest prompt there can be still fits: nothing is lost.
    assert live.request("POST", path, body(path, "again " * 380, 5))[0] == 200
    live.settle()


@pytest.mark.parametrize("path", PATHS)
def test_readers_that_only_say_that_they_will_not_write_any_more_are_no_leak(live, path):
    raw = connect(live, path, json.dumps(body(path, limit=20, stream=True)).encode())
    raw.shutdown(socket.SHUT_WR)
    while raw.recv(4096):
        pass  # the server may answer or take it for leaving; it ends either way
    live.settle()


@pytest.mark.parametrize("path", PATHS)
def test_a_reader_that_takes_nothing_holds_up_nobody(live, path):
    slow = connect(live, path, json.dumps(body(path, limit=1200, stream=True)).encode())
    assert live.request("POST", path, body(path, "quick", 3))[0] == 200
    slow.close()
    live.settle()


@pytest.mark.parametrize("path", PATHS)
def test_what_is_too_large_or_too_long_is_refused_in_the_dialects_shape(live, path):
    status, _, answer = live.request("POST", path, body(path, "x" * 400_000))
    assert (status, "300000 bytes" in answer["error"]["message"]) == (413, True)
    assert (answer.get("type") == "error") == (path == "/v1/messages")
    if path == "/v1/messages":
        assert answer["error"]["type"] == "request_too_large"
    status, _, answer = live.request("POST", path, body(path, "word " * 20_000))
    assert status == 400
    field = "input" if path == "/v1/responses" else "messages"
    told = answer["error"]
    assert told["message"].startswith("prompt is too long" if path == "/v1/messages" else f"{field}: ")
    live.settle()


def test_a_request_that_comes_byte_by_byte_is_answered(live):
    data = json.dumps(body(PATHS[2], "hi", 3)).encode()
    raw = connect(live, PATHS[2], b"", len(data))
    for at in range(0, len(data), 7):
        raw.sendall(data[at : at + 7])
    assert raw.recv(15).startswith(b"HTTP/1.1 200")
    live.settle()
