"""Sessions of both clients: pauses, forks, compaction, usage; the hints they send and what they learn."""

from __future__ import annotations

import time
from typing import Any

import pytest

import tenuto
from tenuto.fake_server import FakeServer, VirtualClock
from tenuto.forecast import PauseForecast, PauseForecaster

MESSAGES = [tenuto.system("You are terse."), tenuto.user("Fix the failing test, please.")]


def flushed(tn: Any) -> None:
    assert tn.hints.flush(5.0)


def test_first_turn_carries_the_opening_hint(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("s", model="m", agent="coder", attended=False, parent="p")) as s:
            await twin.wait(s.chat(MESSAGES))
            assert tn.hints.stats.carried == 1
            assert tn.hints.stats.receipts == {"accepted": 1}
            # The answer proved that the server knows hints, so that the next ones ride in the body.
            s.model_switch("n", back_in_s=60.0)
            await twin.wait(s.chat(MESSAGES))

    twin.run(scenario, server.url, clock=VirtualClock())  # no time passes, so nothing leaves by itself
    opening, switch = server.hints.seen[:2]
    assert opening.via == "header"
    assert opening.action.model_dump(exclude={"seq", "at_s"}, exclude_none=True) == {
        "session": "s",
        "parent": "p",
        "agent": "coder",
        "model": "m",
        "attended": False,
    }
    assert (switch.action.TYPE, switch.action.model, switch.action.back_in_s) == ("agent.model_switch", "n", 60.0)
    assert server.chats[1].body["model"] == "n"


def test_opening_hint_goes_alone_when_no_turn_comes(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("s")):
            server.hints.wait_for("agent.session")

    twin.run(scenario, server.url)
    assert server.hints.seen[0].via == "post"


def test_tool_pause(twin: Any, server: FakeServer) -> None:
    clock = VirtualClock()
    forecaster = PauseForecaster()
    server.reply("", ("bash", {"command": "cd src && pytest -x tests"}))

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("s", model="m")) as s:
            turn = await twin.wait(s.chat(MESSAGES))
            async with twin.enter(s.pause("tool", turn.tool_calls[0])) as gap:
                (hint,) = server.hints.wait_for("agent.pause")
                clock.advance(10.0)
                gap.progress(0.25)
                (update,) = server.hints.wait_for("agent.pause_update")
                clock.advance(20.0)
            assert s.lease is not None  # granted by the receipt
            assert s.lease.tier == "device"
            return gap, hint, update

    gap, hint, update = twin.run(scenario, server.url, clock=clock, forecaster=forecaster)
    assert (hint.kind, hint.tool, hint.program) == ("tool", "bash", "pytest")
    assert hint.forecast.p50_s == pytest.approx(gap.forecast.p50_s, abs=100)
    assert 4.0 < hint.forecast.p50_s < 8.0  # pytest before anything was learned: 5.9 s
    # A quarter done after 10 s: 30 s to go.
    assert update.progress == 0.25
    assert update.forecast.p50_s == pytest.approx(30.0)
    assert gap.duration_s == pytest.approx(30.0)
    assert gap.elapsed_s == pytest.approx(30.0)
    # One call among five pseudo-calls at each level; the program's level is mostly its built-in prior again, hence
    # 1/6 there (and a little more), and 1/6 + 5/6 of that at the level of the argument "tests".
    assert forecaster.predict(gap.key).confidence == pytest.approx(11 / 36, abs=0.02)
    assert "pytest" not in str(server.hints.of_type("agent.session"))


def test_pause_learns_until_the_forecast_fits(twin: Any, server: FakeServer) -> None:
    clock = VirtualClock()

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session(model="m")) as s:
            for _ in range(15):
                async with twin.enter(s.pause("tool", command="make everything")):
                    clock.advance(120.0)
            return s.pause("tool", command="make everything").forecast

    forecast = twin.run(scenario, server.url, clock=clock)
    assert 98.0 < forecast.p50_s < 147.0  # 120 s within one bin of the sketch


def test_short_pause_sends_nothing_unless_it_lasts(twin: Any, server: FakeServer) -> None:
    clock = VirtualClock()

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            quick = PauseForecast(0.02, 0.05)
            for _ in range(5):
                async with twin.enter(s.pause("tool", name="read", forecast=quick)):
                    clock.advance(0.02)
            assert tn.hints.stats.cancelled == 5
            async with twin.enter(s.pause("tool", name="read", forecast=quick)):
                clock.advance(0.6)
                (late,) = server.hints.wait_for("agent.pause")
                assert late.at_s == pytest.approx(0.6, abs=0.01)

    twin.run(scenario, server.url, clock=clock)
    assert len(server.hints.of_type("agent.pause")) == 1


