"""What the local proxy adds to a request: the same requests straight to a server and through ``tenuto proxy``, in turn.

    python bench/proxy_latency.py [--requests 300] [--bytes 50000 250000 1000000]
    python bench/proxy_latency.py --recorded ../shared/recordings

The server is a process that answers every request with the same short event stream at once, so that all that is measured
is the way. Two kinds of requests: one that names its session in a header, and one whose session the proxy has to find
in the conversation itself before it can pass the request on. Times are from the first byte sent to the first byte of the
answer's body, over connections that stay open, with a rest between requests, as agents have it; the two ways take turns in
going first. ``--recorded`` sends what clients were recorded to send instead, each conversation in order, head and body as they
were, so that the sizes are theirs. What is added is told as quantiles of the pairs' differences. On a busy machine the lower quarter says more than
the rest, and the CPU time of the proxy's process more than any time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REST_S = 0.005
WARM_UP = 10
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def server(port: Any) -> None:
    """Answers every request with two events, the second one 2 ms after the first."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: *(\d+)", head.lower())
                await reader.readexactly(int(found[1]) if found else 0)
                if head.startswith(b"GET"):
                    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"server":"tenuto"}')
                    continue
                if b"/v1/kv_hints" in head:
                    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"receipts": []}')
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
                await asyncio.sleep(0.002)
                writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(LAST), LAST))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
        port.put(listener.sockets[0].getsockname()[1])
        await listener.serve_forever()

    asyncio.run(main())


class Line:
    """One open connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> float:
        """Milliseconds to the first event."""
        began = time.perf_counter()
        self._socket.sendall(request)
        data, first = b"", 0.0
        while not data.endswith(b"0\r\n\r\n"):
            data += self._socket.recv(65536)
            if not first and b"data: " in data:
                first = time.perf_counter() - began
        return 1e3 * first


def request(size: int, turn: int, named: bool) -> bytes:
    """A turn of a growing conversation whose body has about ``size`` bytes."""
    words = "the quick brown fox jumps over the lazy dog and reads a file of the project again " * 12
    messages: list[dict[str, Any]] = [{"role": "system", "content": words * 20}, {"role": "user", "content": "go"}]
    while len(messages) * len(words) < size - 20 * len(words):
        messages.append(
            {"role": "assistant" if len(messages) % 2 == 0 else "user", "content": f"{len(messages)} {words}"}
        )
    messages += [{"role": "user", "content": f"turn {n}"} for n in range(turn)]
    tools = [{"type": "function", "function": {"name": f"tool{i}", "description": words}} for i in range(10)]
    body = json.dumps({"model": "m", "messages": messages, "tools": tools, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + ("X-Session-ID: bench\r\n" if named else "") + "\r\n").encode() + body


def cpu_s(pid: int) -> float:
    """User and system time that a process has used; 0 where the platform does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def recorded(folder: Path) -> list[bytes]:
    """The requests of recorded clients, a JSON file each, conversation by conversation."""
    found = []
    for path in sorted(folder.glob("*/*/[0-9]*.json")):
        record = json.loads(path.read_text())
        if record["method"] == "POST" and record["body"] is not None and not record["path"].startswith("/hook"):
            body = json.dumps(record["body"], ensure_ascii=False, separators=(",", ":")).encode()
            fields = [*record["headers"], ("Content-Length", str(len(body)))]
            lines = [f"POST {record['path']} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
            found.append("\r\n".join([*lines, "", ""]).encode() + body)
    return found


def compare(direct: Line, proxied: Line, pid: int, requests: Iterable[bytes], label: str) -> str:
    """One line of the table: all requests but the first ``WARM_UP``."""
    straight: list[float] = []
    through: list[float] = []
    before = 0.0
    for turn, data in enumerate(requests):
        if turn == WARM_UP:  # the first ones open connections and load code
            straight, through, before = [], [], cpu_s(pid)
        for way in ((0, 1), (1, 0))[turn % 2]:
            time.sleep(REST_S)
            (straight, through)[way].append((direct, proxied)[way].ask(data))
    spent = 1e3 * (cpu_s(pid) - before) / len(straight)
    cuts = [statistics.quantiles(times, n=100) for times in (straight, through)]
    added = statistics.quantiles([b - a for a, b in zip(straight, through, strict=True)], n=100)
    cells = [label] + [f"{cut[24]:.2f} / {cut[49]:.2f} / {cut[89]:.2f}" for cut in cuts]
    return "| " + " | ".join([*cells, *(f"{added[at]:.2f}" for at in (24, 49, 89)), f"{spent:.2f}"]) + " |"


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--recorded", type=Path, metavar="DIR", help="folder of recorded requests to send instead")
    parser.add_argument("--bytes", type=int, nargs="+", default=[50_000, 100_000, 250_000, 1_000_000])
    args = parser.parse_args()
    ports: Any = multiprocessing.Queue()
    upstream = multiprocessing.Process(target=server, args=(ports,), daemon=True)
    upstream.start()
    port = ports.get(timeout=30)
    command = [sys.executable, "-m", "tenuto", "proxy", "--upstream", f"http://127.0.0.1:{port}", "--port", "0"]
    environment = {**os.environ, "TENUTO_HISTORY": "off"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as proxy:
        try:
            assert proxy.stdout is not None
            proxy_port = int(proxy.stdout.readline().split()[2].rpartition(":")[2])
            direct, proxied = Line(port), Line(proxy_port)
            print(
                "| request, bytes | session | direct p25 / p50 / p90, ms | proxied, ms | added p25, ms | added p50, ms "
                "| added p90, ms | proxy CPU, ms |"
            )
            print("|---:|---|---:|---:|---:|---:|---:|---:|")
            if args.recorded is not None:
                talk = recorded(args.recorded)
                cuts = statistics.quantiles(map(len, talk), n=20)
                label = f"{cuts[1]:,.0f} / {cuts[9]:,.0f} / {cuts[17]:,.0f} (p10 / p50 / p90) | as recorded"
                again = itertools.islice(itertools.cycle(talk), args.requests + WARM_UP)
                print(compare(direct, proxied, proxy.pid, again, label), flush=True)
            for size in args.bytes if args.recorded is None else ():
                for named, how in ((True, "named in a header"), (False, "found in the prompt")):
                    turns = (request(size, turn, named) for turn in range(args.requests + WARM_UP))
                    label = f"{len(request(size, 0, named)):,} | {how}"
                    print(compare(direct, proxied, proxy.pid, turns, label), flush=True)
        finally:
            proxy.terminate()
            upstream.terminate()
    print(f"\n{args.requests} requests a row, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
