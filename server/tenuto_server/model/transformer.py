"""The dense decoder of the Llama family, over a paged KV pool.

``Transformer`` owns the packed weights and nothing else: the pool, the batch and its memory belong to the caller, so one
object serves any number of pools. It is used by one thread at a time (the executor's).

Precision. "fp32" computes and stores everything in fp32. "bf16" means that weights and KV are *stored* with bf16 precision;
activations are bf16 where the hardware multiplies bf16 (CUDA, or CPUs with AVX512-BF16 or AMX), else fp32 over
bf16-valued weights, which is both faster and more exact there. Quantised weights (``weights_form``) are read as they
are and multiplied in fp32; only the embedding table is kept in the storage precision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from tenuto_kernels.cpu.native_decoder import DecoderLayer, NativeDecoder
from tenuto_kernels.dispatch import backend
from tenuto_kernels.layout import KVLayout
from tenuto_kernels.linear import PackedLinear, fast_bf16, pack_linear
from tenuto_kernels.ops import add_rms_norm, paged_attention, rms_norm, rope_store, silu_mul
from tenuto_kernels.quant import QuantizedWeight, quantize, stack
from tenuto_kernels.rows import AttentionRows
from tenuto_server.errors import ModelError
from tenuto_server.model.config import ModelConfig
from tenuto_server.model.rope import rope_frequencies, rope_tables
from tenuto_server.model.weights import GGUFWeights, Weights

log = logging.getLogger(__name__)

WeightsForm = Literal["dense", "stored", "int8", "int4"]
_Matrix = TypeVar("_Matrix", Tensor, QuantizedWeight)

# Above this size an fp32 copy of bf16 weights is not worth its memory.
_FP32_COPY_LIMIT_BYTES = 8 << 30


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward pass over T tokens of R rows; everything lies on the model's device.

    ``tokens``, ``positions``, ``slots``: int64 [T]: token ids, absolute positions, KV slots (block * block_size + offset).
    ``rows``: which tokens attend to which blocks. ``logits_index``: int64 [S], the tokens whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: AttentionRows
    logits_index: Tensor


@dataclass(frozen=True, eq=False)
class _Layer(DecoderLayer):
    window: int | None


class Transformer:
    """``dtype``: storage precision of weights and KV (bfloat16 or float32). ``invariant``: every token's result is bitwise
    independent of what else is in the batch (slower; for tests). ``weights_form``: ``dense`` in ``dtype``; ``stored``: as a
    quantised file has them, where it has; ``int8`` or ``int4``: quantised here. Raises ``ModelError`` for missing or
    misshapen weights."""

    weights_form: WeightsForm = "dense"

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        invariant: bool = False,
        weights_form: WeightsForm = "dense",
    ) -> None:
        self.weights_form = weights_form  # in the end: what it came to
        self.config, self.dtype, self.device, self.invariant = config, dtype, torch.device(device), invariant
        self.activation_dtype = activation_dtype(dtype, self.device, invariant)
        self._scale = config.head_dim**-0.5
        factors = weights["rope_factors"] if config.rope_scaling and config.rope_scaling.kind == "factors" else None
        frequencies, self._rope_factor = rope_frequencies(config, factors)
        self._frequencies = frequencies.to(self.device)
        embed = self._checked(weights, "embed", config.vocab_size, config.hidden_size)
        self._embed = embed.to(self.device, dtype)
        del embed
        self._keep_fp32 = self._fp32_bytes() <= _FP32_COPY_LIMIT_BYTES
        head = "embed" if config.tie_embeddings else "head"
        self._head = self._pack([self._matrix(weights, head, config.vocab_size, config.hidden_size)], None)
        self._norm = self._vector(weights, "norm", config.hidden_size)
        self._layers = list(self._build_layers(weights))
        packed = [linear for layer in self._layers for linear in layer.linears()]
        if not any(linear.bits < 16 for linear in (*packed, self._head)):
            self.weights_form = "dense"
        self._native = self._build_native()

    @property
    def kind(self) -> str:
        """How a forward pass runs: `native` (one call for all layers) or `layers` (one operator at a time)."""
        return "native" if self._native is not None else "layers"

    @property
    def linear_kind(self) -> str:
        """The path of the matrix products (`tenuto_kernels.linear`)."""
        return self._head.kind

    def kv_layout(self, block_size: int) -> KVLayout:
        """The layout of a pool for this model, in its storage dtype."""
        return KVLayout(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, block_size, self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: Tensor) -> Tensor:
        """Compute the batch, write its KV into ``pool`` and return logits fp32 [S, vocab] of ``logits_index``.

        All KV the rows can see, except that of the batch itself, must be in the pool already.
        """
        config, eps = self.config, self.config.rms_eps
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = (-1, config.num_heads, config.head_dim)
        kv_heads = (-1, config.num_kv_heads, config.head_dim)
        cos, sin = rope_tables(batch.positions, self._frequencies, self._rope_factor)
        x = torch.nn.functional.embedding(batch.tokens, self._embed).to(self.activation_dtype)
        if self._native is not None:
            return self._native.forward(x.float(), cos, sin, pool, batch.slots, batch.rows, batch.logits_index)
        normed = rms_norm(x, self._layers[0].attn_norm, eps)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.qkv(normed).split_with_sizes((q_size, kv_size, kv_size), dim=-1)
            q, k = q.view(heads), k.view(kv_heads)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
            q = rope_store(q, k, v.view(kv_heads), cos, sin, pool, index, batch.slots)
            is_last = index == config.num_layers - 1
            if is_last and not len(batch.logits_index):
                return torch.empty((0, config.vocab_size), device=self.device)
            attended = paged_attention(
                q, pool, index, batch.rows, self._scale, window=layer.window, invariant=self.invariant
            ).flatten(1)
            if is_last:  # beyond the last layer's KV only the wanted tokens matter
                x, attended = x.index_select(0, batch.logits_index), attended.index_select(0, batch.logits_index)
            x, normed = add_rms_norm(x, layer.o(attended), layer.mlp_norm, eps)
            following = self._norm if is_last else self._layers[index + 1].attn_norm
            x, normed = add_rms_norm(x, layer.down(silu_mul(layer.gate_up(normed))), following, eps)
        return self._head(normed).float()

    def _build_layers(self, weights: Weights) -> Iterator[_Layer]:
        c = self.config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        for index in range(c.num_layers):
            at = f"layers.{index}."
            yield _Layer(
                attn_norm=self._vector(weights, at + "attn_norm", c.hidden_size),
                mlp_norm=self._vector(weights, at + "mlp_norm", c.hidden_size),
                q_norm=self._vector(weights, at + "q_norm", c.head_dim) if c.qk_norm else None,
                k_norm=self._vector(weights, at + "k_norm", c.head_dim) if c.qk_norm else None,
                qkv=self._fused(weights, at, {"q": q_size, "k": kv_size, "v": kv_size}, c.hidden_size),
                o=self._fused(weights, at, {"o": c.hidden_size}, q_size),
                gate_up=self._fused(
                    weights, at, {"gate": c.intermediate_size, "up": c.intermediate_size}, c.hidden_size
                ),
                down=self._fused(weights, at, {"down": c.hidden_size}, c.intermediate_size),
                window=c.window(index),
            )

    def _build_native(self) -> NativeDecoder | None:
        windowed = any(layer.window is not None for layer in self._layers)
        if (
            self.device.type != "cpu"
            or backend() != "cpu"
            or windowed
            or not NativeDecoder.takes(self._layers, self._head)
        ):
            return None
        c = self.config
        return NativeDecoder(
            self._layers,
            self._norm,
            self._head,
            q_heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            eps=c.rms_eps,
            scale=self._scale,
            invariant=self.invariant,
        )

    def _fused(self, weights: Weights, at: str, parts: dict[str, int], inputs: int) -> PackedLinear:
        """One matrix from several that read the same input, stacked along their outputs."""
        matrices = [self._matrix(weights, f"{at}{name}.weight", size, inputs) for name, size in parts.items()]
        has_bias = [f"{at}{name}.bias" in weights for name in parts]
        if self.config.qkv_bias and "q" in parts and not all(has_bias):
            raise ModelError(f"{at}q, k, v should have a bias")
        bias = None
        if any(has_bias):
            bias = torch.cat([self._checked(weights, f"{at}{name}.bias", size) for name, size in parts.items()])
        return self._pack(matrices, bias)

    def _pack(self, matrices: list[Tensor | QuantizedWeight], bias: Tensor | None) -> PackedLinear:
        """One linear layer from matrices stacked along their outputs, quantised only if all are, and alike."""
        weight: Tensor | QuantizedWeight
        quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
        if len(quantized) == len(matrices) and len({matrix.bits for matrix in quantized}) == 1:
            weight = stack(quantized).to(self.device)
        else:
            dense = [m.dense(self.dtype) if isinstance(m, QuantizedWeight) else m for m in matrices]
            weight = (dense[0] if len(dense) == 1 else torch.cat(dense)).to(self.device)
        return pack_linear(
            weight,
            None if bias is None else bias.to(self.device),
            dtype=self.dtype,
            invariant=self.invariant,
            keep_fp32=self._keep_fp32,
        )

    def _matrix(self, weights: Weights, name: str, *shape: int) -> Tensor | QuantizedWeight:
        """The matrix in the form asked for; the output head is never coarser than 8 bits, which every token's choice
        depends on."""
        if self.weights_form == "stored" and isinstance(weights, GGUFWeights) and name in weights:
            stored = weights.quantized(name)
            if stored is not None:
                return self._shaped(name, stored, shape)
        dense = self._checked(weights, name, *shape)
        if self.weights_form in ("int8", "int4"):
            bits = 4 if self.weights_form == "int4" and name not in ("embed", "head") else 8
            return quantize(dense, bits) or dense
        return dense

    def _vector(self, weights: Weights, name: str, size: int) -> Tensor:
        return self._checked(weights, name, size).to(self.device, torch.float32)

    @staticmethod
    def _checked(weights: Weights, name: str, *shape: int) -> Tensor:
        try:
            tensor = weights[name]
        except KeyError:
            raise ModelError(f"the weights lack {name!r}") from None
        return Transformer._shaped(name, tensor, shape)

    @staticmethod
    def _shaped(name: str, weight: _Matrix, shape: tuple[int, ...]) -> _Matrix:
        if tuple(weight.shape) != shape:
            raise ModelError(f"weight {name!r} has shape {list(weight.shape)}, the config says {list(shape)}")
        return weight

    def _fp32_bytes(self) -> int:
        c = self.config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        layers = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
        return 4 * (layers + c.vocab_size * c.hidden_size)


def activation_dtype(dtype: torch.dtype, device: torch.device, invariant: bool) -> torch.dtype:
    """What activations are computed in for weights stored as ``dtype`` (see the module's docstring)."""
    if dtype == torch.float32 or device.type != "cpu":
        return dtype
    return torch.bfloat16 if fast_bf16() and not invariant else torch.float32
