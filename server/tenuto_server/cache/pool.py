"""Free slots of one tier. The pool owns nothing but the list of what is free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tenuto_server.errors import InvariantBroken


class SlotPool:
    """A stack of free block slots 0 .. capacity-1; taking hands out ascending runs while it is fresh."""

    __slots__ = ("_stack", "capacity", "free")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._stack: NDArray[np.int32] = np.arange(capacity - 1, -1, -1, dtype=np.int32)

    def take(self, count: int) -> NDArray[np.int32]:
        """``count`` slots. The caller has checked that they are there."""
        if count > self.free:
            raise InvariantBroken(f"{count} slots asked of a pool with {self.free} free")
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, slots: NDArray[np.int32]) -> None:
        """Returns slots."""
        count = len(slots)
        if self.free + count > self.capacity:
            raise InvariantBroken(f"{count} slots returned to a pool that lacks only {self.capacity - self.free}")
        self._stack[self.free : self.free + count] = slots[::-1]
        self.free += count

    def claim(self, slots: NDArray[np.int32]) -> None:
        """Takes exactly these slots out (a restart finds them in use)."""
        keep = ~np.isin(self._stack[: self.free], slots)
        left = self._stack[: self.free][keep]
        if self.free - len(left) != len(slots):
            raise InvariantBroken("claimed slots were not all free")
        self._stack[: len(left)] = left
        self.free = len(left)

    def free_slots(self) -> NDArray[np.int32]:
        """A copy of what is free, for integrity checks."""
        return self._stack[: self.free].copy()
