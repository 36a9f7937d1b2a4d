"""``tenuto bench agents``: many agents that pause, on less KV memory than their contexts need, beside other servers.

Every agent begins with a prompt of its own and comes back a few times with the same prompt, longer by what its tool printed,
after a pause. Prompts, pauses and order are the same for every server; a pass is over when all agents are. The figure is the
tokens that had to be made, new prompt tokens and answers, over the time of the pass: what is computed twice only costs. With
--hints a second server of ours is told of sessions, pauses and ends. Give the others the same bytes of KV as --device-bytes
and --host-bytes are together (printed before the first pass). A ratio above 1 means that Tenuto is better.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tenuto_server.bench.endpoint import Endpoint, EndpointFailed
from tenuto_server.bench.engine import named_server
from tenuto_server.bench.paired import METHOD, ratio_of
from tenuto_server.bench.prompts import Prompts
from tenuto_server.bench.serving import add_server_options, run_bench, serving
from tenuto_server.config import parse_bytes

HUMAN_SHARE = 0.145
"""Of the pauses, as in the demonstration (KVCT's 43,612 pauses)."""
LONGEST = 2.0
"""Means that a pause lasts at most: a pass is to take as long as its work, not as the longest of its absences."""


@dataclass(frozen=True, slots=True)
class Turn:
    """``pause_s``: before the turn. ``tokens``: what the prompt grows by."""

    pause_s: float
    human: bool
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agent:
    """``starts_s``: after the beginning of the pass."""

    name: str
    starts_s: float
    turns: tuple[Turn, ...]


def make_agents(args: argparse.Namespace, prompts: Prompts, number: int) -> list[Agent]:
    """The agents of one pass: pauses exponential with mean ``--tool-s`` or, for people, ``--human-s``, cut at twice that."""
    dice = random.Random(f"{args.seed} {number}")
    agents = []
    for index in range(args.agents):
        turns = [Turn(0.0, False, tuple(prompts.take(args.context)))]
        for _ in range(args.turns - 1):
            human = dice.random() < HUMAN_SHARE
            mean_s = args.human_s if human else args.tool_s
            pause_s = mean_s * min(LONGEST, dice.expovariate(1.0))
            turns.append(Turn(pause_s, human, tuple(prompts.take(args.grow))))
        agents.append(Agent(f"bench-{number}-{index}", dice.uniform(0.0, args.arrival_s), tuple(turns)))
    return agents


def play(endpoint: Endpoint, agents: Sequence[Agent], count: int, hints: bool) -> dict[str, Any]:
    """One pass. Raises what the first agent failed with, after all are over; mostly ``EndpointFailed``."""
    ttfts: list[float] = []
    failures: list[Exception] = []
    began = time.perf_counter()

    def run(agent: Agent) -> None:
        session = agent.name if hints else None
        prompt: list[int] = []
        time.sleep(agent.starts_s)
        try:
            for number, turn in enumerate(agent.turns):
                if number:
                    if session is not None:
                        kind = {"kind": "human"} if turn.human else {"kind": "tool", "tool": "bash"}
                        endpoint.hint("agent.pause", session, **kind)
                    time.sleep(turn.pause_s)
                prompt.extend(turn.tokens)
                ttfts.append(endpoint.stream(prompt, count, session).times[0])
            if session is not None:
                endpoint.hint("agent.end", session)
        except Exception as error:  # a pass with an agent less would look fast
            failures.append(error)

    threads = [threading.Thread(target=run, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    took = time.perf_counter() - began
    made = sum(len(turn.tokens) + count for agent in agents for turn in agent.turns)
    ordered = sorted(ttfts)
    return {
        "tokens_per_s": made / took,
        "took_s": took,
        "ttft_p50_s": ordered[len(ordered) // 2],
        "ttft_p90_s": ordered[int(len(ordered) * 0.9)],
    }


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 1: a server failed; 2: wrong usage."""
    return run_bench(argv, _parser(), _measure, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto bench agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--against", type=named_server, action="append", default=[], metavar="NAME=URL", help="another OpenAI endpoint")
    add("--hints", action="store_true", help="also measure a server that is told of sessions, pauses and ends")
    add("--agents", type=int, default=16, help="side by side (default: 16)")
    add("--turns", type=int, default=3, help="of every agent (default: 3)")
    add("--context", type=int, default=500, help="tokens of the first prompt (default: 500)")
    add("--grow", type=int, default=80, help="tokens that every further turn adds (default: 80)")
    add("--tokens", type=int, default=16, help="of every answer (default: 16)")
    add("--tool-s", type=float, default=3.0, help="mean pause of a tool, cut at twice that (default: 3)")
    add("--human-s", type=float, default=15.0, help="mean pause of a person, cut at twice that (default: 15)")
    add("--arrival-s", type=float, default=10.0, help="agents begin within this time (default: 10)")
    add("--device-bytes", type=parse_bytes, default=parse_bytes("64MiB"), help="our KV on the device (default: 64MiB)")
    add("--host-bytes", type=parse_bytes, default=parse_bytes("32MiB"), help="our KV in host memory (default: 32MiB)")
    add("--pairs", type=int, default=3, help="passes of every server, in turn and back (default: 3)")
    add("--seed", type=int, default=0, help="of prompts and pauses")
    add_server_options(parser)
    return parser


@contextlib.contextmanager
def _servers(args: argparse.Namespace) -> Iterator[list[tuple[Endpoint, bool]]]:
    """Every server to measure and whether it gets hints; the first is the one that the others are compared with."""
    flags = ["--speculate", "0", "--device-bytes", str(args.device_bytes), "--host-bytes", str(args.host_bytes)]
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(serving(args, flags)).endpoint
        found = [(plain, False)]
        if args.hints:
            told = stack.enter_context(serving(args, flags)).endpoint
            told.name = "tenuto+hints"
            found.append((told, True))
        found += [(Endpoint(name, url, plain.detokenize), False) for name, url in args.against]
        if len({endpoint.name for endpoint, _ in found}) < len(found):
            raise EndpointFailed("--against: every server needs a name of its own; tenuto and tenuto+hints are taken")
        yield found


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tenuto_server.bench.demo import about

    if min(args.pairs, args.agents, args.turns, args.context, args.grow, args.tokens) < 1:
        raise EndpointFailed("--pairs, --agents, --turns, --context, --grow and --tokens must be 1 or more")
    if args.hints and args.url:
        raise EndpointFailed("--hints needs a second server of ours, which is started here: leave --url out")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _servers(args) as servers:
        for endpoint, _ in servers:
            endpoint.probe()
        prompts = Prompts(servers[0][0], args.seed)
        passes = [make_agents(args, prompts, number) for number in range(args.pairs)]
        live = args.agents * (args.context + (args.turns - 1) * args.grow)
        console.print(
            f"{args.agents} agents come to {live:,} tokens of context; KV here: {args.device_bytes + args.host_bytes:,} "
            "bytes in all",
            highlight=False,
        )
        values: dict[str, list[dict[str, Any]]] = {endpoint.name: [] for endpoint, _ in servers}
        load = os.getloadavg()[0]
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=args.pairs * len(servers))
            for number, agents in enumerate(passes):
                for endpoint, hints in servers if number % 2 == 0 else servers[::-1]:
                    progress.update(task, description=endpoint.name)
                    done = play(endpoint, agents, args.tokens, hints)
                    values[endpoint.name].append(done)
                    console.print(
                        f"pass {number + 1}, {endpoint.name}: {done['tokens_per_s']:.1f} tokens/s, {done['took_s']:.1f} s, "
                        f"TTFT p90 {done['ttft_p90_s']:.2f} s",
                        highlight=False,
                    )
                    progress.advance(task)
        return {
            "what": "tenuto bench agents",
            "about": about(),
            "load_before": load,
            "arguments": {key: str(value) for key, value in vars(args).items() if value not in (None, [])},
            "endpoints": [endpoint.about() for endpoint, _ in servers],
            "interval": METHOD,
            "values": values,
            "ratios": _ratios(values),
        }


def _ratios(values: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of our servers over the others, and of the told one over the untold one."""
    ours = [name for name in values if name.startswith("tenuto")]
    pairs = [(a, b) for a in ours for b in values if b not in ours] + [(b, a) for a, b in pairwise(ours)]
    found = {}
    for a, b in pairs:
        ratio = ratio_of([x["tokens_per_s"] / y["tokens_per_s"] for x, y in zip(values[a], values[b], strict=True)])
        found[f"{a} / {b}"] = {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "pairs": ratio.pairs}
    return found


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="All agents together, mean of the passes")
    for head in ("server", "tokens/s", "pass, s", "TTFT p50, s", "TTFT p90, s"):
        table.add_column(head, justify="left" if head == "server" else "right")
    for name, passes in document["values"].items():
        means = [
            sum(one[key] for one in passes) / len(passes)
            for key in ("tokens_per_s", "took_s", "ttft_p50_s", "ttft_p90_s")
        ]
        table.add_row(name, f"{means[0]:.1f}", f"{means[1]:.1f}", f"{means[2]:.2f}", f"{means[3]:.2f}")
    console = Console()
    console.print(table)
    for name, ratio in document["ratios"].items():
        interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
        console.print(f"tokens/s, {name}: {ratio['mean']:.2f}{interval}", highlight=False)
    console.print(f"{METHOD}; commit {str(document['about']['commit'])[:12]}", highlight=False)
