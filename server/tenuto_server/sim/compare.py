"""Two runs side by side: rows of two simulation results, or the decisions of two journals. Pure but for the printing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tenuto_server.sim.traces import TraceFileError, json_lines

_FIGURES = ("missed_tokens", "amplification", "gap_closed")
_CONTEXT = 3


def compare_files(a: Path, b: Path, console: Console) -> int:
    """Prints what differs; 0 when nothing does, else 1. Raises ``TraceFileError`` for a file that is neither."""
    first, second = _document(a), _document(b)
    if (first is None) != (second is None):
        raise TraceFileError(f"{a} and {b} are of different kinds: one is a simulation result, the other a journal")
    if first is not None and second is not None:
        return _results(first, second, console)
    return _journals(a, b, console)


def _document(path: Path) -> dict[str, Any] | None:
    """A simulation result; None for anything that is not one JSON object with rows."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        return None
    return content if isinstance(content, dict) and isinstance(content.get("rows"), list) else None


def _results(a: dict[str, Any], b: dict[str, Any], console: Console) -> int:
    keyed = [{_key(row): row for row in content["rows"]} for content in (a, b)]
    table = Table(title=f"{a.get('commit')} and {b.get('commit')} on {a.get('trace')}", title_justify="left")
    for name in ("policy", "capacity", "seed", "figure", "A", "B", "change"):
        table.add_column(name, justify="left" if name in ("policy", "figure") else "right")
    differs = False
    for key in sorted({*keyed[0], *keyed[1]}, key=str):
        left, right = keyed[0].get(key), keyed[1].get(key)
        where = str(key[0]), f"{key[1]:g}", str(key[2])
        if left is None or right is None:
            table.add_row(
                *where, "row", "missing" if left is None else "there", "missing" if right is None else "there"
            )
            differs = True
            continue
        for name in _FIGURES:
            if left.get(name) != right.get(name):
                table.add_row(*where, name, _text(left.get(name)), _text(right.get(name)), _change(left, right, name))
                differs = True
        differs = differs or left != right
    if table.row_count:
        console.print(table)
    console.print("the runs differ" if differs else "the runs agree in every row")
    return int(differs)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("policy", "capacity_frac", "seed", "tiers", "timing", "hints"))


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _change(left: dict[str, Any], right: dict[str, Any], name: str) -> str:
    a, b = left.get(name), right.get(name)
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return ""
    return f"{b - a:+.4f}" if name == "gap_closed" else f"{100 * (b / a - 1):+.2f} %" if a else ""


def _journals(a: Path, b: Path, console: Console) -> int:
    """Decisions in order, times aside: two runs of one workload decide the same things, not at the same nanosecond."""
    before: list[str] = []
    count = 0
    for left, right in zip_longest(_decisions(a), _decisions(b)):
        if left != right:
            console.print(f"decision {count + 1} differs; before it:", *before[-_CONTEXT:], sep="\n  ", markup=False)
            console.print(f"A {left or '(ended)'}\nB {right or '(ended)'}", markup=False)
            return 1
        before = [*before[-_CONTEXT:], str(left)]
        count += 1
    console.print(f"the journals agree in all {count} decisions")
    return 0


def _decisions(path: Path) -> Iterator[str]:
    for _, entry in json_lines(path):
        yield json.dumps({k: v for k, v in entry.items() if k not in ("n", "t_ns")}, sort_keys=True)
