"""Calls for titles, topics and summaries beside a session's turns, in the shapes of recorded clients, over the real engine:
they change nothing of what is known about the session."""

import json
import time
from pathlib import Path

import pytest

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.integrity import check
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

FOLDER = Path(__file__).parents[2].parent / "shared" / "recordings"
IDENTITY = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")
# Two turns that follow each other, of every client that speaks one of our dialects and sends tools.
TURNS = {
    "claude": ("claude-code-2.1.332/tool_roundtrip", "001", "002"),
    "codex": ("codex-0.171.0/tool_roundtrip", "001", "002"),
    "opencode": ("opencode-1.18.33/tool_roundtrip_chat", "002", "003"),
    "qwen": ("qwen-code-0.24.4/tool_roundtrip", "001", "002"),
    "pi": ("pi-1.6.0/tool_roundtrip_responses", "001", "002"),
    "langchain": ("langchain-1.5.2/tool_roundtrip_anthropic", "001", "002"),
}
NAMED = [name for name in TURNS if name not in ("qwen", "langchain")]  # those that say who speaks
ASK = "Write a short title for this conversation."
recorded = pytest.mark.skipif(not FOLDER.is_dir(), reason="recordings of real clients are not beside this checkout")


@pytest.fixture
def live(make_site):
    executor = NullExecutor(vocab=512, tokens_low=40)
    config = EngineConfig(CacheConfig(16_000), policy="tenuto", max_context_tokens=200_000)
    engine = Engine(config, make_policy("tenuto"), IDENTITY)
    site = make_site(engine, executor, context=200_000, model_aliases=("*",))
    yield site
    check(engine.core.cache)
    assert executor.wrong == []


def turn(client, which):
    """A recorded turn whose answer is cut short."""
    folder, *numbers = TURNS[client]
    record = json.loads((FOLDER / folder / f"{numbers[which]}.json").read_text())
    body = {**record["body"], "stream": False}
    for name in ("stream_options", "max_completion_tokens", "max_tokens", "max_output_tokens"):
        body.pop(name, None)
    body["max_output_tokens" if "input" in body else "max_tokens"] = 3
    return record["path"], body, {k.lower(): v for k, v in record["headers"] if k.lower() != "host"}


def beside(client, system="You are a title generator.", said=None):
    """A call without tools in the same name: what the user said first, and what to make of it."""
    path, body, headers = turn(client, 0)
    for name in ("tools", "tool_choice", "parallel_tool_calls", "thinking"):
        body.pop(name, None)
    if "input" in body:
        body |= {"instructions": system, "input": said or [*body["input"][-1:], {"role": "user", "content": ASK}]}
        return path, body, headers
    messages = said or [*body["messages"][-1:], {"role": "user", "content": ASK}]
    if path.startswith("/v1/messages"):
        body |= {"system": system, "messages": messages}
    else:
        body["messages"] = [{"role": "system", "content": system}, *messages]
    return path, body, headers


def ask(site, path, body, headers):
    status, _, answer = site.request("POST", path, body, headers)
    assert status == 200, answer
    return answer


def send(site, path, body, headers):
    return ask(site, path, body, headers)["tenuto"]


def views(site):
    """All that is shown of every session, without what time alone changes. What an answer's end sets off, a pause and its
    lease, is decided beside the answer: once the same was shown three times, it has come."""
    last, same = None, 0
    while same < 3:
        shown = site.request("GET", "/v1/sessions")[2]["data"]
        for view in shown:
            view.pop("pause_age_s", None)
            if "lease" in view:
                view["lease"].pop("until_s")
        same = same + 1 if shown == last else 1
        last = shown
        time.sleep(0.02)
    return last


def facts(session):
    """What the engine keeps of a session and its pause."""
    pause = session.pause
    return session.context_tokens, pause.started_ns, pause.kind, pause.tool, pause.program, pause.forecast, pause.said


