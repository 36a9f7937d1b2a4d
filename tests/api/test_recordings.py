"""Recorded requests of real clients: all of them parse, and what they tell together is understood.

The scripted engine gives each request the answer that the recording's next request shows, so that pauses, subagents and
compactions are inferred from the traffic that the clients really had.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tenuto.wire import SessionView
from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.locating import common_prefix
from tenuto_server.api.messages_request import CountRequest
from tenuto_server.api.messages_request import to_conversation as from_messages
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.api.responses_request import ResponsesRequest
from tenuto_server.api.responses_request import to_conversation as from_responses
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.scripted import scripted_chat
from tenuto_server.model.toy import toy_tokenizer
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

FOLDER = Path(__file__).parents[2].parent / "shared" / "recordings"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="recordings of real clients are not beside this checkout")

# System first, tools behind it: as most open models' templates have it.
SYSTEM_FIRST = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER = toy_tokenizer()


def records(scenario):
    """The requests of a scenario that a server of ours would answer, by number."""
    found = {}
    for path in sorted((FOLDER / scenario).glob("[0-9]*.json")):
        record = json.loads(path.read_text())
        if record["path"].startswith("/v1/") and isinstance(record["body"], dict):
            found[path.stem] = record
    return found


def scenarios():
    if not FOLDER.is_dir():
        return []
    return [item for item in json.loads((FOLDER / "index.json").read_text())["scenarios"] if records(item["dir"])]


def conversation(record, strip=True, readings=None):
    body = record["body"]
    if record["path"].startswith("/v1/messages"):
        return from_messages(CountRequest.model_validate(body), strip, readings)
    if record["path"].startswith("/v1/responses"):
        return from_responses(ResponsesRequest.model_validate(body), (), strip, readings)
    return from_chat(body["messages"], body.get("tools") or (), strip=strip, readings=readings)


def answer_of(record, later):
    """What the model said to a request: the message behind its own in a later one, in the words that models use."""
    talk = conversation(record)
    count = len(talk.messages)
    for other in later:
        messages = conversation(other).messages
        if messages[:count] == talk.messages and len(messages) > count and messages[count]["role"] == "assistant":
            said = messages[count]
            calls = [
                "<tool_call>\n" + json.dumps(call["function"]) + "\n</tool_call>" for call in said.get("tool_calls", ())
            ]
            return "\n".join(([said["content"]] if said["content"] else []) + calls)
    return "ok"


class Replay:
    """Sends scenarios to a site, one request after the other. ``turns``, ``pauses``: what the engine was told, by request."""

    def __init__(self, site, wait):
        self.site, self.wait, self.answers = site, wait, {}
        self.turns, self.pauses = {}, {}

    def run(self, *scenarios):
        for scenario in scenarios:
            found = records(scenario)
            for number, record in found.items():
                later = [r for n, r in found.items() if n > number]
                self.send(f"{scenario.rpartition('/')[2]}/{number}", record, answer_of(record, later))
        return self

    def send(self, name, record, answer="ok"):
        engine = self.site.engine
        engine.script = lambda turn: TOKENIZER.encode(answer)
        turns, pauses = len(engine.turns), len(engine.pauses)
        headers = {key.lower(): value for key, value in record["headers"] if key.lower() not in ("host", "connection")}
        headers.pop("content-length", None)
        status, _, body = self.site.request("POST", record["path"], record["body"], headers)
        assert status == 200, body
        if isinstance(body, bytes):
            lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
            body = next(
                v for v in map(json.loads, reversed(lines)) if "tenuto" in v or "tenuto" in v.get("response", {})
            )
        self.answers[name] = body.get("response", body)
        self.turns[name] = engine.turns[turns]
        assert len(engine.turns) == turns + 1
        self.site.request("GET", "/v1/sessions")  # whatever was posted before this has been seen
        self.pauses[name] = [(p.kind, p.tool) for p in engine.pauses[pauses:]]
        return body

    def told(self, name):
        return self.answers[name]["tenuto"]


@pytest.fixture
def replay(make_site, wait):
    site = make_site(context=400_000, model_aliases=("*",))
    site.engine.per_step = 10_000
    report = site.engine._report

    def named(turn):
        # Without a name, one session for each beginning: what the longest prefix gives for these recordings.
        name = turn.session or f"chain-{hash(tuple(turn.tokens[:4000].tolist())):x}"
        return report(dataclasses.replace(turn, session=name))

    site.engine._report = named
    return Replay(site, wait)


def tree(item):
    """(session, parent) of every request, from the index, in the names that the server gives."""
    out = {}
    for request in item["requests"]:
        session, agent, parent = (request.get(key) for key in ("session", "agent", "parent"))
        if agent is None:
            out[request["file"][:3]] = (session, None)
        elif item["client"] == "opencode":
            out[request["file"][:3]] = (agent, parent)
        else:
            above = session if parent in ("main", session) else f"{session}/{parent}"
            out[request["file"][:3]] = (f"{session}/{agent}", above)
    return out


@pytest.mark.parametrize("item", scenarios(), ids=lambda item: item["dir"])
def test_every_request_parses_and_the_session_tree_is_the_clients_own(item, replay):
    found = records(item["dir"])
    if "websocket" in item["dir"]:
        # The frames of a WebSocket are the same requests; each goes on from the response before it.
        previous = None
        for number, record in found.items():
            if record["body"].get("previous_response_id"):
                record["body"]["previous_response_id"] = previous
            record["body"]["store"] = True
            replay.send(f"x/{number}", record)
            previous = replay.answers[f"x/{number}"]["id"]
    else:
        replay.run(item["dir"])
    expected = tree(item)
    for name, turn in replay.turns.items():
        session, parent = expected[name.rpartition("/")[2]]
        if turn.side:  # shown with its session, and no turn of it
            assert (turn.session, replay.told(name)["session"]) == (None, session)
            continue
        assert (turn.session, turn.parent) == (session, parent) or session is None, name


def test_pauses_of_a_tool_round_trip(replay):
    replay.run(
        "claude-code-2.1.332/tool_roundtrip", "codex-0.171.0/tool_roundtrip", "opencode-1.18.33/tool_roundtrip_chat"
    )
    assert replay.pauses["tool_roundtrip/001"] == [("tool", "exec_command")]
    assert replay.pauses["tool_roundtrip/002"] == [("human", None)]
    # A title comes before the first turn: it is none, and the turn behind it begins the session.
    title, first = replay.told("tool_roundtrip_chat/001"), replay.told("tool_roundtrip_chat/002")
    assert (title["kind"], title["inferred"], title["session"]) == ("side", ["side_call"], first["session"])
    assert replay.turns["tool_roundtrip_chat/001"].side
    assert replay.pauses["tool_roundtrip_chat/001"] == []
    assert first["kind"] == "turn"
    assert not {"change", "inferred"} & set(first)
    assert replay.pauses["tool_roundtrip_chat/002"][0][0] == "tool"


def test_a_first_call_without_tools_by_a_client_unknown_is_told_when_the_turn_comes(replay):
    title, turn = list(records("opencode-1.18.33/tool_roundtrip_chat").values())[:2]
    for record in (title, turn):
        record["headers"] = [[k, v] for k, v in record["headers"] if k.lower() != "user-agent"]
    replay.send("x/1", title)
    replay.send("x/2", turn)
    assert replay.told("x/1")["kind"] == "turn"
    assert replay.told("x/2")["inferred"] == ["side_call_before"]
    # The pause between them was nobody's, and is filed so before the turn ends it.
    assert replay.pauses["x/1"] == [("human", None)]
    assert replay.pauses["x/2"][0] == ("background", "side_call")
    assert "change" not in replay.told("x/2")


def test_the_sessions_of_opencode_are_its_turns_alone_and_its_subagent_has_ended(make_site):
    """Over the real engine: the title is no turn, and the child is in no pause once it has answered."""
    executor = NullExecutor(vocab=512, tokens_low=40)
    config = EngineConfig(CacheConfig(16_000), policy="tenuto", max_context_tokens=200_000)
    identity = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")
    site = make_site(Engine(config, make_policy("tenuto"), identity), executor, context=200_000, model_aliases=("*",))
    for record in records("opencode-1.18.33/subagent_chat").values():
        headers = {key.lower(): value for key, value in record["headers"] if key.lower() != "host"}
        body = {**record["body"], "max_tokens": 3}
        body.pop("max_completion_tokens", None)
        assert (
            site.request("POST", record["path"], {**body, "stream": False, "stream_options": None}, headers)[0] == 200
        )
    views = {view["id"]: view for view in site.request("GET", "/v1/sessions")[2]["data"]}
    (child,) = (view for view in views.values() if "parent" in view)
    parent = views[child["parent"]]
    assert (len(views), parent["turns"], child["turns"], child["state"]) == (2, 2, 1, "ended")
    assert executor.wrong == []


def test_a_subagent_that_has_answered_is_shown_as_ended(replay):
    engine = replay.site.engine
    replay.run("claude-code-2.1.332/subagent")
    child, parent = (replay.turns[f"subagent/00{n}"] for n in (3, 4))
    for turn in (child, parent):
        kind = "subagent" if turn is child else "human"
        engine.sessions[turn.session] = SessionView(
            id=turn.session, parent=turn.parent, state="paused", pause_kind=kind, pause_age_s=1.0, turns=1
        )
    views = {view["id"]: view for view in replay.site.request("GET", "/v1/sessions")[2]["data"]}
    assert views[child.session]["state"] == "ended"
    assert not {"pause_kind", "pause_age_s"} & set(views[child.session])
    assert (views[parent.session]["state"], views[parent.session]["pause_kind"]) == ("paused", "human")


def test_a_parent_waits_for_its_subagent_and_a_finished_one_for_nobody(replay):
    replay.run("claude-code-2.1.332/subagent")
    assert replay.pauses["subagent/001"] == [("subagent", "Agent")]
    assert replay.pauses["subagent/002"] == [("subagent", "background")]  # its turn is over, its child is at work
    assert "subagent" in replay.told("subagent/003")["inferred"]
    assert replay.pauses["subagent/003"] == [("subagent", "finished")]
    assert replay.pauses["subagent/004"] == [("human", None)]


def test_codex_subagents(replay):
    replay.run("codex-0.171.0/subagent_multi_agent_v2")
    assert replay.pauses["subagent_multi_agent_v2/001"] == [("subagent", "collaboration__spawn_agent")]
    child = replay.turns["subagent_multi_agent_v2/002"]
    assert child.agent == "collab_spawn"
    assert replay.pauses["subagent_multi_agent_v2/003"] == [("human", None)]


def test_subagents_without_any_header_are_known_by_what_their_parent_asked(replay):
    replay.run("qwen-code-0.24.4/subagent_background")
    first = replay.told("subagent_background/001")["session"]
    child = next(n for n, t in replay.turns.items() if t.parent is not None)
    assert replay.turns[child].parent == first
    assert {"spawned", "subagent"} <= set(replay.told(child)["inferred"])
    assert [n for n, t in replay.turns.items() if t.parent is not None] == [child]


def test_compactions_of_claude_code(replay):
    folder = "claude-code-2.1.332/"
    replay.run(*(folder + s for s in ("tool_roundtrip", "resume_1", "resume_2", "compact_manual", "after_compact")))
    for name in ("compact_manual/001", "compact_manual/002"):
        assert replay.told(name)["kind"] == "compaction"
        assert replay.pauses[name] == [("background", "compaction")]
    told = replay.told("after_compact/001")
    assert "compaction" in told["inferred"]
    assert told["change"]["part"] == "messages"
    assert not any("compaction" in replay.told(f"resume_{n}/001").get("inferred", ()) for n in (1, 2))


def test_compactions_of_codex(replay):
    replay.run("codex-0.171.0/auto_compact")
    kinds = [replay.told(f"auto_compact/{n:03}")["kind"] for n in range(1, 8)]
    assert kinds == ["turn", "compaction", "turn", "compaction", "turn", "compaction", "turn"]
    for number in (3, 5, 7):
        assert "compaction" in replay.told(f"auto_compact/{number:03}")["inferred"]
        assert replay.pauses[f"auto_compact/{number - 1:03}"] == [("background", "compaction")]


def test_compaction_by_the_generic_rule(site):
    """No marker and no header: the history is cut short and begins otherwise, everything else is equal."""
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    system = {"role": "system", "content": "rules"}
    long = [system, *({"role": "user", "content": f"step {n} " * 20} for n in range(10))]
    site.chat(messages=long, tools=tools, session_id="s")
    told = site.chat(
        messages=[system, {"role": "user", "content": "what happened so far"}], tools=tools, session_id="s"
    )[2]
    assert told["tenuto"]["inferred"] == ["compaction"]
    assert told["tenuto"]["change"] == {"part": "messages", "message": 1, "role": "user"}
    # A conversation that is taken back to an earlier point is shorter too, and no compaction.
    site.chat(messages=long, tools=tools, session_id="t")
    told = site.chat(messages=long[:3], tools=tools, session_id="t")[2]
    assert "inferred" not in told["tenuto"]
    assert told["tenuto"]["change"]["shorter"] is True


def test_a_prewarm_frame_fills_the_cache_and_is_no_turn(replay):
    found = records("codex-0.171.0/websocket_prewarm")
    replay.send("x/002", found["002"])
    assert replay.turns["x/002"].warm
    assert replay.turns["x/002"].sampling.max_tokens == 0
    assert replay.told("x/002")["kind"] == "prewarm"
    assert replay.pauses["x/002"] == []
    # The turn begins with all that was prepared: there was nothing in it that only an answer would begin with.
    turn = found["003"]
    turn["body"] |= {"previous_response_id": None, "input": found["002"]["body"]["input"] + turn["body"]["input"]}
    replay.send("x/003", turn)
    warmed = replay.turns["x/002"].tokens
    assert replay.turns["x/003"].tokens[: len(warmed)].tolist() == warmed.tolist()


def test_side_calls_are_no_turns_of_their_session(replay):
    first, second = records("claude-code-2.1.332/tool_roundtrip").values()
    replay.send("x/1", first)
    small = json.loads(json.dumps(first))
    small["body"] |= {"model": "claude-haiku-4-5", "tools": [], "system": "Write a title.", "max_tokens": 20}
    small["body"]["messages"] = [{"role": "user", "content": "fix the test"}]
    replay.send("x/side", small)
    side = replay.turns["x/side"]
    assert (side.session, side.side, side.final) == (None, True, True)
    assert replay.pauses["x/side"] == []
    assert replay.told("x/side")["inferred"] == ["side_call"]
    replay.send("x/2", second)
    assert "change" not in replay.told("x/2")  # the turn goes on from the turn before, not from the side call


def test_model_switch_permission_and_end(replay):
    first, second = records("claude-code-2.1.332/tool_roundtrip").values()
    ask = '<tool_call>\n{"name": "AskUserQuestion", "arguments": {"question": "sure?"}}\n</tool_call>'
    first["body"]["tools"].append({"name": "AskUserQuestion", "input_schema": {"type": "object"}})
    replay.send("x/1", first, ask)
    assert replay.pauses["x/1"] == [("permission", "AskUserQuestion")]
    second["body"]["model"] = "claude-other"
    second["headers"].append(["X-Dynamo-Session-Final", "true"])
    replay.send("x/2", second)
    assert replay.told("x/2")["inferred"] == ["model_switch"]
    assert replay.turns["x/2"].model == "claude-other"
    assert replay.turns["x/2"].final


def test_the_order_of_tools_is_kept_and_a_change_of_it_told(replay):
    first, second = records("claude-code-2.1.332/tool_roundtrip").values()
    replay.send("x/1", first)
    tools = second["body"]["tools"]
    tools[2], tools[5] = tools[5], tools[2]
    replay.send("x/2", second)
    change = replay.told("x/2")["change"]
    assert (change["part"], change["reordered"]) == ("tools", True)
    assert change["tool"] == first["body"]["tools"][2]["name"]


@pytest.mark.parametrize("template", [scripted_chat(), ChatTemplate(SYSTEM_FIRST)], ids=["scripted", "system first"])
def test_recorded_turns_are_read_and_rendered_behind_each_other_as_from_nothing(template):
    kept = 0
    for item in scenarios():
        if "websocket" in item["dir"]:
            continue  # its frames go on from stored responses
        builder = PromptBuilder(TOKENIZER, template, whole_chars_max=0)
        for record in records(item["dir"]).values():
            fresh = conversation(json.loads(json.dumps(record)))
            talk = conversation(json.loads(json.dumps(record)), True, builder.readings)
            assert talk.messages == fresh.messages
            assert (talk.places, talk.digests, talk.links) == (fresh.places, fresh.digests, fresh.links)
            prompt = builder.conversation(talk)
            assert prompt.raw == builder.renderer.text(builder._shield.hide(list(fresh.messages)), talk.tools, {})
            assert prompt.tokens.tolist() == builder._shield.encode(prompt.raw).tokens.tolist()
            kept += prompt.kept
    assert kept > 40_000  # few recordings have more than two turns


def expected_shares():
    """Rows of the recordings' own table: (first, second, system first, the same without the attribution line)."""
    if not FOLDER.is_dir():
        return []
    text = (FOLDER / "README.md").read_text()
    number = r" \| ([\d.]+)"
    rows = re.findall(r"\| `([^`]+)` → `([^`]+)`" + number * 4, text)
    out = []
    for first, second, _, _, plain, stripped in rows:
        client, scenario, _ = first.split("/")
        second = f"{client}/{second}" if "/" in second else f"{client}/{scenario}/{second}"
        out.append((first, second, float(plain), float(stripped)))
    return out


@pytest.fixture(scope="module")
def builder():
    return PromptBuilder(TOKENIZER, ChatTemplate(SYSTEM_FIRST))


@pytest.mark.parametrize("row", expected_shares(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_prefixes_are_shared_as_far_as_the_clients_allow(builder, row):
    first, second, *expected = row
    for strip, want in zip((False, True), expected, strict=True):
        texts = []
        for name in (first, second):
            record = json.loads((FOLDER / f"{name}.json").read_text())
            texts.append(builder.conversation(conversation(record, strip)).raw)
        share = 100 * common_prefix(*texts) / len(texts[1])
        # The table counts characters of JSON, this one those of a rendered prompt: within the markup they are the same.
        assert want - 0.3 <= share <= want + 3, (strip, share)
