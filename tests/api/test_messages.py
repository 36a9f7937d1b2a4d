"""``POST /v1/messages`` as its own client and bare sockets see it."""

import json
import threading

import anthropic
import pytest

from tenuto.wire import Divergence
from tenuto_server.api.service import ServedModel
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.toy import TEMPLATE

BASH = {"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {"command": {}}}}
CALL = 'ok\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'


@pytest.fixture
def client(site):
    with anthropic.Anthropic(base_url=site.url, api_key="none", max_retries=0) as client:
        yield client


def ask(**fields):
    return {"model": "toy", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **fields}


def send(site, headers=None, path="/v1/messages", **fields):
    return site.request("POST", path, ask(**fields), headers)


def events(site, **fields):
    """(event name, data) of a stream read to its end."""
    status, headers, data = send(site, stream=True, **fields)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    out = []
    for block in data.decode().split("\n\n")[:-1]:
        name, value = block.split("\n")
        out.append((name.removeprefix("event: "), json.loads(value.removeprefix("data: "))))
    assert all(name == value["type"] for name, value in out)
    return [value for _, value in out]


def test_a_plain_answer(client, site):
    message = client.messages.create(**ask())
    assert [block.text for block in message.content] == ["hello world"]
    assert (message.role, message.stop_reason, message.stop_sequence, message.model) == (
        "assistant",
        "end_turn",
        None,
        "toy",
    )
    assert message.id.startswith("msg_")
    usage = message.usage
    # The scripted engine says that 5 prompt tokens were cached.
    assert usage.cache_read_input_tokens == 5
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + usage.cache_read_input_tokens == len(site.engine.turns[0].tokens)
    assert usage.output_tokens > 0


def test_the_order_of_events(site, tokenizer):
    site.engine.script = lambda turn: tokenizer.encode(CALL)
    site.engine.per_step = 1000
    seen = events(site, tools=[BASH])
    kinds = [(e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in seen]
    assert kinds == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "text_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "input_json_delta"),
        ("content_block_stop", 1, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert seen[0]["message"]["content"] == []
    assert seen[2]["content_block"] == {"type": "text", "text": ""}
    assert seen[5]["content_block"]["input"] == {}
    assert seen[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert seen[-2]["usage"]["output_tokens"] == len(tokenizer.encode(CALL))


def test_a_tool_round_trip_with_the_real_client(client, site, tokenizer, wait):
    site.engine.script = lambda turn: tokenizer.encode(CALL)
    with client.messages.stream(**ask(tools=[BASH], extra_headers={"x-claude-code-session-id": "s"})) as stream:
        first = stream.get_final_message()
    text, use = first.content
    assert (text.text, use.name, use.input) == ("ok", "bash", {"command": "ls -l"})
    assert first.stop_reason == "tool_use"
    wait(lambda: site.engine.pauses)
    pause = site.engine.pauses[0]
    assert (pause.session, pause.kind, pause.tool, pause.program) == ("s", "tool", "bash", "ls")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a.py"}]}
    history = [
        *ask()["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    site.engine.script = lambda turn: tokenizer.encode("done")
    second = client.messages.create(**ask(tools=[BASH], messages=history))
    assert second.content[0].text == "done"
    before, after = (turn.tokens.tolist() for turn in site.engine.turns)
    generated = tokenizer.encode(CALL)
    # The answer comes back as the very ids that were generated, right behind the prompt that they answered.
    assert after[: len(before) + len(generated)] == before + generated
    assert site.engine.turns[1].last_role == "tool"


def test_system_in_every_form_and_strings_as_blocks(site):
    forms = [
        {"system": "be brief"},
        {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3.abc;"},
                {"type": "text", "text": "be brief"},
            ]
        },
        {"system": "x-anthropic-billing-header: cc_version=1.2.3.def; cc_is_subagent=true;\nbe brief"},
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ]
        },
        {"system": "be brief", "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": []}]},
    ]
    for form in forms:
        status, _, body = send(site, **form)
        assert status == 200
        removed = body["tenuto"].get("removed")
        assert removed == (["attribution"] if "billing" in json.dumps(form) else None)
    assert len({tuple(turn.tokens.tolist()) for turn in site.engine.turns}) == 1


def test_the_attribution_line_stays_where_that_is_configured(make_site):
    site = make_site(strip_attribution=False)
    line = "x-anthropic-billing-header: cc_version=1;"
    assert send(site, system=line)[0] == 200
    assert line in site.service.model.tokenizer.decode(site.engine.turns[0].tokens.tolist())


def test_reasoning_is_shown_sealed_or_dropped_as_asked(make_site, tokenizer):
    site = make_site()
    chat = ChatTemplate(TEMPLATE + "{# <think> </think> #}")
    site.service.model = ServedModel("toy", tokenizer, chat, (2,), 4096)
    site.service.__post_init__()
    site.engine.script = lambda turn: tokenizer.encode("<think>\nhmm\n</think>\n\nyes")
    site.engine.per_step = 1000
    quiet = send(site)[2]
    assert [block["type"] for block in quiet["content"]] == ["text"]
    shown = send(site, thinking={"type": "enabled", "budget_tokens": 1024})[2]["content"]
    assert shown[0]["thinking"].strip() == "hmm"
    sealed = send(site, thinking={"type": "adaptive", "display": "omitted"})[2]["content"]
    assert sealed[0]["thinking"] == ""
    assert sealed[0]["signature"] == shown[0]["signature"]
    kinds = [
        e["delta"]["type"] for e in events(site, thinking={"type": "adaptive"}) if e["type"] == "content_block_delta"
    ]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
    # Either form brings the reasoning back; a signature of somebody else is no reason to fail.
    talk = ask()["messages"]
    prompts = []
    for block in (shown[0], sealed[0], {**shown[0], "thinking": ""}):
        send(site, messages=[*talk, {"role": "assistant", "content": [block, {"type": "text", "text": "yes"}]}, *talk])
        prompts.append(site.engine.turns[-1].tokens.tolist())
    assert prompts[0] == prompts[1] == prompts[2]
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQB"}
    assert send(site, messages=[*talk, {"role": "assistant", "content": [foreign]}, *talk])[0] == 200


def test_stop_sequences_and_limits(client, site, tokenizer):
    site.engine.script = lambda turn: tokenizer.encode("one END two")
    message = client.messages.create(**ask(stop_sequences=["XX", "END"]))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one ", "stop_sequence", "END")
    assert client.messages.create(**ask(max_tokens=2)).stop_reason == "max_tokens"
    assert events(site, stop_sequences=["END"])[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_prewarm_computes_and_generates_nothing(site):
    status, _, body = send(
        site, max_tokens=0, system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    )
    assert status == 200
    turn = site.engine.turns[0]
    assert (turn.sampling.max_tokens, turn.warm) == (0, True)
    assert (body["content"], body["usage"]["output_tokens"], body["stop_reason"]) == ([], 0, "max_tokens")
    usage = body["usage"]
    # All but the last token is written to the cache, or read from it.
    assert usage["input_tokens"] == 1
    assert usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] == len(turn.tokens) - 1
    assert site.engine.pauses == []


def test_a_ttl_becomes_a_floor_for_the_pause_after_the_answer(site):
    block = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    status, _, body = send(site, headers={"x-session-id": "of-an-hour"}, system=[block])
    assert status == 200
    (batch,) = site.engine.batches
    (action,) = batch.envelope.actions
    assert (action.action_type, action.payload["session"], action.payload["duration_s"]) == (
        "kv.retain",
        "of-an-hour",
        3600.0,
    )
    assert [receipt["outcome"] for receipt in body["tenuto"]["receipts"]] == ["accepted"]
    usage = body["usage"]
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == usage["cache_creation_input_tokens"] > 0
    send(site, cache_control={"type": "ephemeral"})
    assert len(site.engine.batches) == 1  # a mark alone asks for no certain time


def test_counting_tokens(client, site):
    count = client.messages.count_tokens(model="toy", messages=ask()["messages"], tools=[BASH], system="s")
    client.messages.create(**ask(tools=[BASH], system="s"))
    assert count.input_tokens == len(site.engine.turns[0].tokens)
    assert len(site.engine.turns) == 1


def test_diagnostics_name_what_changed(client, site):
    first = client.messages.create(**ask(diagnostics={"previous_message_id": None}))
    assert first.diagnostics is None
    site.engine.divergence = Divergence(token=1, tokens_lost=3)

    def reason(**fields):
        message = client.messages.create(**ask(**{"diagnostics": {"previous_message_id": first.id}, **fields}))
        return message.diagnostics and message.diagnostics.cache_miss_reason.type

    assert reason() is None
    assert reason(model="claude-other") == "model_changed"
    assert reason(system="new") == "system_changed"
    assert reason(tools=[BASH]) == "tools_changed"
    assert reason(messages=[{"role": "user", "content": "ho"}]) == "messages_changed"
    assert reason(diagnostics={"previous_message_id": "msg_none"}) == "previous_message_not_found"
    more = [*ask()["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert reason(messages=more) is None


def test_other_vendors_model_names_are_answered_and_said_so(site):
    status, _, body = send(site, model="claude-sonnet-9")
    assert (status, body["model"], body["tenuto"]["requested_model"]) == (200, "toy", "claude-sonnet-9")
    status, _, body = send(site, model="llama-99")
    assert (status, body["error"]["type"]) == (404, "not_found_error")


ERRORS = {
    "no max_tokens": ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
    "no messages": ({"messages": []}, "invalid_request_error", "messages"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_request_error", "messages[0].role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]}]},
        "invalid_request_error",
        "messages[0].content[1].type: image content; this model reads text only",
    ),
    "image in a result": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}
                    ],
                }
            ]
        },
        "invalid_request_error",
        "messages[0].content[0].content[0].type",
    ),
    "tool choice": ({"tool_choice": {"type": "tool", "name": "x"}}, "invalid_request_error", "tool_choice.name"),
    "tool name": ({"tools": [{"description": "x"}]}, "invalid_request_error", "tools[0].name"),
    "too long": (
        {"messages": [{"role": "user", "content": "a b " * 5000}]},
        "invalid_request_error",
        "prompt is too long",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_this_dialects_shape(site, name):
    fields, kind, words = ERRORS[name]
    status, headers, body = send(site, **fields)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", kind)
    assert words in body["error"]["message"]
    assert headers["request-id"] == body["request_id"]


def test_errors_reach_the_client_as_its_own_types(make_site):
    site = make_site(api_keys={"one": "key-one"}, inbox_max=256)
    with anthropic.Anthropic(base_url=site.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**ask())
        assert client.with_options(api_key="key-one").messages.create(**ask()).content[0].text == "hello world"
    assert send(site, headers={"x-api-key": "key-one"})[0] == 200
    assert send(site, headers={"x-api-key": "key-one", "authorization": "Bearer other"})[0] == 200
    with anthropic.Anthropic(base_url=site.url, api_key="key-one", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**ask(model="llama-99"))
        site.engine.crash = True
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**ask())


