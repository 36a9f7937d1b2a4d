"""The result of ``tenuto bench engine`` as a table, for people and for documents. Holds no state."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tenuto_server.errors import ConfigError

Row = dict[str, Any]


def show(path: Path, place: str | None) -> int:
    """A written result again: as a table, or as Markdown (``place``: "FILE#PLACE", or "-" for stdout).

    Raises ``ConfigError``.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("what") != "tenuto bench engine":
            raise ValueError
    except ValueError:
        raise ConfigError(f"{path} is not a result of tenuto bench engine") from None
    if place is None:
        print_table(document)
    elif place == "-":
        print(markdown(document))
    else:
        from tenuto_server.sim.markdown import insert

        file, _, name = place.partition("#")
        insert(Path(file), name, markdown(document))
    return 0


def print_table(document: dict[str, Any]) -> None:
    """Medians of every server and ratios with their intervals, on stdout."""
    from rich.console import Console
    from rich.table import Table

    head, rows = _cells(document)
    table = Table(title="Through HTTP, medians; a ratio above 1: Tenuto is better")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for line in notes(document):
        console.print(line, highlight=False, markup=False)


def markdown(document: dict[str, Any]) -> str:
    """The same as Markdown."""
    head, rows = _cells(document)
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]
    return "\n".join(lines) + "\n\n" + "  \n".join(notes(document)) + "\n"


def _cells(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = [endpoint["name"] for endpoint in document["endpoints"]]
    head = ["measure", *names, *(f"times {name} (95 %)" for name in names[1:])]
    rows = []
    for row in document["measures"]:
        medians = [f"{_short(statistics.median(row['values'][name]))} {row['unit']}" for name in names]
        rows.append([row["name"], *medians, *(_ratio(row["ratios"][name]) for name in names[1:])])
    return head, rows


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(found: Row) -> str:
    if found["low"] is None:
        return f"{found['mean']:.2f}"
    return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def notes(document: dict[str, Any]) -> list[str]:
    """Where the figures come from, a line each."""
    about = document["about"]
    pairs = max(len(values) for row in document["measures"] for values in row["values"].values())
    lines = [f"{pairs} values each, alternating; ratio: {document['interval']}."]
    for endpoint in document["endpoints"]:
        told = endpoint.get("version") or endpoint.get("health") or {}
        facts = ", ".join(f"{key} {value}" for key, value in told.items() if isinstance(value, str))
        as_text = "; prompts as text" if endpoint["prompts"] == "text" else ""
        lines.append(f"{endpoint['name']}: model {endpoint['model']}{as_text}" + (f" ({facts})" if facts else ""))
    if document["skipped"]:
        lines.append(f"left out, longer than a context here: {'; '.join(document['skipped'])}")
    load = f"{document['load_before']:.1f} before, {document['load_after']:.1f} after"
    lines.append(
        f"{about['processor']}, {about['cores']} cores, {about['system']}, commit {str(about['commit'])[:12]}, load {load}"
    )
    return lines
