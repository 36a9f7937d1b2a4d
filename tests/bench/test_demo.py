"""The demonstration end to end, on the toy model: real server processes, real tools, the report it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto_server.bench.demo import main
from tenuto_server.bench.demo_arms import Recorded, parse_arm, size_tiers
from tenuto_server.bench.report_table import markdown


def test_arms_by_name() -> None:
    assert (parse_arm("tenuto").policy, parse_arm("tenuto").hints, parse_arm("tenuto").limited) == (
        "tenuto",
        True,
        True,
    )
    assert not parse_arm("tenuto:none").hints
    assert not parse_arm("lru@unlimited").limited
    assert parse_arm("ttl:30").policy == "ttl:30"
    with pytest.raises(ValueError, match="cannot read the arm"):
        parse_arm("lru@fast")
    assert main(["--arms", "lru@fast"]) == 2


def test_a_report_that_cannot_be_written_is_noticed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--report", str(tmp_path / "file" / "report.json")]) == 1
    assert "file" in capsys.readouterr().err


def test_tiers_are_shares_of_the_live_kv() -> None:
    recorded = Recorded((), {}, token_bytes=1000, prefill_tokens_per_s=500.0, wall_s=1.0)
    sizes = size_tiers(recorded, 10_000.0, 1_500, (0.35, 0.2, 0.1))
    assert (sizes.device_bytes, sizes.host_bytes, sizes.disk_bytes) == (3_500_000, 2_000_000, 1_000_000)
    # Prefill makes 500 kB of KV a second; 30 and 6 times that.
    assert (sizes.host_bandwidth, sizes.disk_bandwidth) == (15_000_000, 3_000_000)
    # A device that cannot hold the longest context could not serve it: 1500 tokens and eight blocks.
    assert size_tiers(recorded, 2_000.0, 1_500, (0.35, 0.2, 0.1)).device_bytes == 1_628_000


@pytest.mark.slow
def test_quick_demonstration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_path = tmp_path / "report.json"
    arguments = [
        "--model",
        "toy",
        "--quick",
        "--seed",
        "2",
        "--agents",
        "3",
        "--arms",
        "lru,tenuto",
        "--schedules",
        "2",
    ]
    assert main([*arguments, "--report", str(report_path), "--keep", str(tmp_path / "kept")]) == 0
    shown = capsys.readouterr().out
    assert str(report_path) in shown
    assert "tokens prefilled" in shown
    assert "tenuto / lru" in shown

    report = json.loads(report_path.read_text())
    assert [arm["name"] for arm in report["arms"]] == ["lru", "tenuto"]
    recorded = {(row["session"], row["turn"]): row for row in report["recording"]["rows"]}
    sizes = report["sizes"]
    for arm in report["arms"]:
        (played,) = arm["passes"]
        command = played["command"]
        rows = {(row["session"], row["turn"]): row for row in played["rows"]}
        assert rows.keys() == recorded.keys()
        for key, row in rows.items():
            assert row["prompt_tokens"] == recorded[key]["prompt_tokens"]
            assert row["ttft_s"] > 0.0
        # The server's own count of prefill agrees with what the turns show, unless a turn was preempted or warmed.
        assert arm["summary"]["prefilled_tokens"] >= sum(
            row["prompt_tokens"] - sum(row["cached"].values()) for row in played["rows"]
        )
        assert command[command.index("--device-bytes") + 1] == str(sizes["device_bytes"])
        assert command[command.index("--host-bandwidth") + 1] == str(sizes["host_bandwidth"])
        assert not Path(command[command.index("--disk-dir") + 1]).exists()
    lru, tenuto = report["arms"]
    hints = {arm["name"]: arm["passes"][0]["hints_sent"] for arm in report["arms"]}
    assert hints["lru"]["sent"] + hints["lru"]["carried"] == 0
    assert hints["tenuto"]["receipts"].get("accepted", 0) > 0
    assert tenuto["summary"]["counters"]["leases_granted"] > 0
    assert 0.0 < tenuto["summary"]["counters"]["forward_ns"] < 1e9 * tenuto["summary"]["wall_s"]
    scheduled = report["schedules"]
    assert (scheduled["count"], list(scheduled["arms"])) == (2, ["lru", "tenuto:none", "tenuto"])
    assert scheduled["arms"]["lru"]["prefilled"] >= sum(row["new_tokens"] for row in recorded.values())
    assert {len(of["prefilled"]) for of in scheduled["ratios"].values()} == {2}
    assert "2 schedules of this recording" in " ".join(shown.split())
    table = markdown(report)
    assert "2 schedules in virtual time" in table
    assert "| | lru | tenuto |" in table
    assert f"{lru['summary']['prefilled_tokens']:,} | {tenuto['summary']['prefilled_tokens']:,}" in table
    assert "`tenuto / lru`: ttft_p50" in table
    journal = (tmp_path / "kept" / "tenuto" / "journal.jsonl").read_text().splitlines()
    assert {"retention", "admit", "turn_end"} <= {json.loads(line)["kind"] for line in journal}

    arguments = ["--model", "toy", "--replay", str(tmp_path / "kept"), "--repeat", "2", "--arms", "lru,tenuto"]
    arguments += ["--schedules", "0", "--no-unthrottled"]
    assert main([*arguments, "--report", str(report_path)]) == 0
    assert "pass 2 of 2" in capsys.readouterr().out
    again = json.loads(report_path.read_text())
    assert again["recording"] == report["recording"]
    assert again["sizes"] == sizes
    assert again["workload"] == report["workload"]
    turns = len(report["recording"]["rows"])
    for arm in again["arms"]:
        assert [len(one["rows"]) for one in arm["passes"]] == [turns, turns]
        assert arm["summary"]["turns"] == 2 * turns
    low, high = again["ranges"]["tenuto / lru"]["prefilled_tokens"]
    assert low <= again["ratios"]["tenuto / lru"]["prefilled_tokens"] <= high
    assert "2 passes of every arm" in markdown(again)
    assert again["schedules"] is None


def test_what_is_not_a_kept_recording_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ["--report", str(tmp_path / "report.json")]
    assert main(["--replay", str(tmp_path), *report]) == 1
    assert "recorded.json" in capsys.readouterr().err
    (tmp_path / "recorded.json").write_text('{"recorded": {"rows": 3}, "settings": {}}')
    assert main(["--replay", str(tmp_path), *report]) == 1
    assert "recorded.json is not of a kept recording" in capsys.readouterr().err
    assert main(["--repeat", "0", *report]) == 2
    assert main(["--schedules", "-1", *report]) == 2
