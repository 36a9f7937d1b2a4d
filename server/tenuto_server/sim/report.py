"""The result of a sweep for people: one table in the terminal, one figure as PNG. Pure functions of the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tenuto_server.sim.costs import PRESETS
from tenuto_server.sim.traces import TraceFileError
from tenuto_server.sim.workload import WARM_UP_S, WINDOW_S

Row = dict[str, Any]
VERSION = 1
ARGUMENTS = (
    "policy", "capacity_frac", "alive", "seed", "tiers", "hints", "timing", "service", "unit",
    "host_ratio", "disk_ratio", "shrink", "tenants", "window_h", "warm_up_h",
)  # fmt: skip
"""Arguments of ``tenuto simulate`` that a result depends on."""
_WAITS = ("all", "tool", "human")
_DEFAULTS = {
    "tiers": "device", "hints": "on", "timing": "none", "service": "recorded", "unit": None, "alive": 60.0, "shrink": 1.0,
    "tenants": "", "window_h": WINDOW_S / 3600, "warm_up_h": WARM_UP_S / 3600,
}  # fmt: skip


def document(trace: str, commit: str, arguments: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {"version": VERSION, "trace": trace, "commit": commit, "arguments": arguments, "rows": list(rows)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One row a line, so that two files can be compared by eye; the same content gives the same bytes."""
    head = {key: value for key, value in content.items() if key != "rows"}
    lines = ",\n".join(json.dumps(row, separators=(", ", ": ")) for row in content["rows"])
    text = json.dumps(head, separators=(", ", ": "))[:-1] + ', "rows": [\n' + lines + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """What ``--json`` wrote. Raises ``TraceFileError`` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TraceFileError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION or not content.get("rows"):
        raise TraceFileError(f"{path}: not a result of tenuto simulate --json")
    return content


def command_of(document: dict[str, Any]) -> str:
    """The command that gives a document's rows again."""
    words = ["tenuto simulate", str(document["trace"])]
    for name, value in document["arguments"].items():
        always = name in ("policy", "capacity_frac", "seed")
        tier = name.removesuffix("_ratio") if name.endswith("_ratio") else None
        if tier is not None and tier not in document["arguments"]["tiers"].split(","):
            continue
        if always or (value is not None and _DEFAULTS.get(name, value) != value) or tier is not None:
            words.append(f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float) else _flag(name, value))
    return " ".join(words)


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"


def show_machines(console: Console) -> None:
    """The machines that ``--timing`` knows."""
    table = Table(title="--timing", title_justify="left")
    for name in ("name", "prefill 512 / 32K", "decode 32K", "KV a token", "host / disk", "source"):
        table.add_column(name, justify="left" if name in ("name", "source") else "right")
    for machine in PRESETS.values():
        speeds = [n / (n * (machine.prefill_a_s + machine.prefill_b_s * n / 2)) for n in (512, 32768)]
        step_s = machine.weights_s + 32768 * machine.kv_bytes / machine.memory_bps
        table.add_row(
            machine.name,
            f"{speeds[0]:.0f} / {speeds[1]:.0f} tok/s",
            f"{1 / step_s:.0f} tok/s",
            f"{machine.kv_bytes / 1024:.1f} KiB",
            f"{machine.host_bps / 1e9:.1f} / {machine.disk_bps / 1e9:.1f} GB/s",
            machine.source,
        )
    console.print(table)


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
        for name in ("held_token_s", "held_byte_s", "moved_tokens", "prefetches", "hit_rate_by_tenant"):
            if all(name in row for row in group):
                keys = sorted({key for row in group for key in row[name]})
                merged[name] = {key: _mean([row[name].get(key, 0.0) for row in group]) for key in keys}
        for name in ("leases_granted", "leases_broken", "refused_turns", "turns", "instead_tokens", "busy_s"):
            if all(name in row for row in group):
                merged[name] = _mean([row[name] for row in group])
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
    table.add_column("policy", no_wrap=True, min_width=max(len(row["policy"]) for row in merged))
    for name in ("capacity", "gap closed", "missed", "amplif."):
        table.add_column(name, justify="right")
    for name in classes:
        table.add_column(f"hit {name.replace('_', ' ')}", justify="right")
    if timed:
        for name in _WAITS:
            table.add_column(f"TTFT {name} p50/p90 s", justify="right")
    if any("held_token_s" in row for row in merged):
        table.add_column("held, M token-h", justify="right")
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
            cells += [_ttft(row, name) for name in _WAITS]
        if "held_token_s" in row:
            held = row["held_token_s"]
            cells.append(" ".join(f"{held[tier] / 3.6e9:.3g}" for tier in ("device", "host", "disk") if tier in held))
        table.add_row(*cells)
    console.print(table)


def _ttft(row: Row, name: str) -> str:
    found = row.get("ttft_s", {}).get(name)
    return f"{found['p50']:.2f} / {found['p90']:.2f}" if found else ""


def _has(rows: Sequence[Row], name: str) -> bool:
    return any(name in row["hit_rate"] for row in rows)
