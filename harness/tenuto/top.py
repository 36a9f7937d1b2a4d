"""``tenuto top``: sessions of a server, live in the terminal. Owns nothing but the last answer of the server.

Reads ``GET /v1/sessions`` and ``GET /health`` once a second. ``--once --json`` prints the same facts for scripts. Exit
status: 0 shown, 1 the server could not be reached (with ``--once``), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tenuto.wire import SessionView

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0  # a server on a busy machine answers late
ANSWER_BYTES_MAX = 16 << 20
DEPTH_MAX = 16
# Columns from the most to the least telling, with the width of the terminal from which they are shown.
COLUMNS = (
    ("session", 0),
    ("state", 0),
    ("pause", 40),
    ("since", 50),
    ("lease", 62),
    ("tier", 72),
    ("cached", 80),
    ("context", 90),
    ("last miss", 104),
    ("agent", 122),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at a server. ``problem``: why there is nothing to see; None when there is."""

    url: str
    sessions: tuple[SessionView, ...] = ()
    health: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One session as it is shown; every cell is text, ``depth`` its place in the tree."""

    depth: int
    cells: Mapping[str, str]


def main(argv: list[str]) -> int:
    """``tenuto top``."""
    parser = argparse.ArgumentParser(prog="tenuto top", description="Sessions of a Tenuto server, live.")
    parser.add_argument("--url", help=f"the server; default TENUTO_BASE_URL or {DEFAULT_URL}")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks; default 1")
    parser.add_argument("--once", action="store_true", help="one look, then stop")
    parser.add_argument("--json", action="store_true", help="with --once: the facts as JSON")
    args = parser.parse_args(argv)
    if args.json and not args.once:
        parser.error("--json goes with --once")
    url = (args.url or os.environ.get("TENUTO_BASE_URL") or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    url = url if "//" in url else f"http://{url}"
    if args.once:
        snapshot = look(url)
        _print_once(snapshot, as_json=args.json)
        return 1 if snapshot.problem is not None else 0
    _watch(url, max(0.1, args.every))
    return 0


def look(url: str, key: str | None = None) -> Snapshot:
    """Asks the server once; whatever goes wrong is the snapshot's ``problem``. Key: else ``TENUTO_API_KEY``."""
    key = key if key is not None else os.environ.get("TENUTO_API_KEY")
    try:
        health = _get(url, "/health", key)
        listed = _get(url, "/v1/sessions", key)
    except urllib.error.HTTPError as error:
        reason = "needs TENUTO_API_KEY" if error.code in (401, 403) else f"answers {error.code}: no Tenuto server?"
        return Snapshot(url, problem=f"{url} {reason}")
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", None) or error
        return Snapshot(url, problem=f"{url} does not answer: {getattr(cause, 'strerror', None) or cause}")
    views = []
    for item in listed.get("data") or ():
        try:
            views.append(SessionView.model_validate(item))
        except ValidationError:
            continue  # a newer server may say more than this version reads
    return Snapshot(url, tuple(views), health)


def rows(sessions: Iterable[SessionView]) -> list[Row]:
    """The sessions as a tree, parents before children; those whose parent is gone stand at the top."""
    by_id = {view.id: view for view in sessions}
    children: dict[str | None, list[SessionView]] = {}
    for view in by_id.values():
        parent = view.parent if view.parent in by_id and view.parent != view.id else None
        children.setdefault(parent, []).append(view)
    out: list[Row] = []
    seen: set[str] = set()

    def add(view: SessionView, depth: int) -> None:
        if view.id in seen:
            return
        seen.add(view.id)
        out.append(Row(depth, _cells(view)))
        for child in children.get(view.id, ()):
            add(child, min(depth + 1, DEPTH_MAX))

    for root in [*children.get(None, ()), *by_id.values()]:  # the second round catches circles
        add(root, 0)
    return out


