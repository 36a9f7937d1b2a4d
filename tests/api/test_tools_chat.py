"""Tools, reasoning and schemas in Chat Completions: the official client against a served scripted model."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import openai
import pydantic
import pytest

RULES = [
    {"role": "tool", "when": r"(?s)(.*)", "say": "Result: ${1}"},
    {"when": "look twice", "tool_call": [{"name": "bash", "arguments": {"command": c}} for c in ("ls", "pwd")]},
    {"when": r"run (?P<command>.+)", "say": "I run it.", "tool_call": {"name": "bash", "arguments": {"command": "${command}"}}},
    {"when": "patch it", "tool_call": [{"name": "patch", "arguments": {"input": "+x\n"}}, {"name": "bash", "arguments": {}}]},
    {"when": "think", "reasoning": "step by step", "say": "Thought."},
    {"when": "as JSON", "say": '{"city": "Rom", "people": 3}'},
    {"when": "markup", "say": 'Write <tool_call>{"name": "bash"'},
    {"when": "for ever", "say": "again ", "stop": "length"},
    {"say": "Nothing to do."},
]  # fmt: skip
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
TOOLS = [BASH, {"type": "function", "function": {"name": "done", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    """``tenuto serve --model scripted:FILE`` as a process of its own."""
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "script.json").write_text(json.dumps(RULES))
    arguments = [
        *("--model", f"scripted:{folder / 'script.json'}", "--port", "0", "--port-file", str(folder / "port")),
        *("--device-bytes", "32MiB", "--host-bytes", "16MiB"),
    ]
    code = f"import sys; from tenuto_server.commands import serve; sys.exit(serve({arguments!r}))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "port").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield int((folder / "port").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (folder / "log").read_text()
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(port) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ask(text: str, **more):
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}


def test_a_tool_round_trip_costs_only_what_is_new(client) -> None:
    body = ask("run git status", tools=TOOLS)
    answer = client.chat.completions.create(**body)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I run it.")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "bash",
        {"command": "git status"},
    )
    assert call.id.startswith("call_")
    messages = [*body["messages"], choice.message.model_dump(exclude_none=True)]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "clean"})
    after = client.chat.completions.create(**{**body, "messages": messages})
    assert (after.choices[0].finish_reason, after.choices[0].message.content) == ("stop", "Result: clean")
    had = answer.usage.prompt_tokens + answer.usage.completion_tokens
    # All but the last token of the answer (its KV was never needed) and the block it stands in.
    assert after.usage.prompt_tokens_details.cached_tokens >= had - 17


def test_streamed_calls(client) -> None:
    with client.chat.completions.stream(**ask("look twice", tools=TOOLS)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.content is None or final.message.content == ""
    assert [json.loads(call.function.arguments)["command"] for call in final.message.tool_calls] == ["ls", "pwd"]
    assert len({call.id for call in final.message.tool_calls}) == 2
    chunks = list(client.chat.completions.create(**ask("run ls", tools=TOOLS), stream=True))
    deltas = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "bash")
    assert all(d.id is None and d.function.name is None for d in deltas[1:])
    assert len(deltas) > 2
    assert "".join(d.function.arguments for d in deltas) == '{"command": "ls"}'
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "I run it."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"


def test_custom_tools_take_free_text(client) -> None:
    tools = [{"type": "custom", "custom": {"name": "patch", "description": "edits"}}, BASH]
    body = ask("patch it", tools=tools)
    message = client.chat.completions.create(**body).choices[0].message
    custom, function = message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "patch", "+x\n")
    assert (function.type, function.function.arguments) == ("function", "{}")
    back = [*body["messages"], message.model_dump(exclude_none=True)]
    back += [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
    after = client.chat.completions.create(**{**body, "messages": back})
    assert after.usage.prompt_tokens_details.cached_tokens > 0
    deltas = [
        call
        for chunk in client.chat.completions.create(**body, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert [(d.index, d.type) for d in deltas if d.id] == [(0, "custom"), (1, "function")]
    assert "".join(d.custom["input"] for d in deltas if d.index == 0) == "+x\n"


def test_parallel_calls_can_be_switched_off(client) -> None:
    answer = client.chat.completions.create(**ask("look twice", tools=TOOLS, parallel_tool_calls=False))
    assert len(answer.choices[0].message.tool_calls) == 1


def test_no_tools_no_calls(client) -> None:
    answer = client.chat.completions.create(**ask("run ls"))
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("Nothing to do.", None)
    offered = client.chat.completions.create(**ask("run ls", tools=TOOLS, tool_choice="none"))
    assert offered.choices[0].message.tool_calls is None
    assert offered.choices[0].finish_reason == "stop"
    assert (
        client.chat.completions.create(**ask("markup", tools=TOOLS))
        .choices[0]
        .message.content.endswith('{"name": "bash"')
    )


def test_reasoning_stands_beside_the_text(client) -> None:
    message = client.chat.completions.create(**ask("think", tools=TOOLS)).choices[0].message
    assert (message.reasoning_content, message.content) == ("step by step", "Thought.")


def test_the_limit_is_reported(client) -> None:
    answer = client.chat.completions.create(**ask("for ever", max_tokens=7))
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 7)
    cut = client.chat.completions.create(**ask("run ls", tools=TOOLS, max_tokens=25))
    assert cut.choices[0].finish_reason == "length"


def test_a_prompt_of_100k_tokens(client) -> None:
    messages = [{"role": "system", "content": "A line of code, number 12345.\n" * 10_000}, *ask("run ls")["messages"]]
    began = time.monotonic()
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    assert answer.usage.prompt_tokens > 100_000
    assert answer.choices[0].finish_reason == "tool_calls"
    assert time.monotonic() - began < 30
    again = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    assert again.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_wrong_fields_are_named(client, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask("hi"), extra_body=fields)
    assert refused.value.param == param


class City(pydantic.BaseModel):
    city: str
    people: int


def test_schemas_and_forced_tools_hold(client) -> None:
    pytest.importorskip("xgrammar", reason="the extra 'constrain' is not installed")
    parsed = client.chat.completions.parse(**ask("as JSON"), response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Rom", people=3)
    # The script would say something else: the grammar wins.
    other = client.chat.completions.parse(**ask("hi"), response_format=City, max_tokens=60)
    assert isinstance(other.choices[0].message.parsed, City)
    plain = client.chat.completions.create(**ask("as JSON"), response_format={"type": "json_object"})
    assert json.loads(plain.choices[0].message.content) == {"city": "Rom", "people": 3}
    named = {"type": "function", "function": {"name": "done"}}
    for text, choice, expected in (("look twice", "required", ["bash", "bash"]), ("run ls", named, ["done"])):
        answer = client.chat.completions.create(**ask(text, tools=TOOLS, tool_choice=choice, max_tokens=80)).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert [call.function.name for call in answer.message.tool_calls] == expected
        assert all(isinstance(json.loads(call.function.arguments), dict) for call in answer.message.tool_calls)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": 5}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ask("hi"), response_format=bad, stream=stream)
        assert refused.value.param == "response_format.json_schema.schema"
    broken = {"type": "function", "function": {"name": "x", "parameters": {"type": "object", "properties": 5}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask("hi", tools=[BASH, broken], tool_choice="required"))
    assert refused.value.param == "tools[1].function.parameters"


def post(port: int, path: str, body: dict) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_the_other_dialects_hold_their_answers_too(port) -> None:
    pytest.importorskip("xgrammar", reason="the extra 'constrain' is not installed")
    schema = BASH["function"]["parameters"]
    broken = {"type": "object", "properties": 5}
    ask = {"model": "scripted", "max_tokens": 80, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    tool = {"name": "bash", "input_schema": schema}
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "bash"}}
    status, answer = post(port, "/v1/messages", ask | forced)
    assert (status, answer["stop_reason"], answer["content"][-1]["name"]) == (200, "tool_use", "bash")
    assert isinstance(answer["content"][-1]["input"]["command"], str)
    status, answer = post(
        port, "/v1/messages", ask | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    )
    assert (status, list(json.loads(answer["content"][0]["text"]))) == (200, ["command"])
    status, answer = post(port, "/v1/messages", ask | forced | {"tools": [{"name": "bash", "input_schema": broken}]})
    assert (status, answer["error"]["message"].partition(":")[0]) == (400, "tools[0].input_schema")
    ask = {"model": "scripted", "max_output_tokens": 80, "input": "hi"}
    tool = {"type": "function", "name": "bash", "parameters": schema}
    status, answer = post(port, "/v1/responses", ask | {"tools": [tool], "tool_choice": "required"})
    assert (status, answer["output"][-1]["type"], answer["output"][-1]["name"]) == (200, "function_call", "bash")
    text = {"format": {"type": "json_schema", "name": "x", "schema": broken}}
    status, answer = post(port, "/v1/responses", ask | {"text": text})
    assert (status, answer["error"]["param"]) == (400, "text.format.schema")
