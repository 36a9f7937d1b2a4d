"""What a policy answers: numbers with a reason, and the interface that every policy implements."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tenuto_server.policy.index import Outlook
from tenuto_server.policy.views import ExtentView, PauseKnowledge, PauseView, SystemView, TierName


class Retention(NamedTuple):
    """How much a paused session's KV deserves to stay.

    ``rate``: the Gittins index of the pause times the probability that the KV is still wanted, in 1/s; what the session
    adds to each of its extents. ``valid_s``: seconds after which it must be asked again (math.inf: never).
    ``lease_s``: how long the index stays above the device's price, capped; ``lease_tier``: the tier the lease promises.
    ``prefetch_s``: seconds from now at which lower-tier KV should start to come up; None: not at all. ``outlook``: what the
    decision rests on, to be shown again when nothing but time has passed.
    """

    rate: float
    valid_s: float
    lease_s: float
    lease_tier: TierName
    prefetch_s: float | None
    reason: str
    outlook: Outlook | None = None

    def __eq__(self, other: object) -> bool:
        """Equal decisions may rest on different outlooks."""
        return isinstance(other, Retention) and self[:-1] == other[:-1]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-1])


class TurnView(NamedTuple):
    """A waiting turn. ``compute_tokens`` still to prefill, ``restore_blocks`` still to load, ``age_s`` since arrival."""

    attended: bool
    priority: float
    age_s: float
    compute_tokens: int
    restore_blocks: int


class Policy(Protocol):
    """All decisions. Implementations are pure: no state that one call leaves for the next, no clock."""

    @property
    def name(self) -> str:
        """The name it is chosen by: ``lru``, ``tenuto``, ``tenuto:none`` ..."""
        ...

    @property
    def hears_hints(self) -> bool:
        """False: hints are receipted but do not reach the views."""
        ...

    @property
    def learns(self) -> bool:
        """False: it asks nothing of ``PauseKnowledge`` and heeds no ``SystemView.trust``, so nothing need be taught."""
        ...

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Called at a pause's start, at every hint about it, and when ``valid_s`` has passed."""
        ...

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """The index of an extent on a tier: what it saves per byte and second by being there. Lowest is evicted first."""
        ...

    def keep_below(self, extent: ExtentView, tier: TierName, system: SystemView) -> TierName | None:
        """Where an extent leaving ``tier`` under pressure should be copied first; None: drop it."""
        ...

    def offload_early(self, extent: ExtentView, system: SystemView) -> bool:
        """True: copy the extent from the device down now, so that its device blocks can go at once when needed."""
        ...

    def split(self, start: int, blocks: int, tier: TierName, system: SystemView) -> int:
        """Of ``blocks`` lower-tier blocks from token ``start`` that a turn waits for: how many leading ones to compute
        on the device while the rest loads, so that both finish together (0: load all)."""
        ...

    def admission(self, turn: TurnView) -> tuple[float, ...]:
        """Sort key of a waiting turn, smallest first."""
        ...
