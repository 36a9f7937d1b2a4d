"""What bounds a level of knowledge: the retention index with better learning than any server can have, on the same workload.

``python bench/policy_bound.py TRACE [--knowledge none] [--hints late:30] [--seed 1,2,3] [--alive 60] [--capacity-frac
0.1,0.2,0.33,0.5]`` replays
the one-tier study of ``tenuto simulate`` without the engine: each pause gets its curve when it begins, room is taken from
the lowest index of that moment, the end of a context first. What is printed is the share of the gap from LRU to the
oracle that is closed when the statistics are

- ``as it goes``: learned from nothing while the workload runs, as in the server. Differs from ``tenuto simulate`` only by
  the engine's own economies (an index is asked for again when it has moved by a fifth);
- ``beforehand``: taught the whole workload once before it is played: the same questions, answered with hindsight (and by
  these very sessions);
- ``habits known``: beforehand, and each session's own mean log pause of each kind, its future included, is known from its
  start: all that any history of the session could teach of its pace;
- ``ends known`` (where no ends are told): beforehand, and whether a session returns is known, but not when.

The last two are bounds that no server reaches. CPU seconds are given with each row; of several
seeds their mean comes last.

With ``--hints`` other than ``on`` hints come late or not at all (each by itself, as in ``tenuto simulate``), and beside the share of
the gap stands, as ``gain kept``, the share of what the same hints would have gained over nothing told, had they all come at once.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, log
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "harness"), str(ROOT / "server")]

from tenuto.wire import Forecast, PauseKind  # noqa: E402
from tenuto_server.policy.calibration import GIVE_UP_S, PauseStats  # noqa: E402
from tenuto_server.policy.fates import depth_of  # noqa: E402
from tenuto_server.policy.index import Curve  # noqa: E402
from tenuto_server.policy.pace import Rhythm, Traits, next_habit, rhythm_of  # noqa: E402
from tenuto_server.policy.retention import pause_curve  # noqa: E402
from tenuto_server.policy.views import PauseView  # noqa: E402
from tenuto_server.sim import oracle  # noqa: E402
from tenuto_server.sim.formats import read  # noqa: E402
from tenuto_server.sim.knowledge import Delivery, Knowledge, PauseScale, parse_policy  # noqa: E402
from tenuto_server.sim.traces import COMPACTED_BELOW, Session, Trace  # noqa: E402
from tenuto_server.sim.workload import Workload, request_times, steady  # noqa: E402

UNIT = 64
TENANT = "sim"
FORECAST_MAX_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and the pause after it, sizes in units. ``next_s``: when the session returns, None: never. ``kept``: how
    much of the prompt the next one begins with; ``compacted``: it is below 0.6 of this one. ``*_heard_s``: how far into the pause
    the server hears of the forecast, the compaction and the end, if it is told of such things at all; inf: never."""

    time_s: float
    line: int
    prompt: int
    shared: int
    counts: bool
    kind: PauseKind
    answer: int
    next_s: float | None
    kept: int
    compacted: bool
    forecast: Forecast | None
    forecast_heard_s: float = 0.0
    compaction_heard_s: float = 0.0
    end_heard_s: float = 0.0

    @property
    def last(self) -> bool:
        """The session does not return."""
        return self.next_s is None

    def hearings_s(self) -> list[float]:
        """When in the pause anything new is heard, its start first."""
        return sorted({0.0, self.forecast_heard_s, self.compaction_heard_s, self.end_heard_s} - {inf})

    def size(self, know: Knowledge, after_s: float) -> int:
        """How much of the context is worth keeping, as far as is known by then."""
        return self.kept if know.compaction and self.compacted and self.compaction_heard_s <= after_s else self.prompt

    def said(self, after_s: float) -> Forecast | None:
        """The forecast, if it has been heard by then."""
        return self.forecast if self.forecast_heard_s <= after_s else None


@dataclass(frozen=True, slots=True)
class Stage:
    """What is known of a pause from ``from_s`` seconds on. ``curve``: None when it is known to be the last."""

    from_s: float
    size: int
    curve: Curve | None
    intact: float = 1.0


@dataclass(slots=True)
class Line:
    """A session under way and its open pause."""

    habits: dict[PauseKind, float] = field(default_factory=dict)
    lasts: dict[PauseKind, float] = field(default_factory=dict)
    turn: Turn | None = None
    rhythm: Rhythm | None = None
    traits: Traits | None = None
    given_up: bool = False


