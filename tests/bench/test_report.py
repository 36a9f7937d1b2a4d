"""The report's arithmetic, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenuto_server.bench.report import Summary, TurnRow, percentile, pool, ranges, ratios, summarise
from tenuto_server.bench.report_table import arms_table, ratio_lines, turn_line


def row(
    after: str,
    prompt: int,
    new: int,
    device: int = 0,
    host: int = 0,
    *,
    ttft_s: float = 0.1,
    pause_s: float | None = 1.0,
    misses: dict[str, int] | None = None,
    same: bool = True,
) -> TurnRow:
    cached = {tier: count for tier, count in (("device", device), ("host", host)) if count}
    return TurnRow("agent-1", 0, after, pause_s, prompt, new, cached, misses or {}, ttft_s, same=same)


ROWS = [
    row("start", 1000, 1000, ttft_s=9.0, pause_s=None),
    row("tool", 1100, 100, device=1000, ttft_s=0.2),
    row("tool", 1200, 100, device=400, host=300, ttft_s=1.0, misses={"capacity": 400}),
    row("human", 1300, 100, ttft_s=2.0, misses={"retention": 1200}, same=False),
    row("subagent", 1250, 50, device=1200, ttft_s=0.4, pause_s=None),
    row("post-compaction", 500, 200, device=150, ttft_s=0.6, pause_s=None, misses={"capacity": 150}),
]


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert percentile([7.0], 0.9) == 7.0
    assert percentile([], 0.9) == 0.0


def test_a_summary_by_hand() -> None:
    summary = summarise(ROWS, {"prefill_tokens": 3875.0, "leases_broken": 2.0}, 42.0)
    assert summary.turns == 6
    assert summary.turns_after_pauses == 3
    assert summary.ttft_p50_s == 1.0  # of 0.2, 1.0, 2.0
    assert summary.ttft_p90_s == pytest.approx(1.8)
    assert summary.ttft_mean_s == pytest.approx(3.2 / 3)
    assert summary.new_tokens == 1550
    assert summary.prefilled_tokens == 3875
    assert summary.amplification == pytest.approx(2.5)
    # tool: 1000 + 700 of 1000 + 1100 reusable; human: 0 of 1200; subagent: 1200 of 1200; post-compaction: 150 of 300.
    assert summary.hit_rate["tool"] == pytest.approx(1700 / 2100)
    assert summary.hit_rate["human"] == 0.0
    assert summary.hit_rate["subagent"] == 1.0
    assert summary.hit_rate["post-compaction"] == 0.5
    assert summary.ttft_s["tool"] == (pytest.approx(0.6), pytest.approx(0.92))
    assert summary.cached == {"device": 2750, "host": 300}
    assert summary.restored_tokens == 300
    assert summary.misses == {"capacity": 550, "retention": 1200}
    assert summary.differing_answers == 1
    assert summary.wall_s == 42.0


def test_the_speed_of_the_machine_is_told_by_what_a_token_took() -> None:
    counted = {"prefill_tokens": 900.0, "decode_tokens": 100.0, "forward_ns": 1.5e9}
    assert summarise(ROWS, counted, 42.0).computing_s_per_token == pytest.approx(0.0015)
    assert summarise(ROWS, {"prefill_tokens": 900.0}, 42.0).computing_s_per_token == 0.0


def test_rows_count_what_was_computed() -> None:
    assert [r.prefilled for r in ROWS] == [1000, 100, 500, 1300, 50, 350]
    assert [r.reusable for r in ROWS] == [0, 1000, 1100, 1200, 1200, 300]


def test_ratios_say_what_an_arm_needs_of_another() -> None:
    base = summarise(ROWS, {"prefill_tokens": 3100.0}, 1.0)
    better = summarise([row("tool", 1100, 100, device=1000, ttft_s=0.5)], {"prefill_tokens": 1550.0}, 1.0)
    found = ratios(better, base)
    assert found["ttft_p50"] == pytest.approx(0.5)
    assert found["ttft_mean"] == pytest.approx(0.5 / (3.2 / 3))
    assert found["prefilled_tokens"] == pytest.approx(0.5)
    assert found["amplification"] == pytest.approx((1550 / 100) / (3100 / 1550))
    nothing = summarise([], {"prefill_tokens": 0.0}, 1.0)
    assert ratios(base, nothing)["prefilled_tokens"] is None


def test_passes_are_pooled() -> None:
    """Percentiles are of all turns together, counts of the mean pass."""
    slow, fast = [replace(r, ttft_s=2.0) for r in ROWS], [replace(r, ttft_s=1.0) for r in ROWS[:3]]
    passes = [
        (rows, summarise(rows, {"prefill_tokens": tokens, "leases_granted": 4.0}, wall_s))
        for rows, tokens, wall_s in ((slow, 3000.0, 50.0), (fast, 1000.0, 40.0))
    ]
    pooled = pool(passes)
    paused = [r for r in [*slow, *fast] if r.pause_s is not None]
    assert pooled.ttft_p50_s == percentile([r.ttft_s for r in paused], 0.5)
    assert pooled.turns == len(slow) + len(fast)
    assert pooled.prefilled_tokens == 2000
    assert pooled.counters["leases_granted"] == 4.0
    assert pooled.wall_s == 45.0
    assert pooled.ttft_mean_s == pytest.approx((3 * 2.0 + 2 * 1.0) / 5)
    new = sum(r.new_tokens for r in [*slow, *fast])
    assert pooled.amplification == pytest.approx(4000 / new)
    assert pooled.new_tokens == round(new / 2)
    assert pool(passes[:1]) == passes[0][1]
    with pytest.raises(ValueError, match="no passes"):
        pool([])


def test_ranges_are_over_passes_taken_in_turn() -> None:
    def of(tokens: float) -> Summary:
        return summarise(ROWS, {"prefill_tokens": tokens}, 1.0)

    assert ranges([of(100.0), of(300.0)], [of(200.0), of(400.0)])["prefilled_tokens"] == (0.5, 0.75)
    assert "prefilled_tokens" not in ranges([of(100.0)], [of(0.0)])
    arms = {"tenuto": of(200.0), "lru": of(300.0)}
    passes = {"tenuto": [of(100.0), of(300.0)], "lru": [of(200.0), of(400.0)]}
    (line,) = ratio_lines(arms, "tenuto", ("lru",), passes)
    assert "prefilled_tokens 0.67 (0.50 to 0.75)" in line


def test_the_table_shows_every_arm() -> None:
    from rich.console import Console

    arms = {
        "lru": summarise(ROWS, {"prefill_tokens": 3875.0, "leases_granted": 0.0}, 50.0),
        "tenuto": summarise(ROWS[:3], {"prefill_tokens": 1600.0, "leases_granted": 7.0, "leases_broken": 1.0}, 40.0),
    }
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(arms_table(arms, "arms"))
    text = console.export_text()
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.count("│") >= 3}
    assert "3,875" in lines["tokens prefilled"]
    assert "1,600" in lines["tokens prefilled"]
    assert "7 / 1" in lines["leases granted / broken"]
    assert "81.0%" in lines["hit rate: tool"]
    assert lines["hit rate: human"].count("-") == 1
    assert ratio_lines(arms, "tenuto", ("lru", "absent")) == [
        "tenuto / lru: ttft_p50 0.60, ttft_p90 0.51, ttft_mean 0.56, prefilled_tokens 0.41, amplification 0.53"
    ]


def test_a_line_tells_one_turn() -> None:
    line = turn_line(ROWS[2])
    for part in ("agent-1", "turn 0", "tool 1.00 s", "device   400", "host   300", "computed   500", "capacity 400"):
        assert part in line
