"""What many streams cost the engine: steps with every token sent as an event over HTTP, against steps whose tokens only a callback sees.

    python bench/streams.py                                   # the bundled model, 64 streams
    python bench/streams.py --model toy --forward-ms 20       # forwards that take 20 ms of waiting: only Python is shared
    python bench/streams.py --profile                         # where the event loop's time goes

One process serves as ``tenuto serve`` does (engine thread, event loop, the model's threads); the readers are a second process
that only drains its sockets. Both arms run the same greedy turns of the same length on the same engine, in pairs of
alternating order; a value is the median time of a step while all streams decode (every step has as many tokens to send, and
whatever else the machine does meets single ones), a ratio its like over HTTP against without.
The CPU time of the event loop's thread, and of the readers, which a server elsewhere would not pay for, is given per token while
all streams decode, and as a share of what all cores have in a step: where something else keeps the machine busy, ratios scatter
and this does not.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import queue
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import uvicorn

from tenuto_server.api.app import create_app
from tenuto_server.api.limits import HttpProtocol
from tenuto_server.bench.paired import METHOD, ratio_of
from tenuto_server.commands import build_service
from tenuto_server.config import ServerConfig
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.engine.plan import ForwardPlan, Output, TurnDone

PROMPT = 24


class Clocked:
    """The engine's executor with the end of every forward of all streams stamped, and each forward's time padded if asked."""

    def __init__(self, service: Any, streams: int, forward_s: float) -> None:
        self._executor = service.loop._executor
        self._run, self._streams, self._forward_s = self._executor.run, streams, forward_s
        self.ends: list[float] = []
        self.loop_cpu: list[float] = []
        self.cpu_s = time.thread_time
        self._executor.run = self.run

    def run(self, plan: ForwardPlan) -> Any:
        done = self._run(plan)
        if self._forward_s:
            time.sleep(self._forward_s)
        if len(plan.rows) == self._streams and all(row.sample for row in plan.rows):
            self.ends.append(time.perf_counter())
            self.loop_cpu.append(self.cpu_s())
        return done

    def step_s(self) -> tuple[float, float]:
        """Median time, and mean CPU time of the event loop, between two full forwards since the last call."""
        ends, self.ends = self.ends, []
        cpu, self.loop_cpu = self.loop_cpu, []
        if len(ends) < 3:
            raise SystemExit("too few steps in which all streams decode; use more --tokens")
        return statistics.median(np.diff(ends).tolist()), (cpu[-1] - cpu[0]) / (len(cpu) - 1)


class Server(threading.Thread):
    """The HTTP side on its own thread, with that thread's CPU time."""

    def __init__(self, service: Any, profile: bool) -> None:
        super().__init__(name="http", daemon=True)
        self._service = service
        self._profile = cProfile.Profile() if profile else None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self._uvicorn: uvicorn.Server | None = None
        self.ready = threading.Event()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        settings = uvicorn.Config(
            create_app(self._service), http=HttpProtocol, log_config=None, access_log=False, lifespan="off"
        )
        self._uvicorn = uvicorn.Server(settings)
        if self._profile is not None:
            self._profile.enable()
        serving = asyncio.create_task(self._uvicorn._serve(sockets=[self._listener]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        self.ready.set()
        await serving
        if self._profile is not None:
            self._profile.disable()
            pstats.Stats(self._profile).sort_stats("tottime").print_stats(35)

    def cpu_s(self) -> float:
        """CPU seconds of this thread so far."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident or 0))

    def end(self) -> None:
        """Stops serving."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        self.join(10)


def prompts(streams: int) -> list[list[int]]:
    """Ids of their own for every stream."""
    rng = np.random.default_rng(0)
    return [[int(token) for token in rng.integers(260, 500, PROMPT)] for _ in range(streams)]


def without_http(service: Any, streams: int, tokens: int, number: int) -> None:
    """All turns through the engine's inbox; returns when all have ended."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    for index, prompt in enumerate(prompts(streams)):
        sampling = Sampling(tokens, ignore_eos=True)
        turn = SubmitTurn(
            f"direct-{number}-{index}", "bench", np.array(prompt, np.int32), sampling, session=f"d{index}"
        )
        service.loop.submit(turn, lambda output: outputs.put(output) if isinstance(output, TurnDone) else None)
    for _ in range(streams):
        outputs.get(timeout=600)


def over_http(reader: subprocess.Popen[str]) -> float:
    """All turns by the reading process; returns when all have ended: the CPU seconds that it took for them."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write("go\n")
    reader.stdin.flush()
    word, _, cpu_s = reader.stdout.readline().partition(" ")
    if word != "done":
        raise SystemExit("the reading process failed")
    return float(cpu_s)


def read(port: int, streams: int, tokens: int, kind: str, model: str) -> None:
    """The second process: for every line on stdin it opens all streams and drains them."""
    for _ in sys.stdin:
        waiting = selectors.DefaultSelector()
        for index, prompt in enumerate(prompts(streams)):
            body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True}
            body |= {"ignore_eos": True, "session_id": f"h{index}"}
            if kind == "chat":
                path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"{index} {prompt}"}]
            else:
                path, body["prompt"] = "/v1/completions", prompt
            raw = json.dumps(body).encode()
            connection = socket.create_connection(("127.0.0.1", port))
            head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\nconnection: close\r\n"
            connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
            connection.setblocking(False)
            waiting.register(connection, selectors.EVENT_READ, bytearray())
        left, began = streams, time.process_time()
        while left:
            for key, _ in waiting.select():
                with suppress(BlockingIOError):
                    if data := key.fileobj.recv(65536):  # type: ignore[union-attr]
                        key.data[:] = (key.data + data)[-64:]
                        continue
                    if b"[DONE]" not in key.data:
                        raise SystemExit(f"a stream ended early: {bytes(key.data)!r}")
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    left -= 1
        print("done", time.process_time() - began, flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--streams", type=int, default=64)
    add("--tokens", type=int, default=160, help="of each stream (default: 160)")
    add("--pairs", type=int, default=6)
    add("--threads", type=int, help="CPU threads of the model")
    add("--forward-ms", type=float, default=0.0, help="let every forward wait so much longer, off the interpreter lock")
    add("--kind", default="completions", choices=("completions", "chat"))
    add("--profile", action="store_true", help="profile the event loop's thread (slows it)")
    add("--json", metavar="FILE")
    add("--read", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read, args.streams, args.tokens, args.kind, args.model)
        return
    config = ServerConfig(
        model=args.model, device_bytes=2**30, host_bytes=0, speculate=0, threads=args.threads, log_level="warning"
    )
    service = build_service(config)
    engine: Any = service.loop._engine
    engine.core.config = replace(engine.core.config, running_max=args.streams)
    clocked = Clocked(service, args.streams, args.forward_ms / 1e3)
    service.loop.start()
    server = Server(service, args.profile)
    server.start()
    server.ready.wait(30)
    clocked.cpu_s = server.cpu_s
    gc.collect()
    gc.freeze()  # as the server does
    shape = ["--streams", str(args.streams), "--tokens", str(args.tokens), "--kind", args.kind, "--model", args.model]
    command = [sys.executable, __file__, "--read", str(server.port), *shape]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        without_http(service, args.streams, 8, -1)
        values = measure(args, service, server, reader, clocked)
        assert reader.stdin is not None
        reader.stdin.close()
    server.end()
    service.close()
    report(args, values)


def measure(args: argparse.Namespace, service: Any, server: Server, reader: Any, clocked: Clocked) -> dict[str, Any]:
    """Step times of both arms in pairs, and the event loop's CPU time per token."""
    found: dict[str, Any] = {"http_s": [], "direct_s": [], "loop_us": [], "reader_us": [], "load": os.getloadavg()[0]}
    everything = args.streams * args.tokens
    for number in range(args.pairs):
        for way in ("http", "direct") if number % 2 == 0 else ("direct", "http"):
            clocked.ends.clear()
            clocked.loop_cpu.clear()
            if way == "http":
                found["reader_us"].append(over_http(reader) / everything * 1e6)
            else:
                without_http(service, args.streams, args.tokens, number)
            step_s, loop_s = clocked.step_s()
            found[f"{way}_s"].append(step_s)
            if way == "http":
                found["loop_us"].append(loop_s / args.streams * 1e6)
    return found


def report(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Prints, and writes ``--json``."""
    ratio = ratio_of([http / direct for http, direct in zip(found["http_s"], found["direct_s"], strict=True)])
    mean = {name: sum(found[name]) / len(found[name]) for name in ("http_s", "direct_s", "loop_us", "reader_us")}
    interval = f" ({ratio.low:.3f} to {ratio.high:.3f})" if ratio.low is not None else ""
    print(f"{args.streams} streams, {args.kind}, {args.model}: a step takes {mean['http_s'] * 1e3:.2f} ms over HTTP,")
    print(f"{mean['direct_s'] * 1e3:.2f} ms without: {ratio.mean:.3f} times{interval}; {METHOD}")
    for who in ("loop", "reader"):
        share = mean[f"{who}_us"] / 1e6 * args.streams / mean["direct_s"] / (os.cpu_count() or 1)
        name = "event loop" if who == "loop" else "readers"
        print(f"{name}: {mean[f'{who}_us']:.0f} us of CPU per token, {share:.1%} of a step's on all cores")
    print(f"load {found['load']:.1f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(
                {"what": "bench/streams.py", "arguments": vars(args), **found, "ratio": ratio.mean}, file, indent=1
            )


if __name__ == "__main__":
    main()
