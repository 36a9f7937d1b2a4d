"""``tenuto bench quality``: what the forms of weights and precisions cost in answers, against fp32 with dense weights.

- Perplexity: exp of the mean negative log-likelihood (natural logarithm) of the tokens of a text, in windows that share nothing;
  a window's first token is not scored. The default text are this project's own documents.
- Same best token: share of those positions at which the highest logit is that of the reference, both reading the same text.
- Same greedy text: from the start of each of some windows, tokens that agree with the reference's before the first that does
  not, and how many of the continuations agree throughout. One differing near-tie changes all that follows.

Then what KV in eight bits below the device costs (``--lower-kv`` of tenuto serve), with the weights and precision of the first
variant: the second half of every window, read on top of a first half that was packed and unpacked.

A variant is WEIGHTS/DTYPE, as the options of tenuto serve. The reference is dense/fp32: for a quantised file, its dequantised
weights; that the file itself was quantised costs quality too, which nothing here can see.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

import tenuto_server
from tenuto_kernels.lower import LowerKind
from tenuto_kernels.rows import AttentionRows
from tenuto_server.bench.serving import run_bench
from tenuto_server.errors import ConfigError
from tenuto_server.model.load import DTYPES, LoadedModel, load_model
from tenuto_server.model.transformer import ForwardBatch, Transformer, WeightsForm

if TYPE_CHECKING:
    from rich.console import Console

REFERENCE = "dense/fp32"
VARIANTS = "dense/bf16,stored/bf16,int8/bf16,int4/bf16"
PREFIX_TOKENS = 64
BLOCK = 16


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 1: a model failed; 2: wrong usage."""
    return run_bench(argv, _parser(), _measure, _print)


