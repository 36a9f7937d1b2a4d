"""KV blocks in eight bits a number, as the lower tiers may keep them. Owns no state: `LowerForm` says how the bytes lie.

Every head's key or value of one token (D numbers) has one scale, max|x| / 127 for `int8` and max|x| / 448 for `fp8` (e4m3), kept as
bf16 rounded up, so that nothing is cut off. A packed block is the codes `[L, 2, Hkv, block, D]`, then the scales
`[L, 2, Hkv, block]`, then zeros up to a whole page where a block has many pages, so that it can be read past the page cache.

The definitions are torch's; on a CPU the native library does the same arithmetic, to the bit.
"""

import ctypes
from typing import Literal, get_args

import torch
from torch import Tensor

from tenuto_kernels import memory
from tenuto_kernels.cpu.native_build import library
from tenuto_kernels.layout import KVLayout

LowerKind = Literal["int8", "fp8"]

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_PAGE = 4096
_ALIGN_FROM = 16 * _PAGE


class LowerForm:
    """Packed blocks of a layout. `block_bytes`: of one. Raises ValueError for another kind."""

    def __init__(self, layout: KVLayout, kind: LowerKind) -> None:
        if kind not in get_args(LowerKind):
            raise ValueError(f"a lower form is one of {', '.join(get_args(LowerKind))}, got {kind!r}")
        self.layout, self.kind = layout, kind
        self.groups = layout.num_layers * 2 * layout.num_kv_heads * layout.block_size
        self.codes = self.groups * layout.head_dim
        size = self.codes + 2 * self.groups
        self.block_bytes = -(-size // _PAGE) * _PAGE if size >= _ALIGN_FROM else size

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu", pin: bool = False) -> Tensor:
        """uint8 `[num_blocks, block_bytes]`, zeroed and resident; `pin` as for a layout's pool."""
        shape = (num_blocks, self.block_bytes)
        pinned = pin and torch.device(device).type == "cpu" and torch.cuda.is_available()
        if torch.device(device).type == "cpu" and not pinned:
            return memory.zeros(shape, torch.uint8)
        return torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)

    def pack(self, blocks: Tensor, out: Tensor) -> None:
        """`blocks` `[n, *block_shape]` into `out`, uint8 `[n, block_bytes]` on the same device. Not finite: undefined."""
        native = self._native(blocks, out)
        if native is None:
            self._pack(blocks, out)
            return
        for block, packed in zip(blocks, out, strict=True):
            native.tn_lower_pack(block.data_ptr(), self._bf16, packed.data_ptr(), self.groups, *self._shape)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """The other way: `packed` uint8 `[n, block_bytes]`, `out` `[n, *block_shape]`."""
        native = self._native(out, packed)
        if native is None:
            self._unpack(packed, out)
            return
        for source, block in zip(packed, out, strict=True):
            native.tn_lower_unpack(source.data_ptr(), block.data_ptr(), self._bf16, self.groups, *self._shape)

    @property
    def _bf16(self) -> int:
        return int(self.layout.dtype == torch.bfloat16)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.layout.head_dim, int(self.kind == "fp8")

    def _native(self, blocks: Tensor, packed: Tensor) -> ctypes.CDLL | None:
        on_cpu = blocks.device.type == packed.device.type == "cpu"
        plain = blocks.dtype in (torch.bfloat16, torch.float32) and blocks.is_contiguous() and packed.stride(-1) == 1
        return library() if on_cpu and plain else None

    def _pack(self, blocks: Tensor, out: Tensor) -> None:
        wide = blocks.float().view(len(blocks), self.groups, self.layout.head_dim)
        bits = (wide.abs().amax(-1) / _LARGEST[self.kind]).view(torch.int32)
        scale = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
        inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
        scaled = wide * inverse[..., None]
        if self.kind == "int8":
            codes = scaled.round().to(torch.int8).view(torch.uint8)
        else:
            codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        out[:, : self.codes] = codes.reshape(len(blocks), -1)
        out[:, self.codes : self.codes + 2 * self.groups] = scale.contiguous().view(torch.uint8).view(len(blocks), -1)

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        codes = packed[:, : self.codes].contiguous()
        stored = packed[:, self.codes : self.codes + 2 * self.groups].contiguous()
        scale = stored.view(torch.bfloat16).float()
        values = codes.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()
        wide = values.view(len(packed), self.groups, -1) * scale[..., None]
        out.copy_(wide.view(out.shape))
