"""The figure of a sweep as PNG. Needs matplotlib (the extra ``report``), which is imported only when a figure is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tenuto_server.errors import ConfigError
from tenuto_server.sim.report import Row, mean_rows

_COLUMNS = 3
_CLASSES = (
    ("tool", "tools"),
    ("human", "people"),
    ("subagent", "subagents"),
    ("post_compaction", "compactions"),
)


def need_library() -> None:
    """Raises ``ConfigError`` that says what to install, before hours are spent on figures that cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: pip install 'tenuto[report]'") from None


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Amplification, misses over the oracle, hit rates and held memory against capacity; TTFT where timing was on."""
    need_library()
    from matplotlib.figure import Figure

    merged = mean_rows(rows)
    policies = list(dict.fromkeys(row["policy"] for row in merged))
    oracle = {row["capacity_frac"]: row["missed_share"] for row in merged if row["policy"] == "oracle"}
    panels = _panels(merged, oracle)
    lines = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(5 * _COLUMNS, 3.6 * lines), layout="constrained")
    axes = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (name, value) in zip(axes, panels, strict=False):
        for policy in policies:
            points = sorted(
                (r["capacity_frac"], value(r)) for r in merged if r["policy"] == policy and value(r) is not None
            )
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=policy)
        axis.set_xlabel("device memory / mean live KV")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _panels(rows: Sequence[Row], oracle: dict[float, float]) -> list[tuple[str, Callable[[Row], float | None]]]:
    """(title, figure of a row) of everything that at least one row has."""

    def beyond(row: Row) -> float | None:
        frac = row["capacity_frac"]
        return row["missed_share"] - oracle[frac] if frac in oracle else None

    def hit(name: str) -> Callable[[Row], float | None]:
        return lambda row: row["hit_rate"].get(name)

    def wait(name: str, q: str) -> Callable[[Row], float | None]:
        return lambda row: row.get("ttft_s", {}).get(name, {}).get(q)

    def held(tier: str) -> Callable[[Row], float | None]:
        return lambda row: row["held_token_s"][tier] / 3.6e9 if tier in row.get("held_token_s", {}) else None

    def held_bytes(tier: str) -> Callable[[Row], float | None]:
        return lambda row: row["held_byte_s"][tier] / 3.6e15 if tier in row.get("held_byte_s", {}) else None

    panels: list[tuple[str, Callable[[Row], float | None]]] = [
        ("amplification (prefilled / new tokens)", lambda row: row["amplification"]),
        ("missed beyond the oracle, share of reusable", beyond),
        ("missed, share of reusable", lambda row: None if oracle else row["missed_share"]),
        *((f"hit rate after {what}", hit(name)) for name, what in _CLASSES),
        *((f"TTFT after {what}, {q}, s", wait(name, q)) for name, what in _CLASSES[:2] for q in ("p50", "p90")),
    ]
    timed = any("held_byte_s" in row for row in rows)
    for tier in ("device", "host", "disk"):
        panels.append(
            (f"held on {tier}, TB h", held_bytes(tier)) if timed else (f"held on {tier}, M token h", held(tier))
        )
    return [(name, value) for name, value in panels if any(value(row) is not None for row in rows)]
