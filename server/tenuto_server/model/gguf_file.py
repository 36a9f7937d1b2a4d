"""GGUF files: header, tensor table and dequantisation.

Owns the memory map of one file. The format is the public GGUF v2/v3 layout (little-endian): header, key-values, tensor
infos, aligned data. The ``gguf`` package reads the same header element by element, which takes seconds for a vocabulary
of 50,000 strings; this reader takes about a tenth of one. Its quantisation formulas still serve for every type that has no
fast path here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tenuto_kernels.quant import QuantizedWeight
from tenuto_server.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
# type id -> (elements per block, bytes per block)
_BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34), BF16: (1, 2)}


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. ``shape`` is in torch order (slowest first); ``offset`` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: ``metadata`` (key -> value), ``tensors`` (name -> entry), ``read(name, dtype)``.

    Raises ``ModelError`` for anything that is not a readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy-on-write: torch refuses to wrap read-only memory without a warning, and nothing here writes.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot open {path.name}: {error}") from None
        try:
            metadata, self.tensors = _read_header(self._map)
        except (struct.error, IndexError, UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{path.name} is not a readable GGUF file: {error}") from None
        self.metadata = MappingProxyType(metadata)
        end = max((t.offset + t.nbytes for t in self.tensors.values()), default=0)
        if end > len(self._map):
            raise ModelError(f"{path.name} is truncated: {len(self._map)} bytes, tensors end at {end}")

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, dequantised, in its torch shape, owning its memory."""
        info = self.tensors[name]
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return _dequantize(raw, info.type_id, dtype).view(info.shape)

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """A matrix as it is stored, or None where its type has no form that the kernels read."""
        info = self.tensors[name]
        if info.type_id not in (Q4_0, Q4_1, Q8_0) or len(info.shape) != 2:
            return None
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return _stored(raw, info.type_id, info.shape)


def _read_header(buffer: mmap.mmap) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if buffer[:4] != b"GGUF":
        raise ModelError("not a GGUF file: wrong magic bytes")
    version, n_tensors, n_pairs = struct.unpack_from("<IQQ", buffer, 4)
    if version not in (2, 3):
        raise ModelError(f"GGUF version {version} is not supported (little-endian 2 or 3)")
    position = 24
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key, position = _read_string(buffer, position)
        (kind,) = struct.unpack_from("<I", buffer, position)
        metadata[key], position = _read_value(buffer, position + 4, kind)
    table: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(n_tensors):
        name, position = _read_string(buffer, position)
        (rank,) = struct.unpack_from("<I", buffer, position)
        dims = struct.unpack_from(f"<{rank}Q", buffer, position + 4)
        type_id, offset = struct.unpack_from("<IQ", buffer, position + 4 + 8 * rank)
        position += 4 + 8 * rank + 12
        table.append((name, tuple(reversed(dims)), type_id, offset))
    align = int(metadata.get("general.alignment", 32))
    data = (position + align - 1) // align * align
    return metadata, {
        name: GGUFTensor(name, shape, kind, data + offset, _nbytes(shape, kind)) for name, shape, kind, offset in table
    }


def _read_string(buffer: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", buffer, position)
    end = position + 8 + length
    return buffer[position + 8 : end].decode(), end


def _read_value(buffer: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(buffer, position)
    if kind != _ARRAY:
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, buffer, position)[0], position + struct.calcsize(code)
    item, length = struct.unpack_from("<IQ", buffer, position)
    position += 12
    if item in _SCALARS:
        code = f"<{length}{_SCALARS[item]}"
        return list(struct.unpack_from(code, buffer, position)), position + struct.calcsize(code)
    values: list[Any] = []
    for _ in range(length):
        value, position = _read_value(buffer, position, item)
        values.append(value)
    return values, position


def _nbytes(shape: tuple[int, ...], type_id: int) -> int:
    elements = 1
    for size in shape:
        elements *= size
    per_block, block_bytes = _BLOCKS.get(type_id) or _other_block(type_id)
    return elements // per_block * block_bytes


def _other_block(type_id: int) -> tuple[int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (KeyError, ValueError):
        raise ModelError(f"GGUF tensor type {type_id} is unknown") from None
    return int(elements), int(nbytes)


def _dequantize(raw: torch.Tensor, type_id: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks as in ggml's ``block_q4_0`` (w = d (q - 8)), ``block_q4_1`` (w = d q + m) and ``block_q8_0`` (w = d q);
    a 4-bit block stores elements 0-15 in the low nibbles and 16-31 in the high ones."""
    if type_id in (F32, F16, BF16):
        plain = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[type_id]
        return raw.view(plain).to(dtype, copy=True)
    if type_id not in _BLOCKS:
        return _dequantize_slow(raw, type_id, dtype)
    blocks = raw.view(-1, _BLOCKS[type_id][1])
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if type_id == Q8_0:
        return (blocks[:, 2:].view(torch.int8).float() * scale).to(dtype).flatten()
    start = 4 if type_id == Q4_1 else 2
    packed = blocks[:, start:]
    weights = torch.empty((len(blocks), 32), dtype=torch.float32)
    weights[:, :16] = packed & 15
    weights[:, 16:] = packed >> 4
    if type_id == Q4_1:
        # Multiply, then add, each rounded: a fused multiply-add would differ from ggml in the last bit.
        weights.mul_(scale).add_(blocks[:, 2:4].contiguous().view(torch.float16).float())
    else:
        weights.sub_(8.0).mul_(scale)
    return weights.to(dtype).flatten()


def _stored(raw: torch.Tensor, type_id: int, shape: tuple[int, ...]) -> QuantizedWeight:
    """The blocks of `_dequantize` as codes, scales and minima; Q4_0's offset of 8 steps is a minimum of -8 d, exact."""
    blocks = raw.view(-1, _BLOCKS[type_id][1])
    groups = (shape[0], shape[1] // 32)
    scale = blocks[:, :2].contiguous().view(torch.float16).view(groups)
    if type_id == Q8_0:
        return QuantizedWeight(blocks[:, 2:].contiguous().view(torch.int8).view(shape), scale, None)
    packed = blocks[:, 4 if type_id == Q4_1 else 2 :]
    codes = torch.cat([packed & 15, packed >> 4], dim=1).view(shape)
    minimum = blocks[:, 2:4].contiguous().view(torch.float16).view(groups) if type_id == Q4_1 else -8 * scale
    return QuantizedWeight(codes, scale, minimum)


def _dequantize_slow(raw: torch.Tensor, type_id: int, dtype: torch.dtype) -> torch.Tensor:
    import gguf

    values = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(type_id))
    return torch.from_numpy(values).to(dtype).flatten()
