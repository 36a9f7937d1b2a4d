"""Situations that users of coding agents reported, end to end where no other test has them (docs/scenarios.md lists all).

Long pauses run the real engine and policy under virtual time; what clients see runs the real server over the real engine.
"""

import random

import numpy as np
import pytest

from tenuto.wire import AgentFork, AgentPause, Envelope, Forecast, Shared
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.integrity import check
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import HintBatch, PauseInferred, Sampling, SubmitTurn
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor
from tenuto_server.sim.world import World

BLOCK = 16
IDENTITY = RootIdentity("weights", "", "bf16", 1, BLOCK, b"a secret of sixteen bytes")
DICE = random.Random(5)
PREFILL_S = 1e-3


class Days:
    """A server under virtual time: a token takes 1 ms to compute and 10 us to load from the host."""

    def __init__(self, device=400, host=4000, policy="tenuto"):
        config = EngineConfig(
            CacheConfig(device, host),
            policy=policy,
            max_context_tokens=6000,
            prefill_a_s=PREFILL_S,
            prefill_b_s=0.0,
            block_bytes=4096,
            host_bytes_per_s=4096 / BLOCK / 1e-5,
        )
        self.engine = Engine(config, make_policy(policy), IDENTITY)
        self.machine = NullExecutor()
        self.world = World(
            self.engine,
            self.machine,
            forward_s=lambda plan: sum(len(row.tokens) for row in plan.rows) * PREFILL_S,
            transfer_s=lambda transfer: len(transfer.src_slots) * BLOCK * 1e-5,
            after_step=lambda: check(self.engine.core.cache),
        )
        self.context: dict[str, list[int]] = {}

    def ask(self, name, new, *, at_s=None, then=None, **fields):
        """A turn that goes on from the session's context with ``new`` tokens; its record."""
        if at_s is not None:
            self.world.run(until_s=at_s)
            assert abs(self.world.now_s - at_s) < 0.1
        prompt = [*self.context.get(name, ()), *(DICE.randrange(1, 1000) for _ in range(new))]
        request = f"{name}-{len(self.world.turns)}"
        session = None if fields.get("side") else name
        turn = SubmitTurn(request, "t", np.array(prompt, np.int32), Sampling(4), session=session, **fields)
        record = self.world.submit(turn)
        while not record.ended:
            self.world.run(until_s=self.world.now_s + 0.02)
        assert record.done is not None
        if not fields.get("side"):
            self.context[name] = [*prompt, *record.tokens]
        assert self.machine.wrong == []
        return record

    def hint(self, *actions):
        self.world.at(self.world.now_s, HintBatch(f"h{self.world.steps}", "t", Envelope.of(actions)))
        self.world.run(until_s=self.world.now_s + 1e-3)

    def pause(self, name, kind, tool=None):
        self.world.at(self.world.now_s, PauseInferred("t", name, kind, tool))
        self.world.run(until_s=self.world.now_s + 1e-3)


def recomputed(record):
    return sum(count for label, count in record.done.report.recomputed.items() if label != "cold")


@pytest.mark.parametrize("hinted", [True, False])
def test_a_tool_of_twelve_minutes_under_pressure_costs_nothing_but_a_restore(hinted):
    """C01, C09: other sessions need the device meanwhile; what returns is loaded, not computed, and says so."""
    days = Days()
    days.ask("agent", 3000)
    began = days.world.now_s
    if hinted:
        forecast = Forecast(p50_s=700, p90_s=900)
        days.hint(AgentPause(session="agent", kind="tool", tool="bash", program="make", forecast=forecast))
    else:
        days.pause("agent", "tool", "bash")
    for minute in range(1, 12):
        days.ask(f"other-{minute}", 2500, at_s=began + 60 * minute)
    back = days.ask("agent", 40, at_s=began + 720)
    assert recomputed(back) == 0
    report = back.done.report
    assert sum(report.cached.values()) >= 3000
    first_s = (back.first_token_ns - back.submitted_ns) / 1e9
    assert first_s < 0.2 * 3000 * PREFILL_S


def test_a_parent_waits_25_minutes_for_a_child_that_fills_the_device():
    """C11: nobody keeps the parent warm with requests of its own."""
    days = Days()
    days.ask("parent", 3000)
    began = days.world.now_s
    days.pause("parent", "subagent", "Agent")
    for minute in range(1, 25):
        days.ask("child", 200, at_s=began + 60 * minute, parent="parent")
        days.pause("child", "tool", "bash")
    requests = len(days.world.turns)
    back = days.ask("parent", 300, at_s=began + 1500)
    assert recomputed(back) == 0
    assert requests == 1 + 24


def test_eight_children_of_one_parent_compute_its_prefix_once():
    """C19: all that eight forks compute is the parent's own prompt and eight suffixes."""
    days = Days(device=1200)
    parent = days.ask("parent", 4000)
    days.hint(AgentFork(session="parent", children=tuple(f"c{n}" for n in range(8)), shared=Shared(tokens=4000)))
    shared = days.context["parent"][:4000]
    total = sum(parent.done.report.recomputed.values())
    for number in range(8):
        days.context[f"c{number}"] = shared
        child = days.ask(f"c{number}", 100, parent="parent")
        total += sum(child.done.report.recomputed.values())
    assert total <= 4000 + 8 * (100 + BLOCK)


def test_a_hundred_summaries_between_two_turns_cost_the_session_nothing():
    """C29: calls that are no turns go first when room is needed, and teach nothing about pauses."""
    days = Days(device=450, host=0)
    days.ask("main", 3000)
    days.pause("main", "tool", "bash")
    for _ in range(100):
        days.ask("summary", 400, side=True, final=True)
    back = days.ask("main", 40)
    assert 5 * 450 * BLOCK < 100 * 400  # they would have filled the device over and over
    assert recomputed(back) == 0
    assert days.engine.core.sessions.find("t", "summary") is None


