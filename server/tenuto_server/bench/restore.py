"""``tenuto bench restore``: time to first token after a pause, by where the KV is when the session returns.

A session's prefix is computed (``recompute``: what it would cost to have lost it), then the session returns again and again with
32 new tokens, its blocks having been moved meanwhile: on the device, on disk, prefetched from disk, in host memory. Each return
from below has a twin that finds everything on the device, right before it or right after it in turn; ratios are of such pairs.
For ``disk`` the files are out of the page cache (synced, then posix_fadvise(DONTNEED)), for ``disk-cached`` in it; both is
checked. A return that did not find its blocks where they should be is not counted, but shown.

After each cold return as many bytes are read from the same files past the page cache: a restore is bound by what that takes.
Under load, other streams decode all the while.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tenuto_server.bench import page_cache
from tenuto_server.bench.endpoint import Endpoint, EndpointFailed
from tenuto_server.bench.paired import METHOD, ratio_of
from tenuto_server.bench.prompts import Prompts
from tenuto_server.bench.serving import Serving, add_server_options, run_bench, serving

WAYS = ("recompute", "device", "disk", "disk-cached", "prefetched", "host")
"""In this order: what has come back keeps its lower copy, and host memory is asked before the disk."""

NEW_TOKENS = 32
SLACK_TOKENS = 64
"""So many tokens may be found elsewhere: the end of the last turn lies in a block that is not full."""

_FOUND_SHARE = 0.5
"""At least so much of a prefix must come from where it should; a restore may compute the front while the rest loads."""


_LEFT_SHARE_MAX = 0.05
"""More of the files than that in memory, and a read from the disk has not been one; less than the rest of it, and one from
memory has not."""

_LOAD_PROMPT, _LOAD_TOKENS = 64, 256
_PREFETCH_S_MAX = 30.0


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 1: a server failed; 2: wrong usage."""
    return run_bench(argv, _parser(), _measure, _print)


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="tenuto bench restore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prefix", type=numbers, default=[1024, 4096, 8000], help="tokens (default: 1024,4096,8000)")
    add("--load", type=numbers, default=[0, 4], help="streams that decode meanwhile (default: 0,4)")
    add("--rounds", type=int, default=3, help="prefixes of each length (default: 3)")
    add("--repeats", type=int, default=4, help="returns to each place in a round (default: 4)")
    add_server_options(parser)
    return parser


