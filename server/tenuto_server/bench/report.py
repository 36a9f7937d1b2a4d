"""The arithmetic of the demonstration's report: rows of turns to figures of an arm. Pure functions of values.

A percentile is interpolated linearly between order statistics (position (n - 1) q).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

CLASSES = ("tool", "human", "subagent", "post-compaction")
"""What a turn came after, for the hit rates: a tool, a person, a subagent (the parent's return and the children's first
turns, which begin on the parent's prefix), a compaction."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn of one pass. Times are seconds, counts tokens.

    ``after``: one of ``CLASSES``, or ``start`` and ``summary``, which follow no pause and no change. ``pause_s``: None
    where no pause came before. ``new_tokens``: prompt tokens that nobody had computed before, as the recording pass with
    ample memory showed. ``cached``: reused by tier. ``misses``: recomputed by label (without cold). ``same``: the answer
    equals the recorded one.
    """

    session: str
    turn: int
    after: str
    pause_s: float | None
    prompt_tokens: int
    new_tokens: int
    cached: dict[str, int]
    misses: dict[str, int]
    ttft_s: float
    queue_wait_s: float = 0.0
    restore_wait_s: float = 0.0
    same: bool = True

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens reused, over all tiers."""
        return sum(self.cached.values())

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def reusable(self) -> int:
        """Prompt tokens that a cache of unlimited size would have held."""
        return self.prompt_tokens - self.new_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of an arm. ``hit_rate``: reused / reusable tokens by class; ``ttft_s``: (p50, p90) by class.

    ``prefilled_tokens``: by the server's own counter, so that work which no turn shows (a preempted turn, a warmed prompt)
    counts. ``amplification``: that over the genuinely new tokens.
    """

    turns: int
    turns_after_pauses: int
    ttft_p50_s: float
    ttft_p90_s: float
    prefilled_tokens: int
    new_tokens: int
    amplification: float
    hit_rate: dict[str, float]
    ttft_s: dict[str, tuple[float, float]]
    cached: dict[str, int]
    misses: dict[str, int]
    restored_tokens: int
    differing_answers: int
    wall_s: float
    counters: dict[str, float] = field(default_factory=dict)
    ttft_mean_s: float = 0.0

    @property
    def computing_s_per_token(self) -> float:
        """Seconds in forwards for each token of prompts and answers that was computed; 0 where it was not counted. A machine's
        speed changes, and the wait in a queue by more than that."""
        tokens = self.counters.get("prefill_tokens", 0.0) + self.counters.get("decode_tokens", 0.0)
        return self.counters.get("forward_ns", 0.0) / 1e9 / tokens if tokens else 0.0


def percentile(values: Iterable[float], q: float) -> float:
    """The ``q`` quantile (0..1); 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * q
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarise(rows: Sequence[TurnRow], counters: Mapping[str, float], wall_s: float) -> Summary:
    """Figures of one pass. ``counters``: what the server counted during it, by name (``COUNTERS`` of ``demo_server``)."""
    paused = [row for row in rows if row.pause_s is not None]
    prefilled = int(counters["prefill_tokens"])
    new = sum(row.new_tokens for row in rows)
    cached = _sum(row.cached for row in rows)
    hit_rate, ttft = {}, {}
    for name in CLASSES:
        of_class = [row for row in rows if row.after == name]
        reusable = sum(row.reusable for row in of_class)
        if reusable:
            # What several turns compute at once is new to all but one of them, so a ratio could pass 1 by a hair.
            hit_rate[name] = min(1.0, sum(row.cached_tokens for row in of_class) / reusable)
        if of_class:
            times = [row.ttft_s for row in of_class]
            ttft[name] = (percentile(times, 0.5), percentile(times, 0.9))
    return Summary(
        turns=len(rows),
        turns_after_pauses=len(paused),
        ttft_p50_s=percentile([row.ttft_s for row in paused], 0.5),
        ttft_p90_s=percentile([row.ttft_s for row in paused], 0.9),
        prefilled_tokens=prefilled,
        new_tokens=new,
        amplification=prefilled / new if new else 0.0,
        hit_rate=hit_rate,
        ttft_s=ttft,
        cached=cached,
        misses=_sum(row.misses for row in rows),
        restored_tokens=sum(tokens for tier, tokens in cached.items() if tier != "device"),
        differing_answers=sum(not row.same for row in rows),
        wall_s=wall_s,
        counters=dict(counters),
        ttft_mean_s=sum(row.ttft_s for row in paused) / len(paused) if paused else 0.0,
    )


def pool(passes: Sequence[tuple[Sequence[TurnRow], Summary]]) -> Summary:
    """Several passes of one arm as one: percentiles and hit rates over all their turns, counts for the mean pass.

    ``differing_answers`` and ``turns`` stay sums. Raises ``ValueError`` for none.
    """
    if not passes:
        raise ValueError("no passes to pool")
    n = len(passes)
    summaries = [summary for _, summary in passes]
    counters = {name: sum(each.counters.get(name, 0.0) for each in summaries) / n for name in summaries[0].counters}
    wall_s = sum(summary.wall_s for summary in summaries) / n
    whole = summarise([row for rows, _ in passes for row in rows], counters, wall_s)
    return replace(
        whole,
        new_tokens=round(whole.new_tokens / n),
        amplification=whole.prefilled_tokens * n / whole.new_tokens if whole.new_tokens else 0.0,
        cached={tier: round(tokens / n) for tier, tokens in whole.cached.items()},
        misses={label: round(tokens / n) for label, tokens in whole.misses.items()},
        restored_tokens=round(whole.restored_tokens / n),
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, tokens in count.items():
            total[name] = total.get(name, 0) + tokens
    return total


def ratio(value: float, base: float) -> float | None:
    """``value / base``; None for a base of 0."""
    return value / base if base else None


def ratios(arm: Summary, base: Summary) -> dict[str, float | None]:
    """An arm against another, below 1 where the arm needs less: the figures that must fall."""
    return {
        "ttft_p50": ratio(arm.ttft_p50_s, base.ttft_p50_s),
        "ttft_p90": ratio(arm.ttft_p90_s, base.ttft_p90_s),
        "ttft_mean": ratio(arm.ttft_mean_s, base.ttft_mean_s),
        "prefilled_tokens": ratio(arm.prefilled_tokens, base.prefilled_tokens),
        "amplification": ratio(arm.amplification, base.amplification),
    }


def ranges(arm: Sequence[Summary], base: Sequence[Summary]) -> dict[str, tuple[float, float]]:
    """Lowest and highest of ``ratios`` over the passes of an arm and of its base, taken in turn; what has a base of 0 is left out."""
    found: dict[str, list[float]] = {}
    for one, other in zip(arm, base, strict=True):
        for name, value in ratios(one, other).items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: (min(values), max(values)) for name, values in found.items() if len(values) == len(arm)}
