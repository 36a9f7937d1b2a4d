"""Frozen inputs that several tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tenuto.wire import PauseKind
from tenuto_server.policy.pace import Rhythm
from tenuto_server.policy.priors import P_INTACT
from tenuto_server.policy.views import CostView, History, SystemView, TierView


@dataclass(frozen=True)
class Known:
    """``PauseKnowledge`` that was never taught: what it is told to know."""

    lengths: dict[PauseKind, tuple[float, ...]]
    returns: dict[PauseKind, float] = field(default_factory=dict)
    trusts: tuple[float, float, float] = (0.8, 0.0, 1.0)
    back_after_end: float = 0.05
    scales: tuple[float, float] = (2.2, 100.0)
    seen: dict[tuple[PauseKind, str | None], History] = field(default_factory=dict)

    def quantiles(
        self, tenant: str, kind: PauseKind, key: str | None, rhythm: Rhythm | None = None
    ) -> tuple[float, ...]:
        return self.lengths[kind]

    def p_return_ended(self, tenant: str) -> float:
        return self.back_after_end

    def p_return(
        self,
        tenant: str,
        kind: PauseKind,
        key: str | None = None,
        rhythm: Rhythm | None = None,
        depth: int | None = None,
    ) -> float:
        return self.returns.get(kind, 1.0)

    def p_intact(self, kind: PauseKind, depth: int | None = None) -> float:
        return P_INTACT[kind]

    def scale(self, tenant: str, kind: PauseKind) -> tuple[float, float]:
        return self.scales

    def trust(self, tenant: str, kind: PauseKind, key: str | None) -> tuple[float, float, float]:
        return self.trusts

    def history(self, tenant: str, kind: PauseKind, key: str | None) -> History:
        return self.seen.get((kind, key), History())


SYSTEM = SystemView(
    (
        TierView("device", 1000, 100, 0.0, 0.0),
        TierView("host", 4000, 1000, 0.0, 0.001),
        TierView("disk", 10000, 5000, 0.0, 0.010),
    ),
    CostView(prefill_a_s=0.001, prefill_b_s=1e-6, waiting=0.0, block_tokens=16, block_bytes=1000),
)
"""16 tokens and 1000 bytes a block, 1 ms + 1 us * x a token; host loads a block in 1 ms, disk in 10 ms; all have room."""


@pytest.fixture
def system() -> SystemView:
    return SYSTEM
