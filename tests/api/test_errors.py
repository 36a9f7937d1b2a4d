"""Bad input: the right status, the OpenAI error shape, the field and the limit named, the server unharmed."""

import gzip
import json
import socket

import pytest
import zstandard

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def still_serves(shared_site):
    yield
    status, _, answer = shared_site.chat()
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello world")


def check(result, status, code, param, *words):
    got, headers, body = result
    assert got == status
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"].startswith("req_")
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    for word in words:
        assert str(word) in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_value", "messages"),
        ({"messages": None}, "invalid_value", "messages"),
        ({"messages": ["hi"]}, None, "messages[0]"),
        ({"messages": [{"role": "king", "content": "hi"}]}, None, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, None, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_value",
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, None, "messages[0].tool_calls[0].function.name"),
        ({"tools": [{"type": "function"}]}, None, "tools[0].function.name"),
        ({"tools": {}}, "invalid_value", "tools"),
        ({"model": 5}, "invalid_value", "model"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": True}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": -1}, "invalid_value", "max_completion_tokens"),
        ({"seed": 1.5}, "invalid_value", "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, None, "stop"),
        ({"stop": ""}, None, "stop"),
        ({"stop": ["x" * 1025]}, None, "stop"),
        ({"stop": 5}, "invalid_value", "stop"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream_options": 1}, "invalid_value", "stream_options"),
        ({"n": 2}, "unsupported_value", "n"),
        ({"logprobs": True}, "unsupported_value", "logprobs"),
        ({"top_logprobs": 2}, "unsupported_value", "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "unsupported_value", "logit_bias"),
        ({"presence_penalty": 0.5}, "unsupported_value", "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
        ({"tool_choice": "required"}, None, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, None, "chat_template_kwargs"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_wrong_fields_are_named(shared_site, fields, code, param):
    error = check(shared_site.chat(**fields), 400, code, param, param)
    assert error["type"] == "invalid_request_error"


def test_missing_fields(shared_site):
    check(shared_site.request("POST", CHAT, {"model": "toy"}), 400, "missing_required_parameter", "messages")
    check(shared_site.request("POST", CHAT, {"messages": []}), 400, "missing_required_parameter", "model")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt"),
        ([1, True], "prompt"),
        ([1, 512], "prompt[1]"),
        ([-1], "prompt[0]"),
        (5, "prompt"),
    ],
)
def test_prompts_that_are_none(shared_site, prompt, param):
    status, _, body = shared_site.request("POST", "/v1/completions", {"model": "toy", "prompt": prompt})
    assert (status, body["error"]["param"]) == (400, param)


def test_completion_fields_that_are_not_supported_are_named(shared_site):
    for field, value in (("echo", True), ("best_of", 2), ("suffix", "x"), ("logprobs", 1)):
        body = {"model": "toy", "prompt": "a", field: value}
        check(shared_site.request("POST", "/v1/completions", body), 400, "unsupported_value", field)


def test_unknown_and_harmless_fields_are_accepted(shared_site):
    status, _, _ = shared_site.chat(
        store=True,
        user="me",
        reasoning_effort="low",
        parallel_tool_calls=True,
        nvext={"agent_hints": {"priority": 5}},
        prompt_cache_retention="24h",
        tool_choice="auto",
        n=1,
        top_k=0,
        stop=None,
        stream=False,
        logprobs=False,
        metadata={"a": "b"},
        response_format={"type": "text"},
        whatever=[1, {"x": None}],
    )
    assert status == 200


def test_unknown_model(shared_site):
    check(shared_site.chat(model="llama-99"), 404, "model_not_found", "model", "llama-99", "toy")
    assert shared_site.chat(model="toy-alias")[0] == 200


def test_prompt_too_long_names_both_numbers(shared_site):
    status, _, told = shared_site.request("POST", "/tokenize", {"prompt": "ab " * 3000})
    assert status == 200
    result = shared_site.request("POST", "/v1/completions", {"model": "toy", "prompt": "ab " * 3000})
    check(result, 400, "context_length_exceeded", "prompt", told["count"], 4096)
    check(shared_site.chat("ab " * 3000), 400, "context_length_exceeded", "messages", 4096)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "malformed"),
        (b"", "malformed"),
        (b"[]", "array"),
        (b'"x"', "string"),
        (b"12", "number"),
        (b"null", "null"),
        (b"\xff\xfe\xfa", "malformed"),
        (b'{"model": "\xff"}', "malformed"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "malformed"),
        (b"[" * 50_000, "nested"),
        (b'{"model":"toy","messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested"),
    ],
)
def test_malformed_json(shared_site, body, word):
    check(shared_site.request("POST", CHAT, body), 400, "invalid_json", "body", word)


def test_nesting_that_parses_but_is_too_deep_for_a_template(shared_site):
    deep = {}
    for _ in range(900):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    status, _, body = shared_site.chat(tools=tools)
    assert status in (200, 400)
    assert status == 200 or body["error"]["type"] == "invalid_request_error"


def test_lone_surrogates_are_harmless(shared_site):
    raw = b'{"model":"toy","messages":[{"role":"user","content":"a\\ud800b"}],"session_id":"s\\udfff","cache_salt":"\\ud800"}'
    status, headers, body = shared_site.request("POST", CHAT, raw)
    assert (status, body["tenuto"]["session"], headers["x-tenuto-session"]) == (200, "s?", "s?")
    assert shared_site.engine.turns[-1].salt == "?"
    raw = b'{"model":"\\ud800","messages":[{"role":"user","content":"a"}]}'
    check(shared_site.request("POST", CHAT, raw), 404, "model_not_found", "model")


def test_oversized_body_is_413_even_while_it_is_still_being_sent(shared_site):
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    check(shared_site.request("POST", CHAT, body), 413, "body_too_large", "body", 200_000)


def raw_exchange(site, request: bytes) -> tuple[int, dict]:
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as raw:
        raw.sendall(request)
        data = b""
        while b"\r\n\r\n" not in data or not data.endswith(b"}"):
            piece = raw.recv(65536)
            if not piece:
                break
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_chunked_bodies_are_counted_as_they_come(shared_site):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    small = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}]}).encode()
    framed = b"".join(b"%x\r\n%s\r\n" % (1, small[i : i + 1]) for i in range(len(small))) + b"0\r\n\r\n"
    assert raw_exchange(shared_site, head + framed)[0] == 200
    big = b"".join(b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000) for _ in range(20)) + b"0\r\n\r\n"
    status, body = raw_exchange(shared_site, head + big)
    assert (status, body["error"]["code"]) == (413, "body_too_large")


