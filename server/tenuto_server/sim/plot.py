"""The figure of a sweep as PNG. Needs matplotlib (the extra ``report``), which is imported only when a figure is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tenuto_server.errors import ConfigError
from tenuto_server.sim.report import Row, mean_rows

_COLUMNS = 3
_MARKS = "osD^vPX*"
_WAITS = (("all", "of all turns"), ("tool", "after tools"), ("human", "after people"))
_CLASSES = (
    ("tool", "tools"),
    ("human", "people"),
    ("subagent", "subagents"),
    ("post_compaction", "compactions"),
)


def need_library() -> None:
    """Raises ``ConfigError`` that says what to install, before hours are spent on figures that cannot be drawn."""
    try:
        import_module("matplotlib")
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: pip install 'tenuto[report]'") from None


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Amplification, misses over the oracle, hit rates and held memory against capacity; TTFT where timing was on. Bars
    instead of lines for a single capacity."""
    need_library()
    from matplotlib.figure import Figure

    merged = mean_rows(rows)
    oracle = {row["capacity_frac"]: row["missed_share"] for row in merged if row["policy"] == "oracle"}
    panels = _panels(merged, oracle)
    lines = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(5 * _COLUMNS, 3.4 * lines + 0.9), layout="constrained")
    axes = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (name, value) in zip(axes, panels, strict=False):
        _panel(axis, merged, value)
        axis.set_title(name, fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.suptitle(title, fontsize=11)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=9, frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _panel(axis: Any, rows: Sequence[Row], value: Callable[[Row], float | None]) -> None:
    """One figure of all policies. The axis begins at 0, so that heights can be compared."""
    capacities = sorted({row["capacity_frac"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for number, policy in enumerate(policies):
        found = {row["capacity_frac"]: value(row) for row in rows if row["policy"] == policy}
        points = [(frac, y) for frac in capacities if (y := found.get(frac)) is not None]
        look = "black" if policy == "oracle" else f"C{number}"
        if len(capacities) == 1:
            axis.bar([number], [points[0][1] if points else 0.0], color=look, label=policy)
            continue
        # Later lines are thinner and their marks hollow: policies that agree stay visible below each other.
        width = 3.0 - 2.0 * number / len(policies)
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=look,
            linewidth=width,
            linestyle="--" if policy == "oracle" else "-",
            marker=_MARKS[number % len(_MARKS)],
            markersize=9.0 - 5.0 * number / len(policies),
            markerfacecolor=look if number == 0 else "white",
            label=policy,
        )
    axis.set_ylim(0.0, 1.05 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    if len(capacities) == 1:
        axis.set_xticks([])
        axis.set_xlabel(f"device memory {capacities[0]:g} of the mean live KV", fontsize=9)
    else:
        axis.set_xticks(capacities, [f"{frac:g}" for frac in capacities])
        axis.set_xlabel("device memory / mean live KV", fontsize=9)


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
        ("machine busy, s", lambda row: row.get("busy_s")),
        *((f"TTFT {what}, {q}, s", wait(name, q)) for name, what in _WAITS for q in ("p50", "p90")),
    ]
    timed = any("held_byte_s" in row for row in rows)
    for tier in ("device", "host", "disk"):
        panels.append(
            (f"held on {tier}, TB h", held_bytes(tier)) if timed else (f"held on {tier}, M token h", held(tier))
        )
    return [(name, value) for name, value in panels if _tells(rows, value, always="held" not in name)]


def _tells(rows: Sequence[Row], value: Callable[[Row], float | None], *, always: bool) -> bool:
    """Whether a figure is known at all; unless ``always``, whether policies differ in it by more than a fiftieth too."""
    differ = known = False
    for frac in {row["capacity_frac"] for row in rows}:
        found = [y for row in rows if row["capacity_frac"] == frac and (y := value(row)) is not None]
        known = known or bool(found)
        differ = differ or (bool(found) and max(found) - min(found) > 0.02 * max(found))
    return known and (always or differ)
