"""Two runs side by side: rows of two simulation results, or the decisions of two journals. Pure but for the printing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tenuto_server.sim.traces import TraceFileError, json_lines

_FIGURES = ("missed_tokens", "amplification", "gap_closed")
_CONTEXT = 3
# What of a decision does not depend on the moment at which it is taken.
_STABLE = {
    "admit": ("prompt", "cached", "recompute"),
    "retention": ("why", "pause"),
    "pause_end": ("pause",),
    "turn_end": ("reason", "generated"),
    "lease_broken": ("tier",),
}
_SHOWN = 5


def compare_files(a: Path, b: Path, console: Console, *, by_session: bool = False) -> int:
    """Prints what differs; 0 when nothing does, else 1. Raises ``TraceFileError`` for a file that is neither.

    ``by_session``: journals are compared session by session, by what does not depend on exact times.
    """
    first, second = _document(a), _document(b)
    if (first is None) != (second is None):
        raise TraceFileError(f"{a} and {b} are of different kinds: one is a simulation result, the other a journal")
    if first is not None and second is not None:
        return _results(first, second, console)
    return sessions_agree(a, b, console) if by_session else _journals(a, b, console)


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


def sessions_agree(a: Path, b: Path, console: Console) -> int:
    """Journals of two runs that did not keep the same time: every session's decisions in order, without figures that
    depend on the moment. Prints the share that agrees by kind and the first differences; 0 when all agree, else 1."""
    left, right = _by_session(a), _by_session(b)
    counts: dict[str, list[int]] = {}
    shown: list[str] = []
    for session in sorted({*left, *right}):
        mine, other = left.get(session, []), right.get(session, [])
        for entry in mine:
            counts.setdefault(entry[0], [0, 0, 0])[0] += 1
        for entry in other:
            counts.setdefault(entry[0], [0, 0, 0])[1] += 1
        for block in SequenceMatcher(None, mine, other, autojunk=False).get_matching_blocks():
            for entry in mine[block.a : block.a + block.size]:
                counts[entry[0]][2] += 1
        first = next((i for i, (x, y) in enumerate(zip_longest(mine, other)) if x != y), None)
        if first is not None and len(shown) < _SHOWN:
            x, y = (" ".join(e[first]) if first < len(e) else "(ended)" for e in (mine, other))
            shown.append(f"{session}, decision {first + 1}:\n    A {x}\n    B {y}")
    table = Table(title="decisions by kind, session by session", title_justify="left")
    for name in ("kind", "A", "B", "the same", "share"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, (in_a, in_b, same) in sorted(counts.items()):
        table.add_row(kind, str(in_a), str(in_b), str(same), f"{100 * same / max(in_a, in_b):.1f} %")
    console.print(table)
    if shown:
        console.print("first differences:", *shown, sep="\n  ", markup=False)
    return int(bool(shown))


def _by_session(path: Path) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for _, entry in json_lines(path):
        kind = str(entry.get("kind"))
        facts = [json.dumps(entry.get(name), sort_keys=True) for name in _STABLE.get(kind, ())]
        found.setdefault(str(entry.get("session", "")), []).append((kind, *facts))
    return found
