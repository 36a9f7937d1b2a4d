"""The policy this project exists for, composed of the pure functions beside it. No state."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto_server.policy import admission, retention, tiering
from tenuto_server.policy.decision import Retention, TurnView
from tenuto_server.policy.views import ExtentView, PauseKnowledge, PauseView, SystemView, TierName


@dataclass(frozen=True, slots=True)
class Tenuto:
    """Retention by the Gittins index of each pause. ``hears_hints`` False: from what the server sees alone."""

    name: str = "tenuto"
    hears_hints: bool = True
    learns: bool = True

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """See ``retention.decide``."""
        return retention.decide(pause, knowledge, system, hear=self.hears_hints)

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """See ``tiering.index_of``."""
        return tiering.index_of(extent, tier, system)

    def keep_below(self, extent: ExtentView, tier: TierName, system: SystemView) -> TierName | None:
        """See ``tiering.keep_below``."""
        return tiering.keep_below(extent, tier, system)

    def offload_early(self, extent: ExtentView, system: SystemView) -> bool:
        """See ``tiering.offload_early``."""
        return tiering.offload_early(extent, system)

    def split(self, start: int, blocks: int, tier: TierName, system: SystemView) -> int:
        """See ``tiering.split``."""
        return tiering.split(start, blocks, tier, system)

    def admission(self, turn: TurnView) -> tuple[float, ...]:
        """See ``admission.key``."""
        return admission.key(turn)