# ---- what clients see ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(make_shared_site):
    config = EngineConfig(CacheConfig(3000, 2000), policy="tenuto", max_context_tokens=8000, block_bytes=4096)
    executor = NullExecutor(vocab=512, tokens_low=40)
    yield make_shared_site(Engine(config, make_policy("tenuto"), IDENTITY), executor, context=8000)
    assert executor.wrong == []


def tool(name, description="does it"):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def chat(site, session, messages, tools=(), **fields):
    body = {"model": "toy", "max_tokens": 5, "temperature": 0, "messages": messages, **fields}
    if tools:
        body["tools"] = list(tools)
    status, _, answer = site.request("POST", "/v1/chat/completions", body, {"x-session-id": session})
    assert status == 200, answer
    return answer


def user(text):
    return {"role": "user", "content": text}


def hits(answer):
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def test_a_heartbeat_with_other_tools_is_told_apart_and_leaves_the_conversation_alone(live):
    """C13: it diverges at the tools; the conversation's next turn finds all that it had."""
    talk, tools = [user("go on " * 100)], [tool("bash", "runs " * 40), tool("read", "reads " * 40)]
    first = chat(live, "beat", talk, tools)
    beat = chat(live, "beat", [user("are you there?")], [tool("ping", "pings " * 40)], max_tokens=1)
    assert beat["tenuto"]["change"]["part"] == "tools"
    assert beat["tenuto"]["divergence"]["part"] == "tools"
    talk += [first["choices"][0]["message"], user("and now?")]
    again = chat(live, "beat", talk, tools)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - BLOCK


def test_a_reminder_that_moved_on_resume_is_told_with_both_places(live):
    """C15: everything before it is a hit, and the report says *moved*, not only *changed*."""
    reminder = user("<reminder> " + "skills " * 60)
    talk = [user("one " * 60), reminder, user("two " * 60), user("three " * 60)]
    chat(live, "resume", talk)
    moved = chat(live, "resume", [talk[0], talk[2], reminder, talk[3]])
    assert moved["tenuto"]["change"] == {"part": "messages", "message": 1, "role": "user", "moved_from": 2}
    assert moved["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
    assert moved["tenuto"]["divergence"]["tokens_lost"] > 0


def test_volatile_text_in_the_system_prompt_is_told_by_place_and_cost(live):
    """C17: what stands before it is reused, what it cost is in the answer."""
    rules, talk = "rule " * 200, [user("question " * 60)]
    chat(live, "status", [{"role": "system", "content": f"{rules}\nstatus: clean"}, *talk])
    told = chat(live, "status", [{"role": "system", "content": f"{rules}\nstatus: 3 files"}, *talk])["tenuto"]
    assert told["change"] == {"part": "system"}
    assert told["divergence"]["part"] == "system"
    assert told["divergence"]["token"] >= 200
    assert told["recomputed"]["mutation"] >= 60


def test_conversations_of_one_kind_of_agent_share_their_static_part(live):
    """C21: the first is cold, each other one finds tools and system text."""
    tools = [tool(f"tool_{n}", "does something " * 10) for n in range(10)]
    system = {"role": "system", "content": "You are a worker. " * 40}
    static = None
    for number in range(10):
        answer = chat(live, f"worker-{number}", [system, user(f"task {number} " * 30)], tools)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if number == 0:
            static = live.request("POST", "/tokenize", {"messages": [system], "tools": tools})[2]["count"]
            assert cached < 100
        else:
            assert cached >= 0.95 * (static - BLOCK)


def test_figures_are_kept_by_kind_of_request(live):
    """C27: turns, side calls and compactions have hit rates of their own."""
    tools, talk = [tool("bash")], [user("hello " * 100)]
    for step in range(3):
        talk.append(chat(live, "kinds", talk, tools)["choices"][0]["message"])
        talk.append(user(f"step {step}"))
    assert chat(live, "kinds", [user("a title?")])["tenuto"]["kind"] == "side"
    summary = "CRITICAL: Respond with TEXT ONLY. Summarize."
    compaction = chat(live, "kinds", [*talk, user(summary)], tools, tool_choice="none")
    assert compaction["tenuto"]["kind"] == "compaction"
    assert hits(compaction) > 0.85  # asked as a continuation, it is as warm as a turn
    lines = live.request("GET", "/metrics")[2].decode()
    for kind in ("turn", "side", "compaction"):
        assert f'tenuto_api_prompt_tokens_total{{kind="{kind}"}}' in lines
        assert f'tenuto_api_cached_tokens_total{{kind="{kind}"}}' in lines


def test_two_tool_lists_in_turn_both_stay_warm(live):
    """S11: plan and build have different tools; from the third turn on each finds its own last prompt."""
    lists = {
        "plan": [tool("read", "reads " * 60)],
        "build": [tool("read", "reads " * 60), tool("write", "writes " * 60)],
    }
    talk, before = [user("start " * 100)], {}
    for step in range(10):
        mode = ("plan", "build")[step % 2]
        answer = chat(live, "modes", talk, lists[mode])
        told, cached = answer["tenuto"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if step:
            assert told["change"]["part"] == "tools"
        if mode in before:
            assert cached >= before[mode] - BLOCK
        before[mode] = answer["usage"]["prompt_tokens"]
        talk += [answer["choices"][0]["message"], user(f"step {step}")]
    assert len(live.request("GET", "/v1/sessions/modes")[2]["resident"]) >= 1
