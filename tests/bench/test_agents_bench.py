"""Agents that pause, on a live server of the toy model and beside an endpoint of known speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto_server.bench import main

from .conftest import FIRST_S, TOKEN_S, Metronome

ARGUMENTS = ["--agents", "3", "--turns", "2", "--context", "48", "--grow", "16", "--tokens", "4", "--pairs", "2"]
PAUSES = ["--tool-s", "0.05", "--human-s", "0.2", "--arrival-s", "0.1"]


def test_agents_beside_a_server_of_known_speed(metronome: Metronome, tmp_path: Path) -> None:
    written = tmp_path / "agents.json"
    own = ["--model", "toy", "--threads", "1", "--dtype", "fp32", "--hints"]
    arguments = [*ARGUMENTS, *PAUSES, *own, "--against", f"beat={metronome.url}", "--json", str(written)]
    assert main(["agents", *arguments]) == 0
    document = json.loads(written.read_text())
    assert list(document["values"]) == ["tenuto", "tenuto+hints", "beat"]
    assert document["ratios"].keys() == {"tenuto / beat", "tenuto+hints / beat", "tenuto+hints / tenuto"}
    made = 3 * (48 + 16 + 2 * 4)
    answers_s = 2 * (FIRST_S + 3 * TOKEN_S)
    for passes in document["values"].values():
        assert len(passes) == 2
        for one in passes:
            assert one["tokens_per_s"] == pytest.approx(made / one["took_s"])
            assert 0.0 < one["ttft_p50_s"] <= one["ttft_p90_s"]
    for one in document["values"]["beat"]:
        assert one["took_s"] > answers_s
        assert one["ttft_p50_s"] >= FIRST_S
    for a, b in (name.split(" / ") for name in document["ratios"]):
        rates = [[one["tokens_per_s"] for one in document["values"][name]] for name in (a, b)]
        assert document["ratios"][f"{a} / {b}"]["pairs"] == pytest.approx([x / y for x, y in zip(*rates, strict=True)])
    # One probe and 2 passes of 3 agents with 2 turns; what a turn sends begins with what the turn before it sent.
    sent = [prompt for prompt in metronome.prompts if len(prompt) >= 48]
    assert len(sent) == 12
    firsts, seconds = ([prompt for prompt in sent if len(prompt) == length] for length in (48, 64))
    assert len(firsts) == len(seconds) == 6
    assert sorted(prompt[:48] for prompt in seconds) == sorted(firsts)
    assert len({tuple(prompt) for prompt in firsts}) == 6


def test_wrong_usage_is_named(toy_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", "--url", toy_url, "--hints"]) == 1
    assert "--url" in capsys.readouterr().err
    assert main(["agents", "--url", toy_url, "--turns", "0"]) == 1
    assert "must be 1 or more" in capsys.readouterr().err
    assert main(["agents", *ARGUMENTS, *PAUSES, "--url", toy_url, "--against", f"tenuto={toy_url}"]) == 1
    assert "name of its own" in capsys.readouterr().err
