"""The shape of a model, read from GGUF metadata or from a Hugging Face ``config.json``.

Owns no state: ``ModelConfig`` is a frozen value. Supported are the dense decoders of the Llama family: Llama (SmolLM2,
Llama 3.x), Mistral, Qwen 2/2.5 (bias on q, k, v) and Qwen 3 (RMS norm on q and k heads).

Errors: ``UnsupportedModelError`` names the architecture or the setting that is not supported; ``ModelError`` is its base
and also stands for broken or missing files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tenuto_server.errors import ModelError


class UnsupportedModelError(ModelError):
    """The model's architecture, or one of its settings, is not implemented."""


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched; the formulas are in ``layers.rope_frequencies``.

    ``factors`` means that the weights file carries one divisor per frequency (GGUF's ``rope_freqs.weight``).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that is not a weight. Sizes are counts of elements, positions are tokens."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rms_eps: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    window_from_layer: int = 0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs")
        for field in ("num_layers", "hidden_size", "num_heads", "head_dim", "vocab_size", "max_position"):
            if getattr(self, field) < 1:
                raise ModelError(f"{field} must be positive, got {getattr(self, field)}")

    def window(self, layer: int) -> int | None:
        """How many latest positions (itself included) a query of this layer sees; None: all of them."""
        return self.sliding_window if layer >= self.window_from_layer else None

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers (keys and values, all layers) that one token leaves in the KV pool."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


# Architectures by the name their files use. GGUF stores Mistral as "llama".
_GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_HF_ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
    """Build the config from GGUF key-values (``general.architecture`` and ``<arch>.*``)."""
    arch = str(metadata.get("general.architecture", "missing"))
    if arch not in _GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported (supported: {', '.join(sorted(_GGUF_ARCHITECTURES))})"
        )

    def need(key: str) -> Any:
        if (value := metadata.get(f"{arch}.{key}")) is None:
            raise ModelError(f"GGUF metadata lacks {arch}.{key}")
        return value

    hidden, heads = int(need("embedding_length")), int(need("attention.head_count"))
    head_dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
    rotated = int(metadata.get(f"{arch}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise UnsupportedModelError(f"partial rotary embedding ({rotated} of {head_dim} dimensions) is not supported")
    if metadata.get(f"{arch}.expert_count"):
        raise UnsupportedModelError("mixture-of-experts models are not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab = int(metadata.get(f"{arch}.vocab_size") or (len(tokens) if tokens else 0))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    window = metadata.get(f"{arch}.attention.sliding_window")
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES[arch],
        num_layers=int(need("block_count")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(need("feed_forward_length")),
        vocab_size=vocab,
        max_position=int(need("context_length")),
        rope_theta=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        # Stored as float32: seven digits bring back the decimal number that was meant (1e-5, not 9.99999975e-6).
        rms_eps=float(f"{need('attention.layer_norm_rms_epsilon'):.7g}"),
        rope_scaling=_gguf_scaling(metadata, arch, tensor_names),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        tie_embeddings="output.weight" not in tensor_names,
        sliding_window=int(window) if window else None,
        eos_ids=_gguf_eos(metadata),
        bos_id=None if bos is None else int(bos),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _gguf_scaling(metadata: Mapping[str, Any], arch: str, tensor_names: frozenset[str]) -> RopeScaling | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensor_names:
        return RopeScaling("factors")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported")
    return RopeScaling(
        "linear" if kind == "linear" else "yarn",
        factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_max_position=int(metadata.get(f"{arch}.rope.scaling.original_context_length", 0)),
    )


# A chat turn ends at one of these even where the metadata names only the end of text.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    for index, kind in enumerate(types):
        if kind == 3 and tokens[index] in _END_OF_TURN:
            ids.append(index)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Build the config from a parsed ``config.json`` and, for the end tokens, ``generation_config.json``."""
    arch = str(raw.get("model_type", "missing"))
    if arch not in _HF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {arch!r} is not supported (supported: {', '.join(sorted(_HF_ARCHITECTURES))})"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {raw['hidden_act']!r} is not supported")
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling side by side.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("partial rotary embedding is not supported")
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        num_layers = int(raw["num_hidden_layers"])
        window, window_from = _hf_window(raw, arch, num_layers)
        bos = raw.get("bos_token_id")
        max_position = int(raw["max_position_embeddings"])
        return ModelConfig(
            architecture=arch,
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            max_position=max_position,
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rms_eps=float(raw["rms_norm_eps"]),
            rope_scaling=_hf_scaling(rope, max_position),
            qkv_bias=arch == "qwen2" or bool(raw.get("attention_bias", False)),
            qk_norm=arch == "qwen3",
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            sliding_window=window,
            window_from_layer=window_from,
            eos_ids=_hf_eos(raw, generation or {}),
            bos_id=bos if isinstance(bos, int) else None,
        )
    except KeyError as missing:
        raise ModelError(f"config.json lacks {missing.args[0]!r}") from None


def _hf_window(raw: Mapping[str, Any], arch: str, num_layers: int) -> tuple[int | None, int]:
    """Sliding window in tokens and the first layer that has it: all layers of Mistral, the upper ones of Qwen."""
    window = raw.get("sliding_window")
    if not window or arch == "llama" or (arch != "mistral" and not raw.get("use_sliding_window", False)):
        return None, 0
    first = 0 if arch == "mistral" else int(raw.get("max_window_layers", num_layers))
    kinds = raw.get("layer_types")
    if kinds:
        sliding = [kind == "sliding_attention" for kind in kinds]
        first = sliding.index(True) if True in sliding else num_layers
        if not all(sliding[first:]):
            raise UnsupportedModelError("sliding and full attention layers that alternate are not supported")
    return int(window), first


def _hf_scaling(rope: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(rope["factor"]))
    original = int(rope.get("original_max_position_embeddings") or max_position)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            original_max_position=original,
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    if kind == "yarn" and not (rope.get("mscale") and rope.get("mscale_all_dim")):
        attention = rope.get("attention_factor")
        return RopeScaling(
            "yarn",
            factor=float(rope.get("factor") or max_position / original),
            original_max_position=original,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=None if attention is None else float(attention),
            truncate=bool(rope.get("truncate", True)),
        )
    raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported")


def _hf_eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (raw, generation):
        value = source.get("eos_token_id")
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(ids))


def with_tokens(config: ModelConfig, *, eos_ids: tuple[int, ...], bos_id: int | None, add_bos: bool) -> ModelConfig:
    """The config with the tokenizer's view of its special ids added to its own."""
    merged = tuple(dict.fromkeys((*config.eos_ids, *eos_ids)))
    return dataclasses.replace(
        config, eos_ids=merged, bos_id=config.bos_id if bos_id is None else bos_id, add_bos=add_bos
    )
