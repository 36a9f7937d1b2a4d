"""``tenuto bench hints``: what a hint costs the agent that gives it, the server that takes it, and the turns beside it.

- Agent: microseconds that a call of the SDK takes in the agent's own thread, hints being delivered to a live server meanwhile
  (and with no server there, and with hints turned off).
- Server: milliseconds from sending hints to their receipts, over a connection that stays open; CPU microseconds of the server's
  process per hint, what it uses without any hints taken off.
- Turns: time to first token with sixteen hints riding on the request against none, and decode beside a stream of hints against
  none; ratios of alternating pairs, above 1: the turn with hints took longer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tenuto
from tenuto.forecast import PauseForecaster
from tenuto.wire import AgentKeepalive, AgentPause, AnyAction, Envelope, Forecast
from tenuto_server.bench.endpoint import Endpoint, EndpointFailed
from tenuto_server.bench.measures import decode_rate
from tenuto_server.bench.paired import METHOD, ratio_of
from tenuto_server.bench.prompts import Prompts
from tenuto_server.bench.serving import Serving, add_server_options, run_bench, serving

HINTS_PER_S = 150.0
"""Below the limit that a server sets to a tenant (200 a second)."""

BATCH, RIDERS = 32, 16
STREAMS, TOKENS = 4, 64


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 1: a server failed; 2: wrong usage."""
    return run_bench(argv, _parser(), _measure, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto bench hints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="hints of each kind (default: 300)")
    parser.add_argument("--pairs", type=int, default=10, help="of turns with and without hints (default: 10)")
    add_server_options(parser)
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from tenuto_server.bench.demo import about

    if args.count < 2 * BATCH or args.pairs < 1:
        raise EndpointFailed(f"--count must be {2 * BATCH} or more, --pairs 1 or more")
    load_before = os.getloadavg()[0]
    with serving(args, ["--speculate", "0"]) as served:
        prompts = Prompts(served.endpoint)
        served.endpoint.stream(prompts.take(64), 4)
        agent = _agent(served.endpoint.url, args.count)
        server = [_receipts(served, 1, args.count), _receipts(served, BATCH, args.count)]
        turns = [_riding(served.endpoint, prompts, args.pairs), _beside(served.endpoint, prompts, args.pairs)]
    return {
        "what": "tenuto bench hints",
        "about": about(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "interval": METHOD,
        "agent": agent,
        "server": server,
        "turns": turns,
    }


# ---- the agent's side --------------------------------------------------------------------------------------------


def _agent(url: str, count: int) -> list[dict[str, Any]]:
    nobody = "http://127.0.0.1:9"  # the discard port: refused at once
    with _session(url) as session:
        rows = [
            _called("pause, forecast from history", lambda: _pause(session, None), count),
            _called("pause, forecast given", lambda: _pause(session, 30.0), count),
            _called("one bare hint", lambda: session.emit(AgentKeepalive, for_s=60.0), count),
        ]
        session.services.sender.flush(5.0)
        stats = session.services.sender.stats
        rows[-1]["delivered"] = {"sent": stats.sent, "dropped": stats.dropped, "failed": stats.failed}
        rows[-1]["receipts"] = dict(stats.receipts)
    with _session(nobody) as session:
        rows.append(_called("pause, no server there", lambda: _pause(session, 30.0), count))
    with _hints_off(), _session(url) as session:
        rows.append(_called("pause, hints turned off", lambda: _pause(session, 30.0), count))
    return rows


@contextlib.contextmanager
def _session(url: str) -> Iterator[Any]:
    """A session whose pauses are not written into the user's history."""
    with tenuto.connect_sync(url, forecaster=PauseForecaster()) as client, client.session("bench-hints") as session:
        yield session


@contextlib.contextmanager
def _hints_off() -> Iterator[None]:
    before = os.environ.get("TENUTO_DISABLED")
    os.environ["TENUTO_DISABLED"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TENUTO_DISABLED"]
        else:
            os.environ["TENUTO_DISABLED"] = before


def _pause(session: Any, forecast: float | None) -> None:
    with session.pause("tool", name="bash", command="python -m pytest -q tests", forecast=forecast):
        pass


def _called(name: str, call: Callable[[], object], count: int) -> dict[str, Any]:
    """Wall and thread time of one call, in microseconds; calls are spaced so that hints can leave as they would."""
    wall, cpu = [], []
    for number in range(count + 10):
        cpu_began, began = time.thread_time(), time.perf_counter()
        call()
        ended, cpu_ended = time.perf_counter(), time.thread_time()
        if number >= 10:  # the first ones load code and open the connection
            wall.append(1e6 * (ended - began))
            cpu.append(1e6 * (cpu_ended - cpu_began))
        time.sleep(1 / HINTS_PER_S)
    return {"name": name, "us": _spread(wall), "cpu_us": statistics.fmean(cpu)}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98], "count": len(values)}


# ---- the server's side -------------------------------------------------------------------------------------------


def pause_hints(session: str, count: int) -> list[AnyAction]:
    """``count`` pauses of a tool, with forecasts."""
    forecast = Forecast(p50_s=30.0, p90_s=90.0)
    return [AgentPause(session=session, kind="tool", tool="bash", forecast=forecast) for _ in range(count)]