def _variants(text: str) -> list[tuple[str, str]]:
    found = []
    for part in text.split(","):
        weights, _, dtype = part.partition("/")
        if weights not in get_args(WeightsForm) or dtype not in DTYPES:
            forms = f"{', '.join(get_args(WeightsForm))} and {', '.join(DTYPES)}"
            raise argparse.ArgumentTypeError(f"{part!r} is not WEIGHTS/DTYPE of {forms}")
        found.append((weights, dtype))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto bench quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as for tenuto serve")
    add("--variants", type=_variants, default=_variants(VARIANTS), help=f"default: {VARIANTS}")
    add("--text", type=Path, metavar="FILE", help="another text")
    add("--windows", type=int, default=16, help="windows of the text (default: 16)")
    add("--window-tokens", type=int, default=512, help="tokens of each (default: 512)")
    add("--continuations", type=int, default=8, help="windows that are continued greedily (default: 8)")
    add("--new-tokens", type=int, default=64, help="of each continuation (default: 64)")
    add("--lower-kv", default="int8,fp8", metavar="KIND,...", help="of int8, fp8; empty: none (default: int8,fp8)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from tenuto_server.bench import quality_lower
    from tenuto_server.bench.demo import about

    if min(args.windows, args.continuations, args.new_tokens) < 1 or args.window_tokens <= PREFIX_TOKENS:
        raise ConfigError(f"counts must be 1 or more, --window-tokens more than {PREFIX_TOKENS}")
    kinds: Any = [kind for kind in args.lower_kv.split(",") if kind]
    if unknown := set(kinds) - set(get_args(LowerKind)):
        raise ConfigError(f"--lower-kv: {', '.join(sorted(unknown))} is none of {', '.join(get_args(LowerKind))}")
    text, source = _text(args.text)
    windows: list[list[int]] = []
    reference: Reading | None = None
    rows: list[dict[str, Any]] = []
    lower: list[dict[str, Any]] = []
    for weights, dtype in [("dense", "fp32"), *args.variants]:
        name = f"{weights}/{dtype}"
        form: Any = weights
        precision: Any = dtype
        began = time.perf_counter()
        model = load_model(args.model, dtype=precision, weights=form)
        windows = windows or cut(model, text, args.windows, args.window_tokens)
        found = read(model.transformer, windows, args.continuations, args.new_tokens)
        reference = reference or found
        rows.append({"name": name, **compare(found, reference), "weights_form": model.transformer.weights_form})
        print(f"{name}: perplexity {found.perplexity:.4f}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if len(rows) == 2 and kinds:
            lower = quality_lower.measure(model.transformer, windows, args.continuations, args.new_tokens, kinds)
    return {
        "what": "tenuto bench quality",
        "about": about(),
        "model": args.model,
        "load": os.getloadavg()[0],
        "text": {"source": source, "sha256": hashlib.sha256(text.encode()).hexdigest()},
        "windows": len(windows),
        "window_tokens": args.window_tokens,
        "rows": rows,
        "lower_kv": lower,
    }


def _text(path: Path | None) -> tuple[str, str]:
    """The text and what it is."""
    if path is not None:
        return path.read_text(encoding="utf-8"), str(path)
    root = Path(tenuto_server.__file__).resolve().parents[2]
    documents = sorted((root / "docs").glob("*.md"))
    if documents:
        return "\n".join(file.read_text(encoding="utf-8") for file in documents), "docs/*.md"
    try:
        readme = metadata("tenuto").json.get("description", "")
    except PackageNotFoundError:
        readme = ""
    if not readme:
        raise ConfigError("--text: no documents are installed here; name a text file")
    return str(readme), "README.md"


def cut(model: LoadedModel, text: str, count: int, size: int) -> list[list[int]]:
    """Up to ``count`` windows of ``size`` tokens, spread over the text. Raises ``ConfigError`` for a text too short."""
    tokens = model.tokenizer.encode_ordinary(text)
    whole = len(tokens) // size
    if not whole:
        raise ConfigError(f"--text: it has {len(tokens)} tokens, a window takes {size}")
    numbers = sorted({number * whole // min(count, whole) for number in range(min(count, whole))})
    return [tokens[number * size : (number + 1) * size] for number in numbers]


@dataclass(frozen=True)
class Reading:
    """What a model made of the windows. ``best``: int64 [windows, size - 1], the token with the highest logit after each
    but the last; ``greedy``: the continuations."""

    perplexity: float
    best: Tensor
    greedy: list[list[int]]


def read(transformer: Transformer, windows: Sequence[list[int]], continuations: int, new_tokens: int) -> Reading:
    """Reads every window, and continues the first ``PREFIX_TOKENS`` tokens of the first few by ``new_tokens``."""
    size = len(windows[0])
    # A block for the tokens of the longest row, in a pool of its own; table i holds blocks in order.
    blocks = -(-max(size, PREFIX_TOKENS + new_tokens) // BLOCK)
    pool = transformer.kv_layout(BLOCK).allocate(blocks + 1, transformer.device)
    loss, best = 0.0, []
    for window in windows:
        logits = forward(transformer, pool, 0, window, every=True)[:-1]
        targets = torch.tensor(window[1:], device=logits.device)
        loss += torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum").item()
        best.append(logits.argmax(-1).cpu())
    greedy = [
        _continue(lambda at, row: forward(transformer, pool, at, row, every=False), window[:PREFIX_TOKENS], new_tokens)
        for window in windows[:continuations]
    ]
    return Reading(math.exp(loss / (len(windows) * (size - 1))), torch.stack(best), greedy)


def _continue(step: Callable[[int, list[int]], Tensor], prefix: list[int], count: int) -> list[int]:
    found: list[int] = []
    at, row = 0, prefix
    while len(found) < count:
        token = int(step(at, row)[-1].argmax())
        found.append(token)
        at, row = at + len(row), [token]
    return found


def forward(transformer: Transformer, pool: Tensor, start: int, tokens: list[int], *, every: bool) -> Tensor:
    """Logits [rows, vocab] of all tokens, or of the last, which follow on ``start`` tokens already in the pool."""
    device, end = transformer.device, start + len(tokens)
    positions = torch.arange(start, end, device=device)
    table = torch.arange(1, len(pool), dtype=torch.int32, device=device)[None]
    slots = table[0].long()[positions // BLOCK] * BLOCK + positions % BLOCK
    wanted = torch.arange(0 if every else len(tokens) - 1, len(tokens), device=device)
    rows = AttentionRows((0, len(tokens)), (end,), table)
    batch = ForwardBatch(torch.tensor(tokens, device=device), positions, slots, rows, wanted)
    return transformer.forward(batch, pool)


def compare(found: Reading, reference: Reading) -> dict[str, Any]:
    """``found`` in terms of ``reference``; see the module."""
    agreed = []
    for ours, theirs in zip(found.greedy, reference.greedy, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=True))
        agreed.append(next((number for number, (a, b) in pairs if a != b), len(ours)))
    length = len(reference.greedy[0])
    return {
        "perplexity": found.perplexity,
        "perplexity_change": found.perplexity / reference.perplexity - 1,
        "same_best": (found.best == reference.best).double().mean().item(),
        "greedy_agreed_mean": sum(agreed) / len(agreed),
        "greedy_identical": sum(count == length for count in agreed),
        "greedy_count": len(agreed),
        "greedy_tokens": length,
    }


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Quality of {document['model']} against {REFERENCE}")
    heads = ("weights/dtype", "perplexity", "change", "same best token", "greedy agrees for", "identical")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in document["rows"]:
        name = row["name"]
        if not name.startswith(row["weights_form"]):
            name += f" (became {row['weights_form']})"
        table.add_row(
            name,
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_change']:+.2%}",
            f"{row['same_best']:.2%}",
            f"{row['greedy_agreed_mean']:.1f} of {row['greedy_tokens']}",
            f"{row['greedy_identical']} of {row['greedy_count']}",
        )
    console, about, text = Console(), document["about"], document["text"]
    console.print(table)
    if document["lower_kv"]:
        _print_lower(console, document)
    console.print(
        f"{document['windows']} windows of {document['window_tokens']} tokens of {text['source']} (sha256 "
        f"{text['sha256'][:12]}); {about['processor']}, commit {str(about['commit'])[:12]}",
        highlight=False,
    )


def _print_lower(console: Console, document: dict[str, Any]) -> None:
    from rich.table import Table

    name = document["rows"][1]["name"]
    table = Table(title=f"Second halves of windows after the first came back from a lower tier, {name}")
    heads = ("lower tiers", "bytes", "perplexity", "change", "same best token", "greedy agrees for", "identical")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in document["lower_kv"]:
        table.add_row(
            row["name"],
            f"{row['bytes']:.0%}",
            f"{row['perplexity']:.3f} of {row['native']:.3f}",
            f"{row['perplexity_change']:+.3%}",
            f"{row['same_best']:.2%}",
            f"{row['greedy_agreed_mean']:.1f} of {row['greedy_tokens']}",
            f"{row['greedy_identical']} of {row['greedy_count']}",
        )
    console.print(table)
