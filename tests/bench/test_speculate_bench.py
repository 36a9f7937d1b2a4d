"""``tenuto bench speculate`` on the toy model, as its own draft: greedy answers agree, guesses are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto_server.bench import main


def test_three_servers_side_by_side(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "toy", "--dtype", "fp32", "--threads", "1", "--draft-model", "toy", "--pairs", "1"]
    # A long answer: fewer tokens may come in one piece.
    assert main(["speculate", *arguments, "--tokens", "120", "--json", str(result)]) == 0
    assert "Greedy decoding" in capsys.readouterr().out
    document = json.loads(result.read_text())
    assert [row["kind"] for row in document["rows"]] == ["edit", "prose"]
    for row in document["rows"]:
        assert set(row["ratios"]) == {"lookup", "lookup + draft"}
        assert row["guesses"]["without"] == [0, 0]
        drafted, confirmed = row["guesses"]["lookup + draft"]
        assert drafted >= confirmed > 0
        assert row["differ"]["lookup"] == 0
