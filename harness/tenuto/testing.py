"""Pytest plugin for agents that use Tenuto: ``tenuto_server``, ``tenuto_hints``, ``tenuto_clock``.

Loaded by pytest in every project that has the package installed, so it imports nothing heavy until a fixture is used.
The doubles themselves are ``FakeServer``, ``HintRecorder`` and ``VirtualClock``, importable from here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tenuto.fake_server import FakeServer as FakeServer
    from tenuto.fake_server import HintRecorder as HintRecorder
    from tenuto.fake_server import VirtualClock as VirtualClock

_DOUBLES = ("FakeServer", "HintRecorder", "VirtualClock")


@pytest.fixture
def tenuto_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A running ``FakeServer``; ``TENUTO_BASE_URL`` names it and no pause history is read or written."""
    from tenuto.fake_server import FakeServer

    with FakeServer() as server:
        monkeypatch.setenv("TENUTO_BASE_URL", server.url)
        monkeypatch.setenv("TENUTO_HISTORY", "off")
        monkeypatch.delenv("TENUTO_DISABLED", raising=False)
        yield server


@pytest.fixture
def tenuto_hints(tenuto_server: FakeServer) -> HintRecorder:
    """The hints that ``tenuto_server`` received."""
    return tenuto_server.hints


@pytest.fixture
def tenuto_clock() -> VirtualClock:
    """A clock to pass to a client: ``connect(clock=tenuto_clock)``."""
    from tenuto.fake_server import VirtualClock

    return VirtualClock()


def __getattr__(name: str) -> Any:
    if name in _DOUBLES:
        return getattr(importlib.import_module("tenuto.fake_server"), name)
    raise AttributeError(f"module 'tenuto.testing' has no attribute {name!r}")
