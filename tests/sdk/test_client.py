"""Requests of both clients over a real socket: settings, retries, errors, streams, and a server that fails in every way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import tenuto
from tenuto.fake_server import FakeServer
from tenuto.forecast import PauseForecast, PauseForecaster

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def silent() -> Iterator[str]:
    """A URL on which connections are accepted and nothing is ever answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_chat(twin: Any, server: FakeServer) -> None:
    server.reply("Hello there")

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("s-1", parent="p-1", model="m")) as s:
            return await twin.wait(s.chat(MESSAGES, temperature=0.0, seed=None, extra_headers={"x-mine": "1"}))

    turn = twin.run(scenario, server.url, api_key="key-1")
    assert (turn.text, turn.finish_reason, turn.tool_calls) == ("Hello there", "stop", ())
    assert turn.message == {"role": "assistant", "content": "Hello there"}
    assert turn.usage.prompt_tokens > 0
    assert turn.ttft_s is not None
    assert 0 <= turn.ttft_s <= turn.duration_s
    assert turn.request_id == turn.id == "chatcmpl-1"
    (seen,) = server.chats
    assert seen.headers["x-session-id"] == "s-1"
    assert seen.headers["x-parent-session-id"] == "p-1"
    assert seen.headers["authorization"] == "Bearer key-1"
    assert seen.headers["x-mine"] == "1"
    assert seen.body == {"model": "m", "messages": MESSAGES, "temperature": 0.0}


def test_stream(twin: Any, server: FakeServer) -> None:
    server.reply("pieces of six characters", ("bash", {"command": "ls"}), ("read", {"path": "a\u2028b"}))

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("s-1", model="m")) as s:
            async with twin.enter(s.stream(MESSAGES)) as stream:
                events = await twin.read(stream)
            return events, stream.turn, s

    events, turn, session = twin.run(scenario, server.url)
    assert "".join(event.text for event in events) == turn.text == "pieces of six characters"
    assert len([e for e in events if e.text]) == 4
    assert [(c.name, c.arguments) for c in turn.tool_calls] == [
        ("bash", {"command": "ls"}),
        ("read", {"path": "a\u2028b"}),
    ]
    assert turn.finish_reason == "tool_calls"
    assert turn.usage.report is not None
    assert 0 < turn.ttft_s <= turn.duration_s
    assert session.last_turn is turn
    assert session.usage.turns == 1
    assert server.chats[0].body["stream_options"] == {"include_usage": True}


def test_streamed_and_whole_answers_agree(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session(model="m")) as one, twin.enter(tn.session(model="m")) as two:
            server.reply("the same", ("bash", {"command": "ls"}))
            whole = await twin.wait(one.chat(MESSAGES))
            server.reply("the same", ("bash", {"command": "ls"}))
            async with twin.enter(two.stream(MESSAGES)) as stream:
                await twin.read(stream)
            return whole, stream.turn

    whole, streamed = twin.run(scenario, server.url)
    for turn in (whole, streamed):
        for call in turn.message["tool_calls"]:
            call["id"] = "-"  # numbered by request
    assert whole.message == streamed.message
    assert whole.usage.by_tier == streamed.usage.by_tier


