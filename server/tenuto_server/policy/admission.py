"""The order in which waiting turns are admitted. Pure."""

from __future__ import annotations

from tenuto_server.policy.decision import TurnView

PATIENCE_S = 20.0
"""Age at which an attended turn of priority 0 stops being overtaken."""
UNATTENDED_PATIENCE = 3.0
"""An unattended turn is overtaken this many times longer."""
PRIORITY_SPAN = 4.0
"""Priorities beyond this count as this; each step halves or doubles the patience."""
RESTORE_TOKENS = 1.0
"""Tokens of compute that restoring one block is counted as: a block loads in about the time one token takes to compute
(16 tokens a block, memory tens of times faster than compute)."""


def missing_work(turn: TurnView) -> float:
    """Work still to be done before the first token, in tokens of compute."""
    return turn.compute_tokens + RESTORE_TOKENS * turn.restore_blocks


def key(turn: TurnView) -> tuple[float, ...]:
    """Sort key, smallest first.

    Turns within their patience: attended before unattended, then higher priority, then less missing work per second of
    age, so that warm returns pass cold starts. A turn older than its patience goes before all of those, and such turns go
    by the time they have been over it (earliest deadline first): only turns that arrive before a turn's patience ends can
    ever overtake it.
    """
    priority = min(PRIORITY_SPAN, max(-PRIORITY_SPAN, turn.priority))
    patience = PATIENCE_S * 2.0**-priority * (1.0 if turn.attended else UNATTENDED_PATIENCE)
    if turn.age_s >= patience:
        return (0.0, patience - turn.age_s, 0.0, 0.0)
    return (1.0, 0.0 if turn.attended else 1.0, -priority, (1.0 + missing_work(turn)) / (turn.age_s + 0.01))
