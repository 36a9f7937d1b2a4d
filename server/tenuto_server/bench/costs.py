"""``tenuto bench costs``: what work costs on this machine, measured through HTTP, in the shape that the simulator reads.

Prefill is fitted as ``c + a * n + b * n * n / 2`` seconds for n uncached tokens (token x takes a + b * x), by least squares
over unique prompts of several lengths. Decode is the time between the tokens of one stream, at a short and a long context. Copy bandwidths are what the
server has measured (1 GB/s where it has not used that path yet).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tenuto_server.bench.demo import about
from tenuto_server.bench.demo_server import ServerFailed, ServerProcess

LENGTHS = (256, 512, 1024, 2048, 4096)
DECODE_TOKENS = 48
_IDS = range(260, 500)  # in every vocabulary, the toy one included


def main(argv: Sequence[str]) -> int:
    """Measures, prints, and writes ``--out``. Exit status 0, or 1 when the server failed."""
    args = _parser().parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="tenuto-costs-") as folder:
            flags = ["--model", args.model, "--dtype", args.dtype, "--policy", "lru", "--host-bytes", "256MiB"]
            flags += ["--disk-bytes", "512MiB", "--disk-dir", str(Path(folder) / "kv")]
            with ServerProcess(flags, Path(folder)) as server:
                costs = measure(server.url, args.rounds)
    except ServerFailed as error:
        print(f"tenuto bench costs: {error}", file=sys.stderr)
        return 1
    result = {"name": args.name, **costs, "about": about()}
    for key, value in costs.items():
        print(f"{key:20} {value:.4g}" if isinstance(value, float) else f"{key:20} {value}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        print(f"written to {args.out.resolve()}; use it as: tenuto simulate TRACE --timing {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tenuto bench costs", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="as for tenuto serve")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each length (default: 3)")
    parser.add_argument("--name", default="this machine", help="name in the result")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the result as JSON, for --timing of tenuto simulate"
    )
    return parser


def measure(url: str, rounds: int, seed: int = 1) -> dict[str, Any]:
    """The costs of the server at ``url``."""
    rng = random.Random(seed)
    health = _call(url, "GET", "/health")
    room = _call(url, "GET", "/v1/models")["data"][0].get("max_model_len", max(LENGTHS))
    lengths = [n for n in LENGTHS if n + DECODE_TOKENS < room]
    _first_token_s(url, _prompt(rng, 64))  # whatever is done once is done now
    points = [(n, statistics.median(_first_token_s(url, _prompt(rng, n)) for _ in range(rounds))) for n in lengths]
    _, a, b = fit(points)
    token_s = statistics.median(_token_s(url, _prompt(rng, 64)) for _ in range(rounds))
    long_s = statistics.median(_token_s(url, _prompt(rng, lengths[-1])) for _ in range(rounds))
    tiers = health["detail"]["tiers"]
    kv_bytes = tiers["block_bytes"] // health["detail"].get("block_tokens", 16)
    paths = tiers.get("paths", {})
    return {
        "prefill_a_s": a,
        "prefill_b_s": b,
        "weights_s": token_s,
        "kv_bytes": kv_bytes,
        # What a longer context adds to a token's time is the reading of its KV.
        "memory_bps": kv_bytes * (lengths[-1] - 64) / max(long_s - token_s, 1e-6),
        "host_bps": _bandwidth(paths, "host_device"),
        "disk_bps": _bandwidth(paths, "disk_device"),
        "source": f"tenuto bench costs: {len(points)} lengths up to {lengths[-1]} tokens, {rounds} rounds",
    }


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """(c, a, b) of the least-squares fit of seconds to c + a * n + b * n**2 / 2, each point weighted by 1 / seconds; b is
    not let below 0."""
    n = np.array([length for length, _ in points], float)
    seconds = np.array([taken for _, taken in points])
    columns = np.stack((np.ones_like(n), n, n * n / 2), axis=1)
    scale = (1.0 / seconds)[:, None]
    solved, *_ = np.linalg.lstsq(columns * scale, np.ones_like(seconds), rcond=None)
    if solved[2] < 0:
        solved, *_ = np.linalg.lstsq(columns[:, :2] * scale, np.ones_like(seconds), rcond=None)
        solved = np.append(solved, 0.0)
    c, a, b = (float(value) for value in solved)
    return c, a, b


def _bandwidth(paths: dict[str, Any], name: str) -> float:
    path = paths.get(name) or {}
    return path["bytes"] / (path["elapsed_ns"] / 1e9) if path.get("elapsed_ns") else 1e9


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(_IDS) for _ in range(count)]


def _first_token_s(url: str, prompt: list[int]) -> float:
    began = time.perf_counter()
    _call(url, "POST", "/v1/completions", _body(prompt, 1))
    return time.perf_counter() - began


def _token_s(url: str, prompt: list[int]) -> float:
    began = time.perf_counter()
    answer = _call(url, "POST", "/v1/completions", _body(prompt, DECODE_TOKENS))
    return (time.perf_counter() - began - float(answer["tenuto"]["ttft_s"])) / (DECODE_TOKENS - 1)


def _body(prompt: list[int], count: int) -> dict[str, Any]:
    return {"model": "", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}


def _call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300.0)
    try:
        if body is not None and not body["model"]:
            body["model"] = _call(url, "GET", "/v1/models")["data"][0]["id"]
        data = json.dumps(body) if body is not None else None
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise ServerFailed(f"{path} answered {response.status}: {text[:300]}")
        return json.loads(text)
    finally:
        connection.close()
