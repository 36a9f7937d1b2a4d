"""How well pauses are predicted: the client's forecaster against what published systems use, out of sample in time order.

``python bench/forecast_eval.py [--traces FOLDER] [--json FILE]``. Every pause is predicted from those before it, then learned.
Recorded in whole seconds, they are spread evenly over their second (seeded). Rivals are point forecasts; each becomes a
lognormal with the mean and spread of its own log errors so far, by kind of pause, which is more than their systems grant them:

- ``global median``: the median of all pauses so far;
- ``EWMA``: alpha 0.5 by kind, as TokenCake (2510.18586);
- ``per-tool mean``: a running mean by tool, by kind where the tool has no name, as Continuum (2511.02230).

Columns: sd of log(length / forecast median); share of lengths within the 10-90 % interval (80 % is right); mean log density of
log length (higher is better; the difference of two rows is nats per pause); median of the ratio of length to forecast, either
way.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from math import exp, log, pi, sqrt
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "harness"), str(ROOT / "server")]

from tenuto.distribution import GRID_STEP  # noqa: E402
from tenuto.forecast import PauseForecaster  # noqa: E402
from tenuto.pause_key import PauseKey  # noqa: E402
from tenuto_server.sim.formats import read  # noqa: E402
from tenuto_server.sim.markdown import insert  # noqa: E402
from tenuto_server.sim.traces import json_lines  # noqa: E402

BURN_IN = 50
SHORTEST_S = 0.02
_BASH = re.compile(r"```(?:bash|sh)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Seen:
    """One pause. ``at_s``: when it began, Unix time."""

    session: str
    key: PauseKey
    length_s: float
    at_s: float


def kvct(path: Path) -> Iterator[Seen]:
    """Gaps of recorded sessions, one session after the other. The file has no dates: each session begins at a random hour of a
    random day, so that the time of day tells nothing and its cost is part of the result."""
    rng = random.Random(1)
    for session in read(path).sessions:
        now_s = rng.uniform(0.0, 28 * 86400.0)
        for request in session.requests:
            now_s += request.service_s
            if request.pause_s is not None:
                length = max(SHORTEST_S, request.pause_s + rng.uniform(-0.5, 0.5))
                yield Seen(session.id, PauseKey.of(request.pause), length, now_s)
                now_s += length


def tracelab(path: Path) -> Iterator[Seen]:
    """Wall times of tool calls, with their commands."""
    for _, row in json_lines(path):
        for tool in row.get("tools") or ():
            key = PauseKey.of("tool", tool["tool_name"], arguments=tool.get("input") or {})
            at_s = datetime.fromisoformat(tool["emitted_at"]).timestamp()
            yield Seen(row["session_id"], key, max(SHORTEST_S, tool["tool_wall_latency_ms"] / 1e3), at_s)


def miniswe(folder: Path) -> Iterator[Seen]:
    """From one request to the next, by the command in the answer: generation included, since only requests have times."""
    for path in sorted(folder.glob("miniswe_*.jsonl.gz")):
        rows = sorted((row for _, row in json_lines(path)), key=lambda row: row["timestamp"])
        for row, following in pairwise(rows):
            found = _BASH.search(row["output"])
            key = PauseKey.of("tool", "bash", command=found[1].strip() if found else None)
            length = max(SHORTEST_S, (following["timestamp"] - row["timestamp"]) / 1e6)
            yield Seen(row["session_id"], key, length, row["timestamp"] / 1e6)


class Tenuto:
    """The client's forecaster."""

    name = "tenuto.forecast"

    def __init__(self) -> None:
        self._now_s = 0.0
        self._forecaster = PauseForecaster(clock=lambda: self._now_s)

    def judge(self, seen: Seen) -> tuple[float, float, float, float]:
        """(median, 10 %, 90 %, log density of log length)."""
        self._now_s = seen.at_s
        told = self._forecaster.distribution(seen.key, session=seen.session)
        low, high = seen.length_s * exp(-GRID_STEP / 2), seen.length_s * exp(GRID_STEP / 2)
        density = max(1e-12, told.survival(low) - told.survival(high)) / GRID_STEP
        return told.quantile(0.5), told.quantile(0.1), told.quantile(0.9), log(density)

    def learn(self, seen: Seen) -> None:
        """A pause ended."""
        self._now_s = seen.at_s + seen.length_s
        self._forecaster.observe(seen.key, seen.length_s, session=seen.session)


@dataclass(slots=True)
class Errors:
    """Running mean and variance of log errors."""

    n: int = 0
    mean: float = 0.0
    square: float = 0.0

    def add(self, error: float) -> None:
        """One more."""
        self.n += 1
        step = error - self.mean
        self.mean += step / self.n
        self.square += step * (error - self.mean)

    @property
    def sd(self) -> float:
        """At least 0.1; 1.5 before two are known."""
        return max(0.1, sqrt(self.square / (self.n - 1))) if self.n > 1 else 1.5


