"""The dialects over the real engine and cache, with the executor that does no arithmetic but notices every wrong block."""

import pytest

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

IDENTITY = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")
BLOCK = 16
TOOLS = [{"name": "bash", "input_schema": {"type": "object"}}]


@pytest.fixture
def live(make_site):
    """Sampled ids are single bytes and pieces of the toy vocabulary: rarely what an encoder would choose."""
    executor = NullExecutor(vocab=512, tokens_low=40)
    config = EngineConfig(CacheConfig(400, 400), policy="tenuto", max_context_tokens=5000, block_bytes=4096)
    site = make_site(Engine(config, make_policy("tenuto"), IDENTITY), executor, context=5000)
    yield site
    assert executor.wrong == []


def message(site, talk, session="s", **fields):
    body = {"model": "toy", "max_tokens": 40, "messages": talk, "tools": TOOLS, "temperature": 0, **fields}
    status, _, answer = site.request("POST", "/v1/messages", body, {"x-session-id": session} if session else {})
    assert status == 200, answer
    return answer


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("session", ["s", None])
def test_answers_that_come_back_never_break_the_prefix(live, session):
    talk, cached_before = [user("hello " * 30)], 0
    for step in range(4):
        answer = message(live, talk, session)
        usage, told = answer["usage"], answer["tenuto"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        # All that is new is this step's own text; an answer that was encoded anew would have been a mutation.
        assert usage["cache_read_input_tokens"] >= cached_before - BLOCK
        assert "divergence" not in told
        assert "mutation" not in told["recomputed"]
        cached_before = prompt + usage["output_tokens"] - 1
        talk += [{"role": "assistant", "content": answer["content"]}, user(f"step {step}")]
    assert step == 3


def test_a_changed_message_is_told_in_the_clients_terms(live):
    talk = [user("one " * 20), {"role": "assistant", "content": "two"}, user("three " * 20)]
    first = message(live, talk, system="rules")
    changed = [*talk[:2], user("four " * 20)]
    answer = message(live, changed, system="rules", diagnostics={"previous_message_id": first["id"]})
    told = answer["tenuto"]
    assert (told["divergence"]["message"], told["divergence"]["role"], told["divergence"]["part"]) == (
        2,
        "user",
        "message",
    )
    assert told["change"] == {"part": "messages", "message": 2, "role": "user"}
    reason = answer["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "messages_changed"
    assert reason["cache_missed_input_tokens"] == told["recomputed"]["mutation"] > 0
    assert told["divergence"]["tokens_lost"] <= reason["cache_missed_input_tokens"]


def test_side_calls_leave_no_session_and_no_trace_in_the_one_they_belong_to(live):
    talk = [user("hello " * 30)]
    answer = message(live, talk)
    for number in range(5):
        side = message(live, [user(f"a title {number}")], tools=[], system="titles")
        assert (side["tenuto"]["kind"], side["tenuto"]["session"]) == ("side", "s")
    views = live.request("GET", "/v1/sessions")[2]["data"]
    assert [(view["id"], view["turns"]) for view in views] == [("s", 1)]
    talk += [{"role": "assistant", "content": answer["content"]}, user("more")]
    usage = message(live, talk)["usage"]
    assert (
        usage["cache_read_input_tokens"] >= answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] - BLOCK
    )
    # Of all the side calls at most the last is still known to the engine.
    assert len(live.engine.core.sessions.by_handle) <= 2


def test_prewarmed_prompts_are_hits(live):
    system = [{"type": "text", "text": "rules " * 60, "cache_control": {"type": "ephemeral"}}]
    warm = message(live, [user("x")], system=system, max_tokens=0)
    assert (warm["content"], warm["usage"]["output_tokens"]) == ([], 0)
    usage = message(live, [user("hello")], session="other", system=system)["usage"]
    assert usage["cache_read_input_tokens"] >= warm["usage"]["cache_creation_input_tokens"] - 2 * BLOCK
    assert usage["cache_read_input_tokens"] > 300


def test_a_ttl_earns_a_receipt_with_its_lease(live):
    block = {"type": "text", "text": "rules", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    told = message(live, [user("hello " * 30)], system=[block])["tenuto"]
    (receipt,) = told["receipts"]
    assert receipt["outcome"] in ("accepted", "clipped")
    assert told["lease"] == receipt["lease"]
    assert told["lease"]["until_s"] > 0


def test_the_view_shows_the_tree_the_model_and_the_pause(live):
    answer = message(live, [user("hi")])
    headers = {"x-session-id": "child", "x-parent-session-id": "s"}
    body = {"model": "gpt-small", "input": "go", "max_output_tokens": 5}
    assert live.request("POST", "/v1/responses", body, headers)[0] == 200
    views = {view["id"]: view for view in live.request("GET", "/v1/sessions")[2]["data"]}
    assert (views["s"]["children"], views["child"]["parent"]) == (["child"], "s")
    assert (views["s"]["model"], views["child"]["model"]) == ("toy", "gpt-small")
    assert answer["tenuto"]["kind"] == "turn"


def test_what_is_inferred_is_metered(live):
    message(live, [user("hi")])
    message(live, [user("hi"), {"role": "assistant", "content": "x"}, user("y")], model="claude-x")
    message(live, [user("a title")], tools=[], system="titles")
    text = live.request("GET", "/metrics")[2].decode()
    assert 'tenuto_api_prompt_tokens_total{kind="turn"} ' in text
    assert 'tenuto_api_cached_tokens_total{kind="side"} ' in text
    assert 'tenuto_api_inferred_total{kind="model_switch"} 1.0' in text
    assert "tenuto_api_prompt_memory_bytes " in text


def test_a_prompt_that_is_warmed_is_the_one_that_the_turn_has(live, wait):
    """The new context of a compaction holds an answer that was generated here: warmed as its ids, it is a hit."""
    talk = [user("hello " * 30)]
    body = {"model": "toy", "messages": talk, "max_tokens": 40, "temperature": 0, "session_id": "s"}
    first = live.request("POST", "/v1/chat/completions", body)[2]
    talk += [first["choices"][0]["message"], user("go on " * 10)]
    request = {"messages": talk}
    action = {"session": "s", "phase": "commit", "keep": {"tokens": 0}, "request": request}
    envelope = {"actions": [{"action_id": "1", "action_type": "agent.compaction", "payload": action}]}
    (receipt,) = live.request("POST", "/v1/kv_hints", envelope)[2]["receipts"]
    assert "warming" in receipt["reason"]
    wait(lambda: live.request("GET", "/v1/sessions/s")[2]["context_tokens"] > first["usage"]["total_tokens"])
    second = live.request("POST", "/v1/chat/completions", {**body, "messages": talk})[2]["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= second["prompt_tokens"] - BLOCK
