"""A value of a wrong type in any place of a request: an answer, or a refusal that names that place and nothing else.

Every place of one rich request in each dialect is tried, one at a time, so that a new field is covered by standing in it.
"""

import copy
import json

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EPHEMERAL = {"type": "ephemeral", "ttl": "5m"}

MESSAGES = {
    "model": "toy",
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stop_sequences": ["zzz"],
    "stream": False,
    "system": [{"type": "text", "text": "s", "cache_control": EPHEMERAL}],
    "metadata": {"user_id": '{"session_id": "abc"}'},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "tools": [{"name": "get", "description": "d", "input_schema": SCHEMA, "cache_control": EPHEMERAL}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high", "format": {"type": "text"}},
    "cache_control": EPHEMERAL,
    "diagnostics": {"previous_message_id": "msg_x"},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}]},
        {"role": "system", "content": [{"type": "text", "text": "mid"}], "output_config": {"effort": "low"}},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "y"},
                {"type": "tool_use", "id": "toolu_1", "name": "get", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "go"},
            ],
        },
    ],
}
CHAT = {
    "model": "toy",
    "max_completion_tokens": 4,
    "max_tokens": 4,
    "seed": 1,
    "stop": ["zzz"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "n": 1,
    "metadata": {"k": "v"},
    "prompt_cache_key": "k",
    "session_id": "s",
    "cache_salt": "x",
    "parallel_tool_calls": True,
    "frequency_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "chat_template_kwargs": {"enable_thinking": True},
    "priority": 3,
    "keep_alive": "5m",
    "kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": []},
    "nvext": {
        "agent_hints": {"priority": 1, "osl": 4},
        "cache_control": EPHEMERAL,
        "session_control": {"action": "open", "session_id": "q"},
    },
    "prompt_cache_options": {"ttl": "30m", "mode": "implicit"},
    "prompt_cache_retention": "24h",
    "kv_transfer_params": {"kv_hints": None},
    "vllm_xargs": {"session_id": "s"},
    "session_params": {"id": "z"},
    "response_format": {"type": "text"},
    "tools": [
        {"type": "function", "function": {"name": "get", "description": "d", "parameters": SCHEMA}},
        {"type": "custom", "custom": {"name": "c", "description": "d", "format": {"type": "text"}}},
    ],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}},
                {"id": "call_2", "type": "custom", "custom": {"name": "c", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "r"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "r"},
    ],
}
RESPONSES = {
    "model": "toy",
    "max_output_tokens": 4,
    "stream": False,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "instructions": "i",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"verbosity": "low", "format": {"type": "text"}},
    "parallel_tool_calls": True,
    "prompt_cache_options": {"ttl": "30m", "comparison_response_id": "r"},
    "client_metadata": {"session_id": "s", "x-codex-turn-metadata": '{"request_kind": "turn"}'},
    "background": False,
    "tools": [
        {"type": "function", "name": "get", "description": "d", "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "start: x"}},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "auto"},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "r"}],
            "encrypted_content": "x",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"a": 1}', "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "o"},
        {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    ],
}
ROUTES = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/responses/compact": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
}
WRONG = (None, 5, True, "\ud800", [None], {"type": []})
FEW = (5, [None])  # for routes that read what another one reads
# What changes tokens: a wrong type there is refused, not guessed at.
REFUSED = {
    "/v1/messages": [
        "messages[2].content[0].thinking",
        "messages[2].content[3].name",
        "messages[2].content[3].input",
        "messages[3].content[0].tool_use_id",
        "messages[3].content[0].content",
        "tools[0].description",
        "tools[0].input_schema",
        "tool_choice.type",
        "output_config.format",
    ],
    "/v1/chat/completions": [
        "messages[2].tool_calls[0].function.arguments",
        "messages[2].tool_calls[1].custom.input",
        "messages[3].tool_call_id",
        "tools[0].function.description",
        "tools[1].custom.description",
        "tool_choice",
        "response_format.type",
    ],
    "/v1/responses": [
        "input[4].arguments",
        "input[5].call_id",
        "input[6].input",
        "tools[0].description",
        "tools[2].name",
        "tools[2].tools",
        "tool_choice.type",
        "text.format",
        "text.format.type",
    ],
}


def places(value, path=()):
    """The path of everything in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def replaced(body, path, value):
    body = json.loads(json.dumps(body))  # a copy that shares nothing
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = copy.copy(value)
    return body


def name(path):
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


@pytest.mark.parametrize("path", ROUTES)
def test_the_field_that_is_wrong_is_the_one_named(shared_site, path):
    shared_site.engine.per_step = 100
    body = ROUTES[path]
    status, _, answer = shared_site.request("POST", path, body)
    assert status == 200, answer
    guessed = set(REFUSED.get(path, ()))
    for place in places(body):
        where = name(place)
        for value in WRONG if path in REFUSED else FEW:
            status, _, answer = shared_site.request("POST", path, json.dumps(replaced(body, place, value)).encode())
            assert status in (200, 400, 404), (where, value, answer)
            if status == 200:
                continue
            error = answer["error"]
            said = error["message"].split(": ")[0]
            assert said.startswith(where) or where.startswith(said), (where, value, error)
            if "param" in error:
                assert error["param"] == said
            if value == 5:
                guessed.discard(where)
    assert guessed == set()