@dataclass(slots=True)
class Rival:
    """A point forecast made a lognormal by its own errors. Subclasses say ``point`` and learn in ``update``."""

    name: str = ""
    errors: defaultdict[str, Errors] = field(default_factory=lambda: defaultdict(Errors))

    def point(self, seen: Seen) -> float:
        """Seconds."""
        raise NotImplementedError

    def update(self, seen: Seen) -> None:
        """A pause ended."""
        raise NotImplementedError

    def judge(self, seen: Seen) -> tuple[float, float, float, float]:
        """(median, 10 %, 90 %, log density of log length)."""
        errors = self.errors[seen.key.kind]
        middle, sd = log(self.point(seen)) + errors.mean, errors.sd
        z = (log(seen.length_s) - middle) / sd
        spread = 1.2815515655446004 * sd
        return exp(middle), exp(middle - spread), exp(middle + spread), -0.5 * z * z - log(sd * sqrt(2 * pi))

    def learn(self, seen: Seen) -> None:
        """A pause ended."""
        self.errors[seen.key.kind].add(log(seen.length_s) - log(self.point(seen)))
        self.update(seen)


@dataclass(slots=True)
class GlobalMedian(Rival):
    """The median of everything."""

    name: str = "global median"
    lengths: list[float] = field(default_factory=list)

    def point(self, seen: Seen) -> float:
        return self.lengths[len(self.lengths) // 2] if self.lengths else 10.0

    def update(self, seen: Seen) -> None:
        insort(self.lengths, seen.length_s)


@dataclass(slots=True)
class Ewma(Rival):
    """Exponentially weighted mean by kind."""

    name: str = "EWMA 0.5 by kind"
    means: dict[str, float] = field(default_factory=dict)

    def point(self, seen: Seen) -> float:
        return self.means.get(seen.key.kind, 10.0)

    def update(self, seen: Seen) -> None:
        before = self.means.get(seen.key.kind)
        self.means[seen.key.kind] = seen.length_s if before is None else 0.5 * (before + seen.length_s)


@dataclass(slots=True)
class ToolMean(Rival):
    """Running mean by tool."""

    name: str = "per-tool mean"
    sums: dict[str, tuple[int, float]] = field(default_factory=dict)

    def point(self, seen: Seen) -> float:
        n, total = self.sums.get(seen.key.tool or seen.key.kind, (0, 0.0))
        return total / n if n else 10.0

    def update(self, seen: Seen) -> None:
        key = seen.key.tool or seen.key.kind
        n, total = self.sums.get(key, (0, 0.0))
        self.sums[key] = n + 1, total + seen.length_s


def evaluate(stream: Sequence[Seen], burn_in: int = BURN_IN) -> list[dict[str, float | str]]:
    """One row per kind and forecaster."""
    rows: list[dict[str, float | str]] = []
    for forecaster in (Tenuto(), GlobalMedian(), Ewma(), ToolMean()):
        found: defaultdict[str, list[tuple[float, bool, float]]] = defaultdict(list)
        for number, seen in enumerate(stream):
            median, low, high, density = forecaster.judge(seen)
            if number >= burn_in:
                error = log(seen.length_s / median)
                found[seen.key.kind].append((error, low <= seen.length_s <= high, density))
            forecaster.learn(seen)
        for kind, scores in sorted(found.items()):
            errors = [error for error, _, _ in scores]
            mean = sum(errors) / len(errors)
            rows.append(
                {
                    "kind": kind,
                    "forecaster": forecaster.name,
                    "pauses": len(scores),
                    "log_sd": sqrt(sum((e - mean) ** 2 for e in errors) / len(errors)),
                    "within_80": sum(inside for _, inside, _ in scores) / len(scores),
                    "log_score": sum(density for _, _, density in scores) / len(scores),
                    "typical_factor": exp(sorted(abs(e) for e in errors)[len(errors) // 2]),
                }
            )
    return sorted(rows, key=lambda row: str(row["kind"]))


def table(name: str, rows: list[dict[str, float | str]]) -> str:
    """A table in Markdown."""
    lines = [
        f"{name}:",
        "",
        "| pause | forecaster | n | log-error sd | in 80 % interval | log-score | typical factor |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = f"{row['log_sd']:.3f} | {100 * float(row['within_80']):.1f} % | {row['log_score']:.3f}"
        lines.append(
            f"| {row['kind']} | {row['forecaster']} | {row['pauses']} | {figures} | {row['typical_factor']:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints a table per source."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--traces", type=Path, default=ROOT.parent / "shared" / "traces", help="folder of the shared traces"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--markdown", metavar="FILE[#PLACE]", help="write the tables; into a marked place of a document"
    )
    args = parser.parse_args(argv)
    sources = {
        "KVCT: gaps as a server sees them": (list(kvct(args.traces / "agent_sessions.jsonl.gz")), BURN_IN),
        "mini-SWE: request to request": (list(miniswe(args.traces)), 20),
        "TraceLab example: tool calls": (list(tracelab(args.traces / "tracelab_round_trace.jsonl")), 5),
    }
    tables = {name: evaluate(stream, burn_in) for name, (stream, burn_in) in sources.items()}
    text = "\n\n".join(table(name, rows) for name, rows in tables.items())
    print(text)
    if args.markdown is not None:
        path, _, place = args.markdown.partition("#")
        insert(Path(path), place, f"{text}\n\nGenerated by `python bench/forecast_eval.py`.\n")
    if args.json is not None:
        args.json.write_text(json.dumps(tables, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