def test_forecast_given_by_the_caller(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            async with twin.enter(s.pause("background", forecast=90.0)) as gap:
                server.hints.wait_for("agent.pause")
                gap.progress(eta_s=30.0)
                server.hints.wait_for("agent.pause_update")
                gap.resume_soon(2.0)
                server.hints.wait_for("agent.resume_soon")
            gap.progress(eta_s=1.0)  # it is over: no news
            for nonsense in (float("nan"), -5.0, float("inf")):
                assert s.pause("human", forecast=nonsense).forecast == s.pause("human").forecast

    twin.run(scenario, server.url)
    (pause,) = server.hints.of_type("agent.pause")
    assert pause.forecast.p50_s == 90.0
    assert pause.forecast.p90_s > 90.0
    (update,) = server.hints.of_type("agent.pause_update")
    assert (update.forecast.p50_s, update.forecast.p90_s) == (30.0, 60.0)
    assert server.hints.of_type("agent.resume_soon")[0].in_s == 2.0


def test_tools_side_by_side_are_one_pause(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s, twin.enter(s.pause("tool", name="a", forecast=60.0)):
            server.hints.wait_for("agent.pause")
            async with twin.enter(s.pause("tool", name="b", forecast=5.0)) as inner:
                server.hints.wait_for("agent.pause_update")
            assert inner.duration_s is not None
            async with twin.enter(s.pause("permission")):
                server.hints.wait_for("agent.pause", 2)  # another kind is another pause

    twin.run(scenario, server.url)
    assert [p.kind for p in server.hints.of_type("agent.pause")] == ["tool", "permission"]


def test_cancelled_pause_teaches_nothing(twin: Any, server: FakeServer) -> None:
    forecaster = PauseForecaster()

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            with pytest.raises(KeyboardInterrupt):
                async with twin.enter(s.pause("tool", command="make")):
                    raise KeyboardInterrupt
            assert len(forecaster) == 0
            with pytest.raises(ZeroDivisionError):
                async with twin.enter(s.pause("tool", command="make")):
                    raise ZeroDivisionError
            assert len(forecaster) == 4  # kind, class, tool, program
            assert s.open_pauses == []

    twin.run(scenario, server.url, forecaster=forecaster)


def test_session_that_ends_inside_a_pause_never_returned(twin: Any, server: FakeServer) -> None:
    forecaster = PauseForecaster()

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            s.pause("human").start()
            s.end(keep_s=30.0)
            s.end()  # a second call does nothing
            with pytest.raises(tenuto.SessionClosedError, match="has ended"):
                await twin.wait(s.chat(MESSAGES))

    before = forecaster.predict(tenuto.PauseKey.of("human")).p_return
    twin.run(scenario, server.url, forecaster=forecaster)
    assert forecaster.predict(tenuto.PauseKey.of("human")).p_return < before
    (end,) = server.hints.of_type("agent.end")
    assert end.keep_s == 30.0


def test_unknown_kind_and_invalid_names_never_raise(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("x" * 1000, agent="a" * 1000)) as s:
            assert len(s.id) == 256
            async with twin.enter(s.pause("typo", name="t" * 1000)) as gap:
                assert gap.kind == "unknown"
            s.resume_soon(-1.0)
            s.model_switch("")
            return tn.hints.stats.failed

    assert twin.run(scenario, server.url) == 3  # the overlong agent, the negative time, the empty model


def test_fork(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("root", model="m")) as s:
            turn = await twin.wait(s.chat(MESSAGES))
            async with twin.enter(s.fork("explore")) as child:
                assert child.history == MESSAGES
                report = await twin.wait(child.chat([*child.history, tenuto.user("Find all callers.")]))
            flushed(tn)
            return turn, report, child

    turn, report, child = twin.run(scenario, server.url)
    assert child.closed
    assert child.parent == "root"
    assert child.model == "m"
    assert report.usage.cached_tokens == turn.usage.prompt_tokens  # the whole of the parent's prompt
    (fork,) = server.hints.of_type("agent.fork")
    assert fork.session == "root"
    assert fork.children == (child.id,)
    assert fork.count == 1
    assert (fork.shared.messages, fork.shared.tokens) == (2, turn.usage.prompt_tokens)
    assert fork.shared.fingerprint == tenuto.fingerprint(MESSAGES).digest
    (join,) = server.hints.of_type("agent.join")
    assert (join.session, join.child, join.keep) == ("root", child.id, False)
    assert server.chats[1].headers["x-parent-session-id"] == "root"
    types = [(h.action.TYPE, h.action.session) for h in server.hints.seen]
    # The fork rides with the child's first request, so that it cannot come after it.
    assert types.index(("agent.fork", "root")) < types.index(("agent.session", child.id))


def test_fan_out_announces_once(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> list[str]:
        async with twin.enter(tn.session("root", model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            children = s.fan_out(["a", "b", "a"], when_s=1.0)
            for child in children:
                async with twin.enter(child):
                    pass
            flushed(tn)
            return [child.id for child in children]

    ids = twin.run(scenario, server.url)
    assert len(set(ids)) == 3
    (fork,) = server.hints.of_type("agent.fork")
    assert (list(fork.children), fork.count, fork.when_s) == (ids, 3, 1.0)
    assert [j.child for j in server.hints.of_type("agent.join")] == ids


def test_spawn_shares_nothing(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("root", model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            async with twin.enter(s.spawn("reviewer", model="small")) as child:
                assert (child.history, child.parent, child.model) == ([], "root", "small")
            s.join(child, keep=True)
            flushed(tn)

    twin.run(scenario, server.url)
    assert server.hints.of_type("agent.fork") == []
    (join,) = server.hints.of_type("agent.join")
    assert join.keep


def test_compaction_commit(twin: Any, server: FakeServer) -> None:
    tools = [{"type": "function", "function": {"name": "bash"}}]

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("s", model="m")) as s:
            first = await twin.wait(s.chat(MESSAGES, tools=tools))
            async with twin.enter(s.compaction(keep_messages=1, expect_tokens=50)) as compaction:
                flushed(tn)
                ask = tenuto.user("Summarise.")
                summary = await twin.wait(s.chat([*s.history, ask], tools=tools))
                assert summary.usage.cached_tokens == first.usage.prompt_tokens
                compaction.commit([MESSAGES[0], tenuto.user("Summary: done")])
            assert compaction.state == "committed"
            with pytest.raises(tenuto.TenutoError, match="it is committed"):
                compaction.commit([])
            flushed(tn)

    twin.run(scenario, server.url)
    begin, commit = server.hints.of_type("agent.compaction")
    assert (begin.phase, begin.keep.messages, begin.expect_tokens, begin.request) == ("begin", 1, 50, None)
    assert (commit.phase, commit.keep.messages) == ("commit", 1)  # the system message is all that stays
    assert commit.request == {
        "model": "m",
        "messages": [MESSAGES[0], {"role": "user", "content": "Summary: done"}],
        "tools": tools,
    }


def test_compaction_abort_and_large_prompt(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("s", model="m")) as s:
            with pytest.raises(ZeroDivisionError):
                async with twin.enter(s.compaction()):
                    raise ZeroDivisionError
            async with twin.enter(s.compaction()) as large:
                large.commit([tenuto.user("x" * 300_000)])
            async with twin.enter(s.compaction(warm=False)) as cold:
                cold.commit(MESSAGES)
            flushed(tn)

    twin.run(scenario, server.url)
    phases = [(h.phase, h.request) for h in server.hints.of_type("agent.compaction")]
    assert phases == [(p, None) for p in ("begin", "abort", "begin", "commit", "begin", "commit")]


def test_keepalive_ends_with_the_session(twin: Any, server: FakeServer) -> None:
    clock = VirtualClock()

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("s", model="m")) as s:
            handle = s.keepalive(for_s=3600.0, every_s=10.0)
            server.hints.wait_for("agent.keepalive", 1)
            clock.advance(10.0)
            server.hints.wait_for("agent.keepalive", 2)
        clock.advance(100.0)
        time.sleep(0.05)
        assert not handle.active

    twin.run(scenario, server.url, clock=clock)
    assert [k.for_s for k in server.hints.of_type("agent.keepalive")] == [25.0, 25.0]


def test_usage_misses_and_divergence(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("s", model="m")) as s:
            first = await twin.wait(s.chat(MESSAGES))
            assert s.last_miss is None
            assert s.usage.cache_hit_ratio == 0.0
            second = await twin.wait(s.chat([*s.history, tenuto.user("And now?")]))
            assert s.divergence is None
            changed = [tenuto.system("You are verbose."), *s.history[1:]]
            third = await twin.wait(s.chat(changed))
            assert (s.divergence.part, s.divergence.index) == ("system", 0)
            return first, second, third, s

    first, second, third, s = twin.run(scenario, server.url)
    turns = (first, second, third)
    assert s.usage.turns == 3
    assert s.usage.prompt_tokens == sum(t.usage.prompt_tokens for t in turns)
    assert s.usage.cached_tokens == second.usage.cached_tokens + third.usage.cached_tokens
    assert s.usage.cache_hit_ratio == s.usage.cached_tokens / s.usage.prompt_tokens
    assert sum(s.usage.by_tier.values()) == s.usage.prompt_tokens
    assert s.last_miss.label == "mutation"
    assert s.last_miss.tokens == s.usage.misses["mutation"] > 0
    assert s.last_miss.where.part == "system"


def test_current_session(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        assert tenuto.current_session() is None
        async with twin.enter(tn.session("outer", model="m")) as outer:
            assert tenuto.current_session() is outer
            async with twin.enter(outer.fork("inner")) as inner:
                assert tenuto.current_session() is inner
            assert tenuto.current_session() is outer
        assert tenuto.current_session() is None

    twin.run(scenario, server.url)


def test_message_helpers() -> None:
    call = tenuto.ToolCall("c1", "bash", {}, "")
    assert tenuto.tool_result(call, "out") == tenuto.tool_result("c1", "out")
    assert tenuto.tool_result(call, "out") == {"role": "tool", "tool_call_id": "c1", "content": "out"}
    assert tenuto.system("a") == {"role": "system", "content": "a"}


def test_history_is_saved_at_close(twin: Any, server: FakeServer, tmp_path: Any) -> None:
    path = tmp_path / "pauses.json"

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            for _ in range(40):
                async with twin.enter(s.pause("tool", command="make")):
                    pass

    twin.run(scenario, server.url, forecaster=PauseForecaster(path))
    assert PauseForecaster(path).predict(tenuto.PauseKey.of("tool", command="make")).confidence > 0.8
