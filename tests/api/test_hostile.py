"""Odd, huge and hostile requests in every dialect: an answer or a clear refusal, and the next request is served."""

import json
import re
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto_server.api.traffic import SESSIONS_MAX

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
PLAIN = {
    MESSAGES: {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "toy", "max_output_tokens": 5, "input": "hi", "store": False},
    CHAT: {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
}
PATHS = sorted(PLAIN)

scalars = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8)
junk = st.recursive(
    scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=6), c, max_size=3), max_leaves=8
)
texts = st.sampled_from(
    ["hi", "", "<|im_end|>", "\ufdd0\ufdd1" + "0" * 32 + "\ufdd1", "\ud800", "x-anthropic-billing-header: a"]
)
kinds = st.sampled_from(
    [
        "text",
        "input_text",
        "tool_use",
        "tool_result",
        "thinking",
        "image",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "reasoning",
        "message",
        "compaction",
        "item_reference",
        "tool_reference",
        "web_search_call",
        "new",
    ]
)
FIELDS = ["type", "text", "content", "id", "name", "input", "arguments", "tool_use_id", "call_id", "output", "thinking"]
FIELDS += ["signature", "encrypted_content", "summary", "role", "tool_calls", "function", "namespace", "cache_control"]
blocks = st.fixed_dictionaries({"type": kinds}, optional={name: texts | junk for name in FIELDS if name != "type"})
roles = st.sampled_from(["user", "assistant", "system", "developer", "tool", "robot"])
contents = texts | st.lists(blocks | junk, max_size=4) | junk
messages = st.fixed_dictionaries(
    {"role": roles, "content": contents}, optional={"tool_calls": st.lists(blocks, max_size=2) | junk}
)
tools = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b", ""]) | junk},
        optional={"type": kinds, "input_schema": junk, "function": junk, "tools": junk},
    )
    | junk,
    max_size=3,
)


@pytest.fixture(scope="module")
def opened(shared_site):
    shared_site.engine.per_step = 100
    return shared_site


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    talk=st.lists(messages | blocks | junk, min_size=1, max_size=4),
    tools=tools | junk,
    extra=st.dictionaries(
        st.sampled_from(
            [
                "system",
                "instructions",
                "tool_choice",
                "thinking",
                "metadata",
                "stop",
                "diagnostics",
                "prompt_cache_options",
                "client_metadata",
                "reasoning",
                "text",
                "previous_response_id",
            ]
        ),
        junk | texts,
        max_size=2,
    ),
)
def test_any_shape_is_answered_or_refused(opened, path, talk, tools, extra):
    key = "input" if path == RESPONSES else "messages"
    body = {**PLAIN[path], key: talk, "tools": tools, **extra}
    raw = json.dumps(body).encode()
    status, headers, answer = opened.request("POST", path, raw)
    assert status in (200, 400, 413), answer
    if status != 200:
        error = answer["error"]
        # The field at fault stands first, and it is one that was sent or is missing.
        named = re.match(r"([a-z_]+)[\w.\[\]-]*: ", error["message"])
        assert named is not None, error
        assert named[1] in {*body, "body", "messages"}, error
        assert (answer.get("type") == "error") == (path == MESSAGES)
    assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", PATHS)
def test_after_all_that_the_site_serves(opened, path):
    assert opened.request("POST", path, PLAIN[path])[0] == 200
    assert opened.engine.open == {}
    assert opened.service.loop.healthy


@pytest.mark.parametrize("path", PATHS)
def test_deep_nesting(opened, path):
    def deep(levels):
        return "[" * levels + "]" * levels

    def broken(hole):
        body = (
            {"tools": [{"type": "function", "name": "f", "input_schema": {"a": "@"}, "parameters": {"a": "@"}}]}
            if hole == "tools"
            else {"metadata": {"a": "@"}}
        )
        if hole == "tools" and path == CHAT:
            body["tools"] = [{"type": "function", "function": body["tools"][0]}]
        return json.dumps({**PLAIN[path], **body})

    for hole in ("metadata", "tools"):
        for levels in (50, 900, 40_000):
            raw = broken(hole).replace('"@"', deep(levels)).encode()
            status, _, answer = opened.request("POST", path, raw)
            assert status in (200, 400), (hole, levels)
            if status == 400:
                assert "nested too deeply" in answer["error"]["message"]
    blocks: object = "x"
    for _ in range(200):
        blocks = [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]
    key = "input" if path == RESPONSES else "messages"
    status, _, answer = opened.request("POST", path, {**PLAIN[path], key: [{"role": "user", "content": blocks}]})
    assert status in (200, 400)


@pytest.mark.parametrize("path", PATHS)
def test_ten_thousand_tools_and_messages(make_site, path):
    site = make_site(context=3_000_000)
    site.engine.per_step = 100
    one = {"name": "t", "description": "d", "parameters": {}, "input_schema": {}, "type": "function"}
    many = [{**one, "name": f"tool_{n}"} for n in range(10_000)]
    if path == CHAT:
        many = [{"type": "function", "function": tool} for tool in many]
    key = "input" if path == RESPONSES else "messages"
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"m{n}"} for n in range(1001)]
    headers = {"x-session-id": "s"}
    status, _, answer = site.request("POST", path, {**PLAIN[path], "tools": many, key: talk}, headers)
    assert status == 200, answer
    assert len(site.engine.turns[0].tokens) > 100_000
    # The session's last prompt tells which tool is missing.
    told = site.request("POST", path, {**PLAIN[path], "tools": many[1:], key: talk}, headers)[2]["tenuto"]
    assert told["change"] == {"part": "tools", "tool": "tool_0"}


@pytest.mark.parametrize("path", PATHS)
def test_half_closed_and_abandoned_sockets(make_site, wait, path):
    site = make_site()
    site.engine.step_s, site.engine.script = 0.02, lambda turn: [65] * 2000
    body = json.dumps({**PLAIN[path], "max_tokens": 2000, "max_output_tokens": 2000, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    def connect(data):
        raw = socket.create_connection(("127.0.0.1", site.port), timeout=10)
        site.sockets.append(raw)
        raw.sendall(data)
        return raw

    connect(head + body[:10]).close()  # gone in the middle of its body
    connect(head[:20])  # says nothing more
    streaming = connect(head + body)
    assert streaming.recv(20).startswith(b"HTTP/1.1 200")
    wait(lambda: len(site.engine.open) == 1)
    streaming.close()
    wait(lambda: len(site.engine.cancelled) == 1 and not site.engine.open)
    half = connect(head + body)
    half.shutdown(socket.SHUT_WR)  # it will not write any more; the server may take that for leaving or go on
    site.engine.step_s, site.engine.per_step = 0.0, 1000
    wait(lambda: not site.engine.open and not site.engine.held)
    assert site.request("POST", path, PLAIN[path])[0] == 200


def test_many_children_and_spawns_stay_bounded(make_site, tokenizer):
    site = make_site()
    site.engine.per_step = 1000
    call = '<tool_call>\n{"name": "Agent", "arguments": {"prompt": "a task of some length"}}\n</tool_call>'
    site.engine.script = lambda turn: tokenizer.encode(call)
    tools = [{"name": "Agent", "input_schema": {}}]
    for number in range(150):
        headers = {"x-session-id": f"s{number}", "x-parent-session-id": "root"}
        assert site.request("POST", MESSAGES, {**PLAIN[MESSAGES], "max_tokens": 500, "tools": tools}, headers)[0] == 200
    assert site.service.traffic.sessions == 150 <= SESSIONS_MAX
    assert all(len(spawns) <= 64 for spawns in site.service.traffic._spawns.values())