@dataclass
class Found:
    """Values of one length under one load: seconds by way; ``pairs``: by way, of a return and its twin on the device, the
    quotient of their seconds; ``cached``: shares of the files that were still in memory where they should not have been;
    ``other``: returns that found their blocks elsewhere, or their files in memory; ``disk_s``: what reading as many bytes as a
    cold return loaded took without a server; ``loaded``: those bytes."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    pairs: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS[2:]})
    cached: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from tenuto_server.bench.demo import about

    if args.url:
        raise EndpointFailed("--url: this needs a server of its own, whose disk folder it can reach")
    flags = ["--speculate", "0", "--device-bytes", "2GiB", "--host-bytes", "1GiB"]
    flags += ["--disk-bytes", "2GiB"]
    load_before = os.getloadavg()[0]
    rows = []
    with serving(args, flags, disk=True) as served:
        prompts = Prompts(served.endpoint)
        served.endpoint.stream(prompts.take(256), 8)  # what is done once is done now
        room = served.endpoint.context_tokens or sys.maxsize
        extra = NEW_TOKENS + SLACK_TOKENS
        if max(args.prefix) + extra > room:
            raise EndpointFailed(f"--prefix: a context has {room} tokens here, {extra} of which are needed besides")
        for streams in args.load:
            with _load(served.endpoint, prompts, streams):
                rows += [_length(served, prompts, size, streams, args) for size in args.prefix]
    return {
        "what": "tenuto bench restore",
        "about": about(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "arguments": {key: str(value) for key, value in vars(args).items() if value is not None},
        "command": list(served.command),
        "rows": rows,
    }


@contextlib.contextmanager
def _load(endpoint: Endpoint, prompts: Prompts, streams: int) -> Iterator[None]:
    """``streams`` streams that decode without a break."""
    stop = threading.Event()
    failures: list[EndpointFailed] = []

    def run(prompt: list[int]) -> None:
        while not stop.is_set():
            try:
                endpoint.stream(prompt, _LOAD_TOKENS)
            except EndpointFailed as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=run, args=(prompts.take(_LOAD_PROMPT),)) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def _length(served: Serving, prompts: Prompts, size: int, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    found = Found()
    for number in range(args.rounds):
        measure_round(served, prompts, size, f"restore-{streams}-{size}-{number}", args.repeats, found)
        times = ", ".join(f"{way} {statistics.median(s):.3f}" for way, s in found.seconds.items() if s)
        print(f"{size} tokens, {streams} streams, round {number + 1}: {times}", file=sys.stderr, flush=True)
    left = max(found.cached, default=None)
    return {"tokens": size, "streams": streams, **asdict(found), "left_in_page_cache": left}


def measure_round(served: Serving, prompts: Prompts, size: int, name: str, repeats: int, found: Found) -> None:
    """One prefix of ``size`` tokens through all places, as session ``name``, which ends with it."""
    endpoint, prefix = served.endpoint, prompts.take(size)

    def come_back(way: str, tier: str | None) -> float | None:
        answer = endpoint.stream([*prefix, *prompts.take(NEW_TOKENS)], 4, name)
        cached = answer.report.get("cached") or {}
        elsewhere = {t: n for t, n in cached.items() if n > SLACK_TOKENS and t != tier}
        if elsewhere or (tier is not None and cached.get(tier, 0) < _FOUND_SHARE * size):
            found.other.append(f"{way}: found {cached}")
            return None
        found.seconds[way].append(answer.times[0])
        return answer.times[0]

    def from_below(way: str, tier: str, move: Callable[[], str | None]) -> float | None:
        if (complaint := move()) is not None:
            found.other.append(f"{way}: {complaint}")
            return None
        before = _loaded_bytes(endpoint)
        took = come_back(way, tier)
        if way == "disk" and took is not None and served.disk is not None:
            loaded = _loaded_bytes(endpoint) - before
            if (alone_s := page_cache.read_past_s(served.disk, loaded)) is not None:
                found.disk_s.append(alone_s)
                found.loaded.append(loaded)
        return took

    come_back("recompute", None)
    for way, tier, move in _moves(served, name, found):
        for number in range(repeats):
            twin = come_back("device", "device") if number % 2 == 0 else None
            took = from_below(way, tier, move)
            twin = come_back("device", "device") if number % 2 else twin
            if took is not None and twin is not None:
                found.pairs[way].append(took / twin)
    endpoint.hint("agent.end", name)


def _loaded_bytes(endpoint: Endpoint) -> int:
    """What has come from the disk to the device so far."""
    paths = endpoint.ask("GET", "/health")["detail"]["tiers"]["paths"]
    loaded: int = paths.get("disk_device", {}).get("bytes", 0)
    return loaded


def _moves(served: Serving, name: str, found: Found) -> list[tuple[str, str, Callable[[], str | None]]]:
    """(way, tier that the blocks are then found on, how they get there: what went wrong, or None)."""
    endpoint, disk = served.endpoint, served.disk
    assert disk is not None

    def to(tier: str) -> None:
        endpoint.demote(name, tier)

    def to_cold_disk() -> str | None:
        to("disk")
        left = _leave_memory(disk)
        if left is not None:
            found.cached.append(left)
        return f"{left:.0%} of the files stayed in memory" if left is not None and left > _LEFT_SHARE_MAX else None

    def to_cached_disk() -> str | None:
        to("disk")
        page_cache.load(disk)
        there = page_cache.cached_share(disk)
        few = there is not None and there < 1 - _LEFT_SHARE_MAX
        return f"only {there:.0%} of the files were in memory" if few else None

    def prefetched() -> str | None:
        complaint = to_cold_disk()
        wanted = sum(endpoint.resident(name).values()) - SLACK_TOKENS
        endpoint.hint("kv.prefetch", name)
        give_up = time.perf_counter() + _PREFETCH_S_MAX
        while endpoint.resident(name).get("device", 0) < wanted:
            if time.perf_counter() > give_up:
                return f"not prefetched within {_PREFETCH_S_MAX:.0f} s"
            time.sleep(0.01)
        return complaint

    return [
        ("disk", "disk", to_cold_disk),
        ("disk-cached", "disk", to_cached_disk),
        ("prefetched", "device", prefetched),
        ("host", "host", lambda: to("host")),
    ]


def _leave_memory(folder: Path) -> float | None:
    """Drops the files under ``folder`` from the page cache; the share that stayed. A page still being written stays once."""
    left: float | None = None
    for _ in range(5):
        page_cache.drop(folder)
        left = page_cache.cached_share(folder)
        if left is None or left <= _LEFT_SHARE_MAX:
            break
        time.sleep(0.1)
    return left


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Time to first token after a pause, s: median (times that of device, by pairs)")
    for index, head in enumerate(("tokens", "other streams", *WAYS)):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in document["rows"]:
        medians = {way: statistics.median(times) for way, times in row["seconds"].items() if times}
        cells = []
        for way in WAYS:
            ratio = f"\n{ratio_of(row['pairs'][way])}" if row["pairs"].get(way) else ""
            if way == "recompute" and "device" in medians:
                ratio = f"\n{medians[way] / medians['device']:.0f}"
            cells.append(f"{medians[way]:.3f}{ratio}" if way in medians else "-")
        table.add_row(str(row["tokens"]), str(row["streams"]), *cells)
    console, about = Console(), document["about"]
    console.print(table)
    left = [row["left_in_page_cache"] for row in document["rows"] if row["left_in_page_cache"] is not None]
    shown = f"at most {max(left):.1%} of the files stayed in the page cache" if left else "page cache not checked"
    console.print(f"times device: {METHOD}", highlight=False)
    console.print(f"disk: synced, then posix_fadvise(DONTNEED); {shown}", highlight=False)
    for row in document["rows"]:
        if row["disk_s"] and row["seconds"]["device"]:
            alone_s, device_s = statistics.median(row["disk_s"]), statistics.median(row["seconds"]["device"])
            text = f"{row['tokens']} tokens, {row['streams']} streams: {statistics.median(row['loaded']) / 1e6:.0f} MB from the disk"
            text += (
                f", read alone in {alone_s * 1e3:.0f} ms: {(device_s + alone_s) / device_s:.2f} times device at least"
            )
            console.print(text, highlight=False)
        for text in row["other"]:
            console.print(f"not counted, {row['tokens']} tokens, {row['streams']} streams: {text}", highlight=False)
    load = f"{document['load_before']:.1f} before, {document['load_after']:.1f} after"
    console.print(
        f"{about['processor']}, {about['cores']} cores, commit {str(about['commit'])[:12]}, load {load}",
        highlight=False,
    )
