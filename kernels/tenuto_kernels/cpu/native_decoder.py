"""A whole decoder in one native call: what `native_decoder.cpp` needs to know of a model, and of a batch.

Owner of the state: a `NativeDecoder` keeps the weights it was built from alive and holds their addresses. Between two
operators of one call nothing returns to Python, which costs as much as the arithmetic when a batch is one token.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tenuto_kernels import memory
from tenuto_kernels.cpu.native_build import library
from tenuto_kernels.linear import PackedLinear
from tenuto_kernels.rows import AttentionRows

_ALIGN_BYTES = 4096
_pointer, _long, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _pointer), ("bias", _pointer), ("outputs", _long), ("inputs", _long), ("kind", _long)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _pointer) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, _Linear) for name in ("qkv", "o", "gate_up", "down")],
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", _pointer),
        ("norm", _pointer),
        ("head", _Linear),
        *[(name, _long) for name in ("count", "hidden", "q_heads", "kv_heads", "dim", "intermediate")],
        ("eps", _float),
        ("scale", _float),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *[(name, _long) for name in ("tokens", "rows", "max_blocks", "wanted", "blocks", "block_size")],
        *[(name, _long) for name in ("pool_bf16", "invariant")],
        *[(name, _pointer) for name in ("pool", "cosine", "sine", "slots", "index", "start", "context", "tables")],
    ]


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Norms in fp32, projections packed: `qkv` [(Hq + 2 Hkv) D, H], `o` [H, Hq D], `gate_up` [2F, H], `down` [H, F]."""

    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear

    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class NativeDecoder:
    """Raises ValueError where `takes` is false."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: PackedLinear,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        invariant: bool = False,
    ) -> None:
        loaded = library()
        if loaded is None or not self.takes(layers, head):
            raise ValueError("every projection of a native decoder must be packed natively")
        self._forward = loaded.tn_forward
        _gather([linear for layer in layers for linear in layer.linears()] + [head])
        self._kept = (tuple(layers), norm, head)
        self._shape = (len(layers), kv_heads, head_dim)
        self._invariant, self._vocabulary = invariant, head.out_features
        self._layers = (_Layer * len(layers))(*[_layer(layer) for layer in layers])
        hidden, intermediate = layers[0].qkv.in_features, layers[0].down.in_features
        sizes = (len(layers), hidden, q_heads, kv_heads, head_dim, intermediate)
        self._decoder = _Decoder(ctypes.addressof(self._layers), norm.data_ptr(), _linear(head), *sizes, eps, scale)

    @staticmethod
    def takes(layers: Sequence[DecoderLayer], head: PackedLinear) -> bool:
        """Whether these can be run natively: there is a layer, and a native path for every projection."""
        packed = [linear for layer in layers for linear in layer.linears()]
        return bool(packed) and library() is not None and all(each.panels is not None for each in (*packed, head))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: Tensor,
        slots: Tensor,
        rows: AttentionRows,
        logits_index: Tensor,
    ) -> Tensor:
        """Run all layers over embeddings x fp32 [T, H] (overwritten), write their KV to `slots` int64 [T] of the pool
        and return logits fp32 [S, vocabulary] of the tokens `logits_index` int64 [S].

        cos, sin: fp32 [T, D/2]. Raises ValueError where the batch does not fit the pool or its own shapes.
        """
        blocks, layers, _, kv_heads, size, dim = pool.shape
        tokens = len(x)
        if (layers, kv_heads, dim) != self._shape or not pool.is_contiguous():
            raise ValueError(f"pool {tuple(pool.shape)} does not fit layers, KV heads, D = {self._shape}")
        if pool.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"pool must be bfloat16 or float32, got {pool.dtype}")
        if rows.num_tokens != tokens or cos.shape != (tokens, dim // 2) or slots.shape != (tokens,):
            raise ValueError(f"{tokens} embeddings, {rows.num_tokens} tokens in rows, slots {tuple(slots.shape)}")
        x, cos, sin, slots, index = (t.contiguous() for t in (x, cos, sin, slots, logits_index))
        tables = rows.block_tables.contiguous()
        start = torch.tensor(rows.query_start, dtype=torch.int32)
        context = torch.tensor(rows.context_len, dtype=torch.int32)
        logits = torch.empty(len(index), self._vocabulary)
        if x.dtype != torch.float32 or cos.dtype != torch.float32 or slots.dtype != torch.int64:
            raise ValueError(
                f"x, cos and slots must be fp32, fp32 and int64, got {x.dtype}, {cos.dtype}, {slots.dtype}"
            )
        batch = _Batch(
            *(tokens, rows.num_rows, tables.shape[1], len(index), blocks, size),
            *(pool.dtype == torch.bfloat16, self._invariant),
            *[t.data_ptr() for t in (pool, cos, sin, slots, index, start, context, tables)],
        )
        failed = self._forward(
            ctypes.addressof(self._decoder),
            ctypes.addressof(batch),
            x.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise ValueError(f"a slot, block table, length or index does not fit the pool {tuple(pool.shape)}")
        return logits


def _gather(packed: list[PackedLinear]) -> None:
    """Move the weights, which lie wherever they were made, into one buffer on huge pages, in the order of their use."""
    panels = [linear.panels for linear in packed if linear.panels is not None]
    sizes = [-(-each.data.numel() * each.data.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES for each in panels]
    arena = memory.zeros((sum(sizes),), torch.uint8)
    at = 0
    for each, size in zip(panels, sizes, strict=True):
        each.move(arena[at : at + size])
        at += size


def _linear(packed: PackedLinear) -> _Linear:
    panels = packed.panels
    assert panels is not None
    bias = None if panels.bias is None else panels.bias.data_ptr()
    return _Linear(panels.data.data_ptr(), bias, packed.out_features, packed.in_features, panels.kind)


def _layer(layer: DecoderLayer) -> _Layer:
    norms = (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    if any(norm is not None and (norm.dtype != torch.float32 or not norm.is_contiguous()) for norm in norms):
        raise ValueError("norms must be contiguous fp32")
    pointers = [None if norm is None else norm.data_ptr() for norm in norms]
    return _Layer(*pointers, *[_linear(packed) for packed in layer.linears()])
