"""Bad input to a real process: the OpenAI error shape, the field and the limit named, the right status; then it still serves,
and holds nothing. (Every single field is tried in ``tests/api``; here it is one of each kind, against the real engine.)"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def still_serves(plain: Any) -> Iterator[None]:
    """After every case: the same answer as ever, no turn forgotten, no block held."""
    before = plain.complete("The server is", 6)["text"]
    yield
    assert plain.complete("The server is", 6)["text"] == before
    plain.at_rest()
    assert plain.health()["status"] == "ok"


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error object of a refusal, whose form is checked."""
    got, headers, body = answer
    assert got == status, body
    assert headers["content-type"] == "application/json"
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert isinstance(error, dict)
    return error


BODIES: dict[str, tuple[str, Any, int, str | None, str | None, str]] = {
    # name: path, body, status, param, code, words of the message
    "unknown model": (
        CHAT,
        {"model": "no-such-model", "messages": HI},
        404,
        "model",
        "model_not_found",
        "no-such-model",
    ),
    "no model": (CHAT, {"messages": HI}, 400, "model", "missing_required_parameter", "model"),
    "no messages": (CHAT, {"model": "toy"}, 400, "messages", "missing_required_parameter", "messages"),
    "wrong type": (
        CHAT,
        {"model": "toy", "messages": HI, "max_tokens": "9"},
        400,
        "max_tokens",
        "invalid_value",
        "int",
    ),
    "out of range": (
        CHAT,
        {"model": "toy", "messages": HI, "temperature": 9},
        400,
        "temperature",
        "invalid_value",
        "2",
    ),
    "wrong role": (CHAT, {"model": "toy", "messages": [{"role": "king"}]}, 400, "messages[0].role", None, "assistant"),
    "too many stops": (CHAT, {"model": "toy", "messages": HI, "stop": list("abcde")}, 400, "stop", None, "4"),
    "not supported": (CHAT, {"model": "toy", "messages": HI, "n": 2}, 400, "n", "unsupported_value", "1"),
    "foreign token": (PLAIN, {"model": "toy", "prompt": [1, 512]}, 400, "prompt[1]", None, "511"),
    "empty prompt": (PLAIN, {"model": "toy", "prompt": ""}, 400, "prompt", None, "at least one"),
    "too long a prompt": (
        PLAIN,
        {"model": "toy", "prompt": [7] * 4096},
        400,
        "prompt",
        "context_length_exceeded",
        "4096",
    ),
    "too long a chat": (
        CHAT,
        {"model": "toy", "messages": [{"role": "user", "content": "x0" * 5000}]},
        400,
        "messages",
        "context_length_exceeded",
        "4096",
    ),
    "malformed": (CHAT, b'{"model": "toy", "messages": [', 400, "body", "invalid_json", "line 1"),
    "not an object": (CHAT, b"[1, 2]", 400, "body", None, "object"),
    "not UTF-8": (CHAT, b'{"model": "\xff"}', 400, "body", "invalid_json", "JSON"),
    "nested": (CHAT, b'{"model":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "body", "invalid_json", "nested"),
    "too large": (CHAT, b'{"model": "toy", "x": "' + b"x" * 70_000 + b'"}', 413, "body", "body_too_large", "65536"),
    "no envelope": ("/v1/kv_hints", {"actions": 5}, 400, "actions", "invalid_envelope", "actions"),
    "no such page": ("/v1/chat", {"model": "toy"}, 404, None, "unknown_url", "/v1/chat"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(plain: Any, name: str) -> None:
    path, body, status, param, code, words = BODIES[name]
    error = error_of(plain.request("POST", path, body), status)
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_stream_is_refused_like_anything_else(plain: Any) -> None:
    body = {"model": "toy", "messages": HI, "stream": True, "top_p": 7}
    assert error_of(plain.request("POST", CHAT, body), 400)["param"] == "top_p"
    body = {"model": "toy", "prompt": [7] * 5000, "stream": True}
    assert error_of(plain.request("POST", PLAIN, body), 400)["code"] == "context_length_exceeded"


def test_compressed_body_that_grows_beyond_the_limit(plain: Any) -> None:
    bomb = gzip.compress(json.dumps({"model": "toy", "messages": HI, "x": "x" * 10_000_000}).encode())
    assert len(bomb) < 64 * 1024
    error = error_of(plain.request("POST", CHAT, bomb, {"content-encoding": "gzip"}), 413)
    assert "65536" in error["message"]


def test_headers(plain: Any) -> None:
    """An oversized head, an overlong name of a session, and hints that are none."""
    body = {"model": "toy", "messages": HI, "max_tokens": 2}
    error = error_of(plain.request("POST", CHAT, body, {"x-filler": "x" * 20_000}), 431)
    assert "16384" in error["message"]
    error = error_of(plain.request("POST", CHAT, body, {"x-session-id": "s" * 300}), 400)
    assert (error["param"], error["code"]) == ("x-session-id", "invalid_header")
    assert "256" in error["message"]
    status, _, answer = plain.request("POST", CHAT, body, {"x-tenuto-hints": "!!!"})
    assert status == 200, "hints never fail a generation"
    assert answer["tenuto"]["receipts"][0]["outcome"] == "rejected"


def test_endless_head_and_no_http_at_all(plain: Any) -> None:
    answer = plain.raw(b"GET / HTTP/1.1\r\nx: " + b"x" * 200_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"error"' in answer
    assert plain.raw(b"\x16\x03\x01 this is no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_unknown_session(plain: Any) -> None:
    for method in ("GET", "DELETE"):
        error = error_of(plain.request(method, "/v1/sessions/nobody"), 404)
        assert (error["param"], error["code"]) == ("session", "session_not_found")
        assert "nobody" in error["message"]
    action = {"action_id": "1", "action_type": "agent.pause", "payload": {"session": "nobody", "kind": "tool"}}
    status, _, answer = plain.request("POST", "/v1/kv_hints", {"actions": [action]})
    assert (status, answer["receipts"][0]["outcome"]) == (200, "missing")


def test_what_the_openai_client_makes_of_it(plain: Any) -> None:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt=[7] * 5000)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_client_that_hangs_up(plain: Any, tools: Any) -> None:
    """Its turn ends and its blocks are free, though nobody said so."""
    cancelled = plain.figure("tenuto_turns", "cancelled")
    with plain.stream("Once upon a time", 3900) as pieces:
        next(pieces)
        tools.eventually(lambda: plain.figure("tenuto_turns_running") == 1, "the turn to be seen running")
    tools.eventually(lambda: plain.figure("tenuto_turns", "cancelled") == cancelled + 1, "the turn to be cancelled")
    plain.at_rest()
