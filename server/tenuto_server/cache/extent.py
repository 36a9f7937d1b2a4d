"""The unit of bookkeeping: a run of consecutive blocks of one prefix with the same residency, users and pins.

Extents form a prefix tree. They are written by ``CacheManager`` only; this module holds the node and the two operations
that keep its neighbours consistent, ``split`` and ``join``. Both leave the *lower* part's object in place, so that
whoever points at the end of a prefix (a session, a sequence) stays right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tenuto_server.cache.identity import HASH_BYTES, chain

if TYPE_CHECKING:
    from tenuto_server.cache.moves import Move

DEVICE, HOST, DISK = 0, 1, 2
# Return rates are kept as whole numbers of this many parts per second: sums of them never drift.
RATE_PARTS = 1 << 40
TierName: TypeAlias = Literal["device", "host", "disk"]
TIERS: tuple[TierName, ...] = ("device", "host", "disk")
LostLabel: TypeAlias = Literal["retention", "capacity"]
Slots: TypeAlias = NDArray[np.int32]


class Extent:
    """``blocks`` blocks from block index ``start`` of a prefix.

    ``tokens``: int32 [blocks * block_tokens]; a *tail* (the partial last block of a turn) has ``fill`` < block_tokens
    tokens in one block, hangs in its parent's ``tails`` and is never continued in place, only copied from.
    ``slots[tier]``: int32 [blocks] or None. ``pins``: references of running sequences at or below here. ``moves``: copies
    in flight. ``users``: sessions whose last context ends at or below here; ``rate``: sum of their return rates in
    1/RATE_PARTS per second.
    ``owner``: number of the tenant under whose root it hangs. ``lost``: why the last copy went, for a tombstone. Chained hashes are worked out when first asked for: what never leaves
    the device needs none.
    """

    __slots__ = (
        "_hashes",
        "blocks",
        "children",
        "fill",
        "last_used_s",
        "lost",
        "moves",
        "order",
        "owner",
        "parent",
        "pins",
        "rate",
        "refused",
        "slots",
        "stamp",
        "start",
        "tails",
        "tips",
        "tokens",
        "users",
        "uses",
    )

    def __init__(
        self,
        parent: Extent | None,
        start: int,
        blocks: int,
        tokens: NDArray[np.int32],
        order: int,
        fill: int = 0,
        hashes: bytes | None = None,
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self._hashes = hashes
        self.blocks = blocks
        self.fill = fill
        self.order = order
        self.owner: int = parent.owner if parent is not None else 0
        self.slots: list[Slots | None] = [None, None, None]
        self.children: dict[bytes, Extent] = {}
        self.tails: list[Extent] = []
        self.tips: set[int] = set()
        self.pins = 0
        self.moves: list[Move] = []
        self.users = 0
        self.rate = 0
        self.uses = 0
        self.last_used_s = 0.0
        self.lost: LostLabel | None = None
        self.refused = 0
        self.stamp = 0

    @property
    def end(self) -> int:
        """Block index after the last block."""
        return self.start + self.blocks

    @property
    def known_hashes(self) -> bytes | None:
        """The chained hashes if they have been asked for before. Known hashes imply known ones above."""
        return self._hashes

    @property
    def hashes(self) -> bytes:
        """The chained hashes of the blocks, 16 bytes each; for a root, the root hash."""
        if (known := self._hashes) is not None:
            return known
        unknown, node = [], self
        while (known := node._hashes) is None:
            unknown.append(node)
            assert node.parent is not None
            node = node.parent
        for below in reversed(unknown):
            size = len(below.tokens) // below.blocks
            known = below._hashes = chain(node.last_hash, below.tokens, size)
            node = below
        return known

    @property
    def last_hash(self) -> bytes:
        """The chained hash of the last block; for a root, the root hash."""
        return self.hashes[-HASH_BYTES:]

    @property
    def resident(self) -> bool:
        """Some tier holds a copy."""
        device, host, disk = self.slots
        return device is not None or host is not None or disk is not None

    @property
    def tombstone(self) -> bool:
        """Known but held nowhere, and not on its way anywhere."""
        return self.parent is not None and not self.moves and not self.resident

    def best_tier(self) -> int | None:
        """The fastest tier that holds it; None for a tombstone."""
        device, host, disk = self.slots
        if device is not None:
            return DEVICE
        if host is not None:
            return HOST
        return DISK if disk is not None else None

    def moving_to(self, tier: int) -> bool:
        """A copy to that tier is in flight."""
        return any(move.dst == tier for move in self.moves)

    def evictable(self, tier: int) -> bool:
        """Its copy on that tier may go now: nobody uses it, or what is used is its copy on the device."""
        used = self.pins and (tier == DEVICE or self.slots[DEVICE] is None)
        return self.slots[tier] is not None and not used and not self.moves

    def token_end(self, block_tokens: int) -> int:
        """Token position after the last token."""
        return self.start * block_tokens + len(self.tokens)


def split(extent: Extent, blocks: int, block_tokens: int, order: int) -> Extent:
    """Cuts the first ``blocks`` blocks off into a new parent of ``extent``, which keeps the rest. Returns the new part."""
    assert extent.parent is not None
    assert not extent.fill
    assert 0 < blocks < extent.blocks
    cut = blocks * block_tokens
    known = extent._hashes
    front = known[: blocks * HASH_BYTES] if known is not None else None
    upper = Extent(extent.parent, extent.start, blocks, extent.tokens[:cut], order, hashes=front)
    for tier, slots in enumerate(extent.slots):
        if slots is not None:
            upper.slots[tier] = slots[:blocks]
            extent.slots[tier] = slots[blocks:]
    upper.pins, upper.users, upper.rate = extent.pins, extent.users, extent.rate
    upper.uses, upper.last_used_s, upper.lost, upper.refused = (
        extent.uses,
        extent.last_used_s,
        extent.lost,
        extent.refused,
    )
    upper.moves = list(extent.moves)
    for move in extent.moves:
        move.pieces.insert(move.pieces.index(extent), upper)
    extent.parent.children[_key(upper, block_tokens)] = upper
    extent.start += blocks
    extent.blocks -= blocks
    extent.tokens = extent.tokens[cut:]
    if known is not None:
        extent._hashes = known[blocks * HASH_BYTES :]
    extent.parent = upper
    extent.stamp += 1
    upper.children[_key(extent, block_tokens)] = extent
    return upper


def joinable(upper: Extent, lower: Extent, blocks_max: int) -> bool:
    """Whether the two are one run: same residency, users, pins, and nothing hanging between them."""
    return (
        upper.parent is not None
        and not lower.fill
        and len(upper.children) == 1
        and not upper.tails
        and not upper.moves
        and not lower.moves
        and upper.users == lower.users
        and upper.pins == lower.pins
        and upper.lost == lower.lost
        and upper.refused == lower.refused
        and upper.blocks + lower.blocks <= blocks_max
        and (upper.slots[0] is None) == (lower.slots[0] is None)
        and (upper.slots[1] is None) == (lower.slots[1] is None)
        and (upper.slots[2] is None) == (lower.slots[2] is None)
    )


def join(upper: Extent, lower: Extent, block_tokens: int) -> None:
    """``lower`` takes ``upper``'s blocks in front of its own; ``upper`` is no longer part of the tree."""
    assert upper.parent is not None
    if upper._hashes is not None:
        lower._hashes = upper._hashes + lower.hashes
    for tier, slots in enumerate(lower.slots):
        front = upper.slots[tier]
        if slots is not None and front is not None:
            lower.slots[tier] = np.concatenate((front, slots))
    lower.tokens = np.concatenate((upper.tokens, lower.tokens))
    lower.start = upper.start
    lower.blocks += upper.blocks
    lower.last_used_s = max(upper.last_used_s, lower.last_used_s)
    lower.uses = min(upper.uses, lower.uses)
    lower.parent = upper.parent
    lower.stamp += 1
    upper.stamp += 1
    upper.parent.children[_key(lower, block_tokens)] = lower
    upper.parent, upper.children = None, {}
    upper.slots = [None, None, None]


def _key(extent: Extent, block_tokens: int) -> bytes:
    return extent.tokens[:block_tokens].tobytes()