def test_chat_without_a_session_opens_and_ends_one(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        turn = await twin.wait(tn.chat("just this", model="m"))
        tn.hints.flush(5.0)
        return turn

    assert twin.run(scenario, server.url).text == "ok"
    assert server.chats[0].body["messages"] == [{"role": "user", "content": "just this"}]
    assert server.hints.types() == ["agent.session", "agent.end"]


def test_chat_and_chat_stream_in_a_session(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session("mine", model="m")) as s:
            await twin.wait(tn.chat("one", session=s))
            async with twin.enter(tn.chat_stream("two", session=s)) as stream:
                await twin.read(stream)
            return s.usage.turns

    assert twin.run(scenario, server.url) == 2
    assert {r.headers["x-session-id"] for r in server.chats} == {"mine"}


def test_model_defaults_to_what_the_server_lists(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session()) as s:
            await twin.wait(s.chat(MESSAGES))
            async with twin.enter(s.stream(MESSAGES)) as stream:
                await twin.read(stream)
            await twin.wait(s.chat(MESSAGES, model="named"))

    twin.run(scenario, server.url)
    assert [r.body["model"] for r in server.chats] == ["fake", "fake", "named"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_settings_from_the_environment(
    twin: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setenv("TENUTO_BASE_URL", server.url + suffix)
    monkeypatch.setenv("TENUTO_API_KEY", "from-env")

    async def scenario(tn: Any) -> Any:
        return await twin.wait(tn.chat("hello", model="m"))

    assert twin.run(scenario).text == "ok"
    assert server.chats[0].headers["authorization"] == "Bearer from-env"
    assert tenuto.connect().base_url == server.url


def test_default_url() -> None:
    client = tenuto.connect_sync()
    assert client.base_url == "http://127.0.0.1:8000"
    client.close()


def test_disabled_turns_hints_off(twin: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_DISABLED", "1")

    async def scenario(tn: Any) -> Any:
        assert not tn.hints.enabled
        async with twin.enter(tn.session(model="m")) as s:
            async with twin.enter(s.pause("tool", command="make")) as gap:
                gap.progress(0.5)
            with s.keepalive(60.0), s.compaction() as compaction:
                compaction.commit(MESSAGES)
            await twin.wait(s.chat(MESSAGES))
            s.fork("child").end()
        assert tn.hints.flush()
        return tn.hints.stats.offered

    assert twin.run(scenario, server.url) == 0
    assert server.hints.seen == []
    assert [r.path for r in server.requests] == ["/v1/chat/completions"]


class _Oracle(PauseForecaster):
    """Counts how often it is asked."""

    asked = 0

    def predict(self, *args: Any, **named: Any) -> PauseForecast:
        self.asked += 1
        return super().predict(*args, **named)


def test_disabled_pauses_teach_and_predict_only_when_asked(
    twin: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_DISABLED", "1")
    forecaster = _Oracle()

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            for given in (None, 30.0):
                async with twin.enter(s.pause("tool", command="make", forecast=given)):
                    pass
            assert forecaster.asked == 0
            assert s.pause("tool", command="make", forecast=30.0).forecast.p50_s == 30.0

    twin.run(scenario, server.url, forecaster=forecaster)
    assert forecaster.asked == 1
    assert forecaster.predict(tenuto.PauseKey.of("tool", command="make")).confidence > 0.0


def test_retries_then_succeeds(twin: Any, server: FakeServer) -> None:
    server.fail(503, **{"retry-after": "0.01"})
    server.fail(429, **{"retry-after": "0.01"})

    async def scenario(tn: Any) -> Any:
        return await twin.wait(tn.chat("hello", model="m"))

    assert twin.run(scenario, server.url).text == "ok"
    assert len(server.chats) == 3
    bodies = [r.body for r in server.chats]
    assert bodies[0] == bodies[1] == bodies[2]


def test_gives_up_after_two_retries_and_reports(twin: Any, server: FakeServer) -> None:
    server.fail(500, times=3, **{"retry-after": "0"})

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            with pytest.raises(tenuto.InternalServerError, match="500: scripted failure") as caught:
                await twin.wait(s.chat(MESSAGES))
            assert (caught.value.code, caught.value.param, caught.value.status) == ("scripted", "messages", 500)
            assert (await twin.wait(s.chat(MESSAGES))).text == "ok"  # the session is unharmed

    twin.run(scenario, server.url)
    assert len(server.chats) == 4


def test_client_errors_are_not_retried(twin: Any, server: FakeServer) -> None:
    server.fail(404)

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            with pytest.raises(tenuto.NotFoundError):
                async with twin.enter(s.stream(MESSAGES)):
                    pass

    twin.run(scenario, server.url)
    assert len(server.chats) == 1


def test_stream_that_breaks_off(twin: Any, server: FakeServer) -> None:
    server.faults.cut_stream_after = 2
    server.reply("this answer is cut off")

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session(model="m")) as s:
            with pytest.raises(tenuto.APIConnectionError):
                async with twin.enter(s.stream(MESSAGES)) as stream:
                    await twin.read(stream)
            return stream.turn, s

    turn, session = twin.run(scenario, server.url)
    assert turn.text == "this a"
    assert session.last_turn is None  # no turn ended, so nothing is counted as one
    assert session.usage.turns == 0


def test_leaving_a_stream_early(twin: Any, server: FakeServer) -> None:
    server.reply("x" * 600)

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session(model="m")) as s:
            async with twin.enter(s.stream(MESSAGES)) as stream:
                pass
            assert s.usage.turns == 0
            assert stream.turn.text == ""
            return await twin.wait(s.chat(MESSAGES))

    assert twin.run(scenario, server.url).text == "ok"


def test_stream_must_be_entered(server: FakeServer) -> None:
    raises = pytest.raises(RuntimeError, match="enter the stream first")
    with tenuto.connect_sync(server.url) as tn, tn.session(model="m") as s, raises:
        next(iter(s.stream(MESSAGES)))

    async def twin() -> None:
        async with tenuto.connect(server.url) as client, client.session(model="m") as session:
            with pytest.raises(RuntimeError, match="enter the stream first"):
                async for _ in session.stream(MESSAGES):
                    pass

    anyio.run(twin)


def test_timeout(twin: Any, silent: str) -> None:
    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            with pytest.raises(tenuto.APITimeoutError):
                await twin.wait(s.chat(MESSAGES, timeout=0.05))

    twin.run(scenario, silent, max_retries=0)


def test_answer_that_is_no_json(twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_DISABLED", "1")  # the listener answers one connection only
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nx-request-id: r1\r\n\r\n<html>")

        thread = threading.Thread(target=answer)
        thread.start()

        async def scenario(tn: Any) -> None:
            async with twin.enter(tn.session(model="m")) as s:
                with pytest.raises(tenuto.APIError, match="not a JSON object") as caught:
                    await twin.wait(s.chat(MESSAGES))
                assert caught.value.request_id == "r1"

        twin.run(scenario, f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_server_down_costs_next_to_nothing(twin: Any, nowhere: str) -> None:
    """Nothing raised, at most 250 ms at connect, nothing for a hint; only a turn fails, and says why."""
    times: dict[str, float] = {}

    async def scenario(tn: Any) -> Any:
        times["connect"] = time.perf_counter() - start
        async with twin.enter(tn.session(model="m")) as s:
            begun = time.perf_counter()
            for _ in range(200):
                async with twin.enter(s.pause("tool", command="make test")) as gap:
                    gap.progress(eta_s=3.0)
            s.keepalive(60.0)
            s.model_switch("other")
            s.fork("child").end()
            times["hints"] = time.perf_counter() - begun
            with pytest.raises(tenuto.APIConnectionError, match=f"no connection to {nowhere}"):
                await twin.wait(s.chat(MESSAGES))
            time.sleep(0.05)
            return tn

    start = time.perf_counter()
    client = twin.run(scenario, nowhere, max_retries=0)
    assert times["connect"] < 0.25
    assert times["hints"] / 200 < 0.005
    stats = client.hints.stats
    assert stats.queued == stats.sent == 0
    assert stats.failed >= 1
    assert stats.offered == stats.failed + stats.dropped + stats.cancelled


def test_silent_server_delays_no_hint_and_no_close(twin: Any, silent: str) -> None:
    async def scenario(tn: Any) -> float:
        async with twin.enter(tn.session(model="m")) as s:
            begun = time.perf_counter()
            for _ in range(100):
                async with twin.enter(s.pause("human")):
                    pass
            return time.perf_counter() - begun

    start = time.perf_counter()
    assert twin.run(scenario, silent) < 0.5
    assert time.perf_counter() - start < 2.0


def test_slow_hints_delay_no_turn(twin: Any, server: FakeServer) -> None:
    server.faults.hint_delay_s = 5.0  # far above the budget of a delivery

    async def scenario(tn: Any) -> float:
        async with twin.enter(tn.session(model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            begun = time.perf_counter()
            for _ in range(5):
                async with twin.enter(s.pause("human")):
                    time.sleep(0.002)
                await twin.wait(s.chat(MESSAGES))
            return time.perf_counter() - begun

    assert twin.run(scenario, server.url) < 1.0


def test_hints_go_on_while_the_server_is_slow_to_answer(twin: Any, server: FakeServer) -> None:
    # An engine in a long forward: longer than a delivery waits, though every hint arrives.
    server.faults.hint_delay_s = 0.3

    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session(model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            for _ in range(3):
                async with twin.enter(s.pause("human")):
                    time.sleep(0.2)
        return tn.hints.stats

    stats = twin.run(scenario, server.url)
    assert stats.failed == stats.cancelled == 0
    assert stats.reachable
    give_up = time.monotonic() + 5.0
    while server.hints.types().count("agent.pause") < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    assert server.hints.types().count("agent.pause") == 3


def test_strict_raises_a_rejected_hint_on_the_next_turn(twin: Any, server: FakeServer) -> None:
    server.outcome = lambda action: (
        ("rejected", "no such thing") if action.TYPE == "agent.resume_soon" else ("accepted", "")
    )

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session(model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            s.resume_soon(1.0)
            assert tn.hints.flush(5.0)
            with pytest.raises(tenuto.HintRejectedError, match=r"agent\.resume_soon: rejected: no such thing"):
                await twin.wait(s.chat(MESSAGES))
            await twin.wait(s.chat(MESSAGES))

    twin.run(scenario, server.url, strict=True)
    twin_of_lax_client_does_not_raise(twin, server)


def twin_of_lax_client_does_not_raise(twin: Any, server: FakeServer) -> None:
    async def scenario(tn: Any) -> Any:
        async with twin.enter(tn.session(model="m")) as s:
            await twin.wait(s.chat(MESSAGES))
            s.resume_soon(1.0)
            tn.hints.flush(5.0)
            await twin.wait(s.chat(MESSAGES))
            return tn.hints.stats.receipts

    assert twin.run(scenario, server.url)["rejected"] == 1


def test_works_on_trio(server: FakeServer) -> None:
    pytest.importorskip("trio")

    async def main() -> None:
        async with tenuto.connect(server.url) as tn, tn.session(model="m") as s:
            assert (await s.chat(MESSAGES)).text == "ok"

    anyio.run(main, backend="trio")
