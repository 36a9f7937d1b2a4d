"""A server that records its traffic: the file holds what happened and nothing anybody said; the simulator plays it."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tenuto.trace import TracePause, TraceTurn, read_trace
from tenuto_server.sim.cli import simulate

WORD = "xylophone"


def test_traffic_becomes_a_trace(serve: Any, tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    server = serve("--device-bytes", "8MiB", "--host-bytes", "0", "--recorder", str(folder))
    for name in ("one", "two"):
        prompt = f"{name}: " + f"{WORD} " * 30
        for turn in range(3):
            answer = server.complete(prompt, 8, session_id=f"{WORD}-{name}")
            prompt += answer["text"] + f" {turn} {WORD}"
            hint = {
                "action_id": "a",
                "action_type": "agent.pause",
                "payload": {"session": f"{WORD}-{name}", "seq": turn + 1, "kind": "tool", "tool": "grep"},
            }
            assert server.request("POST", "/v1/kv_hints", {"protocol_version": "0.1", "actions": [hint]})[0] == 200
            time.sleep(0.05)
    tools.eventually(lambda: server.figure("tenuto_recorder_lines") >= 6, "the record to be written")
    assert server.figure("tenuto_recorder_lost") == 0
    assert server.stop() == 0
    (path,) = folder.iterdir()
    assert WORD not in path.read_text()
    header, events = read_trace(path)
    assert header.model == "toy"
    turns = [event for event in events if isinstance(event, TraceTurn)]
    assert [turn.session for turn in turns] == ["s1"] * 3 + ["s2"] * 3
    for before, after in pairwise(turns):
        if before.session == after.session:
            assert after.kept_tokens is not None
            assert before.prompt_tokens <= after.kept_tokens < after.prompt_tokens
    pauses = [event for event in events if isinstance(event, TracePause)]
    assert {(pause.kind, pause.tool) for pause in pauses} == {("tool", "grep")}
    assert all(pause.duration_s >= 0.04 for pause in pauses if pause.returned)
    arguments = ["--policy", "lru", "--capacity-frac", "1", "--alive", "2", "--window-h", "0.05", "--warm-up-h", "0.01"]
    assert simulate([str(path), *arguments, "--unit", "16", "--jobs", "1"]) == 0
    assert "lru" in capsys.readouterr().out
