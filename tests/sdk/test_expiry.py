"""``compact_before_expiry``: one summary in a long pause, while the lease holds; nothing without the opt-in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

import tenuto
from tenuto.fake_server import FakeServer, VirtualClock

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
ASK = tenuto.user("Summarise.")
HUMAN = {"forecast": 18_000.0}  # five hours


class Harness:
    """An agent that keeps its own messages, as agents do, and knows how to summarise them."""

    def __init__(self, session: Any, server: FakeServer, clock: VirtualClock) -> None:
        self.session = session
        self.server = server
        self.clock = clock
        self.messages: list[Any] = [tenuto.system("You are terse."), tenuto.user("Read every file. " * 2000)]
        self.threads: set[str] = set()
        self.inside: Callable[[], Awaitable[object]] | None = None
        self.summary: Any = None

    async def turn(self, text: str | None = None) -> Any:
        if text is not None:
            self.messages.append(tenuto.user(text))
        turn = await self.session.chat(self.messages, tools=TOOLS)
        self.messages.append(turn.message)
        return turn

    async def summarise(self, compaction: tenuto.Compaction) -> None:
        self.threads.add(threading.current_thread().name)
        self.summary = await self.session.chat([*self.messages, ASK], tools=TOOLS, tool_choice="none")
        if self.inside is not None:
            await self.inside()
        self.messages = [self.messages[0], tenuto.user(f"So far: {self.summary.text}")]
        compaction.commit(self.messages)

    async def leased(self, pauses: int = 1) -> None:
        """Waits until the client knows the lease of the ``pauses``th announcement."""
        await until(lambda: len(self.server.hints.of_type("agent.pause")) >= pauses)
        await until(lambda: self.session.lease_ends_s is not None)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10.0):
        while not condition():
            await anyio.sleep(0.005)


async def quiet() -> None:
    """Long enough for the sender's worker to look at a moved clock several times, and for a request to arrive."""
    await anyio.sleep(0.15)


