"""What a simulation counts, and the row of figures that comes of it. Owner of the counts of one run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

MISS_LABELS = ("cold", "mutation", "capacity", "retention")


@dataclass(slots=True)
class Tally:
    """Counts in units; ``unit`` turns them into tokens. Requests before the window, and those whose session's previous
    request was not simulated, count for nothing; nor, where things take time, does what a request brought that was refused.

    ``found``: what some tier held when a turn was admitted. ``instead``: what of that was computed all the same, since that
    was quicker than to load it or the load was late: no miss, but work."""

    unit: int
    turns: int = 0
    refused: int = 0
    prompt: int = 0
    reusable: int = 0
    found: int = 0
    instead: int = 0
    class_reusable: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    class_found: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    tenant_reusable: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    tenant_found: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    tier_found: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    labels: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    ttft_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self,
        prompt: int,
        reusable: int,
        found: int,
        classes: tuple[str, ...],
        tenant: str = "sim",
        instead: int = 0,
    ) -> None:
        """One request: ``found`` of its ``reusable`` units were there, ``instead`` of them were computed nevertheless."""
        self.turns += 1
        self.prompt += prompt
        self.reusable += reusable
        self.found += found
        self.instead += instead
        for name in classes:
            self.class_reusable[name] += reusable
            self.class_found[name] += found
        self.tenant_reusable[tenant] += reusable
        self.tenant_found[tenant] += found

    def row(self) -> dict[str, Any]:
        """The figures in tokens."""
        unit = self.unit
        fresh, prefilled = self.prompt - self.reusable, self.prompt - self.found + self.instead
        figures: dict[str, Any] = {
            "turns": self.turns,
            "refused_turns": self.refused,
            "prompt_tokens": self.prompt * unit,
            "reusable_tokens": self.reusable * unit,
            "missed_tokens": (self.reusable - self.found) * unit,
            "prefilled_tokens": prefilled * unit,
            "instead_tokens": self.instead * unit,
            "fresh_tokens": fresh * unit,
            "amplification": round(prefilled / fresh, 6) if fresh else None,
            "hit_rate": _rates(self.class_found, self.class_reusable),
            "hit_rate_all": round(self.found / self.reusable, 6) if self.reusable else None,
            "found_tokens_by_tier": {tier: n * unit for tier, n in sorted(self.tier_found.items())},
            "misses_by_label": {label: self.labels.get(label, 0) * unit for label in MISS_LABELS},
        }
        if len(self.tenant_reusable) > 1:
            figures["hit_rate_by_tenant"] = _rates(self.tenant_found, self.tenant_reusable)
        if self.ttft_s:
            figures["ttft_s"] = {name: _quantiles(values) for name, values in sorted(self.ttft_s.items())}
        return figures


def _rates(found: dict[str, int], reusable: dict[str, int]) -> dict[str, float]:
    return {name: round(found[name] / n, 6) for name, n in sorted(reusable.items()) if n}


def _quantiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 by the nearest rank, and the mean, of request to first token in seconds."""
    ranked = sorted(values)
    at = {f"p{q}": round(ranked[min(len(ranked) - 1, -(-q * len(ranked) // 100) - 1)], 6) for q in (50, 90, 99)}
    return {**at, "mean": round(sum(ranked) / len(ranked), 6), "n": len(ranked)}


def classes_of(pause: str, compacted: bool, thread: str) -> tuple[str, ...]:
    """Under which classes a request counts: the pause before it, and what is special about it."""
    names = ["subagent" if thread == "subagent" else pause]
    if compacted:
        names.append("post_compaction")
    return tuple(names)
