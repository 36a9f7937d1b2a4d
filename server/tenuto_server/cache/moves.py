"""Copies in flight between tiers: begun (destination reserved, source protected), then finished or failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tenuto_server.cache.extent import Extent, Slots

Purpose: TypeAlias = Literal["offload", "restore", "prefetch"]


@dataclass(slots=True, eq=False)
class Move:
    """One copy. ``pieces``: the extents it covers, in order; a split of one of them inserts its new part here.

    ``drop_source``: the source copy goes as soon as the destination holds the bytes (an offload under pressure).
    ``ahead``: blocks that were on the same way when it was begun.
    """

    id: int
    src: int
    dst: int
    pieces: list[Extent]
    src_slots: Slots
    dst_slots: Slots
    purpose: Purpose
    drop_source: bool = False
    begun_ns: int = 0
    hashes: bytes = b""
    waiters: int = field(default=0)
    ahead: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks copied."""
        return len(self.src_slots)
