"""``tenuto.wrap`` around the installed OpenAI SDK, sync and async: same results, same types, and hints."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

import tenuto
from tenuto.fake_server import FakeServer
from tenuto.wrapping import _Watch

openai = pytest.importorskip("openai")

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
PROMPT: list[dict[str, Any]] = [tenuto.system("Be terse."), tenuto.user("Run the tests.")]


class SyncSDK:
    """Drives ``OpenAI`` through the calls that ``AsyncSDK`` makes on ``AsyncOpenAI``."""

    kind = openai.OpenAI

    def __init__(self, url: str, **options: Any) -> None:
        plain = self.kind(base_url=f"{url}/v1", api_key="key", max_retries=2)
        self.client = tenuto.wrap(plain, **options)

    def create(self, **body: Any) -> Any:
        return self.client.chat.completions.create(model="m", **body)

    def text(self, **body: Any) -> str:
        chunks = self.client.chat.completions.create(model="m", stream=True, **body)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def drop_stream(self, **body: Any) -> None:
        stream = self.client.chat.completions.create(model="m", stream=True, **body)
        next(iter(stream))
        stream.close()

    def close(self) -> None:
        self.client.close()


class AsyncSDK(SyncSDK):
    kind = openai.AsyncOpenAI

    def __init__(self, url: str, **options: Any) -> None:
        self.portal_manager = anyio.from_thread.start_blocking_portal()
        self.portal = self.portal_manager.__enter__()
        super().__init__(url, **options)

    def create(self, **body: Any) -> Any:
        async def call() -> Any:
            return await self.client.chat.completions.create(model="m", **body)

        return self.portal.call(call)

    def text(self, **body: Any) -> str:
        async def call() -> str:
            chunks = await self.client.chat.completions.create(model="m", stream=True, **body)
            return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

        return self.portal.call(call)

    def drop_stream(self, **body: Any) -> None:
        async def call() -> None:
            stream = await self.client.chat.completions.create(model="m", stream=True, **body)
            async for _ in stream:
                break
            await stream.close()

        self.portal.call(call)

    def close(self) -> None:
        self.portal.call(self.client.close)
        self.portal_manager.__exit__(None, None, None)


@pytest.fixture(params=[SyncSDK, AsyncSDK], ids=["sync", "async"])
def sdk(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Any]:
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(request.param(server.url, **options))
        return made[-1]

    make.kind = request.param.kind  # type: ignore[attr-defined]
    yield make
    for one in made:
        one.close()


def test_type_and_results_are_the_sdks(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk()
    assert type(wrapped.client) is sdk.kind
    gc.collect()  # the original client is gone; its transport must not be
    server.reply("whole")
    answer = wrapped.create(messages=PROMPT)
    assert answer.choices[0].message.content == "whole"
    server.reply("streamed in several pieces")
    assert wrapped.text(messages=PROMPT) == "streamed in several pieces"
    assert server.chats[0].headers["authorization"] == "Bearer key"
    assert server.chats[0].body == {"model": "m", "messages": PROMPT}


def test_conversation_is_one_session_with_pauses(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk()
    server.reply("", ("bash", {"command": "cd src && pytest -q tests"}))
    answer = wrapped.create(messages=PROMPT, tools=TOOLS)
    (pause,) = server.hints.wait_for("agent.pause")
    assert (pause.kind, pause.tool, pause.program) == ("tool", "bash", "pytest")
    call = answer.choices[0].message
    more = [*PROMPT, call.model_dump(exclude_none=True), tenuto.tool_result(call.tool_calls[0].id, "3 passed")]
    server.reply("All pass.")
    assert wrapped.text(messages=more, tools=TOOLS) == "All pass."
    kinds = [p.kind for p in server.hints.wait_for("agent.pause", 2)]
    assert kinds == ["tool", "human"]
    sessions = {r.headers["x-session-id"] for r in server.chats}
    assert sessions == {p.session for p in server.hints.of_type("agent.pause")}
    assert len(sessions) == 1
    assert len(server.hints.of_type("agent.session")) == 1


def test_two_conversations_are_two_sessions(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk()
    for _ in range(2):  # the same first prompt twice is two conversations
        wrapped.create(messages=PROMPT)
    wrapped.create(messages=[tenuto.user("something else")])
    assert len({r.headers["x-session-id"] for r in server.chats}) == 3


def test_named_session_and_current_session(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk(session="fixed")
    wrapped.create(messages=PROMPT)
    wrapped.create(messages=[tenuto.user("other")])
    assert [r.headers["x-session-id"] for r in server.chats] == ["fixed", "fixed"]


def test_current_session_is_used(server: FakeServer) -> None:
    client = tenuto.wrap(openai.OpenAI(base_url=f"{server.url}/v1", api_key="key"))
    with tenuto.connect_sync(server.url) as tn, tn.session("outer") as s:
        client.chat.completions.create(model="m", messages=PROMPT)
        server.hints.wait_for("agent.pause")
        assert s.open_pauses[0].kind == "human"
    assert server.chats[0].headers["x-session-id"] == "outer"
    client.close()


def test_retries_pass_through(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk()
    server.fail(503, times=2, **{"retry-after": "0.01"})
    assert wrapped.create(messages=PROMPT).choices[0].message.content == "ok"
    assert len(server.chats) == 3
    assert len({r.headers["x-session-id"] for r in server.chats}) == 1
    server.fail(400)
    with pytest.raises(openai.BadRequestError):
        wrapped.create(messages=PROMPT)


def test_stream_left_early_is_no_end_of_turn(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk()
    server.reply("x" * 200)
    wrapped.drop_stream(messages=PROMPT)
    server.reply("whole")
    wrapped.create(messages=[tenuto.user("another")])
    (pause,) = server.hints.wait_for("agent.pause")
    assert pause.session == server.chats[1].headers["x-session-id"]


def test_other_paths_are_left_alone(sdk: Any, server: FakeServer) -> None:
    wrapped = sdk()
    if sdk.kind is openai.OpenAI:
        assert [m.id for m in wrapped.client.models.list()] == ["fake"]
        assert server.hints.seen == []


def test_failing_observer_changes_nothing(sdk: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[_Watch] = []

    def broken(self: _Watch, *args: Any) -> Any:
        watches.append(self)
        raise RuntimeError("ours")

    wrapped = sdk()
    wrapped.create(messages=PROMPT)
    monkeypatch.setattr(_Watch, "ended", broken)
    assert wrapped.text(messages=PROMPT) == "ok"
    monkeypatch.setattr(_Watch, "request", broken)
    assert wrapped.create(messages=PROMPT).choices[0].message.content == "ok"
    assert watches[0].errors == 2


def test_server_without_hints_is_no_trouble(sdk: Any, server: FakeServer) -> None:
    server.faults.hint_status = 404
    wrapped = sdk()
    for _ in range(3):
        assert wrapped.create(messages=PROMPT).choices[0].message.content == "ok"


def test_what_cannot_be_wrapped(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="not built on httpx"):
        tenuto.wrap(object())

    class Odd:
        def __init__(self) -> None:
            self._client = httpx.Client()  # the right library, but no way to hand a client back

    odd = Odd()
    with caplog.at_level(logging.WARNING, logger="tenuto"), warnings.catch_warnings():
        assert tenuto.wrap(odd) is odd
    assert "stays unwrapped" in caplog.text
    odd._client.close()
