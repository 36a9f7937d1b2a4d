"""Many simulations side by side: every policy at every capacity for every seed, in parallel processes.

Owns the worker processes. Rows come back in a fixed order whatever finishes first, so that the same arguments give the
same bytes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

from tenuto_server.sim.formats import read
from tenuto_server.sim.study import Setup, simulate
from tenuto_server.sim.traces import Trace, shrunk
from tenuto_server.sim.workload import Workload, steady

Row = dict[str, Any]


@lru_cache(maxsize=2)
def _trace(source: str, shrink: float = 1.0) -> Trace:
    return read(source) if shrink == 1.0 else shrunk(_trace(source), shrink)


@lru_cache(maxsize=4)
def workload_of(
    source: str, alive: float, seed: int, window_s: float, warm_up_s: float, served: bool, shrink: float = 1.0
) -> Workload:
    """The workload of a seed: the same for every policy and capacity."""
    return steady(_trace(source, shrink), alive, seed, window_s=window_s, warm_up_s=warm_up_s, served=served)


def run_one(source: str, setup: Setup) -> Row:
    """One row, in this process."""
    s = setup
    workload = workload_of(source, s.alive, s.seed, s.window_s, s.warm_up_s, s.served, s.shrink)
    return simulate(_trace(source, s.shrink), setup, workload)


def sweep(source: str | Path, setups: Sequence[Setup], jobs: int, heard: Callable[[Setup, Row], None]) -> list[Row]:
    """Runs all ``setups`` in up to ``jobs`` processes; ``heard`` is called as each ends. Rows are in the order of
    ``setups`` and carry ``gap_closed``."""
    rows: dict[int, Row] = {}
    if jobs <= 1:
        for i, setup in enumerate(setups):
            rows[i] = run_one(str(source), setup)
            heard(setup, rows[i])
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(setups)), mp_context=context) as pool:
            # The slow ones first, so that no process idles at the end.
            order = sorted(range(len(setups)), key=lambda i: (setups[i].policy in ("oracle", "lru"), i))
            running = {pool.submit(run_one, str(source), setups[i]): i for i in order}
            for future in as_completed(running):
                i = running[future]
                rows[i] = future.result()
                heard(setups[i], rows[i])
    ordered = [rows[i] for i in range(len(setups))]
    close_gaps(ordered)
    return ordered


def close_gaps(rows: Sequence[Row]) -> None:
    """Adds ``gap_closed`` to every row: the share of the misses between LRU and the oracle, at the same capacity and seed,
    that its policy avoids. None where either was not run, or where they do not differ."""
    missed = {(row["policy"], row["capacity_frac"], row["seed"]): row["missed_tokens"] for row in rows}
    for row in rows:
        key = row["capacity_frac"], row["seed"]
        lru, oracle = missed.get(("lru", *key)), missed.get(("oracle", *key))
        gap = lru - oracle if lru is not None and oracle is not None else 0
        row["gap_closed"] = round((lru - row["missed_tokens"]) / gap, 6) if gap and lru is not None else None
