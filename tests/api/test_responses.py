"""``/v1/responses`` as its own client and bare sockets see it."""

import json
import threading

import openai
import pytest

from tenuto_server.api.messages_request import seal
from tenuto_server.api.responses_store import ResponseStore

CALL = 'ok\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'
BASH = {"type": "function", "name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "description": "edit files", "format": {"type": "text"}}
GROUP = {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "spawn_agent", "parameters": {}}]}


@pytest.fixture
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(**fields):
    return {"model": "toy", "input": "hi", **fields}


def send(site, headers=None, path="/v1/responses", **fields):
    return site.request("POST", path, ask(**fields), headers)


def says(site, tokenizer, text):
    site.engine.script = lambda turn: tokenizer.encode(text)


def prompt_of(site, index=-1):
    return site.service.model.tokenizer.decode(site.engine.turns[index].tokens.tolist())


def events(site, **fields):
    """The events of a stream read to its end, in which each name equals its event's type."""
    status, _, data = send(site, stream=True, **fields)
    assert status == 200
    out = []
    for block in data.decode().split("\n\n")[:-1]:
        name, value = block.split("\n")
        out.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


def test_a_plain_answer(client, site):
    response = client.responses.create(**ask())
    assert response.output_text == "hello world"
    assert (response.status, response.model, response.error) == ("completed", "toy", None)
    assert response.id.startswith("resp_")
    usage = response.usage
    assert usage.input_tokens == len(site.engine.turns[0].tokens)
    assert usage.input_tokens_details.cached_tokens == 5  # as the scripted engine says
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_the_order_of_events(site, tokenizer):
    says(site, tokenizer, CALL)
    site.engine.per_step = 1000
    seen = events(site, tools=[BASH])
    assert [e["type"].removeprefix("response.") for e in seen] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [e["sequence_number"] for e in seen] == list(range(len(seen)))
    assert [e["output_index"] for e in seen if "output_index" in e] == [0] * 6 + [1] * 4
    final = seen[-1]["response"]
    text, call = final["output"]
    assert text["content"][0]["text"] == "ok"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "bash",
        {"command": "ls -l"},
    )
    assert len({text["id"], call["id"], call["call_id"]}) == 3
    assert seen[0]["response"]["status"] == "in_progress"
    assert final["usage"]["output_tokens"] == len(tokenizer.encode(CALL))


def test_a_tool_round_trip_with_the_real_client(client, site, tokenizer):
    says(site, tokenizer, CALL)
    with client.responses.stream(**ask(tools=[BASH])) as stream:
        first = stream.get_final_response()
    says(site, tokenizer, "done")
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
    said = [item.model_dump(exclude_none=True) for item in first.output]
    hello = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    second = client.responses.create(**ask(tools=[BASH], input=[hello, *said, result]))
    assert second.output_text == "done"
    before, after = (turn.tokens.tolist() for turn in site.engine.turns)
    generated = tokenizer.encode(CALL)
    assert after[: len(before) + len(generated)] == before + generated
    # The same through the server's own memory.
    third = client.responses.create(**ask(tools=[BASH], input=[result], previous_response_id=first.id))
    assert third.output_text == "done"
    assert site.engine.turns[2].tokens.tolist() == after


def test_previous_responses_belong_to_their_tenant_and_can_be_fetched_and_deleted(make_site):
    site = make_site(api_keys={"one": "k1", "two": "k2"})
    one, two = ({"authorization": f"Bearer k{n}"} for n in (1, 2))
    _, _, first = send(site, one)
    stored = site.request("GET", f"/v1/responses/{first['id']}", headers=one)[2]
    assert stored == first
    assert site.request("GET", f"/v1/responses/{first['id']}", headers=two)[0] == 404
    status, _, body = send(site, two, previous_response_id=first["id"])
    assert (status, body["error"]["param"]) == (400, "previous_response_id")
    assert body["error"]["code"] == "previous_response_not_found"
    listed = site.request("GET", f"/v1/responses/{first['id']}/input_items", headers=one)[2]
    assert [item["content"] for item in listed["data"]] == ["hi"]
    assert site.request("DELETE", f"/v1/responses/{first['id']}", headers=two)[0] == 404
    assert site.request("DELETE", f"/v1/responses/{first['id']}", headers=one)[2]["deleted"] is True
    assert send(site, one, previous_response_id=first["id"])[0] == 400


def test_what_is_not_to_be_stored_is_not(site):
    _, _, first = send(site, store=False)
    assert first["store"] is False
    assert site.request("GET", f"/v1/responses/{first['id']}")[0] == 404


