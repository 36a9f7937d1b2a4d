"""A steady state made of recorded sessions: who starts when, the measured window, and the mean live KV in it.

Each session is used several times under new names. Starts are spread at random over the whole time during which the
session could still touch the window, so that at every moment the mix of young and old sessions is that of a system that
has run for ever; a session that would have begun before the simulation does enters at the last request it made before.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from tenuto_server.errors import ConfigError
from tenuto_server.sim.traces import Session, Trace

WARM_UP_S = 4 * 3600.0
WINDOW_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Thread:
    """One use of a session. ``start_s``: when its request number ``first`` is sent; times count from the simulation's
    begin."""

    name: str
    session: Session
    start_s: float
    first: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """``threads`` by start. Only requests sent within ``from_s .. to_s`` count. ``alive``: time-average number of main
    sessions alive in the window; ``live_tokens``: time-average of the contexts of all sessions alive, tokens. ``served``:
    requests are as far apart as they were recorded, the answers' time included."""

    threads: tuple[Thread, ...]
    from_s: float
    to_s: float
    alive: float
    live_tokens: float
    seed: int
    served: bool = False


def request_times(session: Session, *, served: bool) -> list[float]:
    """When each request is sent, seconds from the first. ``served``: answers take their recorded time, else none."""
    times = [0.0]
    for request in session.requests[:-1]:
        times.append(times[-1] + (request.away_s(served=served) or 0.0))
    return times


def steady(
    trace: Trace,
    alive: float,
    seed: int,
    *,
    window_s: float = WINDOW_S,
    warm_up_s: float = WARM_UP_S,
    served: bool = False,
) -> Workload:
    """Sessions of a trace in steady state, ``alive`` of them at a time on average. Raises ``ConfigError`` where no session
    of the trace lives at all (every one is a single request)."""
    times = [request_times(session, served=served) for session in trace.sessions]
    mean_s = sum(at[-1] for at in times) / len(times)
    if mean_s <= 0.0:
        raise ConfigError(f"{trace.name}: no session has a pause; a steady state needs sessions that live for a while")
    rng = random.Random(f"{seed}/starts")
    per_session = alive / mean_s / len(times)
    total_s = warm_up_s + window_s
    threads, owed = [], rng.random()
    for i in sorted(range(len(times)), key=lambda _: rng.random()):
        session, at = trace.sessions[i], times[i]
        span_s = at[-1] + total_s
        owed += per_session * span_s
        count, owed = int(owed), owed - int(owed)
        for k in range(count):
            begin_s = (k + rng.random()) / count * span_s - at[-1]
            first = max(0, bisect_right(at, -begin_s) - 1)
            threads.append(Thread(f"{session.id}#{k}", session, begin_s + at[first], first))
    shift_s = max(0.0, -min((thread.start_s for thread in threads), default=0.0))
    threads = [Thread(t.name, t.session, t.start_s + shift_s, t.first) for t in threads]
    threads.sort(key=lambda thread: (thread.start_s, thread.name))
    from_s = shift_s + warm_up_s
    return _measured(tuple(threads), from_s, from_s + window_s, seed, served)


def arrivals(trace: Trace, seed: int, *, served: bool = True) -> Workload:
    """The trace as it was recorded: every session once, at its own time, all of it measured."""
    starts = trace.starts_s or (0.0,) * len(trace.sessions)
    threads = tuple(
        Thread(f"{session.id}#0", session, start)
        for start, session in sorted(zip(starts, trace.sessions, strict=True), key=_start)
    )
    end_s = max(t.start_s + request_times(t.session, served=served)[-1] for t in threads)
    return _measured(threads, 0.0, end_s + 1.0, seed, served)


def _start(pair: tuple[float, Session]) -> tuple[float, str]:
    return pair[0], pair[1].id


def _measured(threads: tuple[Thread, ...], from_s: float, to_s: float, seed: int, served: bool) -> Workload:
    alive_s = live = 0.0
    for thread in threads:
        for session, start_s, first in _lines(thread, served):
            at = request_times(session, served=served)
            for i in range(first, len(at) - 1):
                low, high = start_s + at[i] - at[first], start_s + at[i + 1] - at[first]
                held_s = max(0.0, min(high, to_s) - max(low, from_s))
                live += held_s * session.requests[i].prompt
                if session.thread == "main":
                    alive_s += held_s
    window_s = to_s - from_s
    return Workload(threads, from_s, to_s, alive_s / window_s, live / window_s, seed, served)


def _lines(thread: Thread, served: bool) -> Iterator[tuple[Session, float, int]]:
    """A session and its subagents as (session, start, first request)."""
    yield thread.session, thread.start_s, thread.first
    at = request_times(thread.session, served=served)
    for child in thread.session.children:
        parent = child.after - 1
        if thread.first <= parent < len(at):
            yield child.session, thread.start_s + at[parent] - at[thread.first], 0
