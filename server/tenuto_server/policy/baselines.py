"""Policies to compare with, each by name. They ignore hints and hold no state.

``lru``: least recently used on every tier, what falls off one is copied to the next. ``ttl:<seconds>``: the same, but KV
of sessions within so many seconds of their pause goes after all other. ``class-ttl``: the same with a time for each kind
of pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from tenuto.wire import PauseKind
from tenuto_server.policy.admission import key
from tenuto_server.policy.decision import Retention, TurnView
from tenuto_server.policy.views import ExtentView, PauseKnowledge, PauseView, SystemView, TierName

PROTECTED = 1e12
"""Added to the priority of what a TTL protects; last use decides among equals."""


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used over a hierarchy of tiers: no early offload, no prefetch, restores are loaded whole."""

    name: str = "lru"
    hears_hints: bool = False
    learns: bool = False

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Nothing is retained on purpose."""
        return Retention(0.0, inf, 0.0, system.tiers[-1].tier, None, "lru")

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """When it was last used."""
        return extent.last_used_s

    def keep_below(self, extent: ExtentView, tier: TierName, system: SystemView) -> TierName | None:
        """The next tier, unless a lower one has it already."""
        below = False
        for view in system.tiers:
            if view.tier == tier:
                below = True
            elif below and view.capacity_blocks > 0:
                return None if view.tier in extent.on else view.tier
        return None

    def offload_early(self, extent: ExtentView, system: SystemView) -> bool:
        """Never."""
        return False

    def split(self, start: int, blocks: int, tier: TierName, system: SystemView) -> int:
        """Loads everything."""
        return 0

    def admission(self, turn: TurnView) -> tuple[float, ...]:
        """The order that all policies share, so that comparisons compare retention."""
        return key(turn)


@dataclass(frozen=True, slots=True)
class Ttl(Lru):
    """A fixed time to live on top of LRU, by kind of pause; ``default_s`` for kinds without one of their own."""

    name: str = "ttl"
    default_s: float = 300.0
    by_kind_s: tuple[tuple[PauseKind, float], ...] = field(default=())

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Rate 1 while the time to live runs, 0 after."""
        left_s = dict(self.by_kind_s).get(pause.kind, self.default_s) - pause.elapsed_s
        if left_s <= 0.0:
            return Retention(0.0, inf, 0.0, system.tiers[-1].tier, None, f"{pause.kind}: expired")
        return Retention(1.0, left_s, left_s, "device", None, f"{pause.kind}: {left_s:.0f}s to live")

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """Last use, protected extents after all others."""
        return extent.last_used_s + (PROTECTED if extent.rate > 0.0 else 0.0)


CLASS_TTL_S: tuple[tuple[PauseKind, float], ...] = (
    # Times by which about 95 % of the returns of each kind have come (KVCT gaps, TraceLab for the last two); an hour caps
    # human gaps at 95 %.
    ("tool", 180.0),
    ("human", 3600.0),
    ("subagent", 400.0),
    ("permission", 900.0),
    ("background", 180.0),
)


def class_ttl() -> Ttl:
    """``class-ttl``."""
    return Ttl("class-ttl", default_s=180.0, by_kind_s=CLASS_TTL_S)
