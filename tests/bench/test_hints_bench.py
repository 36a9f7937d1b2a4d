"""``tenuto bench hints`` and ``tenuto bench restore`` against live servers of the toy model, and the page cache."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tenuto_server.bench import main, page_cache


def test_hints(toy_url: str, result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hints", "--url", toy_url, "--count", "64", "--pairs", "2", "--json", str(result)]) == 0
    assert "32 hints to receipts" in capsys.readouterr().out
    document = json.loads(result.read_text())
    agent = {row["name"]: row for row in document["agent"]}
    assert agent["one bare hint"]["us"]["count"] == 64
    assert agent["one bare hint"]["receipts"].get("accepted", 0) > 0
    assert agent["one bare hint"]["delivered"]["failed"] == 0
    for row, hints in zip(document["server"], (1, 32), strict=True):
        assert row["hints"] == hints
        assert sum(row["receipts"].values()) == hints * row["ms"]["count"]  # a receipt for every hint
        assert 0 < row["ms"]["p50"] <= row["ms"]["p99"]
        assert "cpu_us_per_hint" not in row  # whose process it is cannot be told from an address
    for row in document["turns"]:
        assert len(row["values"]) == 2
        assert row["ratio"]["low"] <= row["ratio"]["mean"] <= row["ratio"]["high"]


def test_restore(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "toy", "--threads", "1", "--prefix", "512", "--load", "0,1", "--rounds", "1"]
    assert main(["restore", *arguments, "--repeats", "1", "--json", str(result)]) == 0
    shown = capsys.readouterr().out
    assert "posix_fadvise" in shown
    document = json.loads(result.read_text())
    assert [(row["tokens"], row["streams"]) for row in document["rows"]] == [(512, 0), (512, 1)]
    for row in document["rows"]:
        # Every return is either timed, or shown with what it found instead.
        counted = sum(len(times) for times in row["seconds"].values())
        assert counted + len(row["other"]) == 9  # computed once, four returns from below, and a twin of each
        assert row["seconds"]["recompute"]
        assert sum(bool(times) for times in row["seconds"].values()) >= 3
        for way, pairs in row["pairs"].items():
            assert len(pairs) <= len(row["seconds"][way])
        assert len(row["disk_s"]) == len(row["loaded"]) <= 1


def test_restore_needs_a_server_of_its_own(toy_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "--url", toy_url]) == 1
    assert "server of its own" in capsys.readouterr().err


def test_files_leave_the_page_cache(tmp_path: Path) -> None:
    assert page_cache.cached_share(tmp_path) is None
    path = tmp_path / "deep" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x" * (8 << 20))
    if (share := page_cache.cached_share(tmp_path)) is None:
        pytest.skip("this file system does not tell what is in memory")
    assert share > 0.95  # just written
    page_cache.drop(tmp_path)
    left = page_cache.cached_share(tmp_path)
    assert left is not None
    if left == 1.0:
        pytest.skip("this file system lives in memory")
    assert left < 0.05
    time.sleep(0.05)
    assert (page_cache.cached_share(tmp_path) or 0.0) <= left  # asking brings nothing in
    page_cache.load(tmp_path)
    assert (page_cache.cached_share(tmp_path) or 0.0) > 0.95


def test_reading_past_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "segment-00000"
    path.parent.mkdir()
    path.write_bytes(b"x" * (9 << 20))
    assert page_cache.read_past_s(tmp_path, 9 << 20) is None  # whole pieces only
    taken = page_cache.read_past_s(tmp_path, 6 << 20)
    assert taken is None or 0 < taken < 30
    assert page_cache.read_past_s(tmp_path, 0) is None
