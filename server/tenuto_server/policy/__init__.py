"""The decisions: pure functions of frozen views. Policies write numbers, mechanism obeys numbers."""

from __future__ import annotations

from math import isfinite

from tenuto_server.policy.baselines import Lru, Ttl, class_ttl
from tenuto_server.policy.calibration import PauseStats
from tenuto_server.policy.decision import Policy
from tenuto_server.policy.published import Continuum, ContinuumReleased, Gdsf, InferCept, KvFlow, Mori, TokenCake
from tenuto_server.policy.tenuto import Tenuto

__all__ = ["POLICY_NAMES", "PauseStats", "Policy", "make_policy"]

_PUBLISHED: tuple[Policy, ...] = (
    Continuum(),
    ContinuumReleased(),
    InferCept(),
    TokenCake(),
    KvFlow(),
    Mori(),
    Gdsf(),
)
POLICY_NAMES: tuple[str, ...] = (
    "tenuto",
    "tenuto:none",
    "lru",
    "ttl:<seconds>",
    "class-ttl",
    *(policy.name for policy in _PUBLISHED),
)


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ``ValueError`` that lists the names."""
    match name.split(":", 1):
        case ["tenuto"]:
            return Tenuto()
        case ["tenuto", "none"]:
            return Tenuto("tenuto:none", hears_hints=False)
        case ["lru"]:
            return Lru()
        case ["class-ttl"]:
            return class_ttl()
        case ["ttl", text]:
            try:
                seconds = float(text)
            except ValueError:
                seconds = -1.0
            if isfinite(seconds) and seconds >= 0.0:
                return Ttl(name, default_s=seconds)
        case [plain]:
            for policy in _PUBLISHED:
                if policy.name == plain:
                    return policy
    raise ValueError(f"unknown policy {name!r}; one of: {', '.join(POLICY_NAMES)}")
