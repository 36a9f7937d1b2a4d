"""The doubles that ship with the product, and the pytest plugin that brings them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request

import pytest

import tenuto
from tenuto import testing
from tenuto.fake_server import FakeServer, HintRecorder, VirtualClock

pytest_plugins: list[str] = []


def test_fixtures_come_with_the_package(
    tenuto_server: FakeServer, tenuto_hints: HintRecorder, tenuto_clock: VirtualClock
) -> None:
    assert os.environ["TENUTO_BASE_URL"] == tenuto_server.url
    with tenuto.connect_sync(clock=tenuto_clock) as tn, tn.session("s", model="m") as s:
        s.chat([tenuto.user("hello")])
        with s.pause("human") as gap:
            tenuto_hints.wait_for("agent.pause")
            tenuto_clock.advance(60.0)
    assert gap.duration_s == 60.0
    assert tenuto_hints is tenuto_server.hints


def test_lazy_exports() -> None:
    assert testing.FakeServer is FakeServer
    assert testing.VirtualClock is VirtualClock
    with pytest.raises(AttributeError):
        testing.nothing_of_the_kind  # noqa: B018


def test_recorder_says_what_did_not_come() -> None:
    with pytest.raises(AssertionError, match=r"0 of 1 agent\.pause hints came within 0\.01 s"):
        HintRecorder().wait_for("agent.pause", timeout_s=0.01)


def test_server_must_be_started() -> None:
    server = FakeServer()
    with pytest.raises(RuntimeError, match="not been started"):
        server.url  # noqa: B018
    server.close()


def get(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_other_paths(server: FakeServer) -> None:
    assert get(f"{server.url}/health") == (200, {"status": "ok"})
    assert get(f"{server.url}/v1/models")[0] == 200
    status, body = get(f"{server.url}/nowhere")
    assert status == 404
    assert "error" in body


def test_unknown_and_invalid_hints_are_rejected(server: FakeServer) -> None:
    actions = [
        {"action_id": "a", "action_type": "agent.dance", "payload": {"session": "s"}},
        {"action_id": "b", "action_type": "agent.keepalive", "payload": {"session": "s"}},
        {"action_id": "c", "action_type": "agent.end", "payload": {"session": "s"}},
    ]
    data = json.dumps({"actions": actions}).encode()
    request = urllib.request.Request(f"{server.url}/v1/kv_hints", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        receipts = json.loads(response.read())["receipts"]
    assert [(r["action_id"], r["outcome"]) for r in receipts] == [
        ("a", "rejected"),
        ("b", "rejected"),
        ("c", "accepted"),
    ]
    assert server.hints.types() == ["agent.end"]
