"""What the simulated harness knows and how reliably its word arrives. Values and their parsers; no state.

A policy is named ``<policy>`` or ``tenuto:<knowledge>``, knowledge being ``none`` or a sum of ``r2=<x>``, ``end``,
``compaction`` and ``fork``. Delivery is ``on``, ``off``, ``late:<seconds>``, ``lost:<share>``, ``lying[:<share>]``,
``dup`` or ``reorder``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log, sqrt
from random import Random
from typing import Literal, TypeAlias

from tenuto_server.errors import ConfigError
from tenuto_server.policy import Policy, make_policy
from tenuto_server.sim.traces import PauseClass, Session

Z90 = 1.2815515655446004
PAUSE_MIN_S = 1.0
"""Pauses are recorded in whole seconds: shorter ones count as this where logarithms are taken."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the harness tells. ``r2``: share of a pause's log-variance, within its class, that its forecasts explain;
    None: it forecasts nothing."""

    r2: float | None = None
    end: bool = False
    compaction: bool = False
    fork: bool = False


def parse_policy(name: str) -> tuple[Policy | None, Knowledge]:
    """The engine's policy and what the harness tells it; no policy for ``oracle``, which needs no engine.

    Raises ``ConfigError`` for a name or a piece of knowledge that does not exist.
    """
    if name == "oracle":
        return None, Knowledge()
    base, _, rest = name.partition(":")
    if base != "tenuto" or rest in ("", "none"):
        try:
            return make_policy(name), Knowledge()
        except ValueError as error:
            raise ConfigError(f"{error}, oracle, tenuto:[r2=<x>][+end][+compaction][+fork]") from None
    r2, told = None, set()
    for part in rest.split("+"):
        key, _, value = part.partition("=")
        if key == "r2" and value:
            r2 = _number(part, value, 0.0, 1.0)
        elif part in ("end", "compaction", "fork"):
            told.add(part)
        else:
            raise ConfigError(f"policy {name!r}: {part!r} is none of none, r2=<x>, end, compaction, fork")
    return make_policy("tenuto"), Knowledge(r2, "end" in told, "compaction" in told, "fork" in told)


FaultKind: TypeAlias = Literal["on", "off", "late", "lost", "lying", "dup", "reorder"]
_PLAIN: tuple[FaultKind, ...] = ("on", "off", "dup", "reorder")
_REORDER_S = 20.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """How hints arrive. ``amount``: seconds for ``late``, a share for ``lost`` (of hints) and ``lying`` (of sessions)."""

    kind: FaultKind = "on"
    amount: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Delivery:
        """Reads ``--hints``. Raises ``ConfigError``."""
        kind, _, value = text.partition(":")
        if not value:
            for plain in _PLAIN:
                if kind == plain:
                    return cls(plain)
        if kind == "lying":
            return cls("lying", _number(text, value, 0.0, 1.0) if value else 1.0)
        if kind == "late":
            return cls("late", _number(text, value, 0.0, 1e6))
        if kind == "lost":
            return cls("lost", _number(text, value, 0.0, 1.0))
        raise ConfigError(f"--hints {text!r} is none of on, off, late:<s>, lost:<share>, lying[:<share>], dup, reorder")

    def delays_s(self, rng: Random) -> list[float]:
        """When a hint arrives, seconds from when it was sent; empty: never."""
        match self.kind:
            case "off":
                return []
            case "late":
                return [self.amount]
            case "lost":
                return [] if rng.random() < self.amount else [0.0]
            case "dup":
                return [0.0, _REORDER_S * rng.random()]
            case "reorder":
                return [_REORDER_S * rng.random()]
            case _:
                return [0.0]


def parse_tenants(text: str) -> tuple[tuple[str, float], ...]:
    """Reads ``--tenants``: names with weights, as in ``quiet=1,busy=9``. Raises ``ConfigError``."""
    found = []
    for part in filter(None, text.split(",")):
        name, _, weight = part.partition("=")
        found.append((name.strip(), _number(part, weight or "1", 1e-9, 1e9)))
    if len({name for name, _ in found}) != len(found) or not all(name for name, _ in found):
        raise ConfigError(f"--tenants {text!r}: different names with weights are expected, as in quiet=1,busy=9")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PauseScale:
    """The log-normal scale of each class of pause: (mean of log seconds, log-sd)."""

    by_class: dict[PauseClass, tuple[float, float]]

    @classmethod
    def of(cls, sessions: Iterable[Session], *, served: bool = False) -> PauseScale:
        """Measured over all pauses of a trace; ``served``: each with the answer's time before it."""
        logs: dict[PauseClass, list[float]] = {}
        for session in sessions:
            for line in (session, *(child.session for child in session.children)):
                for request in line.requests:
                    away_s = request.away_s(served=served)
                    if away_s is not None:
                        logs.setdefault(request.pause, []).append(log(max(away_s, PAUSE_MIN_S)))
        scale = {}
        for cls_, values in logs.items():
            mean = sum(values) / len(values)
            scale[cls_] = mean, max(0.1, sqrt(sum((v - mean) ** 2 for v in values) / len(values)))
        return cls(scale)

    def forecast(self, cls_: PauseClass, pause_s: float | None, r2: float, rng: Random) -> tuple[float, float]:
        """(p50, p90) seconds of the posterior of log R after a noisy look at it.

        With log R ~ N(m, s^2) within the class and a look y = log R + N(0, s^2 (1 - r2) / r2), the posterior is
        N(m + r2 (y - m), s^2 (1 - r2)): r2 is the share of the variance that it explains. A session that never returns is
        looked at as if it did, at a time drawn from its class: the harness does not know better.
        """
        mean, sd = self.by_class.get(cls_, (log(10.0), 1.5))
        draw, noise = rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0)
        length = log(max(pause_s, PAUSE_MIN_S)) if pause_s is not None else mean + sd * draw
        if r2 <= 0.0:
            middle = mean
        else:
            middle = mean + r2 * (length + sd * sqrt((1.0 - r2) / r2) * noise - mean)
        return exp(middle), exp(middle + Z90 * sd * sqrt(1.0 - r2))

    def lie(self, cls_: PauseClass, pause_s: float | None, rng: Random) -> tuple[float, float]:
        """A confident forecast of the opposite: long for short pauses, short for long ones."""
        mean, sd = self.by_class.get(cls_, (log(10.0), 1.5))
        length = log(max(pause_s, PAUSE_MIN_S)) if pause_s is not None else mean + 3.0 * sd
        middle = 2.0 * mean - length + 0.1 * sd * rng.gauss(0.0, 1.0)
        return exp(middle), exp(middle + 0.1 * sd)


def _number(text: str, value: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = low - 1.0
    if not low <= number <= high:
        raise ConfigError(f"{text!r}: a number from {low:g} to {high:g} is expected")
    return number
