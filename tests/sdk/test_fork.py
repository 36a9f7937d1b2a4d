"""A fork is verified, not assumed: what the child sends is compared with the prompt it was forked from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tenuto
from tenuto.fake_server import FakeServer

MESSAGES = [tenuto.system("You are terse."), tenuto.user("Fix the failing test, please.")]
BASH, READ = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("bash", "read"))
TOOLS = [BASH, READ]
TASK = tenuto.user("Find all callers.")


Change = tuple[Callable[[list[Any]], list[Any]], list[dict[str, Any]], str]


def changed_history(history: list[Any]) -> list[Any]:
    return [history[0], tenuto.user("Something else."), *history[2:]]


CHANGES: dict[str, Change] = {
    "tools reordered": (lambda h: h, [READ, BASH], "tools[0] (tool): order-only"),
    "tool dropped": (lambda h: h, [BASH], "tools[1] (tool): truncated"),
    "system": (lambda h: [tenuto.system("You are verbose."), *h[1:]], TOOLS, "system[0] (system): changed"),
    "history": (changed_history, TOOLS, "messages[0] (user): changed"),
}


async def first_request(twin: Any, child: Any, messages: list[Any], tools: list[Any], streamed: bool) -> None:
    if not streamed:
        await twin.wait(child.chat(messages, tools=tools))
        return
    async with twin.enter(child.stream(messages, tools=tools)) as stream:
        await twin.read(stream)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("after", ["prompt", "answer"])
def test_equal_fork_is_silent(twin: Any, server: FakeServer, strict: bool, after: str) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("root", model="m")) as s:
            turn = await twin.wait(s.chat(MESSAGES, tools=TOOLS))
            async with twin.enter(s.fork("explore", tools=[dict(t) for t in TOOLS], strict=strict)) as child:
                start = child.history if after == "prompt" else [*child.history, turn.message]
                await twin.wait(s.chat([*s.history, tenuto.user("Meanwhile.")], tools=TOOLS))  # the parent goes on
                answer = await twin.wait(child.chat([*start, TASK], tools=TOOLS))
                assert child.divergence is None
                return turn, answer

    turn, answer = twin.run(scenario, server.url)  # a warning would be an error here
    assert answer.usage.cached_tokens >= turn.usage.prompt_tokens


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("change", CHANGES)
def test_difference_is_named_once_and_the_request_goes_on(
    twin: Any, server: FakeServer, change: str, streamed: bool
) -> None:
    alter, tools, where = CHANGES[change]

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("root", model="m")) as s:
            await twin.wait(s.chat(MESSAGES, tools=TOOLS))
            async with twin.enter(s.fork("explore")) as child:
                start = [*alter(child.history), TASK]
                with pytest.warns(tenuto.PrefixDivergedWarning, match=re.escape(where)) as caught:
                    await first_request(twin, child, start, tools, streamed)
                assert [Path(w.filename).parent for w in caught] == [Path(__file__).parent]  # at the agent's code
                assert str(child.divergence).startswith(where)
                await first_request(twin, child, [*child.history, tenuto.user("More.")], tools, streamed)
                assert child.divergence is None
                await first_request(twin, child, [tenuto.user("Anew.")], tools, streamed)  # the child's own affair
                assert child.divergence is not None

    twin.run(scenario, server.url)
    assert len(server.chats) == 4


@pytest.mark.parametrize("change", CHANGES)
def test_strict_fork_raises_before_anything_is_sent(twin: Any, server: FakeServer, change: str) -> None:
    alter, tools, where = CHANGES[change]

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("root", model="m")) as s:
            await twin.wait(s.chat(MESSAGES, tools=TOOLS))
            async with twin.enter(s.fork("explore", strict=True)) as child:
                for streamed in (False, True):  # and again, until it is put right
                    with pytest.raises(tenuto.PrefixDivergedError, match=re.escape(where)):
                        await first_request(twin, child, [*alter(child.history), TASK], tools, streamed)
                assert len(server.chats) == 1
                await first_request(twin, child, [*child.history, TASK], TOOLS, False)
            assert tn.hints.flush(5.0)

    twin.run(scenario, server.url)
    assert len(server.chats) == 2
    assert len(server.hints.of_type("agent.fork")) == 1


def test_tools_known_at_the_fork_are_compared_there(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("root", model="m")) as s:
            await twin.wait(s.chat(MESSAGES, tools=TOOLS))
            with pytest.raises(tenuto.PrefixDivergedError, match=r"tools\[0\] \(tool\): order-only"):
                s.fork("explore", tools=[READ, BASH], strict=True)
            with pytest.warns(tenuto.PrefixDivergedWarning, match=r"tools\[0\] .*order-only") as caught:
                children = s.fan_out(["a", "b"], tools=[READ, BASH])
            assert [w.filename for w in caught] == [__file__]
            for child in children:
                child.end()
            assert tn.hints.flush(5.0)

    twin.run(scenario, server.url)
    (fork,) = server.hints.of_type("agent.fork")  # nothing was announced of the one refused
    assert len(fork.children) == 2


def test_fork_of_a_session_without_a_turn(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("root", model="m")) as s:
            with pytest.raises(tenuto.PrefixDivergedError, match="no turn yet"):
                s.fork("explore", strict=True)
            async with twin.enter(s.fork("explore", tools=TOOLS)) as child:
                await twin.wait(child.chat(MESSAGES))  # nothing to compare with

    twin.run(scenario, server.url)


def test_spawned_child_is_not_compared(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("root", model="m")) as s:
            await twin.wait(s.chat(MESSAGES, tools=TOOLS))
            async with twin.enter(s.spawn("reviewer")) as child:
                await twin.wait(child.chat([TASK]))
                assert child.divergence is None

    twin.run(scenario, server.url)