def play(server: FakeServer, scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with (
            tenuto.connect(server.url, clock=clock, max_retries=0) as tn,
            tn.session("s", model="m") as s,
        ):
            await scenario(Harness(s, server, clock))

    anyio.run(main)


def phases(server: FakeServer) -> list[str]:
    return [h.phase for h in server.hints.of_type("agent.compaction")]


def test_a_pause_of_five_hours_costs_one_summary_of_the_warm_prefix(server: FakeServer) -> None:
    async def scenario(h: Harness) -> None:
        handle = h.session.compact_before_expiry(h.summarise, min_tokens=1000)
        await h.turn()
        live = list(h.messages)
        async with h.session.pause("human", **HUMAN):
            await h.leased()
            h.clock.advance(54.9)  # the lease is one of 60 s, and the lead 5 s
            await quiet()
            assert len(server.chats) == 1
            h.clock.advance(0.2)
            await until(lambda: handle.compacted == 1)
            assert [m.kind for m in server.hints.wait_for("agent.pause", 2)] == ["human", "human"]
            for _ in range(300):  # the rest of the five hours, a minute at a time
                h.clock.advance(60.0)
                await anyio.sleep(0)
            await quiet()
        request = server.chats[1].body
        assert request["messages"] == [*live, ASK]
        assert request["tools"] == TOOLS
        usage = h.summary.usage
        assert usage.cached_tokens >= 0.99 * usage.prompt_tokens
        back = await h.turn("Good morning.")
        assert back.usage.prompt_tokens < 0.1 * usage.prompt_tokens
        assert h.threads == {"MainThread"}  # the agent's own loop
        assert (handle.compacted, handle.failed) == (1, 0)

    play(server, scenario)
    assert len(server.chats) == 3
    assert phases(server) == ["begin", "commit"]


def test_nothing_happens_without_the_opt_in(server: FakeServer) -> None:
    async def scenario(h: Harness) -> None:
        await h.turn()
        async with h.session.pause("human", **HUMAN):
            await h.leased()
            h.clock.advance(56.0)
            await quiet()

    play(server, scenario)
    assert len(server.chats) == 1
    assert phases(server) == []


@pytest.mark.parametrize(
    "why", ["small", "another kind", "no lease", "no turn", "lapsed", "stopped", "pause over", "another pause inside"]
)
def test_when_it_stays_quiet(server: FakeServer, why: str) -> None:
    async def scenario(h: Harness) -> None:
        if why == "no lease":
            server.lease_s = None
        handle = h.session.compact_before_expiry(h.summarise, min_tokens=50_000 if why == "small" else 1000)
        if why != "no turn":
            await h.turn()
        turns = len(server.chats)
        pause = h.session.pause("tool" if why == "another kind" else "human", **HUMAN).start()
        if why == "no lease":
            await until(lambda: len(server.hints.of_type("agent.pause")) == 1)
        else:
            await h.leased()
        if why == "stopped":
            handle.stop()
        if why == "pause over":
            pause.stop()
        if why == "another pause inside":
            h.session.pause("tool", **HUMAN).start()
        h.clock.advance(61.0 if why == "lapsed" else 56.0)
        await quiet()
        assert len(server.chats) == turns
        assert (handle.compacted, handle.failed) == (0, 0)

    play(server, scenario)
    assert phases(server) == []


def test_each_pause_may_be_used_once(server: FakeServer) -> None:
    async def scenario(h: Harness) -> None:
        handle = h.session.compact_before_expiry(h.summarise, min_tokens=20)
        await h.turn()
        for number in (1, 2):
            async with h.session.pause("human", **HUMAN):
                await h.leased(2 * number - 1)
                h.clock.advance(56.0)
                await until(lambda n=number: handle.compacted == n)  # type: ignore[misc]
                await h.leased(2 * number)
                h.clock.advance(56.0)  # the announcement after it was granted a lease of its own
                await quiet()
            if number == 2:
                async with h.session.pause("human", **HUMAN):  # no turn since: there is nothing to compact
                    await h.leased(5)
                    h.clock.advance(56.0)
                    await quiet()
            await h.turn("Go on. " * 20)
        assert handle.compacted == 2

    play(server, scenario)
    assert phases(server) == ["begin", "commit"] * 2


def test_a_longer_lease_moves_the_summary(server: FakeServer) -> None:
    async def scenario(h: Harness) -> None:
        handle = h.session.compact_before_expiry(h.summarise, min_tokens=1000, lead_s=10.0)
        await h.turn()
        async with h.session.pause("human", **HUMAN) as pause:
            await h.leased()
            server.lease_s = 400.0
            h.clock.advance(30.0)
            pause.announce_again()
            await until(lambda: h.session.lease.until_s == 400.0)
            for seconds in (25.0, 355.0):  # into the lead of the first lease, and far beyond it
                h.clock.advance(seconds)
                await quiet()
            assert handle.compacted == 0
            h.clock.advance(11.0)
            await until(lambda: handle.compacted == 1)

    play(server, scenario)


@pytest.mark.parametrize("by", ["pause", "turn", "end"])
def test_the_end_of_the_pause_calls_the_summary_off(server: FakeServer, by: str) -> None:
    async def scenario(h: Harness) -> None:
        handle = h.session.compact_before_expiry(h.summarise, min_tokens=1000)
        await h.turn()
        live = list(h.messages)
        entered = anyio.Event()

        async def wait() -> None:
            entered.set()
            await anyio.sleep_forever()

        h.inside = wait
        pause = h.session.pause("human", **HUMAN).start()
        await h.leased()
        h.clock.advance(56.0)
        with anyio.fail_after(10.0):
            await entered.wait()
        if by == "pause":
            pause.stop()
        if by == "end":
            h.session.end()
        else:
            await h.turn("I am back.")
            assert h.messages[: len(live)] == live
        await quiet()
        assert (handle.compacted, handle.failed) == (0, 0)

    play(server, scenario)
    assert sorted(phases(server)) == ["abort", "begin"]


def test_a_failure_stays_with_the_handle(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(h: Harness) -> None:
        handle = h.session.compact_before_expiry(h.summarise, min_tokens=1000)
        await h.turn()
        async with h.session.pause("human", **HUMAN):
            await h.leased()
            server.fail(500)
            h.clock.advance(56.0)
            await until(lambda: handle.failed == 1)
            await until(lambda: h.session.lease_ends_s == h.clock() + 60.0)  # that of the second announcement
            h.clock.advance(56.0)  # one attempt a pause
            await quiet()
        assert isinstance(handle.error, tenuto.InternalServerError)
        assert handle.compacted == 0
        await h.turn("Still there?")

    with caplog.at_level(logging.WARNING, logger="tenuto"):
        play(server, scenario)
    assert "the summary failed: InternalServerError" in caplog.text
    assert phases(server)[-1] == "abort"
    assert len(server.chats) == 3  # the turn, the summary that failed, and the next turn


def test_a_client_that_closes_in_the_middle_leaves_nothing_behind(server: FakeServer) -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with tenuto.connect(server.url, clock=clock) as tn:
            h = Harness(tn.session("s", model="m"), server, clock)
            h.session.compact_before_expiry(h.summarise, min_tokens=1000)
            await h.turn()
            entered = anyio.Event()

            async def wait() -> None:
                entered.set()
                await anyio.sleep_forever()

            h.inside = wait
            h.session.pause("human", **HUMAN).start()
            await h.leased()
            clock.advance(56.0)
            with anyio.fail_after(10.0):
                await entered.wait()

    anyio.run(main)
    for thread in threading.enumerate():
        if thread.name == "tenuto-compact":
            thread.join(5.0)
            assert not thread.is_alive()


def test_arguments(server: FakeServer) -> None:
    async def scenario(h: Harness) -> None:
        for lead_s in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="lead_s"):
                h.session.compact_before_expiry(h.summarise, min_tokens=0, lead_s=lead_s)
        with pytest.raises(ValueError, match="min_tokens"):
            h.session.compact_before_expiry(h.summarise, min_tokens=-1)

    play(server, scenario)
