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
import contextlib
import http.client
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PREFIX, NEW = 4096, 32
PREFILLS = (512, 2048, 4096)
STREAMS = (1, 4, 8)
DECODE_PROMPT, DECODE_TOKENS = 64, 128
KINDS = ("start", "ttft", "prefill", "decode")
START_S_MAX = 300.0


class Server:
    """One ``tenuto serve`` in a folder of its own."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        port_file, log = folder / "port", folder / "log"
        command = [sys.executable, "-m", "tenuto", "serve", "--model", options.model, "--dtype", options.dtype]
        command += ["--port", "0", "--port-file", str(port_file), "--disk-dir", str(folder / "kv")]
        command += ["--device-bytes", "1GiB", "--host-bytes", "512MiB", "--disk-bytes", "1GiB"]
        command += ["--threads", str(options.threads)] if options.threads else []
        began = time.perf_counter()
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while not port_file.exists():
            if self._process.poll() is not None or time.perf_counter() - began > START_S_MAX:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.01)
        self.ready_s = time.perf_counter() - began
        self.port = int(port_file.read_text())
        loaded = re.search(r"loaded \S+ \(.*\) in ([0-9.]+) s", log.read_text())
        self.load_s = float(loaded[1]) if loaded else float("nan")
        self.model = options.model

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A JSON answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        with contextlib.closing(connection):
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw, {"content-type": "application/json"})
            answer = connection.getresponse()
            data = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {data}")
        return data

    def complete(self, prompt: list[int], count: int, session: str) -> tuple[list[float], dict[str, Any]]:
        """A greedy stream: seconds from sending to each piece of text, and the cache report."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        raw = json.dumps({**body, "stream": True, "session_id": session})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        times: list[float] = []
        report: dict[str, Any] = {}
        with contextlib.closing(connection):
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", raw, {"content-type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if any(choice.get("text") for choice in event["choices"]):
                        times.append(time.perf_counter() - began)
                    report = event.get("tenuto", report)
        return times, report

    def demote(self, session: str, tier: str) -> None:
        """Has all blocks of a session moved off the device, to ``tier``."""
        give_up = time.perf_counter() + 60
        while "device" in self.ask("GET", f"/v1/sessions/{session}").get("resident", {}):
            if time.perf_counter() > give_up:
                raise SystemExit(f"the blocks of {session} would not move to {tier}")
            payload = {"session": session, "tier": tier}
            action = {"action_id": "1", "action_type": "kv.demote", "payload": payload}
            self.ask("POST", "/v1/kv_hints", {"actions": [action]})
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(60)


def prompts(server: Server) -> Callable[[int], list[int]]:
    """A function that gives n tokens of this project's own sources, each time others."""
    files = sorted((ROOT / "server").rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    tokens: list[int] = server.ask("POST", "/tokenize", {"model": server.model, "prompt": text})["tokens"]
    rng = random.Random(0)

    def take(count: int) -> list[int]:
        start = rng.randrange(len(tokens) - count)
        # A stretch may come again; an id of its own in front keeps it from being found in the cache.
        return [rng.choice(tokens), rng.choice(tokens), *tokens[start : start + count - 2]]

    return take


def measure_ttft(server: Server, take: Callable[[int], list[int]], number: int) -> dict[str, float]:
    """One round over one prefix. Disk comes before host, since what has come back keeps its lower copy."""
    prefix, name = take(PREFIX), f"ttft-{number}"
    found: dict[str, float] = {}
    for way, tier in (("cold", ""), ("device", ""), ("disk", "disk"), ("host", "host")):
        if tier:
            server.demote(name, tier)
        times, report = server.complete([*prefix, *take(NEW)], 4, name)
        cached = report["cached"]
        expected = {} if way == "cold" else {way: PREFIX}
        if {tier: n for tier, n in cached.items() if n > 64} != expected:
            print(f"  note: {way} in round {number + 1} found {cached}; what is missing was computed")
        found[way] = times[0]
    return found


def measure_decode(server: Server, take: Callable[[int], list[int]], streams: int, number: int) -> float:
    """Tokens a second over all streams."""
    spans: list[tuple[float, float]] = []

    def run(prompt: list[int], name: str) -> None:
        began = time.perf_counter()
        times, _ = server.complete(prompt, DECODE_TOKENS, name)
        spans.append((began + times[0], began + times[-1]))

    threads = [
        threading.Thread(target=run, args=(take(DECODE_PROMPT), f"decode-{streams}-{number}-{index}"))
        for index in range(streams)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    return streams * (DECODE_TOKENS - 1) / (last - first)


def timed(command: list[str]) -> float:
    """Seconds a process takes, start of the interpreter included; the median of five."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def machine(server: Server) -> dict[str, Any]:
    """Where the figures come from."""
    about = server.ask("GET", "/health")["detail"]["about"]
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"cpu": cpu, "cores": os.cpu_count(), "commit": commit, "load_before": os.getloadavg()[0], **about}


def run(server: Server, kinds: set[str], rounds: int) -> dict[str, Any]:
    """All figures: name -> median, and the single values under ``rounds``."""
    values: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        values.setdefault(name, []).append(value)
        print(f"  {name:28s} {value:10.3f}", flush=True)

    take = prompts(server)
    server.complete(take(256), 8, "warm-up")
    if "start" in kinds:
        note("start load_s", server.load_s)
        note("start ready_s", server.ready_s)
        bare = timed([sys.executable, "-c", "pass"])
        note("start import_tenuto_s", timed([sys.executable, "-c", "import tenuto"]) - bare)
        note("start import_client_s", timed([sys.executable, "-c", "from tenuto import Client"]) - bare)
        note("start help_s", timed([sys.executable, "-m", "tenuto", "--help"]))
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
        if "ttft" in kinds:
            ways = measure_ttft(server, take, number)
            for way, seconds in ways.items():
                note(f"ttft {way}_s", seconds)
                if way != "cold":
                    note(f"ttft {way} ratio", ways["cold"] / seconds)
        for count in PREFILLS if "prefill" in kinds else ():
            times, _ = server.complete(take(count), 1, f"prefill-{count}-{number}")
            note(f"prefill {count} tokens/s", count / times[0])
        for streams in STREAMS if "decode" in kinds else ():
            note(f"decode {streams} tokens/s", measure_decode(server, take, streams, number))
    figures = {name: statistics.median(found) for name, found in values.items()}
    best = {name: min(found) if name.endswith("_s") else max(found) for name, found in values.items()}
    return {"figures": figures, "best": best, "rounds": values}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = set(options.only.split(","))
    if unknown := kinds - set(KINDS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with us
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options)
        try:
            where = machine(server)
            print(", ".join(f"{name} {value}" for name, value in where.items()))
            result = {"machine": where, **run(server, kinds, options.rounds)}
        finally:
            server.stop()
    print(f"\n{options.model}, {options.dtype}: median and best of {options.rounds}, load now {os.getloadavg()[0]:.1f}")
    for name, value in result["figures"].items():
        print(f"{name:28s} {value:10.3f} {result['best'][name]:10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
