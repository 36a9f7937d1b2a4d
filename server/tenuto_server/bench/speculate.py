"""``tenuto bench speculate``: decoding with guesses beside decoding without, on the same prompts.

Two kinds of greedy answers: ``edit`` begins to repeat a file of this project's sources that the prompt shows, as an agent that
rewrites a file does; ``prose`` goes on from a stretch of the sources, where only what repeats itself can be guessed. Servers with
the same flags but for guessing run side by side, and are asked one after the other in an order that turns round; a ratio
above 1 means that guessing is faster. Acceptance is what the servers report for the sessions. Answers are compared: guessing
must change none (in bf16 a forward of several tokens may round otherwise than one of a single token; such differences are counted).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tenuto_server
from tenuto_server.bench.endpoint import Endpoint
from tenuto_server.bench.measures import decode_rate
from tenuto_server.bench.paired import METHOD, ratio_of
from tenuto_server.bench.serving import add_server_options, run_bench, serving

KINDS = ("edit", "prose")
_FILE_CHARS = (1200, 3000)
_PROSE_TOKENS = 300


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 1: a server failed; 2: wrong usage."""
    return run_bench(argv, _parser(), _measure, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto bench speculate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--speculate", type=int, default=8, metavar="N", help="tokens to guess ahead (default: 8)")
    add("--draft-model", metavar="NAME", help="a third server that guesses with this model as well")
    add("--tokens", type=int, default=160, help="of each answer (default: 160)")
    add("--pairs", type=int, default=10, help="prompts of each kind (default: 10)")
    add("--seed", type=int, default=0, help="of the prompts")
    add_server_options(parser)
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from tenuto_server.bench.demo import about

    load, guessing = os.getloadavg()[0], ["--speculate", str(args.speculate)]
    arms = {"without": ["--speculate", "0"], "lookup": guessing}
    if args.draft_model:
        arms["lookup + draft"] = [*guessing, "--draft-model", args.draft_model]
    with contextlib.ExitStack() as stack:
        endpoints = {
            name: stack.enter_context(serving(args, ["--host-bytes", "0", *flags])).endpoint
            for name, flags in arms.items()
        }
        makers = _makers(next(iter(endpoints.values())), args.seed)
        rows = [_kind(kind, makers[kind], endpoints, args) for kind in KINDS]
    arguments = {key: str(value) for key, value in vars(args).items() if value is not None}
    facts = {"about": about(), "arguments": arguments, "load_before": load, "load_after": os.getloadavg()[0]}
    return {"what": "tenuto bench speculate", **facts, "interval": METHOD, "rows": rows}


def _makers(endpoint: Endpoint, seed: int) -> dict[str, Callable[[], list[int]]]:
    """A prompt's ids by its kind, others each time."""
    files = sorted(Path(tenuto_server.__file__).parent.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    small = [text for text in texts if _FILE_CHARS[0] <= len(text) <= _FILE_CHARS[1]]
    rng, prose = random.Random(seed), endpoint.tokenize("\n".join(texts)[:200_000])

    def edit() -> list[int]:
        text = rng.choice(small)
        number, start = rng.randrange(10**6), "\n".join(text.splitlines()[:2])
        return endpoint.tokenize(f"Task {number}. A file:\n\n{text}\n\nThe same file again, tidied:\n\n{start}\n")

    def going_on() -> list[int]:
        at = rng.randrange(len(prose) - _PROSE_TOKENS)
        return prose[at : at + _PROSE_TOKENS]

    return {"edit": edit, "prose": going_on}


def _kind(
    kind: str, make: Callable[[], list[int]], endpoints: dict[str, Endpoint], args: argparse.Namespace
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in endpoints}
    guesses = {name: [0, 0] for name in endpoints}
    differ = dict.fromkeys(endpoints, 0)
    for number in range(args.pairs):
        prompt, said = make(), {}
        order = list(endpoints) if number % 2 == 0 else list(endpoints)[::-1]
        for name in order:
            session = f"{kind}-{number}"
            rates[name].append(decode_rate(endpoints[name], [prompt], args.tokens, [session]))
            view = endpoints[name].ask("GET", f"/v1/sessions/{session}")
            guesses[name][0] += view.get("drafted", 0)
            guesses[name][1] += view.get("confirmed", 0)
            said[name] = _answer(endpoints[name], prompt, args.tokens)
        for name in endpoints:
            differ[name] += said[name] != said["without"]
    ratios = {}
    for name in [name for name in endpoints if name != "without"]:
        found = ratio_of([a / b for a, b in zip(rates[name], rates["without"], strict=True)])
        ratios[name] = {"mean": found.mean, "low": found.low, "high": found.high}
    return {"kind": kind, "tokens_per_s": rates, "guesses": guesses, "differ": differ, "ratios": ratios}


def _answer(endpoint: Endpoint, prompt: list[int], count: int) -> str:
    body = {"model": endpoint.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return str(endpoint.ask("POST", "/v1/completions", body)["choices"][0]["text"])


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(document["rows"][0]["tokens_per_s"])
    table = Table(title="Greedy decoding, one stream, tokens/s: median; times that without guesses (95 %)")
    for index, head in enumerate(("answer", *names, "guesses confirmed", "answers that differ")):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in document["rows"]:
        cells = []
        for name in names:
            values = sorted(row["tokens_per_s"][name])
            cell, ratio = f"{values[len(values) // 2]:.1f}", row["ratios"].get(name)
            if ratio is not None:
                spread = f" ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio["low"] is not None else ""
                cell += f"  {ratio['mean']:.2f}{spread}"
            cells.append(cell)
        shares = [f"{right} of {made}" for made, right in list(row["guesses"].values())[1:]]
        differ = [str(count) for count in list(row["differ"].values())[1:]]
        table.add_row(row["kind"], *cells, ", ".join(shares), ", ".join(differ))
    console, about = Console(), document["about"]
    console.print(table)
    load = f"{document['load_before']:.1f} before, {document['load_after']:.1f} after"
    console.print(
        f"{about['processor']}, {about['cores']} cores, commit {str(about['commit'])[:12]}, load {load}",
        highlight=False,
    )