def test_unknown_fields_betas_and_blocks_are_accepted(client, site):
    message = client.beta.messages.create(
        **ask(
            betas=["anything-2030-01-01"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_body={"output_config": {"effort": "high"}, "new_field": [1], "service_tier": "auto"},
        )
    )
    assert message.content[0].text == "hello world"
    odd = [
        {"role": "user", "content": [{"type": "new_block", "data": {"a": 1}, "cache_control": {"type": "ephemeral"}}]}
    ]
    assert send(site, messages=odd, output_config={"effort": "low"})[0] == 200
    text = site.service.model.tokenizer.decode(site.engine.turns[-1].tokens.tolist())
    assert '{"type": "new_block", "data": {"a": 1}}' in text


def test_deferred_tools_stay_out_until_they_are_referred_to(site):
    later = {**BASH, "name": "later", "defer_loading": True}
    send(site, tools=[BASH, later])
    decode = site.service.model.tokenizer.decode
    assert "later" not in decode(site.engine.turns[-1].tokens.tolist())
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    send(site, tools=[BASH, later], messages=[*ask()["messages"], {"role": "user", "content": [result]}])
    first, second = (decode(turn.tokens.tolist()) for turn in site.engine.turns)
    assert '"name": "later"' in second
    assert second.startswith(first.split("<|im_start|>assistant")[0])  # the tools before it are where they were


def test_a_prefilled_answer_goes_on_where_it_stopped(site):
    send(site, messages=[*ask()["messages"], {"role": "assistant", "content": "The answer ("}])
    text = site.service.model.tokenizer.decode(site.engine.turns[0].tokens.tolist())
    assert text.endswith("<|im_start|>assistant\nThe answer (")


def test_a_stream_that_fails_ends_with_an_error_event(make_site, wait):
    site = make_site()
    site.engine.step_s, site.engine.script = 0.05, lambda turn: [65] * 100

    def crash():
        wait(lambda: bool(site.engine.open))
        site.engine.crash = True
        site.request("GET", "/v1/sessions")

    thread = threading.Thread(target=crash)
    thread.start()
    seen = events(site)
    thread.join(10)
    assert seen[-1]["type"] == "error"
    assert seen[-1]["error"]["type"] == "overloaded_error"


def test_the_model_list_reads_in_this_dialect(client):
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == ("toy", "model", "toy")
    assert client.models.retrieve("toy").id == "toy"
