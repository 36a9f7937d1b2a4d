"""``tenuto bench kernels``: linear layers and paged attention of this machine, without a model.

Prints milliseconds (each call's best of N, summed) for one pass over a model's linear layers at several row counts, one path a
column, and for decode and prefill attention over a paged pool at several context lengths, times the number of layers. The
shapes are those of SmolLM2-135M; other work on the machine makes every figure worse, so the load is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tenuto_kernels.cpu import native
from tenuto_kernels.linear import PATHS, PackedLinear

LAYERS, HIDDEN, FFN, VOCAB = 30, 576, 1536, 49152
Q_HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
SHAPES = ((Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)
ROWS = (1, 2, 4, 8, 16, 64, 256, 512)


def best_ms(run: Callable[[], object], repeat: int) -> float:
    """The shortest of ``repeat`` calls."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def pass_ms(layers: list[PackedLinear], x: dict[int, torch.Tensor], repeat: int) -> float:
    """One pass over `layers` in order, so that no weight is still cached; the sum of each layer's best time."""
    best = [float("inf")] * len(layers)
    for _ in range(repeat):
        for i, layer in enumerate(layers):
            started = time.perf_counter()
            layer(x[layer.in_features])
            best[i] = min(best[i], time.perf_counter() - started)
    return sum(best) * 1e3


def linears(paths: list[str], repeat: int) -> list[dict[str, Any]]:
    """Milliseconds a pass, for each number of rows, by path; printed and returned."""
    weights = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    head = torch.randn(VOCAB, HIDDEN).bfloat16()
    flops = 2 * sum(w.numel() for w in weights)
    print(f"\nlinear layers, bf16 weights, {flops / 2e6:.0f} M parameters, ms a pass (fp32 activations)")
    print("rows".rjust(6) + "".join(f"{path:>14}" for path in paths) + f"{'head native':>14}{'native GFLOPS':>16}")
    packed = {path: [PackedLinear(w, None, path) for w in weights] for path in paths}
    packed_head = PackedLinear(head, None, "native") if "native" in paths else None
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        x = {width: torch.randn(rows, width) for width in (HIDDEN, FFN)}
        cells = [pass_ms(packed[path], x, repeat) for path in paths]
        row: dict[str, Any] = {"rows": rows, "ms": dict(zip(paths, cells, strict=True))}
        line = f"{rows:6d}" + "".join(f"{cell:14.1f}" for cell in cells)
        if packed_head is not None:
            row["head_ms"] = pass_ms([packed_head], x, repeat)
            line += f"{row['head_ms']:14.1f}"
            line += f"{flops * rows / cells[paths.index('native')] / 1e6:16.0f}"
        print(line, flush=True)
        found.append(row)
    return found


def attention(repeat: int) -> list[dict[str, Any]]:
    """Milliseconds of all layers, by kind, context and rows; printed and returned."""
    blocks = 1024
    pool = torch.randn(blocks, 1, 2, KV_HEADS, BLOCK, DIM).bfloat16()
    scale = DIM**-0.5
    print(f"\npaged attention, bf16 pool, ms for {LAYERS} layers ({Q_HEADS}/{KV_HEADS} heads, D={DIM}, block {BLOCK})")
    found: list[dict[str, Any]] = []
    for context in (512, 2048, 8192):
        for batch in (1, 4):
            tables = torch.stack([torch.randperm(blocks)[: context // BLOCK] for _ in range(batch)]).int()
            lengths = torch.full((batch,), context, dtype=torch.int32)
            q = torch.randn(batch, Q_HEADS, DIM)
            out = torch.empty_like(q)
            ms = best_ms(
                partial(native.paged_decode, q, pool, 0, tables, lengths, scale, out),
                4 * repeat,
            )
            rate = 2 * batch * context * KV_HEADS * DIM * 2 / ms / 1e6
            print(f"decode   context {context:5d}  rows {batch:4d} {ms * LAYERS:9.2f}  {rate:6.1f} GB/s")
            found.append(
                {"kind": "decode", "context": context, "rows": batch, "ms": ms * LAYERS, "bytes_per_s": rate * 1e9}
            )
        for chunk in (32, 512):
            start = torch.tensor([0, chunk], dtype=torch.int32)
            q = torch.randn(chunk, Q_HEADS, DIM)
            out = torch.empty_like(q)
            one, length = tables[:1], lengths[:1]
            ms = best_ms(
                partial(native.paged_prefill, q, pool, 0, start, one, length, scale, out),
                repeat,
            )
            flops = 4 * DIM * Q_HEADS * (chunk * (context - chunk) + chunk * (chunk + 1) / 2)
            print(f"prefill  context {context:5d}  rows {chunk:4d} {ms * LAYERS:9.2f}  {flops / ms / 1e6:6.0f} GFLOPS")
            found.append(
                {"kind": "prefill", "context": context, "rows": chunk, "ms": ms * LAYERS, "flops": flops / ms * 1e3}
            )
    return found


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes ``--json``. Exit status 0; 2: wrong usage."""
    parser = argparse.ArgumentParser(
        prog="tenuto bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--paths", default="native,onednn-fp32,torch", help=f"of {', '.join(PATHS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args(argv)
    asked = options.paths.split(",")
    if unknown := set(asked) - set(PATHS):
        print(f"tenuto bench kernels: {', '.join(sorted(unknown))} is none of {', '.join(PATHS)}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        load = os.getloadavg()[0]
        print(f"torch {torch.__version__}, {platform.machine()}, {options.threads} threads, load before {load:.1f}")
        if not native.available():
            print("the native operator could not be built here: its path and the attention are left out")
        products = linears([path for path in asked if path != "native" or native.available()], options.repeat)
        attended = attention(options.repeat) if native.available() else []
    finally:
        torch.set_num_threads(before)
    if options.json is not None:
        from tenuto_server.bench.demo import about

        document = {"what": "tenuto bench kernels", "about": about(), "threads": options.threads, "load_before": load}
        document |= {"linears": products, "attention": attended}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.json.resolve()}")
    return 0
