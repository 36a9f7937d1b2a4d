"""The result of a sweep for people: one table in the terminal, one figure as PNG. Pure functions of the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
VERSION = 1


def document(trace: str, commit: str, arguments: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {"version": VERSION, "trace": trace, "commit": commit, "arguments": arguments, "rows": list(rows)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One row a line, so that two files can be compared by eye; the same content gives the same bytes."""
    head = {key: value for key, value in content.items() if key != "rows"}
    lines = ",\n".join(json.dumps(row, separators=(", ", ": ")) for row in content["rows"])
    text = json.dumps(head, separators=(", ", ": "))[:-1] + ', "rows": [\n' + lines + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """One row per policy and capacity: means over the seeds."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["policy"], row["capacity_frac"]), []).append(row)
    out = []
    for (policy, frac), group in groups.items():
        gaps = [row["gap_closed"] for row in group if row.get("gap_closed") is not None]
        classes = sorted({name for row in group for name in row["hit_rate"]})
        merged: Row = {
            "policy": policy,
            "capacity_frac": frac,
            "seeds": len(group),
            "missed_share": _mean([row["missed_tokens"] / max(1, row["reusable_tokens"]) for row in group]),
            "amplification": _mean([row["amplification"] for row in group if row["amplification"] is not None]),
            "gap_closed": _mean(gaps) if gaps else None,
            "hit_rate": {
                name: _mean([row["hit_rate"][name] for row in group if name in row["hit_rate"]]) for name in classes
            },
            "prefilled_tokens": _mean([row["prefilled_tokens"] for row in group]),
        }
        if all("ttft_s" in row for row in group):
            merged["ttft_s"] = {
                name: {
                    q: _mean([row["ttft_s"][name][q] for row in group if name in row["ttft_s"]]) for q in ("p50", "p90")
                }
                for name in sorted({name for row in group for name in row["ttft_s"]})
            }
        if all("held_token_s" in row for row in group):
            merged["held_token_s"] = {
                tier: _mean([row["held_token_s"][tier] for row in group]) for tier in group[0]["held_token_s"]
            }
        out.append(merged)
    return out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def show(rows: Sequence[Row], console: Console, title: str) -> None:
    """The table."""
    merged = mean_rows(rows)
    classes = [name for name in ("tool", "human", "subagent", "post_compaction") if _has(merged, name)]
    timed = any("ttft_s" in row for row in merged)
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for name in ("capacity", "gap closed", "missed", "amplif."):
        table.add_column(name, justify="right")
    for name in classes:
        table.add_column(f"hit {name.replace('_', ' ')}", justify="right")
    if timed:
        for name in ("tool", "human"):
            table.add_column(f"TTFT {name} p50/p90 s", justify="right")
    last = None
    for row in sorted(merged, key=lambda r: r["capacity_frac"]):
        if last is not None and row["capacity_frac"] != last:
            table.add_section()
        last = row["capacity_frac"]
        cells = [
            row["policy"],
            f"{row['capacity_frac']:g}",
            "" if row["gap_closed"] is None else f"{100 * row['gap_closed']:.1f} %",
            f"{100 * row['missed_share']:.2f} %",
            f"{row['amplification']:.2f}",
            *("" if name not in row["hit_rate"] else f"{row['hit_rate'][name]:.3f}" for name in classes),
        ]
        if timed:
            cells += [_ttft(row, name) for name in ("tool", "human")]
        table.add_row(*cells)
    console.print(table)


def _ttft(row: Row, name: str) -> str:
    found = row.get("ttft_s", {}).get(name)
    return f"{found['p50']:.2f} / {found['p90']:.2f}" if found else ""


def _has(rows: Sequence[Row], name: str) -> bool:
    return any(name in row["hit_rate"] for row in rows)
