"""``tenuto simulate`` and ``tenuto compare``: arguments in, table and files out.

Exit status of ``simulate``: 0 done, 1 the trace or a setting cannot be used (the reason is on stderr), 2 wrong usage; of
``compare``: 0 the runs agree, 1 they differ, 2 a file cannot be read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tenuto_server.errors import ConfigError, TenutoServerError
from tenuto_server.sim import markdown, plot, report
from tenuto_server.sim.compare import compare_files
from tenuto_server.sim.costs import PRESETS
from tenuto_server.sim.study import Setup
from tenuto_server.sim.sweep import Row, sweep
from tenuto_server.sim.workload import WARM_UP_S, WINDOW_S

Number = TypeVar("Number", int, float)

POLICIES = "lru,oracle,tenuto:none,tenuto:end+compaction,tenuto:r2=0.5+end+compaction,tenuto:r2=0.9+end+compaction"
CAPACITIES = "0.1,0.2,0.33,0.5"


def simulate(argv: list[str]) -> int:
    """``tenuto simulate``."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.timing == "list":
        report.show_machines(_console())
        return 0
    if (args.trace is None) == (args.show is None):
        parser.error("give a trace to simulate, or --show and a result")
    try:
        if args.plot is not None:
            plot.need_library()
        document = _study(args) if args.show is None else report.read_json(args.show)
        told = document["arguments"]
        title = f"{document['trace']}: {told['alive']:g} alive, seeds {told['seed']}, hints {told['hints']}"
        report.show(document["rows"], _console(), title)
        if args.json is not None:
            report.write_json(args.json, document)
        if args.plot is not None:
            plot.draw(document["rows"], args.plot, title)
        if args.markdown is not None:
            path, _, place = args.markdown.partition("#")
            markdown.insert(Path(path), place, markdown.render(document, report.command_of(document)))
        return 0
    except TenutoServerError as error:
        print(f"tenuto simulate: {error}", file=sys.stderr)
        return 1


def _study(args: argparse.Namespace) -> dict[str, Any]:
    rows = _run(args.trace, _setups(args), args.jobs, Console(stderr=True))
    arguments = {name: getattr(args, name) for name in report.ARGUMENTS}
    return report.document(Path(args.trace).name, commit(), arguments, rows)


def _setups(args: argparse.Namespace) -> list[Setup]:
    policies = [name.strip() for name in args.policy.split(",") if name.strip()]
    tiers = tuple(args.tiers.split(","))
    setups = [
        Setup(
            policy=policy,
            capacity_frac=frac,
            seed=seed,
            alive=args.alive,
            unit=args.unit or (64 if args.timing == "none" else 16),
            tiers=tiers,
            hints=args.hints,
            timing=args.timing,
            service=args.service,
            host_ratio=args.host_ratio,
            disk_ratio=args.disk_ratio,
            shrink=args.shrink,
            tenants=args.tenants,
            window_s=args.window_h * 3600.0,
            warm_up_s=args.warm_up_h * 3600.0,
        )
        for seed in _numbers(args.seed, int)
        for frac in _numbers(args.capacity_frac, float)
        for policy in policies
    ]
    if not setups:
        raise ConfigError("nothing to run: --policy, --capacity-frac and --seed each need a value")
    for setup in setups:
        setup.check()
    return setups


def _numbers(text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{text!r}: comma-separated numbers are expected") from None


def _run(source: str, setups: Sequence[Setup], jobs: int, console: Console) -> list[Row]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(setups))

        def heard(setup: Setup, row: Row) -> None:
            progress.update(task, advance=1, description=f"{setup.policy} at {setup.capacity_frac:g}")

        return sweep(source, setups, jobs, heard)


def _console() -> Console:
    """Standard output; wide enough for the table where nobody looks through a window."""
    console = Console()
    return console if console.is_terminal else Console(width=132)


def commit() -> str:
    """The commit of this source tree, else the version installed."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0:
        return asked.stdout.strip()
    try:
        return version("tenuto")
    except PackageNotFoundError:
        return "unknown"


def compare(argv: list[str]) -> int:
    """``tenuto compare``: two results of ``simulate``, or two journals of a server."""
    parser = argparse.ArgumentParser("tenuto compare", description="Show what differs between two runs.")
    parser.add_argument("a", type=Path, help="result of simulate --json, or a decision journal (JSON lines)")
    parser.add_argument("b", type=Path, help="the other one, of the same kind")
    parser.add_argument("--by-session", action="store_true", help="journals that did not keep the same time")
    args = parser.parse_args(argv)
    try:
        return compare_files(args.a, args.b, _console(), by_session=args.by_session)
    except TenutoServerError as error:
        print(f"tenuto compare: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tenuto simulate", description="Replay agent sessions against cache policies.")
    parser.add_argument("trace", nargs="?", help="a trace file or folder, or synthetic:<sessions>[:<seed>]")
    parser.add_argument("--policy", default=POLICIES, help="comma-separated; tenuto:<knowledge> (default %(default)s)")
    parser.add_argument("--capacity-frac", default=CAPACITIES, help="device memory as fractions of the mean live KV")
    parser.add_argument("--alive", type=float, default=60.0, help="sessions alive on average (default %(default)g)")
    parser.add_argument("--seed", default="1", help="comma-separated seeds (default %(default)s)")
    parser.add_argument("--tiers", default="device", help="device, or device,host, or device,host,disk")
    parser.add_argument("--hints", default="on", help="on, off, late:<s>, lost:<share>, lying[:<share>], dup, reorder")
    parser.add_argument("--timing", default="none", help=f"none, or a machine: {', '.join(PRESETS)}; list")
    parser.add_argument("--host-ratio", type=float, default=4.0, help="host size in device sizes (default %(default)g)")
    parser.add_argument(
        "--disk-ratio", type=float, default=16.0, help="disk size in device sizes (default %(default)g)"
    )
    parser.add_argument("--tenants", default="", help="whose the sessions are, by weight: quiet=1,busy=9 (default one)")
    parser.add_argument("--shrink", type=float, default=1.0, help="divide the trace's token counts by this (default 1)")
    parser.add_argument("--service", default="recorded", help="without timing: recorded or none (answers take no time)")
    parser.add_argument("--unit", type=int, help="tokens of one simulated block (default 64, with timing 16)")
    parser.add_argument("--window-h", type=float, default=WINDOW_S / 3600, help="hours measured (default %(default)g)")
    parser.add_argument("--warm-up-h", type=float, default=WARM_UP_S / 3600, help="hours before (default %(default)g)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--plot", type=Path, help="draw a figure here (PNG)")
    parser.add_argument("--markdown", metavar="FILE[#PLACE]", help="write tables; into a marked place of a document")
    parser.add_argument("--show", type=Path, metavar="RESULT", help="instead of a trace: what --json wrote before")
    return parser