def test_a_response_that_goes_on_counts_what_it_holds():
    """Counting looks at what is new alone; the sum is what a whole count gives, a bracket or two aside."""
    items, step = tuple({"type": "message", "content": "x" * n} for n in (10, 20, 30, 40)), 2
    chained, alone = ResponseStore(10**6), ResponseStore(10**6)
    chained.put("t", {"id": "a"}, items[:step], 1)
    for store in (chained, alone):
        store.put("t", {"id": "b", "previous_response_id": "a"}, items, 1)
    before = chained.get("t", "a").size
    assert abs(chained.bytes - before - alone.bytes) <= 2
    # A conversation that is not the one before it is counted whole.
    other = tuple(dict(item) for item in items)
    chained.put("t", {"id": "c", "previous_response_id": "b"}, other, 1)
    assert chained.get("t", "c").items_bytes == alone.get("t", "b").items_bytes


def test_the_store_is_bounded_in_bytes(make_site):
    site = make_site(stored_responses_bytes=20_000)
    ids = [send(site, input=f"{number} " + "x" * 500)[2]["id"] for number in range(30)]
    store = site.service.responses
    assert 0 < store.bytes <= 20_000
    assert site.request("GET", f"/v1/responses/{ids[0]}")[0] == 404
    assert site.request("GET", f"/v1/responses/{ids[-1]}")[0] == 200
    for response_id in ids:
        site.request("DELETE", f"/v1/responses/{response_id}")
    assert store.bytes == 0


def test_instructions_are_the_system_message_and_are_not_inherited(site):
    _, _, first = send(site, instructions="be brief")
    assert prompt_of(site).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    send(site, previous_response_id=first["id"], input="more")
    assert prompt_of(site).startswith("<|im_start|>user\nhi")
    developer = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    send(site, input=developer)
    assert site.engine.turns[-1].tokens.tolist() == site.engine.turns[0].tokens.tolist()


def test_custom_and_namespace_tools(site, tokenizer):
    written = json.dumps({"name": "patch", "arguments": {"input": "*** Begin\n+x"}})
    says(site, tokenizer, f"<tool_call>\n{written}\n</tool_call>")
    _, _, body = send(site, tools=[PATCH])
    (item,) = body["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin\n+x")
    kinds = [e["type"].removeprefix("response.") for e in events(site, tools=[PATCH])]
    assert kinds[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    hello = {"role": "user", "content": "hi"}
    assert send(site, tools=[PATCH], input=[hello, item, result])[0] == 200
    generated = site.engine.turns[0].tokens.tolist() + tokenizer.encode(f"<tool_call>\n{written}\n</tool_call>")
    assert site.engine.turns[-1].tokens.tolist()[: len(generated)] == generated


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_limit_cuts_off_is_incomplete_and_never_markup(site, tokenizer, stream):
    """A patch that is half there must not look like a whole one."""
    given = 'a "b"\\ \n\u00e9\U0001f600 end'
    written = json.dumps({"name": "patch", "arguments": {"input": given}})
    written = f"<tool_call>\n{written}\n</tool_call>"
    count = len(tokenizer.encode(written))
    says(site, tokenizer, written)
    inputs = set()
    for limit in range(1, count):
        fields = {"tools": [PATCH], "max_output_tokens": limit}
        if stream:
            seen = events(site, **fields)
            body = seen[-1]["response"]
            assert [e["item"] for e in seen if e["type"] == "response.output_item.done"] == body["output"]
        else:
            _, _, body = send(site, **fields)
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        for item in body["output"]:
            if item["type"] == "custom_tool_call":
                assert given.startswith(item["input"])
                assert item["status"] == "incomplete" or item["input"] == given
                inputs.add(item["input"])
            else:
                assert item["status"] == "incomplete"
                assert "<tool_call>".startswith(item["content"][0]["text"].strip())
    assert {"", given} < inputs


def test_tools_in_a_namespace(site, tokenizer):
    says(site, tokenizer, '<tool_call>\n{"name": "team__spawn_agent", "arguments": {"message": "go"}}\n</tool_call>')
    _, _, body = send(site, tools=[GROUP], input="start")
    (item,) = body["output"]
    assert (item["name"], item["namespace"]) == ("spawn_agent", "team")
    send(site, tools=[GROUP], input=[{"role": "user", "content": "start"}, item])
    assert '"team__spawn_agent"' in prompt_of(site)


def test_hosted_tools_are_left_out_and_their_items_kept_as_text(site):
    tools = [BASH, {"type": "web_search"}, {"type": "tool_search", "execution": "client"}]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
        {
            "type": "agent_message",
            "id": "amsg_1",
            "author": "/root",
            "content": [{"type": "input_text", "text": "go on"}],
        },
    ]
    assert send(site, tools=tools, input=items)[0] == 200
    text = prompt_of(site)
    assert "tool_search" not in text
    assert '{"type": "web_search_call", "action": {"query": "x"}}' in text
    assert "user\ngo on" in text
    assert "amsg_1" not in text


