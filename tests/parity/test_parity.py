"""The simulator's agents against the engine's own thread and a real (toy) model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto_server.parity.command import BLOCK_TOKENS, main, scaled
from tenuto_server.sim.generator import generate

SHORT = [
    "synthetic:30:2",
    "--model",
    "toy",
    "--minutes",
    "0.06",
    "--speed",
    "60",
    "--alive",
    "12",
    "--capacity-frac",
    "0.4",
]


@pytest.mark.parametrize("hints", ["on", "late:0.5", "lying"])
def test_a_live_run_is_decided_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], hints: str) -> None:
    assert main([*SHORT, "--hints", hints, "--keep", str(tmp_path)]) == 0
    live, replayed = ((tmp_path / f"{name}.journal").read_text() for name in ("live", "replayed"))
    assert live == replayed
    kinds = {json.loads(line)["kind"] for line in live.splitlines()}
    assert {"admit", "turn_end", "retention", "pause_end"} <= kinds
    shown = " ".join(capsys.readouterr().out.split())
    assert "the journals agree in all" in shown
    assert "time to first token" in shown


def test_what_cannot_be_run_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--policy", "oracle"]) == 1
    assert main([*SHORT, "--hints", "perhaps"]) == 1
    assert "tenuto bench parity: " in capsys.readouterr().err


def test_a_scaled_trace_keeps_its_shape() -> None:
    whole = generate(5, 1)
    small = scaled(whole, 100.0, 10.0)
    for a, b in zip(whole.sessions, small.sessions, strict=True):
        assert len(a.requests) == len(b.requests)
        for x, y in zip(a.requests, b.requests, strict=True):
            assert y.prompt == max(BLOCK_TOKENS, round(x.prompt / 100))
            assert y.shared <= y.prompt
            assert (y.pause_s is None) == (x.pause_s is None)
