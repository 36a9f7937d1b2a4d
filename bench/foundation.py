"""The foundation's figures, measured through HTTP against a real server process.

    python bench/foundation.py                      # the bundled model in bf16, all figures, three rounds
    python bench/foundation.py --json out.json      # and written down
    python bench/foundation.py --model toy --rounds 1 --only ttft,decode

What is measured, all as a client sees it:

- ``ttft``: time to first token of a 4K prefix and 32 new tokens: nothing cached, the prefix on the device, brought back from
  host memory, brought back from disk (through the page cache). ``ratio``: cold over it, from the same round.
- ``prefill``: prompt tokens over time to first token, nothing cached.
- ``decode``: tokens a second over all streams, from the first token of the first stream to the last of the last.
- ``start``: loading the model (as the server reports it), start to readiness, ``import tenuto``, ``tenuto --help``.

Other work on the machine makes every figure worse, so the load is printed beside them, and the best round beside the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tenuto_server.bench.demo import about
from tenuto_server.bench.endpoint import Endpoint
from tenuto_server.bench.measures import decode_rate
from tenuto_server.bench.prompts import Prompts
from tenuto_server.bench.serving import Serving, add_server_options, serving
from tenuto_server.errors import TenutoServerError

PREFIX, NEW = 4096, 32
PREFILLS = (512, 2048, 4096)
STREAMS = (1, 4, 8)
DECODE_PROMPT, DECODE_TOKENS = 64, 128
KINDS = ("start", "ttft", "prefill", "decode")


def measure_ttft(server: Endpoint, prompts: Prompts, number: int) -> dict[str, float]:
    """One round over one prefix. Disk comes before host, since what has come back keeps its lower copy."""
    prefix, name = prompts.take(PREFIX), f"ttft-{number}"
    found: dict[str, float] = {}
    for way, tier in (("cold", ""), ("device", ""), ("disk", "disk"), ("host", "host")):
        if tier:
            server.demote(name, tier)
        answer = server.stream([*prefix, *prompts.take(NEW)], 4, name)
        cached = answer.report["cached"]
        expected = {} if way == "cold" else {way: PREFIX}
        if {tier: n for tier, n in cached.items() if n > 64} != expected:
            print(f"  note: {way} in round {number + 1} found {cached}; what is missing was computed")
        found[way] = answer.times[0]
    return found


def measure_decode(server: Endpoint, prompts: Prompts, streams: int, number: int) -> float:
    """Tokens a second over all streams."""
    names = [f"decode-{streams}-{number}-{index}" for index in range(streams)]
    return decode_rate(server, [prompts.take(DECODE_PROMPT) for _ in names], DECODE_TOKENS, names)


def timed(command: list[str]) -> float:
    """Seconds a process takes, start of the interpreter included; the median of five."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def machine(server: Endpoint) -> dict[str, Any]:
    """Where the figures come from."""
    served, found = server.ask("GET", "/health")["detail"]["about"], about()
    where = {"cpu": found["processor"], "cores": found["cores"], "commit": found["commit"], **served}
    return {**where, "load_before": os.getloadavg()[0]}


def run(served: Serving, kinds: set[str], rounds: int) -> dict[str, Any]:
    """All figures: name -> median, and the single values under ``rounds``."""
    values: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        values.setdefault(name, []).append(value)
        print(f"  {name:28s} {value:10.3f}", flush=True)

    server = served.endpoint
    prompts = Prompts(server)
    server.stream(prompts.take(256), 8, "warm-up")
    if "start" in kinds:
        note("start load_s", served.load_s or float("nan"))
        note("start ready_s", served.ready_s or float("nan"))
        bare = timed([sys.executable, "-c", "pass"])
        note("start import_tenuto_s", timed([sys.executable, "-c", "import tenuto"]) - bare)
        note("start import_client_s", timed([sys.executable, "-c", "from tenuto import Client"]) - bare)
        note("start help_s", timed([sys.executable, "-m", "tenuto", "--help"]))
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
        if "ttft" in kinds:
            ways = measure_ttft(server, prompts, number)
            for way, seconds in ways.items():
                note(f"ttft {way}_s", seconds)
                if way != "cold":
                    note(f"ttft {way} ratio", ways["cold"] / seconds)
        for count in PREFILLS if "prefill" in kinds else ():
            answer = server.stream(prompts.take(count), 1, f"prefill-{count}-{number}")
            note(f"prefill {count} tokens/s", count / answer.times[0])
        for streams in STREAMS if "decode" in kinds else ():
            note(f"decode {streams} tokens/s", measure_decode(server, prompts, streams, number))
    figures = {name: statistics.median(found) for name, found in values.items()}
    best = {name: min(found) if name.endswith("_s") else max(found) for name, found in values.items()}
    return {"figures": figures, "best": best, "rounds": values}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", type=Path)
    add_server_options(parser)
    options = parser.parse_args()
    kinds = set(options.only.split(","))
    if unknown := kinds - set(KINDS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    flags = ["--device-bytes", "1GiB", "--host-bytes", "512MiB", "--disk-bytes", "1GiB"]
    try:
        with serving(options, flags, disk=True) as served:
            where = machine(served.endpoint)
            print(", ".join(f"{name} {value}" for name, value in where.items()))
            result = {"machine": where, **run(served, kinds, options.rounds)}
    except TenutoServerError as error:
        raise SystemExit(str(error)) from None
    print(f"\n{options.model}, {options.dtype}: median and best of {options.rounds}, load now {os.getloadavg()[0]:.1f}")
    for name, value in result["figures"].items():
        print(f"{name:28s} {value:10.3f} {result['best'][name]:10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
