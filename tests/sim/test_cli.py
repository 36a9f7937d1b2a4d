"""The commands from outside: their files, their exit status, their words when something is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tenuto_server.sim import plot
from tenuto_server.sim.cli import compare, simulate

SMALL = ["synthetic:30:1", "--alive", "10", "--window-h", "0.5", "--warm-up-h", "0.2", "--jobs", "1"]
REQUIRED = {
    "policy", "capacity_frac", "capacity_tokens", "seed", "reusable_tokens", "missed_tokens", "prefilled_tokens",
    "fresh_tokens", "amplification", "hit_rate", "misses_by_label", "gap_closed",
}  # fmt: skip


def run(out: Path, *more: str) -> int:
    return simulate([*SMALL, "--json", str(out), *more])


def test_the_json_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    policies = "lru,oracle,tenuto:none,tenuto:r2=0.5+end+compaction"
    assert run(out, "--policy", policies, "--capacity-frac", "0.3,0.6", "--seed", "1,2") == 0
    content = json.loads(out.read_text())
    assert content["version"] == 1
    assert content["trace"] == "synthetic:30:1"
    assert content["commit"]
    rows = content["rows"]
    assert len(rows) == 4 * 2 * 2
    assert all(row.keys() >= REQUIRED for row in rows)
    for row in rows:
        assert row["prefilled_tokens"] == row["fresh_tokens"] + row["missed_tokens"]
        if row["policy"] == "lru":
            assert row["gap_closed"] in (0.0, None)
        if row["policy"] == "oracle":
            assert row["gap_closed"] in (1.0, None)
    shown = capsys.readouterr().out
    assert "gap closed" in " ".join(shown.split())


def test_the_same_arguments_give_the_same_bytes_in_one_process_or_two(tmp_path: Path) -> None:
    more = ("--policy", "lru,tenuto:end+compaction", "--capacity-frac", "0.3")
    assert run(tmp_path / "a.json", *more) == 0
    assert run(tmp_path / "b.json", *more, "--jobs", "2") == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert compare([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0


def test_compare_tells_two_runs_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "a.json", "--policy", "lru", "--capacity-frac", "0.3") == 0
    assert run(tmp_path / "b.json", "--policy", "lru,ttl:60", "--capacity-frac", "0.3") == 0
    capsys.readouterr()
    assert compare([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "missing" in capsys.readouterr().out


def test_compare_journals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def journal(name: str, rates: list[float], shift: int) -> str:
        rows = [{"n": i, "t_ns": shift + i, "kind": "retention", "rate": rate} for i, rate in enumerate(rates)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    a, b = journal("a", [1.0, 2.0, 3.0], 0), journal("b", [1.0, 2.0, 3.0], 99)
    assert compare([a, b]) == 0
    assert compare([a, journal("c", [1.0, 5.0, 3.0], 0)]) == 1
    assert "decision 2" in capsys.readouterr().out
    assert compare([a, journal("d", [1.0], 0)]) == 1
    assert compare([a, str(tmp_path / "none")]) == 2


def test_timing_and_tiers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ("--policy", "tenuto:end", "--capacity-frac", "0.4", "--timing", "h100-8b", "--unit", "64")
    assert run(out, *more, "--tiers", "device,host") == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["gap_closed"] is None
    tool = row["ttft_s"]["tool"]
    assert 0.0 < tool["p50"] <= tool["p90"] <= tool["p99"]
    assert row["held_token_s"]["device"] > 0
    assert row["held_byte_s"]["device"] == row["held_token_s"]["device"] * 131_072
    status = simulate(["--show", str(out), "--markdown", str(tmp_path / "t.md")])
    assert status == 0
    assert "Time to first token" in (tmp_path / "t.md").read_text()


@pytest.mark.parametrize("wrong", [
    ["--policy", "mru"],
    ["--capacity-frac", "a"],
    ["--hints", "late:x"],
    ["--tiers", "device,disk"],
    ["--policy", ""],
])  # fmt: skip
def test_wrong_settings_are_told_before_anything_runs(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate([*SMALL, *wrong]) == 1
    assert "tenuto simulate: " in capsys.readouterr().err


def test_tables_into_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, document = tmp_path / "out.json", tmp_path / "doc.md"
    document.write_text("before\n<!-- study -->\nold\n<!-- /study -->\nafter\n")
    more = ("--policy", "lru,oracle,tenuto:end", "--capacity-frac", "0.3,0.5")
    assert run(out, *more, "--markdown", f"{document}#study") == 0
    text = document.read_text()
    assert text.startswith(
        "before\n<!-- study -->\n\nShare of the LRU-to-oracle gap closed:\n\n| policy | 0.3 | 0.5 | mean |"
    )
    assert text.endswith("<!-- /study -->\nafter\n")
    assert "old" not in text
    assert "tenuto simulate synthetic:30:1 --policy lru,oracle,tenuto:end --capacity-frac 0.3,0.5" in text
    (row,) = [
        r for r in json.loads(out.read_text())["rows"] if r["policy"] == "tenuto:end" and r["capacity_frac"] == 0.3
    ]
    assert f"{100 * row['gap_closed']:.1f} %" in text
    # The same again from the result, into a file of its own.
    assert simulate(["--show", str(out), "--markdown", str(tmp_path / "alone.md")]) == 0
    assert (tmp_path / "alone.md").read_text().strip() in text
    assert run(out, *more, "--markdown", f"{document}#elsewhere") == 1
    assert "<!-- elsewhere -->" in capsys.readouterr().err


def test_a_result_is_asked_for_or_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(["--timing", "list"]) == 0
    assert "h200-70b" in capsys.readouterr().out
    (tmp_path / "no.json").write_text("[]")
    assert simulate(["--show", str(tmp_path / "no.json")]) == 1
    assert simulate(["--show", str(tmp_path / "none.json")]) == 1
    for both in ([], ["synthetic:5", "--show", "x.json"]):
        with pytest.raises(SystemExit) as ended:
            simulate(both)
        assert ended.value.code == 2


def test_a_figure_or_a_word_about_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.png"
    status = run(tmp_path / "out.json", "--policy", "lru,oracle", "--capacity-frac", "0.3,0.5", "--plot", str(path))
    if importlib.util.find_spec("matplotlib") is None:
        assert status == 1
        assert "pip install 'tenuto[report]'" in capsys.readouterr().err
    else:
        assert status == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        one = tmp_path / "one.png"
        plot.draw([row for row in rows if row["capacity_frac"] == 0.3], one, "one capacity")
        assert one.read_bytes().startswith(b"\x89PNG")
        assert one.read_bytes() != path.read_bytes()