def _cells(view: SessionView) -> dict[str, str]:
    prompt = view.last.prompt_tokens if view.last is not None else 0
    lease = view.lease
    pause: str = (view.pause_kind or "") if view.state == "paused" else ""
    if view.state == "ended" and lease is not None:
        # No promise for a next turn, but what it asked to be kept in case it is resumed.
        pause, lease = f"kept {duration(lease.until_s)}", None
    return {
        "session": view.id,
        "state": view.state,
        "pause": pause,
        "since": duration(view.pause_age_s) if view.state == "paused" else "",
        "lease": f"{lease.tier} {duration(lease.until_s)}" if lease is not None else "",
        "tier": _tiers(view),
        "cached": f"{100 * view.last.cached_tokens / prompt:.0f}%" if view.last is not None and prompt else "",
        "context": f"{view.context_tokens:,}" if view.context_tokens else "",
        "last miss": _miss(view),
        "agent": view.agent or "",
    }


def _tiers(view: SessionView) -> str:
    """Where the context lies now: shares of the resident tokens by tier."""
    total = max(view.context_tokens, sum(view.resident.values()), 1)
    parts = [f"{tier} {100 * tokens / total:.0f}%" for tier, tokens in view.resident.items() if tokens]
    return " ".join(parts)


def _miss(view: SessionView) -> str:
    """What the last turn computed again, and where its prompt had changed; tokens never seen are no miss."""
    if view.last is None:
        return ""
    lost = {label: tokens for label, tokens in view.last.recomputed.items() if tokens and label != "cold"}
    text = " ".join(f"{label} {tokens:,}" for label, tokens in lost.items())
    where = view.last.divergence
    if where is not None and lost.get("mutation"):
        place = f"{where.part or 'prompt'}" + (f" {where.message}" if where.message is not None else "")
        text += f" @ {place}"
    return text


def duration(seconds: float | None) -> str:
    """Seconds as people read them: 0.4s, 12s, 3m05s, 2h10m, 4d."""
    if seconds is None:
        return ""
    if seconds < 0:
        return "over"
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d"


def _headline(snapshot: Snapshot) -> str:
    if snapshot.problem is not None:
        return snapshot.problem
    health = snapshot.health
    states = [view.state for view in snapshot.sessions]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in ("running", "waiting", "paused") if state in states
    )
    text = f"{snapshot.url}  {health.get('model', '')}  {health.get('status', '')}  {len(states)} sessions"
    problems = "; ".join(str(p) for p in health.get("problems") or ())
    return text + (f" ({counts})" if counts else "") + (f"  {problems}" if problems else "")


def render(snapshot: Snapshot, width: int) -> RenderableType:
    """The screen; columns that do not fit the width are left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(
        _headline(snapshot), style="bold red" if snapshot.problem else "bold", overflow="ellipsis", no_wrap=True
    )
    if snapshot.problem is not None:
        return Group(head)
    table = Table(box=None, pad_edge=False, expand=False, header_style="dim")
    shown = [name for name, minimum in COLUMNS if width >= minimum]
    for name in shown:
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", ratio=None, max_width=36 if name == "session" else None
        )
    styles = {"running": "green", "waiting": "yellow", "ended": "dim"}
    for row in rows(snapshot.sessions):
        indent = "  " * (row.depth - 1) + "└ " if row.depth else ""
        cells = [indent + row.cells[name] if name == "session" else row.cells[name] for name in shown]
        table.add_row(*(Text(cell) for cell in cells), style=styles.get(row.cells["state"]))
    return Group(head, table if table.row_count else Text("no sessions yet", style="dim"))


def _print_once(snapshot: Snapshot, *, as_json: bool) -> None:
    if as_json:
        shown = [{"depth": row.depth, **row.cells} for row in rows(snapshot.sessions)]
        views = [view.model_dump(mode="json", exclude_none=True) for view in snapshot.sessions]
        body = {"url": snapshot.url, "problem": snapshot.problem, "health": snapshot.health}
        print(json.dumps({**body, "rows": shown, "sessions": views}))
        return
    from rich.console import Console

    console = Console(file=sys.stderr if snapshot.problem else sys.stdout)
    console.print(render(snapshot, console.width))


def _watch(url: str, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(render(look(url), console.width), refresh=True)
            time.sleep(every_s)


def _get(url: str, path: str, key: str | None) -> Mapping[str, Any]:
    request = urllib.request.Request(f"{url}{path}", headers={"accept": "application/json"})
    if key:
        request.add_header("authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # a server of one's own is no matter of proxies
    with opener.open(request, timeout=TIMEOUT_S) as response:
        body = json.loads(response.read(ANSWER_BYTES_MAX))
    if not isinstance(body, dict):
        raise ValueError("the answer is no JSON object")
    return body
