"""``tenuto bench engine``: prefill, decode and time to first token through HTTP, beside other servers in the same run.

Every measure is taken in pairs: this server and each ``--against`` one after the other, with the same prompts, in an order
that turns round from pair to pair. Prompts are token ids of /v1/completions (text for servers that take none), so all servers
must serve the same vocabulary; decoding is greedy and runs past the end of text. A ratio above 1 means that Tenuto is better.
The server is started with --speculate 0, unless --serve-flags say otherwise: guessing pays on some texts only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tenuto_server.bench.endpoint import Endpoint, EndpointFailed
from tenuto_server.bench.measures import KINDS, Measure, Prompt, cold, decode, prefill, warm
from tenuto_server.bench.paired import METHOD, ratio_of
from tenuto_server.bench.prompts import Prompts
from tenuto_server.bench.serving import Serving, add_server_options, serving
from tenuto_server.errors import TenutoServerError

SERVER_FLAGS = ("--speculate", "0", "--device-bytes", "3GiB", "--host-bytes", "0")
"""All KV on the device, as the servers compared have it; 3 GiB hold 140,000 tokens of the bundled model."""


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 1: a server failed; 2: wrong usage."""
    args = _parser().parse_args(argv)
    from tenuto_server.bench import engine_table

    try:
        if args.show is not None:
            return engine_table.show(args.show, args.markdown)
        document = _measure(args)
    except (TenutoServerError, OSError) as error:
        print(f"tenuto bench engine: {error}", file=sys.stderr)
        return 1
    engine_table.print_table(document)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.json.resolve()}")
    return 0


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def _grid(text: str) -> list[tuple[int, int]]:
    return [(int(streams), int(context)) for streams, _, context in (part.partition("x") for part in text.split(","))]


def _kinds(text: str) -> list[str]:
    wanted = text.replace("ttft", "cold,warm").split(",")
    if unknown := set(wanted) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of {', '.join(KINDS)}, ttft")
    return wanted


def named_server(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url):
        raise argparse.ArgumentTypeError(f"must be NAME=URL, got {text!r}")
    return name, url


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--against", type=named_server, action="append", default=[], metavar="NAME=URL", help="another OpenAI endpoint")
    add("--only", type=_kinds, default=list(KINDS), help=f"of {', '.join(KINDS)}; ttft: cold and warm")
    add("--streams", type=_numbers, default=[1, 8, 32], help="side by side while decoding (default: 1,8,32)")
    add("--contexts", type=_numbers, default=[512, 2048, 8000], help="tokens of prompt (default: 512,2048,8000)")
    add("--decode", type=_grid, metavar="STREAMSxCONTEXT,...", help="just these, instead of all combinations")
    add("--prefill", type=_numbers, metavar="N,...", help="prompts of prefill, instead of --contexts")
    add("--prefix", type=_numbers, default=[4096], help="cached prefixes for TTFT (default: 4096)")
    add("--tokens", type=int, default=64, help="decoded by each stream (default: 64)")
    add("--pairs", type=int, default=10, help="of each measure (default: 10)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--json", type=Path, metavar="FILE", help="write all values there")
    add("--show", type=Path, metavar="FILE", help="print a written result again, and measure nothing")
    add("--markdown", metavar="FILE#PLACE", help="with --show: as Markdown, into the place of a document; -: print")
    add_server_options(parser)
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from tenuto_server.bench.demo import about

    if args.pairs < 1 or args.tokens < 2:
        raise EndpointFailed("--pairs must be 1 or more, --tokens 2 or more")
    started = time.monotonic()
    with serving(args, SERVER_FLAGS) as served:
        ours = served.endpoint
        ours.probe()
        endpoints = [ours, *(Endpoint(name, url, ours.detokenize) for name, url in args.against)]
        if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
            raise EndpointFailed("--against: every server needs a name of its own, and 'tenuto' is taken")
        for endpoint in endpoints[1:]:
            endpoint.probe()
        measures, skipped = _fitting(_plan(args, Prompts(ours, args.seed)), endpoints)
        load = os.getloadavg()[0]
        rows = _run(measures, endpoints, args.pairs)
        return {
            "what": "tenuto bench engine",
            "about": about(),
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "arguments": {key: str(value) for key, value in vars(args).items() if value not in (None, [])},
            "command": list(served.command),
            "endpoints": [_facts(endpoint, served) for endpoint in endpoints],
            "interval": METHOD,
            "took_s": round(time.monotonic() - started, 1),
            "skipped": skipped,
            "measures": rows,
        }


def _facts(endpoint: Endpoint, served: Serving) -> dict[str, Any]:
    found = endpoint.about()
    if endpoint is served.endpoint:
        found |= {"ready_s": served.ready_s, "load_s": served.load_s}
    return found


def _plan(args: argparse.Namespace, prompts: Prompts) -> list[Measure]:
    grid = args.decode or [(streams, context) for context in args.contexts for streams in args.streams]
    known: dict[int, list[Prompt]] = {}
    made: dict[str, Callable[[], list[Measure]]] = {
        "decode": lambda: [decode(prompts, streams, context, args.tokens, known) for streams, context in grid],
        "prefill": lambda: [prefill(prompts, context, args.pairs) for context in args.prefill or args.contexts],
        "cold": lambda: [cold(prompts, context, args.pairs) for context in args.prefix],
        "warm": lambda: [warm(prompts, context, args.pairs) for context in args.prefix],
    }
    return [measure for kind in KINDS if kind in args.only for measure in made[kind]()]


def _fitting(measures: list[Measure], endpoints: Sequence[Endpoint]) -> tuple[list[Measure], list[str]]:
    """Those that fit into every context, and the names of the others."""
    room = min((endpoint.context_tokens or sys.maxsize for endpoint in endpoints), default=sys.maxsize)
    fitting = [measure for measure in measures if measure.tokens <= room]
    skipped = [measure.name for measure in measures if measure.tokens > room]
    if not fitting:
        raise EndpointFailed(f"nothing to measure: a context here has {room} tokens, too few for {', '.join(skipped)}")
    return fitting, skipped


def _run(measures: Sequence[Measure], endpoints: Sequence[Endpoint], pairs: int) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(len(endpoints) * (len(measure.prepare) + pairs) for measure in measures)
    rows = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for measure in measures:
            progress.update(task, description=measure.name)
            rows.append(_row(measure, endpoints, pairs, lambda: progress.advance(task)))
    return rows


def _row(measure: Measure, endpoints: Sequence[Endpoint], pairs: int, advance: Callable[[], object]) -> dict[str, Any]:
    for prepare in measure.prepare:
        for endpoint in endpoints:
            prepare(endpoint)
            advance()
    values: dict[str, list[float]] = {endpoint.name: [] for endpoint in endpoints}
    for number in range(pairs):
        for endpoint in endpoints if number % 2 == 0 else endpoints[::-1]:
            values[endpoint.name].append(measure.run(endpoint, number))
            advance()
    ours = values[endpoints[0].name]
    ratios = {}
    for endpoint in endpoints[1:]:
        found = ratio_of([measure.ratio(a, b) for a, b in zip(ours, values[endpoint.name], strict=True)])
        ratios[endpoint.name] = {"mean": found.mean, "low": found.low, "high": found.high, "pairs": found.pairs}
    better = "more" if measure.more_is_better else "less"
    return {"name": measure.name, "unit": measure.unit, "better": better, "values": values, "ratios": ratios}
