"""The figure of a sweep as PNG. Needs matplotlib (the extra ``report``), which is imported only when a figure is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenuto_server.errors import ConfigError
from tenuto_server.sim.report import Row, mean_rows


def need_library() -> None:
    """Raises ``ConfigError`` that says what to install, before hours are spent on figures that cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: pip install 'tenuto[report]'") from None


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Amplification, misses over the oracle and hit rates against capacity; TTFT and held memory where timing was on."""
    need_library()
    from matplotlib.figure import Figure

    merged = mean_rows(rows)
    policies = list(dict.fromkeys(row["policy"] for row in merged))
    oracle = {row["capacity_frac"]: row["missed_share"] for row in merged if row["policy"] == "oracle"}
    panels: list[tuple[str, Any]] = [
        ("amplification (prefilled / new tokens)", lambda row: row["amplification"]),
        ("missed share of reusable tokens", lambda row: row["missed_share"]),
        ("hit rate after tools", lambda row: row["hit_rate"].get("tool")),
        ("hit rate after people", lambda row: row["hit_rate"].get("human")),
    ]
    if oracle:
        panels[1] = (
            "missed beyond the oracle, share of reusable",
            lambda row: row["missed_share"] - oracle[row["capacity_frac"]] if row["capacity_frac"] in oracle else None,
        )
    if any("ttft_s" in row for row in merged):
        panels += [
            ("TTFT after tools, p90 s", lambda row: row.get("ttft_s", {}).get("tool", {}).get("p90")),
            ("held on the device, token hours", lambda row: row.get("held_token_s", {}).get("device", 0) / 3600),
        ]
    figure = Figure(figsize=(12, 4 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2).flat
    for axis, (name, value) in zip(axes, panels, strict=True):
        for policy in policies:
            points = sorted(
                (r["capacity_frac"], value(r)) for r in merged if r["policy"] == policy and value(r) is not None
            )
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=policy)
        axis.set_xlabel("device memory / mean live KV")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    next(iter(figure.axes)).legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})