def turns(trace: Trace, workload: Workload, know: Knowledge, delivery: Delivery) -> list[Turn]:
    """All requests of the workload in the order in which they are sent; forecasts are those of ``tenuto simulate``."""
    scale = PauseScale.of(trace.sessions if know.r2 is not None else (), served=True)
    found: list[Turn] = []
    number = 0
    for thread in workload.threads:
        times = request_times(thread.session, served=True)
        begin_s = thread.start_s - times[thread.first]
        lines = [(thread.name, thread.session, thread.first, begin_s)]
        children = [c for c in thread.session.children if thread.first < c.after <= len(times)]
        for k, child in enumerate(children, start=1):
            lines.append((f"{thread.name}/{k}", child.session, 0, begin_s + times[child.after - 1]))
        for name, session, first, start_s in lines:
            number += 1
            rngs = Random(f"{workload.seed}/{name}"), Random(f"{workload.seed}/{name}/delivery")
            found += _line(session, first, start_s, number, workload, know, delivery, scale, rngs)
    found.sort(key=lambda turn: (turn.time_s, turn.line))
    return [turn for turn in found if turn.time_s <= workload.to_s]


def _line(
    session: Session,
    first: int,
    start_s: float,
    number: int,
    workload: Workload,
    know: Knowledge,
    delivery: Delivery,
    scale: PauseScale,
    rngs: tuple[Random, Random],
) -> Iterator[Turn]:
    times, length = request_times(session, served=True), 0
    for i, request in list(enumerate(session.requests))[first:]:
        count = max(1, request.prompt // UNIT)
        shared = min(request.shared // UNIT, length, count - 1) if i > first else 0
        after = session.requests[i + 1] if i + 1 < len(session.requests) else None
        kept = min(after.shared // UNIT, count, max(1, after.prompt // UNIT) - 1) if after else 0
        forecast = None
        if know.r2 is not None:
            p50_s, p90_s = scale.forecast(request.pause, request.away_s(served=True), know.r2, rngs[0])
            forecast = Forecast(p50_s=min(FORECAST_MAX_S, p50_s), p90_s=min(FORECAST_MAX_S, p90_s))
        heard = [min(delivery.delays_s(rngs[1]), default=inf) for _ in range(3)]
        yield Turn(
            start_s + times[i],
            number,
            count,
            shared,
            i > first and start_s + times[i] >= workload.from_s,
            request.pause,
            request.out,
            start_s + times[i + 1] if after else None,
            kept,
            after is not None and after.prompt < COMPACTED_BELOW * request.prompt,
            forecast,
            *heard,
        )
        length = count


def habits_of(played: list[Turn]) -> dict[tuple[int, PauseKind], float]:
    """Each session's mean log pause of each kind, all its pauses counted."""
    logs: defaultdict[tuple[int, PauseKind], list[float]] = defaultdict(list)
    for turn in played:
        if turn.next_s is not None:
            logs[turn.line, turn.kind].append(log(max(1.0, turn.next_s - turn.time_s)))
    return {key: sum(values) / len(values) for key, values in logs.items()}


class Pass:
    """One pass over the turns that teaches ``stats`` and says of every pause what is known of it and when. ``habits``: the
    sessions' own means, where they are known; ``ends``: whether a session returns is known."""

    def __init__(self, stats: PauseStats, know: Knowledge, *, habits: bool = False, ends: bool = False) -> None:
        self._stats, self._know, self._habits, self._ends = stats, know, habits, ends
        self._lines: defaultdict[int, Line] = defaultdict(Line)
        self._waits: list[tuple[float, int, float]] = []

    def run(self, played: list[Turn]) -> list[list[Stage]]:
        return [[self._stage(turn, from_s) for from_s in turn.hearings_s()] for turn in self._teach(played)]

    def teach(self, played: list[Turn]) -> None:
        """The same without any curve, which is most of the time it takes."""
        for _ in self._teach(played):
            pass

    def _teach(self, played: list[Turn]) -> Iterator[Turn]:
        """Each turn when its pause has begun."""
        known = habits_of(played) if self._habits else {}
        for turn in played:
            while self._waits and self._waits[0][0] <= turn.time_s:
                self._give_up(*heapq.heappop(self._waits))
            line = self._lines[turn.line]
            if line.turn is not None:
                self._end(line, turn)
            self._begin(line, turn, known.get((turn.line, turn.kind)))
            yield turn

    def _give_up(self, at_s: float, number: int, began_s: float) -> None:
        line = self._lines[number]
        if (turn := line.turn) is not None and turn.time_s == began_s:
            line.given_up = True
            self._stats.observe_censored(
                TENANT, turn.kind, GIVE_UP_S, None, turn.said(GIVE_UP_S), rhythm=line.rhythm, traits=line.traits
            )

    def _end(self, line: Line, turn: Turn) -> None:
        before = line.turn
        assert before is not None
        length_s, kind = turn.time_s - before.time_s, before.kind
        self._stats.observe(
            TENANT,
            kind,
            None,
            length_s,
            before.said(length_s),
            rhythm=line.rhythm,
            given_up=line.given_up,
            traits=line.traits,
            intact=min(1.0, turn.shared / max(1, before.size(self._know, length_s))),
        )
        line.habits[kind] = next_habit(line.habits.get(kind), kind, length_s)
        line.lasts[kind] = log(max(length_s, 1.0))

    def _told_last(self, turn: Turn, after_s: float) -> bool:
        """Whether the pause is known by then to be the last."""
        return turn.last and (self._ends or (self._know.end and turn.end_heard_s <= after_s))

    def _begin(self, line: Line, turn: Turn, habit: float | None) -> None:
        kind = turn.kind
        line.traits = Traits(
            habit if habit is not None else line.habits.get(kind), line.lasts.get(kind), turn.answer, turn.prompt
        )
        line.rhythm, line.turn, line.given_up = rhythm_of(kind, line.traits), turn, False
        if self._told_last(turn, GIVE_UP_S):
            line.turn = None
            self._stats.observe_end(TENANT, kind, None, turn.said(turn.end_heard_s))
        else:
            heapq.heappush(self._waits, (turn.time_s + GIVE_UP_S, turn.line, turn.time_s))

    def _stage(self, turn: Turn, from_s: float) -> Stage:
        size = turn.size(self._know, from_s)
        if self._told_last(turn, from_s):
            return Stage(from_s, 0, None)
        kind, stats, said, context = turn.kind, self._stats, turn.said(from_s), max(1, size)
        rhythm = self._lines[turn.line].rhythm
        view = PauseView(TENANT, kind, None, 0.0, forecast=said, context_tokens=context, rhythm=rhythm)
        curve, _, _ = pause_curve(view, stats, hear=said is not None)
        return Stage(from_s, size, curve, stats.p_intact(kind, depth_of(context)))


@dataclass(slots=True)
class Held:
    """A paused session's KV: ``size`` units of it are there."""

    since_s: float
    size: int
    stages: list[Stage]
    at: int = 0

    def index(self, now_s: float) -> float:
        """What a unit of it is worth per second, up to a factor."""
        stage = self.stages[self.at]
        return stage.curve.index_at(now_s - self.since_s) * stage.intact if stage.curve is not None else 0.0

    def hear(self) -> int:
        """The next stage begins; returns how much of what is held is known to be useless from now on."""
        self.at += 1
        gone = max(0, self.size - self.stages[self.at].size)
        self.size -= gone
        return gone


def play(played: list[Turn], stages: list[list[Stage]], capacity: int) -> int:
    """Units of reusable prefix that are missed with so much memory."""
    held: dict[int, Held] = {}
    news: list[tuple[float, int, float]] = []  # (when, line, since when it pauses)
    used = missed = 0
    for turn, known in zip(played, stages, strict=True):
        while news and news[0][0] <= turn.time_s:
            _, line, since_s = heapq.heappop(news)
            if (there := held.get(line)) is not None and there.since_s == since_s:
                used -= there.hear()
        before = held.pop(turn.line, None)
        found = before.size if before is not None else 0
        used -= found
        if turn.counts:
            missed += turn.shared - min(found, turn.shared)
        if turn.prompt > capacity:
            continue
        if used > capacity - turn.prompt:
            for _, line in sorted((there.index(turn.time_s), line) for line, there in held.items()):
                gone = min(held[line].size, used - (capacity - turn.prompt))
                used -= gone
                held[line].size -= gone
                if held[line].size == 0:
                    del held[line]
                if used <= capacity - turn.prompt:
                    break
        if known[0].size:
            held[turn.line] = Held(turn.time_s, known[0].size, known)
            used += known[0].size
            for stage in known[1:]:
                heapq.heappush(news, (turn.time_s + stage.from_s, turn.line, turn.time_s))
    return missed


def lru(played: list[Turn], capacity: int) -> int:
    """The same for least recently used blocks; what a new prompt no longer contains keeps its place in the order."""
    order: list[tuple[float, int]] = []
    sizes: dict[int, int] = {}
    newest: dict[int, tuple[int, float]] = {}
    used = missed = 0
    for number, turn in enumerate(played):
        before, before_s = newest.get(turn.line, (-1, 0.0))
        held = sizes.pop(before, 0)
        found = min(held, turn.shared)
        used -= found
        if held > found:
            sizes[-2 - number] = held - found
            heapq.heappush(order, (before_s, -2 - number))
        if turn.counts:
            missed += turn.shared - found
        while used > capacity - turn.prompt and order:
            _, oldest = order[0]
            gone = min(sizes.get(oldest, 0), used - (capacity - turn.prompt))
            used -= gone
            if gone:
                sizes[oldest] -= gone
            if not sizes.get(oldest):
                sizes.pop(oldest, None)
                heapq.heappop(order)
        newest[turn.line], sizes[number] = (number, turn.time_s), turn.prompt
        used += turn.prompt
        heapq.heappush(order, (turn.time_s, number))
    return missed


def belady(workload: Workload, capacity: int) -> int:
    """The same for the oracle of ``tenuto simulate``."""
    missed = 0

    def hear(use: oracle.Use, found: int) -> None:
        nonlocal missed
        if use.counts:
            missed += use.reusable - found

    oracle.play(oracle.uses(workload, UNIT), capacity, hear)
    return missed


def measure(
    trace: Trace, know: Knowledge, delivery: Delivery, seed: int, alive: float, fractions: list[float]
) -> Iterator[tuple[str, list[float], float]]:
    """(row, per cent at each capacity, CPU seconds) for one seed."""
    workload = steady(trace, alive, seed, served=True)
    played = turns(trace, workload, know, delivery)
    sizes = [max(8, int(fraction * workload.live_tokens / UNIT)) for fraction in fractions]
    ends = [(lru(played, size), belady(workload, size)) for size in sizes]
    print(f"seed {seed}, {workload.alive:.1f} alive, {len(played)} turns")
    rows: list[tuple[str, bool, dict[str, bool]]] = [
        ("as it goes", False, {}),
        ("beforehand", True, {}),
        ("habits known", True, {"habits": True}),
    ]
    if not know.end:
        rows.append(("ends known", True, {"ends": True}))
    if delivery.kind != "on":
        rows = rows[:2]
    for name, taught, more in rows:

        def missed(
            known: Knowledge, told: list[Turn], taught: bool = taught, more: dict[str, bool] = more
        ) -> list[int]:
            stats = PauseStats()
            if taught:
                Pass(stats, known, **more).teach(told)
            stages = Pass(stats, known, **more).run(told)
            return [play(told, stages, size) for size in sizes]

        began_s = time.process_time()
        found = missed(know, played)
        shares = [100.0 * (worst - n) / (worst - best) for n, (worst, best) in zip(found, ends, strict=True)]
        yield name, shares, time.process_time() - began_s
        if delivery.kind != "on":
            began_s = time.process_time()
            none = missed(Knowledge(), turns(trace, workload, Knowledge(), Delivery()))
            on = missed(know, turns(trace, workload, know, Delivery()))
            kept = [100.0 * (a - b) / (a - c) for a, b, c in zip(none, found, on, strict=True)]
            yield "  gain kept", kept, time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--knowledge", default="none", help="as after tenuto: in tenuto simulate")
    parser.add_argument("--hints", default="on", help="on, late:SECONDS or lost:SHARE, as in tenuto simulate")
    parser.add_argument("--seed", default="1", help="one or several, as 1,2,3")
    parser.add_argument("--alive", type=float, default=60.0)
    parser.add_argument("--capacity-frac", default="0.1,0.2,0.33,0.5")
    asked = parser.parse_args()
    know, delivery = parse_policy(f"tenuto:{asked.knowledge}")[1], Delivery.parse(asked.hints)
    if delivery.kind not in ("on", "late", "lost"):
        parser.error(f"--hints {asked.hints}: on, late:SECONDS or lost:SHARE")
    trace = read(str(asked.trace))
    fractions = [float(text) for text in asked.capacity_frac.split(",")]
    seeds = [int(text) for text in asked.seed.split(",")]
    print(asked.knowledge, "" if asked.hints == "on" else asked.hints)
    print(f"{'':14}" + "".join(f"{fraction:>8g}" for fraction in fractions) + "    mean   CPU s")
    found: defaultdict[str, list[tuple[list[float], float]]] = defaultdict(list)
    for seed in seeds:
        for name, shares, cpu_s in measure(trace, know, delivery, seed, asked.alive, fractions):
            found[name].append((shares, cpu_s))
            _print(name, shares, cpu_s)
    if len(seeds) > 1:
        print(f"mean of seeds {asked.seed}")
        for name, rows in found.items():
            shares = [sum(values) / len(rows) for values in zip(*(row for row, _ in rows), strict=True)]
            _print(name, shares, sum(cpu_s for _, cpu_s in rows))


def _print(name: str, shares: list[float], cpu_s: float) -> None:
    figures = "".join(f"{share:8.1f}" for share in (*shares, sum(shares) / len(shares)))
    print(f"{name:14}{figures}{cpu_s:8.0f}", flush=True)


if __name__ == "__main__":
    main()
