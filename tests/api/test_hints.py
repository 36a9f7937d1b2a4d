"""Hint carriers, identity, tenants, session views."""

import json
import time

import pytest

from tenuto.headers import encode_hints
from tenuto.wire import AgentCompaction, AgentPause, AgentSession, Divergence, Envelope, Receipt, SessionView

PAUSE = Envelope.of([AgentPause(session="s1", kind="tool", tool="bash")])


def as_json(envelope: Envelope) -> dict:
    return json.loads(envelope.model_dump_json())


def test_envelope_on_its_own(site):
    status, _, body = site.request("POST", "/v1/kv_hints", as_json(PAUSE))
    assert status == 200
    assert body["message_id"] == PAUSE.message_id
    assert body["receipts"] == [{"action_id": PAUSE.actions[0].action_id, "outcome": "accepted", "reason": ""}]
    assert site.engine.batches[0].envelope == PAUSE
    assert site.engine.batches[0].tenant == "default"


@pytest.mark.parametrize("carrier", ["body", "header", "both"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_envelope_on_a_request(site, carrier, path):
    fields = {"kv_hints": as_json(PAUSE)} if carrier != "header" else {}
    headers = {"x-tenuto-hints": encode_hints(PAUSE)} if carrier != "body" else {}
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    status, _, _ = site.request("POST", path, {"model": "toy", **prompt, **fields}, headers)
    assert status == 200
    assert site.engine.turns[0].hints.actions == PAUSE.actions * (2 if carrier == "both" else 1)


@pytest.mark.parametrize(
    "hints",
    [
        "nonsense",
        5,
        [],
        {"actions": 5},
        {"actions": [5]},
        {"actions": [{"action_id": "a1"}]},
        {"message_id": 5, "actions": []},
    ],
)
def test_malformed_hints_never_fail_a_generation(site, hints):
    status, _, answer = site.chat(kv_hints=hints)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello world")
    receipt = answer["tenuto"]["receipts"][0]
    assert receipt["outcome"] == "rejected"
    assert receipt["reason"]


@pytest.mark.parametrize("value", ["!!!", "bm9wZQ", "A" * 8193])
def test_malformed_hint_headers_never_fail_a_generation(site, value):
    status, _, answer = site.chat(headers={"x-tenuto-hints": value})
    assert (status, answer["tenuto"]["receipts"][0]["outcome"]) == (200, "rejected")


def test_good_actions_survive_bad_neighbours(site):
    mixed = {"actions": [{"action_id": "bad"}, as_json(PAUSE)["actions"][0]]}
    _, _, answer = site.chat(kv_hints=mixed)
    assert site.engine.turns[0].hints.actions == PAUSE.actions
    assert answer["tenuto"]["receipts"][0]["action_id"] == "bad"
    status, _, body = site.request("POST", "/v1/kv_hints", mixed)
    assert [r["outcome"] for r in body["receipts"]] == ["accepted", "rejected"]
    assert status == 200


def test_what_is_no_envelope_is_400(site):
    status, _, body = site.request("POST", "/v1/kv_hints", {"actions": 5})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_envelope", "actions")
    assert site.request("POST", "/v1/kv_hints", [1])[0] == 400
    status, _, body = site.request("POST", "/v1/kv_hints", {"pad": "x" * 300_000})
    assert (status, body["error"]["code"]) == (413, "body_too_large")


def test_an_envelope_wholly_over_a_limit_is_429_naming_it(site):
    reason = "limit: hint_actions_max 64 actions an envelope, got 65"
    site.engine.receipts = tuple(Receipt(action_id=f"{n}", outcome="rejected", reason=reason) for n in range(2))
    status, headers, body = site.request("POST", "/v1/kv_hints", as_json(PAUSE))
    assert (status, body["error"]["code"]) == (429, "hint_limit")
    assert "hint_actions_max 64" in body["error"]["message"]
    assert headers["retry-after"] == "1"
    site.engine.receipts = (*site.engine.receipts, Receipt(action_id="2", outcome="accepted"))
    assert site.request("POST", "/v1/kv_hints", as_json(PAUSE))[0] == 200


IDENTITY = [
    ({"x-session-id": "a", "x-parent-session-id": "p"}, {}, ("a", "p")),
    ({"X-Claude-Code-Session-Id": "c", "x-claude-code-agent-id": "k"}, {}, ("c/k", "c")),
    ({"session-id": "r", "thread-id": "t", "x-codex-parent-thread-id": "u"}, {}, ("r/t", "r/u")),
    ({"x-litellm-session-id": "l"}, {"session_id": "b"}, ("l", None)),
    ({}, {"session_id": "b", "prompt_cache_key": "k"}, ("b", None)),
    ({}, {"prompt_cache_key": "k", "metadata": {"user_id": "u"}}, ("k", None)),
    ({}, {"metadata": {"user_id": "user_1_account__session_0f-9"}}, ("0f-9", None)),
    ({}, {"metadata": {"user_id": '{"device_id": "d", "session_id": "j"}'}}, ("j", None)),
    ({}, {"metadata": {"user_id": "me"}}, ("me", None)),
    ({}, {"metadata": {"user_id": 5}}, (None, None)),
    ({}, {}, (None, None)),
]


@pytest.mark.parametrize(("headers", "fields", "expected"), IDENTITY)
def test_identity_in_the_forms_that_clients_send(site, headers, fields, expected):
    assert site.chat(headers=headers, **fields)[0] == 200
    turn = site.engine.turns[0]
    assert (turn.session, turn.parent) == expected


def test_overlong_names_in_foreign_fields_are_digested_alike(site):
    for _ in range(2):
        assert site.chat(prompt_cache_key="k" * 1000)[0] == 200
    first, second = (turn.session for turn in site.engine.turns)
    assert first == second
    assert len(first) < 60


def test_final_and_salt(site):
    site.chat(
        headers={"x-dynamo-session-id": "d", "x-dynamo-session-final": "true", "x-tenuto-cache-salt": "h"},
        cache_salt="b",
    )
    turn = site.engine.turns[0]
    assert (turn.session, turn.final, turn.salt) == ("d", True, "h\nb")


def test_tenants_come_from_keys(make_site):
    site = make_site(api_keys={"alice": "key-a", "bob": "key-b"})
    bearer = {"authorization": "Bearer key-a"}
    assert site.chat(headers=bearer)[0] == 200
    assert site.chat(headers={"x-api-key": "key-b"})[0] == 200
    assert site.chat(headers={"x-api-key": "key-b", "authorization": "Bearer whatever"})[0] == 200
    assert [turn.tenant for turn in site.engine.turns] == ["alice", "bob", "bob"]
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic key-a"}, {"x-api-key": ""}):
        status, _, body = site.chat(headers=headers)
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            401,
            "authentication_error",
            "invalid_api_key",
        )
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/sessions"),
        ("POST", "/v1/kv_hints"),
        ("POST", "/tokenize"),
    ):
        assert site.request(method, path, {} if method == "POST" else None)[0] == 401
    assert site.request("GET", "/health")[0] == 200
    site.request("POST", "/v1/kv_hints", as_json(PAUSE), bearer)
    assert site.engine.batches[0].tenant == "alice"


