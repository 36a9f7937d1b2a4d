"""``tenuto demo``: coding agents recorded once, then replayed under several policies, and what the hints gained.

Owns the run: its folder, its console, its report. Exit status: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto_server.bench.workload import WorkloadSettings, describe, make_plan

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tenuto_server.bench.demo_arms import Arm, ArmResult, Recorded, Sizes
    from tenuto_server.bench.report import Summary

ARMS = "lru,tenuto:none,tenuto"
UNLIMITED_ARMS = ("lru@unlimited", "tenuto@unlimited")
COMPARED = (
    ("tenuto", "lru"),
    ("tenuto", "tenuto:none"),
    ("tenuto@unlimited", "lru@unlimited"),
    ("tenuto@unlimited", "tenuto:none@unlimited"),
)
RECORDING, RECORDED = "recording.jsonl", "recorded.json"
FRACTIONS = (0.35, 0.4, 0.15)
"""Of the mean live KV on device, host and disk."""
SCHEDULES = 40
QUICK = WorkloadSettings(agents=4, tasks=1, turns=(2, 4), brief_chars=500, human_max_s=2.0, arrival_s=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; ``argv`` as on the command line, without the command's name."""
    args = _parser().parse_args(argv)
    # Imported late, so that --help costs nothing.
    from tenuto.errors import TenutoError
    from tenuto_server.bench.demo_arms import parse_arm
    from tenuto_server.errors import TenutoServerError

    try:
        arms = [parse_arm(name) for name in args.arms.split(",")]
    except ValueError as error:
        print(f"tenuto demo: {error}", file=sys.stderr)
        return 2
    if not args.no_unthrottled and not args.quick:
        arms += [arm for arm in map(parse_arm, UNLIMITED_ARMS) if any(arm.policy == other.policy for other in arms)]
    if args.repeat < 1 or args.schedules < 0:
        print("tenuto demo: --repeat must be 1 or more, --schedules 0 or more", file=sys.stderr)
        return 2
    settings = dataclasses.replace(QUICK if args.quick else WorkloadSettings(), seed=args.seed)
    settings = dataclasses.replace(settings, **{k: v for k, v in _sizes(args).items() if v is not None})
    try:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.open("a").close()  # minutes of work should not end in a file that cannot be written
        with _folder(args) as folder:
            _Demo(args, settings, folder).run(arms)
    except BaseExceptionGroup as group:
        # Agents run side by side: what failed first is what there is to say.
        failure: BaseException = group
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if not isinstance(failure, (TenutoError, TenutoServerError, OSError)):
            raise
        print(f"tenuto demo: {failure}", file=sys.stderr)
        return 1
    except (TenutoError, TenutoServerError, OSError) as error:
        print(f"tenuto demo: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tenuto demo", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as for tenuto serve; toy: a random model for tests")
    add("--quick", action="store_true", help="fewer and shorter sessions, no unlimited arms")
    add("--seed", type=int, default=1, help="of the workload")
    add("--arms", default=ARMS, help=f"policies to compare, NAME@unlimited without rate limits (default: {ARMS})")
    add("--no-unthrottled", action="store_true", help="leave out the runs without rate limits")
    add("--report", type=Path, default=Path("demo-report.json"), help="where the report goes")
    add("--repeat", type=int, default=1, metavar="N", help="passes of every arm, in turn and back (default: 1)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--keep", type=Path, metavar="DIR", help="keep recording, logs and journals there")
    where.add_argument("--replay", type=Path, metavar="DIR", help="replay the recording that --keep DIR left there")
    add(
        "--schedules",
        type=int,
        default=SCHEDULES,
        metavar="N",
        help=f"play the recording under N schedules in virtual time as well, 0 for none (default: {SCHEDULES})",
    )
    add("--agents", type=int, help="agents at work side by side (default: 12)")
    add("--compression", type=float, help="human pauses are divided by it (default: 10)")
    for tier, share in zip(("device", "host", "disk"), FRACTIONS, strict=True):
        add(f"--{tier}-fraction", type=float, default=share, help=f"{tier} KV / mean live KV (default: {share})")
    add("--threads", type=int, help="CPU threads of the model")
    return parser


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    return {"agents": args.agents, "compression": args.compression}


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    if args.replay is not None:
        yield args.replay
    elif args.keep is not None:
        for name in ("work", RECORDING, RECORDED):  # of an earlier run
            path = args.keep / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        args.keep.mkdir(parents=True, exist_ok=True)
        yield args.keep
    else:
        with tempfile.TemporaryDirectory(prefix="tenuto-demo-") as name:
            yield Path(name)


class _Demo:
    """One run."""

    def __init__(self, args: argparse.Namespace, settings: WorkloadSettings, folder: Path) -> None:
        from rich.console import Console

        self._args = args
        self._settings = settings
        self._folder = folder
        # A pipe has no width of its own; lines of turns are longer than the 80 columns assumed for it.
        self._console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=160)
        self._model_flags = ["--model", args.model]
        if args.threads is not None:
            self._model_flags += ["--threads", str(args.threads)]

    def run(self, arms: list[Arm]) -> None:
        """Record, size, replay, report."""
        from tenuto_server.bench import demo_arms
        from tenuto_server.bench.demo_recording import load_recording, longest_context, mean_live_tokens

        began = time.monotonic()
        recorded = self._record() if self._args.replay is None else self._read()
        recording = load_recording(self._folder / RECORDING)
        fractions = (self._args.device_fraction, self._args.host_fraction, self._args.disk_fraction)
        live = mean_live_tokens(recording, recorded.new_tokens)
        sizes = demo_arms.size_tiers(recorded, live, longest_context(recording), fractions)
        self._console.print(_sizes_text(sizes, recorded), highlight=False)
        results: dict[str, list[ArmResult]] = {arm.name: [] for arm in arms}
        for n in range(self._args.repeat):
            # In turn and back: what the machine does meanwhile should not always meet the same arm.
            for arm in arms if n % 2 == 0 else arms[::-1]:
                title = arm.name if self._args.repeat == 1 else f"{arm.name}, pass {n + 1} of {self._args.repeat}"
                with self._progress(title, demo_arms.played(arm, recording).turns) as on_row:
                    results[arm.name].append(
                        demo_arms.replay(arm, self._model_flags, self._folder, recording, recorded, sizes, on_row)
                    )
        self._show(results, recorded)
        schedules = self._schedules(fractions) if self._args.schedules else None
        self._write(results, recorded, sizes, schedules, time.monotonic() - began)

    def _record(self) -> Recorded:
        from tenuto_server.bench import demo_arms
        from tenuto_server.bench.demo_tools import WorkFolder

        self._console.print(f"[bold]Tenuto demonstration[/bold]: {describe(self._settings)}", highlight=False)
        work = WorkFolder(self._folder / "work", self._settings.output_chars)
        plans = make_plan(self._settings, work.sources(slow=not self._args.quick))
        turns = sum(len(session.steps) + 1 for plan in plans for session in plan.sessions)
        with self._progress("recording", turns) as on_row:
            recorded = demo_arms.record(self._model_flags, self._folder, work, plans, self._settings, on_row)
        recorded.save(self._folder / RECORDED, self._settings)
        return recorded

    def _read(self) -> Recorded:
        from tenuto_server.bench.demo_arms import Recorded

        recorded, self._settings = Recorded.load(self._folder / RECORDED)
        self._console.print(
            f"[bold]Tenuto demonstration[/bold], of a recording made before: {describe(self._settings)}",
            highlight=False,
        )
        return recorded

    @contextmanager
    def _progress(self, name: str, turns: int) -> Iterator[Any]:
        from tenuto_server.bench.report_table import turn_line

        with self._bar(name, turns) as (progress, task):

            def on_row(row: Any) -> None:
                self._console.print(turn_line(row), highlight=False, markup=False)
                progress.advance(task)

            yield on_row

    @contextmanager
    def _bar(self, name: str, total: int) -> Iterator[tuple[Progress, TaskID]]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console.rule(f"[bold]{name}[/bold]", align="left")
        with Progress(*columns, console=self._console, transient=True, disable=not sys.stdout.isatty()) as progress:
            yield progress, progress.add_task(name, total=total)

    def _schedules(self, fractions: tuple[float, float, float]) -> dict[str, Any]:
        """The same recording again and again in virtual time: one pass is one draw of who meets whom in the queue."""
        from tenuto_server.bench import demo_schedules as schedules
        from tenuto_server.bench.report_table import schedule_lines

        count = self._args.schedules
        with self._bar("schedules, in virtual time", count * len(schedules.ARMS)) as (progress, task):
            scene = schedules.read(self._folder, self._args.model, fractions=fractions)
            passes: dict[str, list[schedules.Pass]] = {arm: [] for arm in schedules.ARMS}
            for arm, one in schedules.play_all(scene, count, schedules.JITTER):
                passes[arm].append(one)
                progress.advance(task)
        compared = schedules.compare(passes)
        self._console.print(
            f"{count} schedules of this recording, pauses varied by a tenth, equally in all arms; the real engine, "
            "policies and SDK, with the recording's speed and the limits above. Median, nine in ten, how often it falls:",
            highlight=False,
        )
        for line in schedule_lines(compared):
            self._console.print(f"  {line}", highlight=False)
        return {"count": count, "jitter": schedules.JITTER, "arms": schedules.figures(passes), "ratios": compared}

    def _show(self, results: dict[str, list[ArmResult]], recorded: Recorded) -> None:
        from tenuto_server.bench.report_table import arms_table, ratio_lines

        say = self._console.print
        say()
        passes = {name: [one.summary for one in of_arm] for name, of_arm in results.items()}
        for limited, title in (
            (True, "Tiers rate-limited to the ratios of a GPU machine"),
            (False, "Without rate limits (on a CPU, host memory is next to free), each agent's first session only"),
        ):
            arms = {name: _pooled(of_arm) for name, of_arm in results.items() if of_arm[0].arm.limited == limited}
            if arms:
                say(arms_table(arms, title))
                subject = "tenuto" if limited else "tenuto@unlimited"
                bases = ("lru", "tenuto:none") if limited else ("lru@unlimited", "tenuto:none@unlimited")
                for line in ratio_lines(arms, subject, bases, passes):
                    say(f"  {line}", highlight=False)
        if self._args.repeat == 1:
            say(
                "One pass is one draw: its p90 is a few turns that meet in the queue, and who meets depends on the moment. "
                "--keep D, then --replay D --repeat N pools several; --schedules N plays it under many schedules in virtual time.",
                highlight=False,
            )
        say(
            f"Genuinely new tokens: {sum(recorded.new_tokens.values()):,}. An answer may differ from the recorded one where "
            "the two best tokens are near-ties: KV written by decode and by prefill agree only within bf16 rounding.",
            highlight=False,
        )

    def _write(
        self,
        results: dict[str, list[ArmResult]],
        recorded: Recorded,
        sizes: Sizes,
        schedules: dict[str, Any] | None,
        took_s: float,
    ) -> None:
        from tenuto_server.bench.report import ranges, ratios

        summaries = {name: _pooled(of_arm) for name, of_arm in results.items()}
        pairs = {
            f"{subject} / {base}": (subject, base)
            for subject, base in COMPARED
            if subject in summaries and base in summaries
        }
        report = {
            "what": "tenuto demo",
            "about": about(),
            "arguments": {key: str(value) for key, value in vars(self._args).items() if value is not None},
            "workload": dataclasses.asdict(self._settings),
            "sizes": dataclasses.asdict(sizes),
            "took_s": round(took_s, 1),
            "passes": self._args.repeat,
            "recording": {"wall_s": recorded.wall_s, "rows": [dataclasses.asdict(row) for row in recorded.rows]},
            "ratios": {name: ratios(summaries[a], summaries[b]) for name, (a, b) in pairs.items()},
            "ranges": {
                name: ranges([one.summary for one in results[a]], [one.summary for one in results[b]])
                for name, (a, b) in pairs.items()
            },
            "schedules": schedules,
            "arms": [
                {
                    **dataclasses.asdict(of_arm[0].arm),
                    "summary": dataclasses.asdict(summaries[name]),
                    "passes": [_pass(one) for one in of_arm],
                }
                for name, of_arm in results.items()
            ],
        }
        self._args.report.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        self._console.print(f"Report: {self._args.report.resolve()} ({took_s:.0f} s in all)", highlight=False)
        if self._args.keep is not None:
            self._console.print(
                f"Recording, journals and logs: {self._folder.resolve()} (again: tenuto demo --replay {self._args.keep})",
                highlight=False,
            )


