"""Configurations: each family's settings, RoPE formulas against transformers, and named errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tenuto_server.errors import ModelError
from tenuto_server.model.config import ModelConfig, UnsupportedModelError, config_from_gguf, config_from_hf
from tenuto_server.model.rope import rope_frequencies

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 5e5,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 1e4,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_rope_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(**SMALL, head_dim=64, rope_parameters=dict(scaling))
    ours = config_from_hf(theirs.to_dict())
    frequencies, factor = rope_frequencies(ours)
    if scaling["rope_type"] == "default":
        expected, expected_factor = 1.0 / (1e6 ** (torch.arange(0, 64, 2).float() / 64)), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_old_and_new_spelling_of_rope_settings_agree() -> None:
    new = transformers.LlamaConfig(**SMALL, rope_parameters=dict(SCALINGS[2])).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in SCALINGS[2].items() if k != "rope_theta"}}
    assert config_from_hf(old) == config_from_hf(new)


def hf(kind: str, **changes: Any) -> ModelConfig:
    return config_from_hf({**SMALL, "model_type": kind, "rms_norm_eps": 1e-6, **changes})


def test_families_differ_where_they_should() -> None:
    assert (hf("qwen2").qkv_bias, hf("qwen2").qk_norm) == (True, False)
    assert (hf("qwen3").qkv_bias, hf("qwen3").qk_norm) == (False, True)
    assert hf("llama", attention_bias=True).qkv_bias
    assert hf("qwen3", head_dim=128).head_dim == 128
    assert hf("llama", eos_token_id=[7, 8]).eos_ids == (7, 8)


def test_sliding_windows() -> None:
    assert [hf("mistral", sliding_window=64).window(layer) for layer in range(4)] == [64] * 4
    assert hf("mistral", sliding_window=None).window(0) is None
    assert hf("qwen2", sliding_window=64).window(3) is None
    qwen = hf("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert [qwen.window(layer) for layer in range(4)] == [None, None, 64, 64]
    kinds = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(UnsupportedModelError, match="alternate"):
        hf("qwen3", sliding_window=64, use_sliding_window=True, layer_types=kinds)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({}, "'missing'"),
        ({**SMALL, "model_type": "llama", "rms_norm_eps": 1e-6, "hidden_act": "gelu"}, "'gelu'"),
        ({**SMALL, "model_type": "llama", "rms_norm_eps": 1e-6, "rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({**SMALL, "model_type": "llama", "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5}, "partial rotary"),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, "lacks"),
        ({**SMALL, "model_type": "llama", "rms_norm_eps": 1e-6, "num_key_value_heads": 3}, "multiple of num_kv_heads"),
    ],
)
def test_what_cannot_run_is_named(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_from_hf(raw)


def gguf_metadata(arch: str = "qwen3") -> dict[str, Any]:
    return {
        "general.architecture": arch,
        f"{arch}.block_count": 2,
        f"{arch}.embedding_length": 64,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.key_length": 32,
        f"{arch}.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.context_length": 1024,
        f"{arch}.rope.freq_base": 1e6,
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<eos>"],
        "tokenizer.ggml.token_type": [1, 3, 3],
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_gguf_metadata() -> None:
    names = frozenset({"output.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_q.bias"})
    config = config_from_gguf(gguf_metadata(), names)
    assert (config.head_dim, config.rms_eps, config.eos_ids, config.vocab_size) == (32, 1e-5, (2, 1), 3)
    assert (config.qkv_bias, config.qk_norm, config.tie_embeddings) == (True, True, False)
    assert config_from_gguf(gguf_metadata(), frozenset()).tie_embeddings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3'"),
        ({"qwen3.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"qwen3.rope.dimension_count": 16}, "partial rotary"),
        ({"qwen3.expert_count": 8}, "mixture-of-experts"),
        ({"qwen3.block_count": None}, r"lacks qwen3\.block_count"),
    ],
)
def test_gguf_metadata_that_cannot_run_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_from_gguf({**gguf_metadata(), **change}, frozenset())


def test_gguf_rope_factors_divide_the_frequencies() -> None:
    config = config_from_gguf(gguf_metadata(), frozenset({"rope_freqs.weight"}))
    plain, _ = rope_frequencies(config_from_gguf(gguf_metadata(), frozenset()))
    divided, factor = rope_frequencies(config, torch.full((16,), 8.0))
    torch.testing.assert_close(divided, plain / 8)
    assert factor == 1.0
