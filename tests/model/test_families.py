"""Every supported family, with random weights: our paged decoder against the transformers class of that family.

Each model is saved as a safetensors folder and comes back through load_model, so names, shapes, biases, norms, RoPE and
the tokenizer file are all on the path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tenuto_server.errors import ModelError
from tenuto_server.model.load import load_model
from tenuto_server.model.tokenizer import serialize
from tenuto_server.model.toy import TEMPLATE, toy_vocabulary

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # far from zero, so that a wrong term cannot hide
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
WINDOWED = {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3-scaling-tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-all-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", WINDOWED),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
TOKENS = torch.randint(3, 512, (100,), generator=torch.Generator().manual_seed(5))


def save(folder: Path, family: str, **options: Any) -> Any:
    """Write the family's folder; returns the transformers model."""
    name, changes = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # fresh biases and norms are constant, which would hide a swap
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(serialize(toy_vocabulary()), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return model


def expected_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS[None]).logits[0].float()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path, paged_runner: Any) -> None:
    expected = expected_logits(save(tmp_path, family))
    model = load_model(str(tmp_path), dtype="fp32")
    tokens = TOKENS.tolist()
    one_shot = paged_runner(model.transformer)((0, 0, tokens), all_logits=True)
    assert expected.std() > 0.5
    torch.testing.assert_close(one_shot, expected, rtol=1e-4, atol=2e-4)

    # The same tokens in chunks, then one by one, as a server computes them.
    run = paged_runner(model.transformer)
    parts = [run((0, start, tokens[start:stop]), all_logits=True) for start, stop in ((0, 37), (37, 64), (64, 90))]
    parts += [run((0, at, [tokens[at]])) for at in range(90, 100)]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=2e-4)


def test_shards_and_one_file_load_alike(tmp_path: Path, paged_runner: Any) -> None:
    save(tmp_path / "one", "qwen2")
    save(tmp_path / "many", "qwen2", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    logits = []
    for name in ("one", "many"):
        model = load_model(str(tmp_path / name), dtype="fp32")
        logits.append(paged_runner(model.transformer)((0, 0, TOKENS.tolist())))
    assert torch.equal(*logits)


def test_bf16_stays_near_fp32(tmp_path: Path, paged_runner: Any) -> None:
    expected = expected_logits(save(tmp_path, "qwen3"))
    model = load_model(str(tmp_path), dtype="bf16")
    run = paged_runner(model.transformer)
    assert run.pool.dtype == torch.bfloat16
    difference = run((0, 0, TOKENS.tolist()), all_logits=True) - expected
    assert difference.std() < 0.1 * expected.std()


def test_folder_gives_tokenizer_template_and_identity(tmp_path: Path) -> None:
    save(tmp_path / "a", "llama")
    model = load_model(str(tmp_path / "a"))
    assert model.name == "a"
    assert model.tokenizer.eos_ids == model.config.eos_ids == (2,)
    prompt = model.chat.render([{"role": "user", "content": "hi"}])
    assert model.tokenizer.decode(model.tokenizer.encode(prompt)) == prompt


def digest_of(folder: Path) -> str:
    return load_model(str(folder)).digest


def test_digest_follows_content_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "a", "llama")
    save(tmp_path / "b", "llama")
    first = digest_of(tmp_path / "a")
    assert digest_of(tmp_path / "b") == first
    weights = tmp_path / "b" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert digest_of(tmp_path / "b") != first
    config = tmp_path / "a" / "config.json"
    config.write_text(config.read_text().replace("1024", "2048"))
    assert digest_of(tmp_path / "a") != first


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "config"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "has no model.safetensors")],
)
def test_a_missing_file_is_named(tmp_path: Path, missing: str, words: str) -> None:
    save(tmp_path, "llama")
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path))


def test_weights_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(ModelError, match=r"layers\.3\."):
        load_model(str(tmp_path))
    config.write_text(text.replace('"vocab_size": 512', '"vocab_size": 511'))
    with pytest.raises(ModelError, match=r"'embed'.*512, 64.*511, 64"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    config.write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(str(tmp_path))