def _receipts(served: Serving, batch: int, count: int) -> dict[str, Any]:
    """Envelopes of ``batch`` hints each."""
    endpoint, times, outcomes = served.endpoint, [], Counter[str]()
    rounds = max(5, count // batch)
    time.sleep(1.0)  # what came before has been dealt with
    idle_cpu, idle_s = _cpu_over(served, lambda: time.sleep(1.0))
    with contextlib.closing(http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=60)) as connection:

        def send() -> None:
            for _ in range(rounds):
                envelope = Envelope.of(pause_hints(f"bench-receipts-{batch}", batch))
                body = envelope.model_dump_json(exclude_none=True)
                began = time.perf_counter()
                connection.request("POST", "/v1/kv_hints", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                data = json.loads(answer.read())
                times.append(1e3 * (time.perf_counter() - began))
                if answer.status != 200:
                    raise EndpointFailed(f"{endpoint.name}: /v1/kv_hints answered {answer.status}: {data}")
                outcomes.update(receipt["outcome"] for receipt in data["receipts"])
                time.sleep(batch / HINTS_PER_S)

        busy_cpu, busy_s = _cpu_over(served, send)
    row: dict[str, Any] = {"hints": batch, "ms": _spread(times), "receipts": dict(outcomes)}
    if busy_cpu is not None and idle_cpu is not None:
        row["cpu_us_per_hint"] = 1e6 * max(0.0, busy_cpu - idle_cpu * busy_s / idle_s) / (rounds * batch)
    return row


def _cpu_over(served: Serving, do: Callable[[], object]) -> tuple[float | None, float]:
    """CPU seconds of the server's process while ``do`` runs (None where the platform does not tell), and wall seconds."""
    began, before = time.perf_counter(), _cpu_s(served)
    do()
    after = _cpu_s(served)
    return (None if before is None or after is None else after - before), time.perf_counter() - began


def _cpu_s(served: Serving) -> float | None:
    try:
        pid = served.process.pid if served.process is not None else None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the turns beside it -----------------------------------------------------------------------------------------


def _riding(endpoint: Endpoint, prompts: Prompts, pairs: int) -> dict[str, Any]:
    """Time to first token of a short cached turn with hints in its body, over that without."""
    prompt, session = prompts.take(256), "bench-riding"
    envelope = Envelope.of(pause_hints(session, RIDERS)).model_dump(mode="json", exclude_none=True)
    endpoint.stream(prompt, 2, session)

    def first(fields: dict[str, Any]) -> float:
        return statistics.median(endpoint.stream(prompt, 2, session, **fields).times[0] for _ in range(3))

    found = _alternating(pairs, lambda: first({"kv_hints": envelope}), lambda: first({}))
    return {"name": f"time to first token, {RIDERS} hints riding", **found}


def _beside(endpoint: Endpoint, prompts: Prompts, pairs: int) -> dict[str, Any]:
    """Time per token of streams while an agent sends hints, over that without."""
    chosen = [prompts.take(64) for _ in range(STREAMS)]

    def hinted() -> float:
        stop, session = threading.Event(), "bench-beside"

        def send() -> None:
            with _session(endpoint.url) as agent:
                while not stop.wait(1 / HINTS_PER_S):
                    agent.emit(AgentPause, kind="tool", tool=session, forecast=Forecast(p50_s=30.0, p90_s=90.0))

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return 1 / decode_rate(endpoint, chosen, TOKENS)
        finally:
            stop.set()
            sender.join()

    found = _alternating(pairs, hinted, lambda: 1 / decode_rate(endpoint, chosen, TOKENS))
    return {"name": f"time per token of {STREAMS} streams beside {HINTS_PER_S:.0f} hints/s", **found}


def _alternating(pairs: int, with_hints: Callable[[], float], without: Callable[[], float]) -> dict[str, Any]:
    values: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            bare = without()
            values.append((with_hints(), bare))
        else:
            hinted = with_hints()
            values.append((hinted, without()))
    found = ratio_of([hinted / bare for hinted, bare in values])
    ratio = {"mean": found.mean, "low": found.low, "high": found.high}
    return {"values": values, "ratio": ratio, "shown": str(found)}


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What hints cost")
    for index, head in enumerate(("", "p50", "p99", "CPU")):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in document["agent"]:
        us = row["us"]
        table.add_row(f"agent: {row['name']}", f"{us['p50']:.0f} us", f"{us['p99']:.0f} us", f"{row['cpu_us']:.0f} us")
    for row in document["server"]:
        ms, cpu = row["ms"], row.get("cpu_us_per_hint")
        name = f"server: {row['hints']} hint{'s' * (row['hints'] > 1)} to receipt{'s' * (row['hints'] > 1)}"
        shown = f"{cpu:.0f} us a hint" if cpu is not None else "-"
        table.add_row(name, f"{ms['p50']:.2f} ms", f"{ms['p99']:.2f} ms", shown)
    console, about = Console(), document["about"]
    console.print(table)
    for row in document["turns"]:
        console.print(f"{row['name']}: {row['shown']} times that without", highlight=False)
    load = f"{document['load_before']:.1f} before, {document['load_after']:.1f} after"
    console.print(
        f"{about['processor']}, {about['cores']} cores, commit {str(about['commit'])[:12]}, load {load}",
        highlight=False,
    )
