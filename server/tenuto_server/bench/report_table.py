"""The report for people: one line for every turn, and the table of the arms side by side. Values in, text out.

``python -m tenuto_server.bench.report_table demo-report.json`` prints the table of a report as Markdown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tenuto_server.bench.report import CLASSES, Summary, TurnRow, percentile, ranges, ratios


def turn_line(row: TurnRow) -> str:
    """One turn: who, what came before it, where its prompt came from, how long the first token took."""
    before = row.after if row.pause_s is None else f"{row.after} {row.pause_s:.2f} s"
    tiers = " ".join(f"{tier} {row.cached.get(tier, 0):>5}" for tier in ("device", "host", "disk"))
    misses = ", ".join(f"{label} {tokens}" for label, tokens in row.misses.items())
    return (
        f"{row.session:<20} turn {row.turn:<2} after {before:<18} {row.prompt_tokens:>5} tokens: {tiers}"
        f" computed {row.prefilled:>5}  TTFT {row.ttft_s:6.2f} s" + (f"  lost: {misses}" if misses else "")
    )


def arms_table(arms: Mapping[str, Summary], title: str) -> Table:
    """The figures of every arm in a column of its own."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    for name in arms:
        table.add_column(name, justify="right")
    for label, cells in _lines(list(arms.values())):
        table.add_row(label, *cells)
    return table


def _lines(arms: list[Summary]) -> list[tuple[str, list[str]]]:
    lines = [
        ("TTFT after pauses p50, s", [f"{arm.ttft_p50_s:.3f}" for arm in arms]),
        ("TTFT after pauses p90, s", [f"{arm.ttft_p90_s:.3f}" for arm in arms]),
        ("TTFT after pauses mean, s", [f"{arm.ttft_mean_s:.3f}" for arm in arms]),
    ]
    for name in CLASSES:
        if any(name in arm.ttft_s for arm in arms):
            times = [arm.ttft_s.get(name) for arm in arms]
            lines.append(
                (f"  after {name}: p50 / p90", [f"{t[0]:.2f} / {t[1]:.2f}" if t is not None else "-" for t in times])
            )
    lines += [
        ("tokens prefilled", [f"{arm.prefilled_tokens:,}" for arm in arms]),
        ("amplification (prefilled / new)", [f"{arm.amplification:.2f}" for arm in arms]),
    ]
    for name in CLASSES:
        if any(name in arm.hit_rate for arm in arms):
            rates = [arm.hit_rate.get(name) for arm in arms]
            lines.append((f"hit rate: {name}", [f"{rate:.1%}" if rate is not None else "-" for rate in rates]))
    lines += [
        ("restored tokens (host, disk)", [f"{arm.restored_tokens:,}" for arm in arms]),
        ("lost to retention / capacity", [_lost(arm) for arm in arms]),
        ("leases granted / broken", [_pair(arm, "leases_granted", "leases_broken") for arm in arms]),
        ("prefetches on time / late", [_pair(arm, "prefetches_on_time", "prefetches_late") for arm in arms]),
        ("answers that differ", [f"{arm.differing_answers} of {arm.turns}" for arm in arms]),
        ("whole pass, s", [f"{arm.wall_s:.1f}" for arm in arms]),
        ("computing, ms a token", [f"{1e3 * arm.computing_s_per_token:.2f}" for arm in arms]),
    ]
    return lines


def _lost(arm: Summary) -> str:
    return f"{arm.misses.get('retention', 0):,} / {arm.misses.get('capacity', 0):,}"


def _pair(arm: Summary, first: str, second: str) -> str:
    return f"{arm.counters.get(first, 0):.0f} / {arm.counters.get(second, 0):.0f}"


def ratio_lines(
    arms: Mapping[str, Summary],
    subject: str,
    bases: tuple[str, ...],
    passes: Mapping[str, Sequence[Summary]] | None = None,
) -> list[str]:
    """``subject`` against each base that ran: what it needs as a share of what the base needs, and, over several
    ``passes`` of each, the lowest and highest share of a pass."""
    lines = []
    for base in bases:
        if subject in arms and base in arms:
            spread = ranges(passes[subject], passes[base]) if passes and len(passes[subject]) > 1 else {}
            lines.append(f"{subject} / {base}: {_ratios(ratios(arms[subject], arms[base]), spread)}")
    return lines


def schedule_lines(compared: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What ``demo_schedules.compare`` found, a line for each pair of arms."""
    return [
        f"{pair}: prefilled {_spread(of['prefilled'])}; TTFT mean {_spread(of['ttft_mean'])}; "
        f"p90 {_spread(of['ttft_p90'])}, over all schedules {of['pooled_p90']:.2f}"
        for pair, of in compared.items()
    ]


def _spread(values: Sequence[float]) -> str:
    """The median ratio, between which two nine in ten lie, and how many fall."""
    low, middle, high = (percentile(values, q) for q in (0.05, 0.5, 0.95))
    fell = sum(value < 1.0 for value in values) / len(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f}, below 1 in {fell:.0%})"


def markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report (``demo-report.json``, read) for a document. Raises ``KeyError`` for another file."""
    about, sizes, workload = report["about"], report["sizes"], report["workload"]
    ranges_of = report["ranges"]
    lines = []
    for limited in (True, False):
        arms = {arm["name"]: Summary(**arm["summary"]) for arm in report["arms"] if arm["limited"] == limited}
        if not arms:
            continue
        lines += ["", "| | " + " | ".join(arms) + " |", "|---|" + "---:|" * len(arms)]
        lines += [f"| {label.strip()} | " + " | ".join(cells) + " |" for label, cells in _lines(list(arms.values()))]
        if limited:
            lines += ["", f"Tiers limited to {sizes['host_bandwidth'] / 1e6:.0f} MB/s (host) and "]
            lines[-1] += f"{sizes['disk_bandwidth'] / 1e6:.0f} MB/s (disk), the ratios of a GPU machine."
        else:
            lines += ["", "Without rate limits, each agent's first session only."]
    lines += ["", *(f"`{name}`: {_ratios(found, ranges_of.get(name))}  " for name, found in report["ratios"].items())]
    if report["passes"] > 1:
        lines += [
            "",
            f"{report['passes']} passes of every arm, in turn; in brackets the lowest and highest ratio of a pass.",
        ]
    if scheduled := report.get("schedules"):
        lines += [
            "",
            f"{scheduled['count']} schedules in virtual time, pauses varied by {scheduled['jitter']:.0%}:",
            "",
        ]
        lines += [f"- {line}" for line in schedule_lines(scheduled["ratios"])]
    commit = (about["commit"] or "unknown")[:12]
    lines.append("")
    lines.append(
        f"{workload['agents']} agents, seed {workload['seed']}; {report['arguments']['model']} on {about['processor']}, "
        f"{about['cores']} cores, {about['system']}, Python {about['python']}, torch {about['packages'].get('torch', '-')}, "
        f"commit {commit}."
    )
    return "\n".join(lines).strip() + "\n"


def _ratios(found: Mapping[str, float | None], spread: Mapping[str, Sequence[float]] | None = None) -> str:
    parts = []
    for name, value in found.items():
        if value is not None:
            low_high = (spread or {}).get(name)
            parts.append(f"{name} {value:.2f}" + (f" ({low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else ""))
    return ", ".join(parts)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text("utf-8"))), end="")
