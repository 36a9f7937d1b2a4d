"""Where the server's time comes from. Holds no state but a ``ManualClock``'s own reading.

Inside the server time is an integer of nanoseconds on a monotonic clock, passed as an argument; only the engine loop, the
runtime and the API read a clock, and they take it as a callable so that a test can supply another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

Clock: TypeAlias = Callable[[], int]

NS_PER_S: Final = 1_000_000_000
monotonic_ns: Clock = time.monotonic_ns


def to_ns(seconds: float) -> int:
    """Nanoseconds of a duration in seconds."""
    return round(seconds * NS_PER_S)


def to_s(nanoseconds: int) -> float:
    """Seconds of a duration in nanoseconds."""
    return nanoseconds / NS_PER_S


class ManualClock:
    """A clock that moves only when told to; a drop-in for ``monotonic_ns``."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> int:
        """Move forward (never back) by ``seconds``; returns the new reading. Raises ``ValueError`` if negative."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self.now_ns += to_ns(seconds)
        return self.now_ns
