"""Who holds how much of each tier, and who holds more than a share. Owner of the counts; ``Residency`` keeps them.

A tier is divided equally between the owners (tenants) that hold any of it. Nobody is kept from taking more while others do not
need theirs; who holds more only makes way first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SLACK = 0.02
"""Whoever is this much above the share is over it, and stays so until back at the share: what changes with it is looked at
again for every extent of that owner, which must not happen at every block."""


class Shares:
    """``capacities``: blocks of each tier. ``changed(owner)`` is called when an owner has come to be over its share somewhere,
    or is no longer. ``crowding``: by owner, the tiers of which it holds more than its share, as bits."""

    def __init__(self, capacities: Sequence[int], changed: Callable[[int], None]) -> None:
        self.used: tuple[dict[int, int], ...] = tuple({} for _ in capacities)
        self._capacities = tuple(capacities)
        self._changed = changed
        self.crowding: dict[int, int] = {}

    def over(self, owner: int) -> int:
        """The tiers of which an owner holds more than its share, as bits."""
        return self.crowding.get(owner, 0) if self.crowding else 0

    @property
    def contended(self) -> bool:
        """Several owners hold blocks of one tier."""
        return any(len(used) > 1 for used in self.used)

    def share(self, tier: int) -> float:
        """Blocks that each owner may hold of a tier before it makes way first."""
        return self._capacities[tier] / max(1, len(self.used[tier]))

    def add(self, tier: int, owner: int, blocks: int) -> None:
        """An owner holds so many more (fewer, if negative) blocks of a tier."""
        used = self.used[tier]
        before, owners = used.get(owner, 0), len(used)
        now = before + blocks
        assert now >= 0
        if now:
            used[owner] = now
        else:
            used.pop(owner, None)
        if len(used) != owners:
            for other in {*used, owner}:  # everybody's share has changed
                self._judge(tier, other)
        elif owners > 1:
            self._judge(tier, owner)

    def _judge(self, tier: int, owner: int) -> None:
        bit, bits = 1 << tier, self.crowding.get(owner, 0)
        limit = self.share(tier) * (1.0 if bits & bit else 1.0 + SLACK)
        is_over = len(self.used[tier]) > 1 and self.used[tier].get(owner, 0) > limit
        if is_over == bool(bits & bit):
            return
        self.crowding[owner] = bits ^ bit
        if not self.crowding[owner]:
            del self.crowding[owner]
        self._changed(owner)
