"""The KV block layout. Owns no state: a `KVLayout` only says how the bytes of a pool are arranged.

A pool is one tensor `[blocks, L, 2, Hkv, block_size, D]`: block-major, so that one block (all layers, keys and values
of `block_size` token slots) is one contiguous range of bytes on every tier and moves with one copy.
"""

from dataclasses import dataclass

import torch

from tenuto_kernels import memory

#: Part of every block's identity: raise it whenever the meaning of a block's bytes changes.
LAYOUT_VERSION = 1

#: Index of keys and of values along the pool's third dimension.
KEY, VALUE = 0, 1

POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KVLayout:
    """Shape and dtype of a KV pool.

    Raises ValueError for a size below one or a dtype that no kernel stores.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in POOL_DTYPES:
            raise ValueError(f"KVLayout.dtype must be one of {POOL_DTYPES}, got {self.dtype}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(L, 2, Hkv, block_size, D)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device | str, pin: bool = False) -> torch.Tensor:
        """A zeroed pool `[num_blocks, *block_shape]`.

        `pin` asks for page-locked host memory, which only means something beside a CUDA device; without one it is
        ignored. Zeroed rather than empty: the memory is then resident before the first request.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        device = torch.device(device)
        pinned = pin and device.type == "cpu" and torch.cuda.is_available()
        shape = (num_blocks, *self.block_shape)
        if device.type == "cpu":
            return (memory.pinned if pinned else memory.zeros)(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=device)
