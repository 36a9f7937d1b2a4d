"""Answers as other servers send them: partial, odd or broken; and the event-stream decoder under any chunking."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenuto
from tenuto.answers import dialect_of, read_ending
from tenuto.sse import SSEDecoder, parse_chunk
from tenuto.turn import TurnBuilder, turn_from_completion


def test_other_servers_leave_much_out() -> None:
    for body in ({}, {"choices": []}, {"choices": [{}]}, {"usage": None, "choices": None, "tenuto": {"cached": 7}}):
        turn = turn_from_completion(body, duration_s=1.0)
        assert (turn.text, turn.tool_calls, turn.usage.prompt_tokens, turn.ttft_s) == ("", (), 0, None)
        assert turn.usage.report is None
        assert turn.usage.lease is None
        assert turn.usage.misses == ()


def test_cached_tokens_of_a_plain_openai_server() -> None:
    body = {"usage": {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}}
    usage = turn_from_completion(body, duration_s=1.0).usage
    assert (usage.cached_tokens, usage.by_tier["recompute"]) == (64, 36)


def test_report_of_the_server() -> None:
    report = {
        "session": "s",
        "prompt_tokens": 100,
        "cached": {"device": 30, "host": 20, "disk": 10},
        "recomputed": {"cold": 10, "retention": 5, "capacity": 25},
        "lease": {"until_s": 9.0, "tier": "host", "tokens": 64},
        "ttft_s": 0.5,
        "from_the_future": True,
    }
    for body in ({"tenuto": report}, {"usage": {"tenuto": report}}):
        usage_body = {"prompt_tokens": 100, **body.get("usage", {})}
        turn = turn_from_completion({**body, "usage": usage_body}, duration_s=1.0)
        assert turn.usage.cached_tokens == 60
        assert turn.usage.by_tier == {"device": 30, "host": 20, "disk": 10, "recompute": 40}
        assert [(m.label, m.tokens, m.where) for m in turn.usage.misses] == [
            ("capacity", 25, None),
            ("retention", 5, None),
        ]
        assert turn.usage.lease is not None
        assert turn.usage.lease.tier == "host"
        assert turn.ttft_s == 0.5


@pytest.mark.parametrize("raw", ["", "{broken", "[1, 2]", '"text"', "null"])
def test_tool_arguments_that_are_no_object(raw: str) -> None:
    call = {"id": "c", "function": {"name": "bash", "arguments": raw}}
    turn = turn_from_completion({"choices": [{"message": {"tool_calls": [call]}}]}, duration_s=0.0)
    assert turn.tool_calls == (tenuto.ToolCall("c", "bash", {}, raw),)


def test_builder_collects_reasoning_and_keeps_order_of_calls() -> None:
    builder = TurnBuilder()
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hmm "},
        {"reasoning_content": "so"},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "two", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "one"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": 1}'}}]},
    ]
    for delta in deltas:
        builder.feed({"choices": [{"delta": delta}]})
    builder.feed({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "tenuto": {"session": "s"}})
    turn = builder.build(ttft_s=0.1, duration_s=0.2)
    assert turn.message["reasoning_content"] == "hmm so"
    assert turn.message["content"] is None
    assert [(c.name, c.arguments) for c in turn.tool_calls] == [("one", {"x": 1}), ("two", {})]
    assert turn.usage.report is not None


@given(
    st.lists(st.text(min_size=1).map(lambda t: json.dumps({"t": t}, ensure_ascii=False)), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.integers(1, 7),
)
def test_decoder_under_any_chunking(texts: list[str], newline: str, size: int) -> None:
    stream = "".join(f": comment{newline}event: x{newline}data: {t}{newline}{newline}" for t in texts)
    data = stream.encode("utf-8", "replace") + newline.encode()
    decoder = SSEDecoder()
    events = [e for i in range(0, len(data), size) for e in decoder.feed(data[i : i + size])]
    assert events == [t.encode("utf-8", "replace").decode() for t in texts]


def test_decoder_joins_lines_of_one_event() -> None:
    assert SSEDecoder().feed(b"data: one\ndata:two\n\ndata: [DONE]\n\n") == ["one\ntwo", "[DONE]"]


def test_error_events() -> None:
    with pytest.raises(tenuto.APIError, match="ended the stream with an error: too busy"):
        parse_chunk('{"error": {"message": "too busy"}}')
    with pytest.raises(tenuto.APIError, match="error: text"):
        parse_chunk('{"error": "text"}')
    for broken in ("{", "[]", "7"):
        with pytest.raises(tenuto.APIConnectionError):
            parse_chunk(broken)


def sse(*events: Any) -> bytes:
    return "".join(f"data: {json.dumps(e)}\n\n" for e in events).encode()


MESSAGES_STREAM = [
    {"type": "message_start", "message": {}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Looking"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "Bash", "input": {}}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"comm'}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": 'and": "ls"}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {}},
]
RESPONSE = {"output": [{"type": "message"}, {"type": "function_call", "name": "shell", "arguments": '{"cmd": "ls"}'}]}


@pytest.mark.parametrize(
    ("dialect", "data", "streamed", "calls"),
    [
        ("messages", sse(*MESSAGES_STREAM), True, (("Bash", {"command": "ls"}),)),
        ("messages", sse(*MESSAGES_STREAM[:-1]), True, None),
        (
            "messages",
            json.dumps(
                {"stop_reason": "tool_use", "content": [{"type": "tool_use", "name": "Read", "input": {"p": 1}}]}
            ).encode(),
            False,
            (("Read", {"p": 1}),),
        ),
        ("messages", b'{"type": "error"}', False, None),
        ("responses", sse({"type": "response.completed", "response": RESPONSE}), True, (("shell", {"cmd": "ls"}),)),
        ("responses", sse({"type": "response.created", "response": {"output": None}}), True, None),
        ("responses", json.dumps(RESPONSE).encode(), False, (("shell", {"cmd": "ls"}),)),
        ("chat", sse({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}), True, ()),
        ("chat", sse({"choices": [{"delta": {"content": "x"}}]}), True, None),
        ("chat", b'{"choices": []}', False, None),
        ("chat", b'{"choices": [{"message": {"tool_calls": [{"function": {"name": "a"}}]}}]}', False, (("a", {}),)),
    ],
)
def test_endings(dialect: str, data: bytes, streamed: bool, calls: Any) -> None:
    ending = read_ending(dialect, data, streamed=streamed)
    assert (ending.calls if ending is not None else None) == calls


def test_dialects_and_prompts() -> None:
    assert [
        dialect_of(p) for p in ("/v1/chat/completions", "/v1/messages?beta=true", "/v1/responses/", "/v1/models")
    ] == [
        "chat",
        "messages",
        "responses",
        None,
    ]
