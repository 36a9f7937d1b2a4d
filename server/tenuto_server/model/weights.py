"""Weights by canonical name, whatever file they come from, and the digest that identifies them.

Owns the open files. Both sources are lazy mappings: a tensor is read and converted when it is asked for, so that loading
a large model never holds two copies of it. Canonical names: ``embed``, ``norm``, ``head`` (absent when tied),
``layers.<i>.{attn_norm,mlp_norm,q_norm,k_norm}`` and ``layers.<i>.{q,k,v,o,gate,up,down}.{weight,bias}``; matrices are
[out, in], and the rows of q and k are in the order that rotates dimension i with i + D/2.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tenuto_kernels.quant import QuantizedWeight
from tenuto_server.errors import ModelError
from tenuto_server.model.config import ModelConfig
from tenuto_server.model.gguf_file import GGUFFile

Weights = Mapping[str, torch.Tensor]

_VECTORS = {
    # canonical: (Hugging Face, GGUF)
    "attn_norm": ("input_layernorm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
}
_MATRICES = {
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}


def _names(config: ModelConfig, column: int) -> dict[str, str]:
    """Canonical name -> name in the file; ``column`` 0 is Hugging Face, 1 GGUF."""
    model, layer = ("model.", "model.layers.{}.") if column == 0 else ("", "blk.{}.")
    top = {"embed": ("embed_tokens", "token_embd"), "norm": ("norm", "output_norm")}
    names = {name: f"{model}{pair[column]}.weight" for name, pair in top.items()}
    if not config.tie_embeddings:
        names["head"] = ("lm_head.weight", "output.weight")[column]
    for index in range(config.num_layers):
        prefix = layer.format(index)
        for name, pair in _VECTORS.items():
            names[f"layers.{index}.{name}"] = f"{prefix}{pair[column]}.weight"
        for name, pair in _MATRICES.items():
            names[f"layers.{index}.{name}.weight"] = f"{prefix}{pair[column]}.weight"
            names[f"layers.{index}.{name}.bias"] = f"{prefix}{pair[column]}.bias"
    return names


class GGUFWeights(Mapping[str, torch.Tensor]):
    """The tensors of one GGUF file in ``dtype``.

    Files of the ``llama`` architecture store q and k with each head's rows interleaved (0, D/2, 1, D/2+1, ...), for a
    RoPE that rotates neighbours; they are put back in order here. Other architectures are stored in order.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> None:
        self._file, self._config, self._dtype = file, config, dtype
        names = _names(config, 1)
        if "rope_freqs.weight" in file.tensors:
            names["rope_factors"] = "rope_freqs.weight"
        self._names = {name: stored for name, stored in names.items() if stored in file.tensors}
        self._interleaved = config.architecture == "llama"

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._file.read(self._names[name], self._dtype)
        heads = self._interleaved_heads(name)
        return in_rotation_order(tensor, heads) if heads else tensor

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A matrix as the file stores it, or None where the kernels do not read its type."""
        weight = self._file.read_quantized(self._names[name])
        heads = self._interleaved_heads(name)
        if weight is None or not heads:
            return weight
        return weight.rows(in_rotation_order(torch.arange(weight.shape[0]), heads))

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows are interleaved in this tensor; 0 where they lie in order."""
        part = name.split(".")[2] if self._interleaved and name.startswith("layers.") else ""
        return {"q": self._config.num_heads, "k": self._config.num_kv_heads}.get(part, 0)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def in_rotation_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of the rows [heads * D, ...] (or of a bias [heads * D])."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class SafetensorsWeights(Mapping[str, torch.Tensor]):
    """The tensors of a folder with ``model.safetensors`` or a sharded index, in ``dtype``."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, safe_open] = {}
        for path in weight_files(folder):
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path.name}: {error}") from None
            self._files.update(dict.fromkeys(handle.keys(), handle))  # type: ignore[no-untyped-call]
        names = _names(config, 0)
        self._names = {name: stored for name, stored in names.items() if stored in self._files}

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        tensor: torch.Tensor = self._files[stored].get_tensor(stored)  # type: ignore[no-untyped-call]
        return tensor.to(self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in a stable order. ``ModelError`` if there is none or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index.name} is not a shard index: {error}") from None
        paths = [folder / str(name) for name in shards]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if path.resolve().parent != folder.resolve() and not path.is_symlink():
            raise ModelError(f"{index.name} names a file outside its folder: {path.name}")
        if not path.exists():
            raise ModelError(f"{folder.name} has no {path.name}")
    return paths


_PIECE = 16 << 20


def weights_digest(paths: list[Path]) -> str:
    """Hex blake2b-256 over every byte of the files, as a two-level tree: pieces of 16 MiB, hashed in parallel, then their
    digests in order with the files' sizes. About 1 GB/s and core; it also warms the page cache for the load that follows.
    Names and times do not enter, so a copied or renamed model keeps its cached KV."""
    root = hashlib.blake2b(digest_size=32)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path in paths:
            try:
                size = path.stat().st_size
                root.update(size.to_bytes(8, "little"))
                offsets = range(0, size, _PIECE)
                for digest in pool.map(_hash_piece, [path] * len(offsets), offsets):
                    root.update(digest)
            except OSError as error:
                raise ModelError(f"cannot read {path.name}: {error}") from None
    return root.hexdigest()


def _hash_piece(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.blake2b(file.read(_PIECE), digest_size=32).digest()
