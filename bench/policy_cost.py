"""What a decision costs: median and 99th percentile of each policy call, in microseconds.

``python bench/policy_cost.py [sessions]``. The sessions are paused at random points of random pauses, half of them with a
forecast; every call is timed by itself in CPU time of the thread, less the cost of reading the clock. "cold" calls meet
distributions that no call before has met.
"""

from __future__ import annotations

import math
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "harness"), str(ROOT / "server")]

from tenuto.wire import Forecast, PauseKind  # noqa: E402
from tenuto_server.policy import PauseStats, make_policy  # noqa: E402
from tenuto_server.policy.index import _cells, mixture  # noqa: E402
from tenuto_server.policy.views import CostView, ExtentView, PauseView, SystemView, TierView  # noqa: E402

SYSTEM = SystemView(
    (
        TierView("device", 8_000, 0, 1e-9, 0.0),
        TierView("host", 40_000, 100, 0.0, 1e-4),
        TierView("disk", 400_000, 100_000, 0.0, 1e-3),
    ),
    CostView(1e-3, 1e-7, 0.5, 16, 22_528 * 16, 0.005),
)
KINDS: tuple[PauseKind, ...] = ("tool", "tool", "tool", "human", "unknown")


def paused(rnd: random.Random) -> PauseView:
    kind = rnd.choice(KINDS)
    p50 = math.exp(rnd.gauss(math.log(10.0), 1.2))
    said = Forecast(p50_s=p50, p90_s=p50 * 3.0) if rnd.random() < 0.5 else None
    return PauseView(
        f"tenant {rnd.randrange(5)}",
        kind,
        f"tool {rnd.randrange(20)}" if kind == "tool" else None,
        math.exp(rnd.gauss(math.log(10.0), 1.5)),
        (("tool", 20), ("human", 3)),
        said,
        turns=5,
        context_tokens=rnd.randrange(100, 100_000),
    )


def taught(rnd: random.Random, pauses: int) -> PauseStats:
    stats = PauseStats()
    for _ in range(pauses):
        view = paused(rnd)
        length = math.exp(rnd.gauss(math.log(10.0), 1.2))
        stats.observe(view.tenant, view.kind, view.key, length, view.forecast)
    return stats


def timed(call: Callable[[int], object], n: int, prepare: Callable[[], None] | None = None) -> tuple[float, float]:
    """Microseconds of ``call(i)`` for i < n: median, 99th percentile."""
    clock = time.thread_time_ns  # other processes do not count
    empty = sorted(-(clock() - clock()) for _ in range(1001))[500]
    taken = []
    for i in range(n):
        if prepare is not None:
            prepare()
        began = clock()
        call(i)
        taken.append(clock() - began - empty)
    taken.sort()
    return taken[n // 2] / 1e3, taken[n * 99 // 100] / 1e3


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rnd = random.Random(1)
    stats = taught(rnd, 5_000)
    views = [paused(rnd) for _ in range(n)]
    extents = [
        ExtentView(
            rnd.randrange(0, 100_000, 16), rnd.randrange(1, 4_000), 1, rnd.expovariate(20.0), rnd.random() * 1e4, 3, ()
        )
        for _ in range(n)
    ]
    ours, deaf = make_policy("tenuto"), make_policy("tenuto:none")

    def forget() -> None:
        mixture.cache_clear()
        _cells.cache_clear()

    numbers = tuple(float(i) for i in range(64))
    rows = [
        # Tells a busy machine from a slow call.
        ("yardstick: hash 64 floats", timed(lambda i: hash(numbers), n)),
        ("retention, tenuto", timed(lambda i: ours.retention(views[i], stats, SYSTEM), n)),
        ("retention, tenuto, again", timed(lambda i: ours.retention(views[i], stats, SYSTEM), n)),
        ("retention, tenuto:none", timed(lambda i: deaf.retention(views[i], stats, SYSTEM), n)),
        ("retention, tenuto, cold", timed(lambda i: ours.retention(views[i], stats, SYSTEM), n // 10, forget)),
        ("priority", timed(lambda i: ours.priority(extents[i], "device", SYSTEM), n)),
        ("keep_below", timed(lambda i: ours.keep_below(extents[i], "device", SYSTEM), n)),
        ("offload_early", timed(lambda i: ours.offload_early(extents[i], SYSTEM), n)),
        ("split", timed(lambda i: ours.split(extents[i].start, extents[i].blocks, "host", SYSTEM), n)),
        (
            "observe",
            timed(lambda i: stats.observe(views[i].tenant, views[i].kind, views[i].key, 9.0, views[i].forecast), n),
        ),
    ]
    print(f"Python {platform.python_version()}, {platform.machine()}, {n} paused sessions; microseconds a call")
    print(f"{'':28}{'median':>10}{'p99':>10}")
    for name, (median, p99) in rows:
        print(f"{name:28}{median:10.2f}{p99:10.2f}")


if __name__ == "__main__":
    main()