def _pooled(passes: list[ArmResult]) -> Summary:
    from tenuto_server.bench.report import pool

    return pool([(one.rows, one.summary) for one in passes])


def _pass(result: ArmResult) -> dict[str, Any]:
    return {
        "summary": dataclasses.asdict(result.summary),
        "hints_sent": result.hints,
        "command": list(result.command[1:]),
        "rows": [dataclasses.asdict(row) for row in result.rows],
    }


def _sizes_text(sizes: Sizes, recorded: Recorded) -> str:
    mib, live = 2**20, sizes.mean_live_tokens * sizes.token_bytes
    shares = [size / live for size in (sizes.device_bytes, sizes.host_bytes, sizes.disk_bytes)]
    return (
        f"Mean live KV {sizes.mean_live_tokens:,.0f} tokens ({live / mib:.0f} MiB), longest context "
        f"{sizes.longest_context:,} tokens. Every arm gets device {sizes.device_bytes / mib:.0f} MiB ({shares[0]:.0%}), "
        f"host {sizes.host_bytes / mib:.0f} MiB ({shares[1]:.0%}), disk {sizes.disk_bytes / mib:.0f} MiB ({shares[2]:.0%}): "
        f"the sessions do not all fit. Prefill makes {sizes.prefill_tokens_per_s:.0f} tokens/s here, so the tiers are "
        f"limited to {sizes.host_bandwidth / 1e6:.0f} MB/s (host) and {sizes.disk_bandwidth / 1e6:.0f} MB/s (disk), "
        f"{sizes.host_bandwidth / sizes.prefill_tokens_per_s / sizes.token_bytes:.0f} and "
        f"{sizes.disk_bandwidth / sizes.prefill_tokens_per_s / sizes.token_bytes:.0f} times that, as on a GPU machine. "
        f"The recording took {recorded.wall_s:.0f} s."
    )


def about() -> dict[str, Any]:
    """Versions, machine and commit, for a report."""
    packages = {}
    for name in ("tenuto", "torch", "numpy", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    root = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False, timeout=5).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {
        "packages": packages,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "commit": commit,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "at_unix_s": round(time.time()),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