@recorded
@pytest.mark.parametrize("client", TURNS)
def test_a_side_call_in_a_pause_changes_nothing_of_its_session(live, client):
    path, body, headers = turn(client, 0)
    answer = ask(live, path, body, headers)
    first = answer["tenuto"]["session"]
    (before,) = views(live)
    assert (before["turns"], before["state"]) == (1, "paused")
    sessions = live.engine.core.sessions.by_handle
    (session,) = (s for s in sessions.values() if not s.side)
    known = facts(session)
    told = send(live, *beside(client))
    if client == "langchain":  # no name and no client that is known: a conversation of its own, and no turn of this one
        assert told["session"] != first
    else:
        assert (told["kind"], told["inferred"]) == ("side", ["side_call"])
    assert [view for view in views(live) if view["id"] in (first, told.get("session"))][:1] == [before]
    assert facts(session) == known
    if client in NAMED:
        path, body, headers = turn(client, 1)
    else:  # by its prompt alone it is the same conversation where it goes on from the answer that was really given
        said = answer if "content" in answer else answer["choices"][0]["message"]
        later = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "go on"}]
        body = {**body, "messages": [*body["messages"], *later]}
    second = send(live, path, body, headers)
    assert (second["session"], second["kind"]) == (first, "turn")
    assert "change" not in second
    assert next(view for view in views(live) if view["id"] == first)["turns"] == 2


@recorded
@pytest.mark.parametrize("client", [*NAMED, "qwen"])
def test_side_calls_before_the_first_turn_open_no_session(live, client):
    for said in (None, [{"role": "user", "content": "Is this a new topic?"}]):
        told = send(live, *beside(client, "Analyze whether this message begins something else.", said))
        assert (told["kind"], told["inferred"]) == ("side", ["side_call"])
        assert views(live) == []
    first = send(live, *turn(client, 0))
    assert first["kind"] == "turn"
    assert not {"change", "inferred"} & set(first)
    assert [view["turns"] for view in views(live)] == [1]


@recorded
@pytest.mark.parametrize("client", NAMED)
def test_a_recap_with_the_whole_history_is_a_side_call_of_a_client_that_always_has_tools(live, client):
    send(live, *turn(client, 0))
    before = views(live)
    path, body, headers = turn(client, 1)
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        body.pop(name, None)
    body["input" if "input" in body else "messages"].append({"role": "user", "content": "What happened so far?"})
    assert send(live, path, body, headers)["kind"] == "side"
    assert views(live) == before


TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def talk(*messages, system="You write code."):
    roles = ("user", "assistant")
    return [{"role": "system", "content": system}] + [
        {"role": roles[n % 2], "content": text} for n, text in enumerate(messages)
    ]


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        (talk("fix it", system="Generate a concise title for the conversation."), "side"),
        (
            talk("fix it", "done", "thanks", system="Other rules."),
            "turn",
        ),  # it goes on from an answer, under other rules
        (talk("fix it", "done", "thanks"), "turn"),  # the same without tools, as some do for a last word
        (talk("another question"), "side"),  # the same rules, nothing in common and no tools
        (talk("user: fix it\nassistant: done", system="Summarize this conversation in 50 words."), "side"),
    ],
)
def test_any_client_behind_a_turn_with_tools(live, messages, kind):
    live.chat(messages=talk("fix it"), tools=TOOLS, session_id="s", max_tokens=3)
    before = views(live)
    told = live.chat(messages=messages, session_id="s", max_tokens=3)[2]["tenuto"]
    assert (told["kind"], told["session"]) == (kind, "s")
    assert (views(live) == before) == (kind == "side")


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("You are a title generator. You output only a title.", "side"),
        ("Analyze if this message indicates a new conversation topic.", "side"),
        ("Summarize this coding conversation in under 50 characters.", "side"),
        ("You are a careful engineer. Write code, explain it, and keep a summary of what was done.", "turn"),
        ("You translate documents.", "turn"),
    ],
)
def test_any_client_before_its_first_turn_by_the_words_of_the_call(live, system, kind):
    told = live.chat(messages=talk("fix it", system=system), session_id="s", max_tokens=3)[2]["tenuto"]
    assert told["kind"] == kind
    assert len(views(live)) == (kind == "turn")


def test_an_agent_without_tools_is_no_side_call_of_itself(live):
    """A coding agent whose user took its tools away: from the second request on it is a conversation."""
    headers = {"user-agent": "claude-cli/2.1.332 (external, sdk-cli)", "x-claude-code-session-id": "s"}
    said = talk("hello")[1:]
    kinds = []
    for _ in range(3):
        body = {"model": "toy", "max_tokens": 3, "messages": said}
        answer = live.request("POST", "/v1/messages", body, headers)[2]
        kinds.append(answer["tenuto"]["kind"])
        said = [*said, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}]
    assert kinds == ["side", "turn", "turn"]
    child = {**headers, "x-claude-code-agent-id": "a1"}
    body = {"model": "toy", "max_tokens": 3, "messages": talk("hello")[1:]}
    assert live.request("POST", "/v1/messages", body, child)[2]["tenuto"]["kind"] == "turn"
