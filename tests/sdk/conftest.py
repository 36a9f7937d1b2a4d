"""Fixtures of the SDK's tests: a fake server, and one surface over the sync and async clients."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from tenuto.client import AsyncClient, Client
from tenuto.fake_server import FakeServer


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENUTO_BASE_URL", "TENUTO_API_KEY", "TENUTO_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENUTO_HISTORY", "off")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


class SyncTwin:
    """Lets one async test body drive a sync client: what would be awaited is called at once."""

    client_type = Client

    def run(self, scenario: Callable[[Any], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        async def main() -> Any:
            with Client(*args, **options) as client:
                return await scenario(client)

        return anyio.run(main)

    async def wait(self, value: Any) -> Any:
        return value

    @contextlib.asynccontextmanager
    async def enter(self, scope: Any) -> AsyncIterator[Any]:
        with scope as inside:
            yield inside

    async def read(self, stream: Any) -> list[Any]:
        return list(stream)


class AsyncTwin:
    """The same for the async client."""

    client_type = AsyncClient

    def run(self, scenario: Callable[[Any], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient(*args, **options) as client:
                return await scenario(client)

        return anyio.run(main)

    async def wait(self, value: Any) -> Any:
        return await value

    @contextlib.asynccontextmanager
    async def enter(self, scope: Any) -> AsyncIterator[Any]:
        async with scope as inside:
            yield inside

    async def read(self, stream: Any) -> list[Any]:
        return [event async for event in stream]


@pytest.fixture(params=["sync", "async"])
def twin(request: pytest.FixtureRequest) -> SyncTwin | AsyncTwin:
    return SyncTwin() if request.param == "sync" else AsyncTwin()


@pytest.fixture
def nowhere() -> str:
    """A URL on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