def test_sessions(site):
    site.engine.sessions = {
        "a": SessionView(id="a", turns=2, resident={"device": 7}),
        "a/b": SessionView(id="a/b", parent="a"),
    }
    _, _, body = site.request("GET", "/v1/sessions")
    assert [view["id"] for view in body["data"]] == ["a", "a/b"]
    assert site.request("GET", "/v1/sessions/a")[2]["resident"] == {"device": 7}
    assert site.request("GET", "/v1/sessions/a/b")[2]["parent"] == "a"
    assert site.request("GET", "/v1/sessions/a%2Fb")[2]["parent"] == "a"
    for path in ("nobody", "n" * 300):
        status, _, body = site.request("GET", f"/v1/sessions/{path}")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "session_not_found", "session")


def test_deleting_a_session_ends_it(site):
    site.engine.sessions = {"a": SessionView(id="a")}
    status, _, body = site.request("DELETE", "/v1/sessions/a")
    assert (status, body["id"], body["receipt"]["outcome"]) == (200, "a", "accepted")
    action = site.engine.batches[0].envelope.actions[0]
    assert (action.action_type, action.payload["session"]) == ("agent.end", "a")
    assert body["deleted"] is True
    assert site.request("DELETE", "/v1/sessions/b")[0] == 404
    site.engine.receipts = (Receipt(action_id="1", outcome="deferred", reason="a turn is running"),)
    assert site.request("DELETE", "/v1/sessions/a")[2]["deleted"] is False


def test_divergence_is_told_by_message(site):
    talk = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    prefix = site.request("POST", "/tokenize", {"messages": talk[:1]})[2]["count"]
    site.engine.divergence = Divergence(token=prefix, tokens_lost=4)
    _, _, answer = site.chat(messages=talk)
    assert answer["tenuto"]["divergence"] == {
        "token": prefix,
        "tokens_lost": 4,
        "message": 1,
        "role": "user",
        "part": "message",
    }


def test_unknown_actions_travel_on(site):
    odd = {"actions": [{"action_id": "1", "action_type": "x.y", "payload": {"session": "s"}, "extra": 1}], "more": 2}
    assert site.request("POST", "/v1/kv_hints", odd)[0] == 200
    assert site.engine.batches[0].envelope.actions[0].parse() is None
    assert Envelope.of([AgentSession(session="s")]).actions[0].parse() == AgentSession(session="s")


def test_a_committed_compaction_warms_its_new_prompt(site):
    """The receipt says so; the engine gets a turn that nobody waits for; a prompt that cannot be read is named."""
    messages = [{"role": "user", "content": "a summary of it all"}]
    commits = [
        AgentCompaction(session="s", seq=1, phase="commit", request={"messages": messages}),
        AgentCompaction(session="s", seq=2, phase="commit", request={"messages": "all of them"}),
        AgentCompaction(session="s", seq=3, phase="commit"),
    ]
    status, _, body = site.request("POST", "/v1/kv_hints", as_json(Envelope.of(commits)))
    assert status == 200
    reasons = [receipt.get("reason", "") for receipt in body["receipts"]]
    assert "warming" in reasons[0]
    assert "not warmed: messages" in reasons[1]
    assert "warm" not in reasons[2]
    deadline = time.monotonic() + 5.0  # the turn follows the receipts through the engine's inbox
    while not site.engine.turns and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(turn.warm, turn.session, turn.sampling.max_tokens) for turn in site.engine.turns] == [(True, "s", 0)]
