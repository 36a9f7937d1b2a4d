"""A sequence's block table. Written by ``CacheManager`` only; the engine and the plan read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tenuto_server.cache.extent import Extent


@dataclass(slots=True, eq=False)
class BlockTable:
    """``blocks``: device slots int32, valid up to token ``front``; ``tip``: the last extent of the pinned path, which
    covers blocks 0 .. ``path_blocks``; ``private``: bool per block, whether the sequence owns its slot, ``owned`` of them.

    ``front``: tokens whose KV is in place (or will be, once the forward that was planned last is done).
    ``strays``: it may own blocks of its path. ``cow``: pinned source of a copy-on-write for the first ``cow_tokens`` tokens of block ``path_blocks``.
    """

    root: Extent
    tip: Extent
    blocks: NDArray[np.int32]
    path_blocks: int = 0
    front: int = 0
    cow: Extent | None = None
    cow_tokens: int = 0
    owned: int = 0
    strays: bool = False
    private: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.private = np.zeros(len(self.blocks), np.bool_)

    def path_tokens(self, block_tokens: int) -> int:
        """Token position where the pinned path ends."""
        return self.path_blocks * block_tokens
