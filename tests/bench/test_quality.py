"""``tenuto bench quality``: perplexity and agreement against what the definitions give, and the command itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tenuto_server.bench import main
from tenuto_server.bench.quality import PREFIX_TOKENS, Reading, compare, cut, read
from tenuto_server.errors import ConfigError
from tenuto_server.model.load import load_model
from tenuto_server.model.transformer import ForwardBatch, Transformer


def test_agreement_by_hand() -> None:
    reference = Reading(10.0, torch.tensor([[1, 2, 3, 4]]), [[5, 6, 7], [8, 9, 1]])
    other = Reading(10.5, torch.tensor([[1, 2, 0, 4]]), [[5, 6, 7], [8, 0, 1]])
    found = compare(other, reference)
    assert found["perplexity_change"] == pytest.approx(0.05)
    assert found["same_best"] == pytest.approx(0.75)
    assert found["greedy_agreed_mean"] == pytest.approx(2.0)  # three and one
    assert (found["greedy_identical"], found["greedy_count"], found["greedy_tokens"]) == (1, 2, 3)


class Rule(Transformer):
    """A model that is sure, to a known degree, that the next token is the last one plus one; it needs no weights."""

    def __init__(self, like: Transformer, margin: float) -> None:
        self.config, self.dtype, self.device, self._margin = like.config, like.dtype, like.device, margin

    def forward(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_index), self.config.vocab_size)
        follows = (batch.tokens[batch.logits_index] + 1) % self.config.vocab_size
        logits[torch.arange(len(logits)), follows] = self._margin
        return logits


def test_perplexity_of_a_known_distribution() -> None:
    """With a logit of m for the right token and 0 for the other V - 1, p = e^m / (e^m + V - 1), and perplexity is 1 / p."""
    toy = load_model("toy", dtype="fp32").transformer
    size = toy.config.vocab_size
    window = list(range(100, 100 + PREFIX_TOKENS + 40))
    found = read(Rule(toy, 3.0), [window, window], continuations=1, new_tokens=5)
    chance = math.exp(3.0) / (math.exp(3.0) + size - 1)
    assert found.perplexity == pytest.approx(1 / chance, rel=1e-5)
    assert found.best.tolist() == [window[1:], window[1:]]
    assert found.greedy == [window[PREFIX_TOKENS : PREFIX_TOKENS + 5]]
    # Knowing nothing, every token is as likely as any other.
    assert read(Rule(toy, 0.0), [window], 1, 1).perplexity == pytest.approx(size, rel=1e-5)


def test_greedy_continues_what_was_read() -> None:
    """Each token of a continuation is the best one after all before it, read at once."""
    model = load_model("toy", dtype="fp32")
    windows = cut(model, "the paged cache of a patient server " * 40, 2, 128)
    found = read(model.transformer, windows, continuations=2, new_tokens=12)
    for window, greedy in zip(windows, found.greedy, strict=True):
        whole = window[:PREFIX_TOKENS] + greedy
        again = read(model.transformer, [whole], continuations=1, new_tokens=1)
        assert again.best[0, PREFIX_TOKENS - 1 :].tolist() == greedy


def test_windows_are_spread_and_whole() -> None:
    model = load_model("toy", dtype="fp32")
    text = "".join(f"line {number} of a long text\n" for number in range(200))
    windows = cut(model, text, 3, 100)
    assert [len(window) for window in windows] == [100, 100, 100]
    assert model.tokenizer.decode(windows[0]) == text[: len(model.tokenizer.decode(windows[0]))]
    assert len(cut(model, text, 10**6, 100)) == len(model.tokenizer.encode_ordinary(text)) // 100
    with pytest.raises(ConfigError, match="tokens"):
        cut(model, "short", 1, 100)


def test_the_command(result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("A session pauses; its prefix stays where the next turn will want it. " * 60)
    arguments = ["--model", "toy", "--text", str(text), "--windows", "2", "--window-tokens", "96", "--new-tokens", "8"]
    assert main(["quality", *arguments, "--variants", "dense/fp32,dense/bf16,int8/bf16", "--json", str(result)]) == 0
    assert "same best" in capsys.readouterr().out
    rows = json.loads(result.read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense/fp32", "dense/fp32", "dense/bf16", "int8/bf16"]
    assert rows[1]["perplexity_change"] == 0.0  # the reference once more
    assert rows[1]["same_best"] == 1.0
    assert abs(rows[2]["perplexity_change"]) < abs(rows[3]["perplexity_change"]) + 0.05
    lower = json.loads(result.read_text())["lower_kv"]
    assert [row["name"] for row in lower] == ["int8", "fp8"]
    assert all(0 < abs(row["perplexity_change"]) < 0.2 for row in lower)
    assert abs(lower[0]["perplexity_change"]) < 0.05
    with pytest.raises(SystemExit):
        main(["quality", "--variants", "int3/bf16"])
    assert main(["quality", "--model", "toy", "--lower-kv", "int3"]) == 1
    assert main(["quality", "--model", "toy", "--text", str(tmp_path / "missing")]) == 1


def test_kernels_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--paths", "magic"]) == 2
