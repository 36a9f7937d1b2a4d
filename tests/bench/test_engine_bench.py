"""``tenuto bench engine``: what it measures of a server of known speed, side by side with a live one."""

from __future__ import annotations

import json
import math
import socket
import statistics
from pathlib import Path

import pytest

from tenuto_server.bench import main
from tenuto_server.bench.endpoint import Endpoint, EndpointFailed
from tenuto_server.bench.measures import cold, decode, decode_rate, prefill, warm
from tenuto_server.bench.prompts import Prompts

from .conftest import FIRST_S, TOKEN_S, Metronome


def test_known_speeds_are_measured(metronome: Metronome, toy_url: str) -> None:
    """Eleven tokens, 20 ms apart: 50 tokens a second, three streams 150. A busy machine is late, never early."""
    peer, prompts = Endpoint("peer", metronome.url), Prompts(Endpoint("tenuto", toy_url))
    assert 0.3 / TOKEN_S < decode_rate(peer, [prompts.take(8)], 11) < 1.05 / TOKEN_S
    assert 0.9 / TOKEN_S < decode_rate(peer, [prompts.take(8) for _ in range(3)], 11) < 3.15 / TOKEN_S
    assert 0.3 * 100 / FIRST_S < prefill(prompts, 100, 1).run(peer, 0) < 100 / FIRST_S
    assert FIRST_S < cold(prompts, 100, 1).run(peer, 0) < 3 * FIRST_S


def test_prompts_of_measures(metronome: Metronome, toy_url: str) -> None:
    """Cold ones are new and equal for all sides; warm ones share a prefix that was sent before; so do decoding ones."""
    peer, prompts = Endpoint("peer", metronome.url), Prompts(Endpoint("tenuto", toy_url))
    measure = prefill(prompts, 50, 2)
    for number in (0, 0, 1):
        measure.run(peer, number)
    one, again, other = metronome.prompts
    assert one == again
    assert (len(one), len(other)) == (50, 50)
    assert one[:3] != other[:3]

    metronome.prompts.clear()
    measure = warm(prompts, 40, 2)
    for prepare in measure.prepare:
        prepare(peer)
    measure.run(peer, 1)
    sent = metronome.prompts
    assert [len(prompt) for prompt in sent] == [40, 72, 72, 72]
    assert all(prompt[:40] == sent[0] for prompt in sent)
    assert len({tuple(prompt) for prompt in sent}) == 4

    known: dict[int, list[list[int]]] = {}
    assert [len(decode(prompts, streams, 30, 4, known).prepare) for streams in (2, 3, 1)] == [2, 1, 0]


def test_a_server_that_takes_text_only(metronome: Metronome, toy_url: str) -> None:
    metronome.text_only = True
    ours = Endpoint("tenuto", toy_url)
    peer = Endpoint("peer", metronome.url, ours.detokenize)
    peer.probe()
    assert not peer.takes_ids
    prompt = ours.tokenize("def main() -> None:")
    assert peer.stream(prompt, 3).tokens == 3
    assert metronome.prompts[-1] == "def main() -> None:"
    assert peer.about() == {"name": "peer", "url": metronome.url, "model": "beat", "prompts": "text"} | {
        "version": {"version": "7"},
        "health": {"version": "7"},
    }
    with pytest.raises(EndpointFailed, match=r"peer: /v1/completions answered 422: .*a string, please"):
        Endpoint("peer", metronome.url).probe()


def test_a_live_server_counts_as_asked(toy_url: str) -> None:
    ours = Endpoint("tenuto", f"{toy_url}/v1/")
    prompt = Prompts(ours).take(64)
    answer = ours.stream(prompt, 9)
    assert answer.tokens == 9
    assert 1 <= len(answer.times) <= 9
    assert list(answer.times) == sorted(answer.times)
    assert sum(ours.stream(prompt, 2).report["cached"].values()) >= 48


def test_failures_name_the_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = Endpoint("gone", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(EndpointFailed, match=r"gone: .* did not answer"):
            gone.probe()
    with pytest.raises(EndpointFailed, match="not an http address"):
        Endpoint("odd", "ftp://somewhere")


def test_side_by_side(
    metronome: Metronome, toy_url: str, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Fewer tokens may come in one piece.
    arguments = ["--url", toy_url, "--against", f"beat={metronome.url}", "--pairs", "3", "--tokens", "40"]
    arguments += ["--decode", "1x64,2x64", "--prefill", "64,9000", "--prefix", "96", "--json", str(result)]
    assert main(["engine", *arguments]) == 0
    capsys.readouterr()
    document = json.loads(result.read_text())
    names = [row["name"] for row in document["measures"]]
    assert names == [
        "decode, 1 stream, 64 context",
        "decode, 2 streams, 64 context",
        "prefill, 64 tokens",
        "TTFT, 96 + 32 tokens, cold",
        "TTFT, 96 + 32 tokens, warm",
    ]
    assert document["skipped"] == ["prefill, 9000 tokens"]  # longer than the other server's context
    assert document["about"]["cores"]
    assert {"tenuto", "torch"} <= document["about"]["packages"].keys()
    assert [endpoint["name"] for endpoint in document["endpoints"]] == ["tenuto", "beat"]
    for row in document["measures"]:
        ours, theirs = row["values"]["tenuto"], row["values"]["beat"]
        better = [a / b if row["better"] == "more" else b / a for a, b in zip(ours, theirs, strict=True)]
        ratio = row["ratios"]["beat"]
        assert ratio["pairs"] == pytest.approx(better)
        assert ratio["mean"] == pytest.approx(math.prod(better) ** (1 / 3))
        assert ratio["low"] <= ratio["mean"] <= ratio["high"]

    place = tmp_path / "page.md"
    place.write_text("# Speed\n\n<!-- engine -->\n<!-- /engine -->\n")
    assert main(["engine", "--show", str(result), "--markdown", f"{place}#engine"]) == 0
    page = place.read_text()
    shown = statistics.median(document["measures"][3]["values"]["beat"])
    assert "| measure | tenuto | beat | times beat (95 %) |" in page
    assert f"| {shown:.3g} s |" in page
    assert main(["engine", "--show", str(result)]) == 0
    assert "left out, longer than a context" in capsys.readouterr().out


def test_wrong_usage(toy_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["engine", "--only", "speed"])
    assert stopped.value.code == 2
    assert main(["engine", "--url", toy_url, "--prefill", "99999", "--only", "prefill", "--pairs", "1"]) == 1
    assert "too few for prefill, 99999 tokens" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert main(["engine", "--show", str(tmp_path / "other.json")]) == 1
    assert "not a result of tenuto bench engine" in capsys.readouterr().err
