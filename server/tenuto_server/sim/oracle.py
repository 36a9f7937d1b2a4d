"""What perfect knowledge of the future would miss: furthest next use per block, keeping only what the next prompt contains.

An exact simulation of its own, not a policy: it reads the future of the workload, which no policy can. It obeys the one
rule that binds every policy: while a request is served, its whole prompt is on the device (``resident`` True). Without
that rule (``resident`` False) it bounds even systems that could compute attention without holding the KV.

Belady's rule (furthest next use goes first, "A study of replacement algorithms for a virtual-storage computer", 1966) per
block; all blocks of one session that the next prompt will contain share their next use, so a count per session is exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tenuto_server.sim.traces import COMPACTED_BELOW, Session
from tenuto_server.sim.workload import Workload, request_times


@dataclass(frozen=True, slots=True)
class Use:
    """One request, as the oracle sees it, in units. ``next_s``: when the session's next prompt comes, None: never;
    ``kept``: how much of this prompt that one will contain."""

    time_s: float
    line: int
    prompt: int
    reusable: int
    next_s: float | None
    kept: int
    counts: bool
    pause: str
    compacted: bool
    thread: str


def uses(workload: Workload, unit: int) -> list[Use]:
    """All requests of a workload whose answers take no time, in the order in which they are served."""
    found: list[tuple[float, int, int, Use]] = []
    number = 0
    for thread in workload.threads:
        times = request_times(thread.session, served=workload.served)
        begin_s = thread.start_s - times[thread.first]
        lines = [(thread.session, thread.first, begin_s)]
        for child in thread.session.children:
            if child.after - 1 >= thread.first and child.after <= len(times):
                lines.append((child.session, 0, begin_s + times[child.after - 1]))
        for session, first, start_s in lines:
            number += 1
            for order, use in enumerate(_line(session, first, start_s, number, unit, workload)):
                found.append((use.time_s, number, order, use))
    found.sort(key=lambda entry: entry[:3])
    return [use for *_, use in found if use.time_s <= workload.to_s]


def _line(session: Session, first: int, start_s: float, number: int, unit: int, workload: Workload) -> Iterator[Use]:
    times = request_times(session, served=workload.served)
    requests, length = session.requests, 0
    for i in range(first, len(requests)):
        request = requests[i]
        count = max(1, request.prompt // unit)
        shared = min(request.shared // unit, length, count - 1) if i > first else 0
        following = requests[i + 1] if i + 1 < len(requests) else None
        kept = 0
        if following is not None:
            kept = min(following.shared // unit, count, max(1, following.prompt // unit) - 1)
        time_s = start_s + times[i]
        before = requests[i - 1] if i > first else None
        yield Use(
            time_s,
            number,
            count,
            shared,
            start_s + times[i + 1] if following is not None else None,
            kept,
            i > first and time_s >= workload.from_s,
            before.pause if before is not None else "first",
            before is not None and request.prompt < COMPACTED_BELOW * before.prompt,
            session.thread,
        )
        length = count


def play(requests: list[Use], capacity: int, hear: Callable[[Use, int], None], *, resident: bool = True) -> None:
    """Serves all requests with ``capacity`` units of memory; ``hear(use, found)`` gets the units found of each."""
    held: dict[int, int] = {}
    heap: list[tuple[float, int]] = []
    due: dict[int, float] = {}
    total = 0

    def shrink(limit: int) -> None:
        nonlocal total
        while total > limit and heap:
            at, line = heap[0]
            if due.get(line) != -at or not held.get(line):
                heapq.heappop(heap)
                continue
            gone = min(held[line], total - limit)
            held[line] -= gone
            total -= gone

    for use in requests:
        found = held.pop(use.line, 0)
        due.pop(use.line, None)
        total -= found
        fits = use.prompt <= capacity
        if not fits:
            found = 0
        hear(use, min(found, use.reusable))
        if resident and fits:
            shrink(capacity - use.prompt)
        if use.next_s is not None and use.kept and fits:
            held[use.line], due[use.line] = use.kept, use.next_s
            total += use.kept
            heapq.heappush(heap, (-use.next_s, use.line))
            shrink(capacity)
