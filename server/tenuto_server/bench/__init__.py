"""Measurements against a live server, and the demonstration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

_BENCHES = {
    "agents": ("tenuto_server.bench.agents", "many pausing agents on too little KV memory, beside other servers"),
    "costs": ("tenuto_server.bench.costs", "what work costs on this machine, for tenuto simulate --timing"),
    "engine": ("tenuto_server.bench.engine", "prefill, decode and time to first token, beside other servers"),
    "hints": ("tenuto_server.bench.hints", "what a hint costs the agent and the server"),
    "kernels": ("tenuto_server.bench.kernels", "linear layers and paged attention of this machine"),
    "quality": ("tenuto_server.bench.quality", "perplexity and greedy agreement of every form of weights"),
    "restore": ("tenuto_server.bench.restore", "time to first token after a pause, by where the KV was"),
    "speculate": ("tenuto_server.bench.speculate", "decoding with guesses beside decoding without"),
    "parity": ("tenuto_server.parity.command", "the simulator against the engine with a real model"),
}


def main(argv: Sequence[str]) -> int:
    """``tenuto bench NAME ...``. Exit status of the benchmark; 2 for an unknown name."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: tenuto bench NAME [options]\n")
        for name, (_, text) in _BENCHES.items():
            print(f"  {name:12} {text}")
        print(
            "\nMore scripts are in the folder bench/ of the sources; docs/benchmarks.md tells how all of them measure."
        )
        return 0
    if argv[0] not in _BENCHES:
        print(f"tenuto bench: {argv[0]!r} is none of {', '.join(_BENCHES)}", file=sys.stderr)
        return 2
    return int(import_module(_BENCHES[argv[0]][0]).main(argv[1:]))