def test_oversized_headers_are_431(shared_site):
    check(shared_site.chat(headers={"x-big": "y" * 17_000}), 431, "headers_too_large", "headers", 16_384)
    # So long that the HTTP parser gives up before there is a request at all.
    status, body = raw_exchange(shared_site, b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"y" * 70_000)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")


def test_what_is_not_http_is_answered_in_the_same_shape(shared_site):
    status, body = raw_exchange(shared_site, b"HELLO\r\n\r\n")
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_overlong_identity_header(shared_site):
    check(shared_site.chat(headers={"x-session-id": "s" * 257}), 400, "invalid_header", "x-session-id", 256)


def test_unknown_routes_and_methods(shared_site):
    check(shared_site.request("GET", "/v1/nothing"), 404, "unknown_url", None, "/v1/nothing")
    check(shared_site.request("GET", CHAT), 405, "method_not_allowed", None, "GET")


def test_compressed_bodies(shared_site):
    small = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"content-encoding": "gzip"}
    assert shared_site.request("POST", CHAT, gzip.compress(small), headers)[0] == 200
    bomb = gzip.compress(b"x" * 5_000_000)
    check(shared_site.request("POST", CHAT, bomb, headers), 413, "body_too_large", "body", 200_000)
    check(shared_site.request("POST", CHAT, small, headers), 400, "invalid_encoding", "body")
    check(shared_site.request("POST", CHAT, gzip.compress(small)[:-9], headers), 400, "invalid_encoding", "body")
    headers = {"content-encoding": "zstd"}
    assert shared_site.request("POST", CHAT, zstandard.compress(small), headers)[0] == 200
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 5_000_000)
    for bomb in (zstandard.compress(b"x" * 5_000_000), unsized):
        check(shared_site.request("POST", CHAT, bomb, headers), 413, "body_too_large", "body", 200_000)
    check(shared_site.request("POST", CHAT, small, headers), 400, "invalid_encoding", "body")
    check(shared_site.request("POST", CHAT, zstandard.compress(small)[:-5], headers), 400, "invalid_json", "body")
    error = shared_site.request("POST", CHAT, small, {"content-encoding": "br"})
    check(error, 415, "unsupported_encoding", "content-encoding", "br")


def test_tokenize_and_detokenize(shared_site, tokenizer):
    text = "<|im_start|>héllo €"
    _, _, told = shared_site.request("POST", "/tokenize", {"prompt": text})
    assert told == {"count": len(told["tokens"]), "max_model_len": 4096, "tokens": tokenizer.encode(text)}
    _, _, back = shared_site.request("POST", "/detokenize", {"tokens": told["tokens"]})
    assert back == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    _, _, chat = shared_site.request("POST", "/tokenize", {"messages": messages})
    assert chat["tokens"] == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    check(shared_site.request("POST", "/tokenize", {}), 400, None, "prompt")
    check(shared_site.request("POST", "/detokenize", {"tokens": [9999]}), 400, None, "tokens[0]")
    check(shared_site.request("POST", "/detokenize", {"tokens": ["a"]}), 400, "invalid_value", "tokens[0]")
    check(shared_site.request("POST", "/tokenize", {"prompt": "a", "model": "b"}), 404, "model_not_found", "model")
