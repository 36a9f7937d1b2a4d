"""What other servers' clients put on the wire about sessions, priorities and how long to keep a prefix."""

import pytest

MONTH_S = 31 * 86400.0
MARK = {"type": "ephemeral", "ttl": "1h"}


def asked(site, **fields):
    """(turn, actions that followed its answer) of a chat request with these fields."""
    headers = fields.pop("headers", {})
    turns, batches = len(site.engine.turns), len(site.engine.batches)
    status, _, answer = site.chat(session_id="s", headers=headers, **fields)
    assert status == 200, answer
    actions = [action for batch in site.engine.batches[batches:] for action in batch.envelope.actions]
    return site.engine.turns[turns], [(action.action_type, action.payload.get("duration_s")) for action in actions]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"keep_alive": "5m"}, 300.0),
        ({"keep_alive": 90}, 90.0),
        ({"keep_alive": -1}, MONTH_S),
        ({"keep_alive": "-1m"}, MONTH_S),
        ({"ttl": 3600}, 3600.0),
        ({"ttl": 10**8}, MONTH_S),  # more than a hint can say: it is cut, not refused
        ({"prompt_cache_retention": "24h"}, 86400.0),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "30m"}}}, 1800.0),
        ({"nvext": {"cache_control": {"ttl": "90s"}}}, 90.0),
        ({"nvext": {"session_control": {"session_id": "x", "action": "open", "timeout": 120}}}, 120.0),
        ({"nvext": {"session_control": {"action": "open"}}}, 300.0),
        ({"nvext": {"session_control": {"action": "open", "timeout": "soon"}}}, None),
        ({"keep_alive": 10**400, "ttl": -(10**400)}, None),
        ({"keep_alive": "soon", "ttl": [], "nvext": [], "prompt_cache_options": 5}, None),
        ({"keep_alive": "5m", "ttl": 3600}, 3600.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": MARK}]}]}, 3600.0),
        ({"messages": [{"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "t"}, "cache_control": MARK}]}, 3600.0),
    ],
)
def test_a_life_that_is_asked_for_becomes_a_retain_for_the_pause(site, fields, seconds):
    _, actions = asked(site, **fields)
    assert actions == ([] if seconds is None else [("kv.retain", seconds)])


@pytest.mark.parametrize("value", [0, "0", "0s", "0m"])
def test_keep_alive_zero_releases(site, value):
    assert asked(site, keep_alive=value)[1] == [("kv.release", None)]


def test_a_mark_asks_again_each_turn_wherever_it_stands_now(site):
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    marked = [{**talk[0], "content": [{"type": "text", "text": "one", "cache_control": MARK}]}, *talk[1:]]
    assert asked(site, messages=marked)[1] == [("kv.retain", 3600.0)]
    assert asked(site, messages=[*marked, {"role": "user", "content": "more"}])[1] == [("kv.retain", 3600.0)]
    assert asked(site, messages=talk)[1] == []


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0.0),
        ({"priority": 3}, -3.0),  # vLLM: the lower goes first
        ({"headers": {"x-vllm-priority": "-2"}, "priority": 3}, 2.0),  # and its header goes before its field
        ({"headers": {"x-vllm-priority": "high"}, "priority": 3}, -3.0),
        ({"priority": 3, "rid": "a"}, 3.0),  # SGLang: the higher goes first
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 100, "speculative_prefill": True}}}, 5.0),
        ({"priority": "much"}, 0.0),
        ({"priority": True}, 0.0),
        ({"priority": 10**400}, -1e9),
        ({"nvext": {"agent_hints": [1]}}, 0.0),
    ],
)
def test_priorities_come_in_the_scales_of_their_servers(site, fields, priority):
    assert asked(site, **fields)[0].priority == priority


@pytest.mark.parametrize(
    "fields",
    [
        {"session_params": {"id": "theirs"}},
        {"nvext": {"session_control": {"session_id": "theirs", "action": "open"}}},
        {"vllm_xargs": {"session_id": "theirs"}},
    ],
)
def test_sessions_are_found_where_other_servers_look_for_them(site, fields):
    site.chat(**fields)
    assert site.engine.turns[-1].session == "theirs"
    site.chat(headers={"x-session-id": "ours"}, **fields)
    assert site.engine.turns[-1].session == "ours"


def test_a_session_that_is_closed_with_its_request_is_final(site):
    turn, _ = asked(site, nvext={"session_control": {"session_id": "s", "action": "close"}})
    assert turn.final
    assert not asked(site, nvext={"session_control": {"session_id": "s"}})[0].final


def test_hints_may_ride_in_kv_transfer_params(site):
    action = {"action_id": "1", "action_type": "agent.keepalive", "payload": {"session": "s", "for_s": 5}}
    turn, _ = asked(site, kv_transfer_params={"kv_hints": {"actions": [action]}, "do_remote_decode": True})
    assert [item.action_id for item in turn.hints.actions] == ["1"]
    assert asked(site, kv_transfer_params={"kv_hints": 5})[0].hints is None
    assert asked(site, kv_transfer_params="x")[0].hints is None


def test_sessions_open_and_close_by_the_routes_of_sglang(site):
    status, _, name = site.request("POST", "/open_session", {"capacity_of_str_len": 1000})
    assert status == 200
    assert name.startswith("session-")
    assert site.request("POST", "/open_session", {"session_id": "mine"})[2] == "mine"
    assert site.request("POST", "/close_session", {"session_id": "mine"})[0] == 200
    sent = [(a.action_type, a.payload["session"]) for b in site.engine.batches for a in b.envelope.actions]
    assert sent == [("agent.session", name), ("agent.session", "mine"), ("agent.end", "mine")]
    for body in ({}, {"session_id": ""}, {"session_id": 5}, {"session_id": "x" * 300}):
        status, _, answer = site.request("POST", "/close_session", body)
        assert (status, answer["error"]["param"]) == (400, "session_id")