def test_reasoning_comes_back_from_text_summary_or_seal(site):
    hello = {"role": "user", "content": "hi"}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
    forms = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": seal("hmm")},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hmm"}], "encrypted_content": "gAAAA"},
    ]
    for form in forms:
        assert send(site, input=[hello, form, answer, hello])[0] == 200
    assert len({tuple(turn.tokens.tolist()) for turn in site.engine.turns}) == 1
    assert send(site, input=[hello, {"type": "reasoning", "encrypted_content": "!!"}, answer, hello])[0] == 200


def test_compaction_is_a_continuation_and_its_result_can_be_sent_back(client, site, tokenizer):
    items = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "do it"}]
    client.responses.create(**ask(input=items))
    says(site, tokenizer, "they asked to do it")
    raw = client.responses.with_raw_response.compact(model="toy", input=items)
    compacted = raw.parse()
    assert (compacted.object, [item.type for item in compacted.output]) == (
        "response.compaction",
        ["message", "compaction"],
    )
    before, asked = (prompt_of(site, index) for index in (0, 1))
    assert asked.startswith(before.removesuffix("<|im_start|>assistant\n"))  # the same prompt, and a request behind it
    says(site, tokenizer, "on it")
    window = json.loads(raw.text)["output"]
    client.responses.create(**ask(input=[*window, {"role": "user", "content": "go on"}]))
    assert "Summary of the conversation so far:\nthey asked to do it" in prompt_of(site)
    assert "do it<|im_end|>\n<|im_start|>user\ngo on" in prompt_of(site)


def test_prewarm_generates_nothing(site):
    for fields in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}}):
        _, _, body = send(site, **fields)
        assert (body["output"], body["usage"]["output_tokens"]) == ([], 0)
        assert site.engine.turns[-1].warm
        assert send(site, previous_response_id=body["id"], input="more")[0] == 200
        assert "user\nhi<|im_end|>\n<|im_start|>user\nmore" in prompt_of(site)


def test_diagnostics(client):
    first = client.responses.create(**ask(instructions="a"))

    def told(**fields):
        options = {"comparison_response_id": fields.pop("compare", first.id)}
        return client.responses.create(**ask(**{"instructions": "a", **fields}), prompt_cache_options=options)

    assert told().prompt_cache_diagnostics.type == "cache_hit"
    assert told(tools=[BASH]).prompt_cache_diagnostics.reason == "tools_changed"
    assert told(input="ho").prompt_cache_diagnostics.reason == "input_changed"
    assert told(model="gpt-9").prompt_cache_diagnostics.reason == "model_changed"
    assert told(compare="resp_none").prompt_cache_diagnostics.type == "comparison_response_not_found"
    assert first.prompt_cache_diagnostics is None


def test_limits(site, client, tokenizer):
    says(site, tokenizer, "one two three")
    response = client.responses.create(**ask(max_output_tokens=2))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events(site, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_counting(site):
    count = send(site, path="/v1/responses/input_tokens")[2]["input_tokens"]
    send(site)
    assert count == len(site.engine.turns[0].tokens)


def test_without_a_websocket_library_clients_are_sent_back_to_plain_http(make_site):
    site = make_site(ws="none")
    headers = {"upgrade": "websocket", "connection": "upgrade"}
    status, headers, body = site.request("GET", "/v1/responses", headers=headers)
    assert (status, body["error"]["code"]) == (426, "websocket_not_supported")
    assert "upgrade" in headers
    assert site.request("GET", "/v1/responses")[0] == 405


ERRORS = {
    "nothing": ({"input": None}, "input", "missing"),
    "empty": ({"input": []}, "input", "no message"),
    "item": ({"input": [7]}, "input[0]", "expected an object"),
    "role": ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "expected user"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input[0].content[0].type",
        "this model reads text only",
    ),
    "tool": ({"tools": [{"type": "function"}]}, "tools[0].name", "expected a string"),
    "tool type": ({"tools": [{"name": "x"}]}, "tools[0].type", "expected a string"),
    "choice": ({"tools": [BASH], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among"),
    "format": ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "json_schema"),
    "no format": ({"text": {"format": "json"}}, "text.format", "an object"),
    "background": ({"background": True}, "background", "waited for"),
    "unknown response": ({"previous_response_id": "resp_x"}, "previous_response_id", "resp_x"),
    "too long": ({"input": "a b " * 5000}, "input", "4096"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_field(site, name):
    fields, param, words = ERRORS[name]
    status, _, body = send(site, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert words in body["error"]["message"]


def test_a_failed_stream_says_so(make_site, wait):
    site = make_site()
    site.engine.step_s, site.engine.script = 0.05, lambda turn: [65] * 100

    def crash():
        wait(lambda: bool(site.engine.open))
        site.engine.crash = True
        site.request("GET", "/v1/sessions")

    thread = threading.Thread(target=crash)
    thread.start()
    last = events(site)[-1]
    thread.join(10)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_unavailable"
