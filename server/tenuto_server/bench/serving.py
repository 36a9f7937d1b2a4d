"""What benchmarks of a served model share: their command, and the server that is measured. Owns the server's temporary folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto_server.bench.demo_server import ServerProcess
from tenuto_server.bench.endpoint import Endpoint, EndpointFailed
from tenuto_server.errors import TenutoServerError


@dataclass(frozen=True)
class Serving:
    """``folder``, ``process`` and the times are None for a server that was not started here. ``ready_s``: from the start of
    the process to readiness; ``load_s``: loading the model, as the server says."""

    endpoint: Endpoint
    command: tuple[str, ...] = ()
    disk: Path | None = None
    process: ServerProcess | None = None
    ready_s: float | None = None
    load_s: float | None = None


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """How the server is to be started, or where it runs."""
    add = parser.add_argument_group("server").add_argument
    add("--url", help="measure a Tenuto that runs there, instead of starting one")
    add("--model", default="smollm2-135m", help="as for tenuto serve")
    add("--dtype", default="bf16", choices=("bf16", "fp32"))
    add("--weights", default="auto", help="as for tenuto serve: auto, dense, stored, int8, int4")
    add("--threads", type=int, help="CPU threads of the model")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags for tenuto serve, in one quoted string")


def run_bench(
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """A benchmark's command: measures, shows, writes the document to ``--json``. Exit status 0; 1: a server or model failed,
    or the document cannot be written; wrong usage ends with 2."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values there")
    args = parser.parse_args(argv)
    try:
        document = measure(args)
        show(document)
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"written to {args.json.resolve()}")
    except (TenutoServerError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def serving(args: argparse.Namespace, flags: Sequence[str], disk: bool = False) -> Iterator[Serving]:
    """A ready server, stopped in the end if it was started here; also when this process is asked to end.

    ``flags``: this benchmark's own, which the user's come after. Raises ``ServerFailed`` and ``EndpointFailed``.
    """
    if args.url:
        endpoint = Endpoint("tenuto", args.url)
        if endpoint.ask("GET", "/health").get("detail") is None:
            raise EndpointFailed(f"--url: {args.url} is not a Tenuto server")
        yield Serving(endpoint)
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with us
    try:
        with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as name:
            folder = Path(name)
            command = ["--model", args.model, "--dtype", args.dtype, "--weights", args.weights, *flags]
            command += ["--threads", str(args.threads)] if args.threads else []
            command += ["--disk-dir", str(folder / "kv")] if disk else []
            command += shlex.split(args.serve_flags)
            began = time.perf_counter()
            with ServerProcess(command, folder) as process:
                ready_s = time.perf_counter() - began
                loaded = re.search(r"loaded in ([0-9.]+) s", process.log.read_text(errors="replace"))
                yield Serving(
                    Endpoint("tenuto", process.url),
                    tuple(command),
                    folder / "kv" if disk else None,
                    process,
                    ready_s,
                    float(loaded[1]) if loaded else None,
                )
    finally:
        signal.signal(signal.SIGTERM, before)
