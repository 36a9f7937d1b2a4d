"""``tenuto run`` and ``tenuto proxy``. Own the wiring of upstream, tracker, hooks and server for one process.

Exit status of ``run``: the agent's own; 2 for wrong usage, 126 or 127 when the agent could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import h11

from tenuto.client import DEFAULT_BASE_URL, Client
from tenuto.forecast import PauseForecaster
from tenuto.hooks import claude_run_hooks
from tenuto.proxy.agents import LOCAL_KEY, Setting, agent_of, prepare
from tenuto.proxy.hook_sink import HookSink
from tenuto.proxy.launch import NOT_EXECUTABLE, NOT_FOUND, run_agent
from tenuto.proxy.normalise import parts_of
from tenuto.proxy.server import ProxyServer
from tenuto.proxy.tracker import Tracker
from tenuto.proxy.upstream import Upstream

DEFAULT_LISTEN = "127.0.0.1:4040"
# No agent waits for the proxy's hints, so a busy server may take its time over them.
HINT_BUDGET_S = 2.0
# Instructions and tools of coding agents take 5,000 to 25,000 tokens before the first word of the task.
SMALL_WINDOW = 32_768
# A session whose agent has exited may be resumed by the next process, as scripts do.
KEEP_S = 300.0


def run(argv: list[str]) -> int:
    """``tenuto run [options] -- COMMAND...``."""
    parser = _parser("run", "Runs a coding agent behind a local proxy that tells the server what the agent is doing.")
    parser.usage = "tenuto run [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--model", help="model to set in the agent; by default the first one that the server lists")
    parser.add_argument("--agent", help="which agent the command starts, where its name does not tell")
    parser.add_argument("--no-hooks", action="store_true", help="infer from traffic alone")
    parser.add_argument("--print", dest="show", action="store_true", help="print what would be run, and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the agent's command line")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command: tenuto run -- claude")
    upstream = _upstream(parser, args)
    try:
        return asyncio.run(_run(args, command, upstream))
    except FileNotFoundError:
        print(f"tenuto run: no such command: {command[0]}", file=sys.stderr)
        return NOT_FOUND
    except PermissionError:
        print(f"tenuto run: not executable: {command[0]}", file=sys.stderr)
        return NOT_EXECUTABLE


def proxy(argv: list[str]) -> int:
    """``tenuto proxy [options]``."""
    parser = _parser("proxy", "Serves the local proxy for any number of clients, until it is stopped.")
    parser.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="default %(default)s")
    parser.add_argument("--port", type=int, help="port alone; 0 takes a free one")
    args = parser.parse_args(argv)
    upstream = _upstream(parser, args)
    host, _, port = args.listen.rpartition(":")
    try:
        number = args.port if args.port is not None else int(port)
    except ValueError:
        parser.error(f"--listen: not HOST:PORT: {args.listen!r}")
    try:
        asyncio.run(_serve(args, upstream, host.strip("[]") or "127.0.0.1", number))
    except OSError as error:
        print(f"tenuto proxy: cannot listen on {args.listen}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"tenuto {name}", description=text)
    parser.add_argument("--upstream", metavar="URL", help=f"the server; default TENUTO_BASE_URL or {DEFAULT_BASE_URL}")
    parser.add_argument(
        "--kind",
        choices=("tenuto", "local", "hosted"),
        help="what the server is: Tenuto, another server of one's own, or a provider's (bytes untouched, no hints); "
        "by default found out",
    )
    parser.add_argument(
        "--normalise",
        metavar="PARTS",
        help="what to rewrite in requests: attribution (Claude Code's first line), tools (their order), all or none; "
        "by default attribution for a server of one's own, nothing for a provider's",
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=KEEP_S,
        metavar="SECONDS",
        help="keep KV this long after the end; default %(default)g",
    )
    parser.add_argument("--verbose", action="store_true", help="log to stderr")
    return parser


def _upstream(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Upstream:
    try:
        args.normalise = parts_of(args.normalise) if args.normalise is not None else None
    except ValueError as error:
        parser.error(f"--normalise: {error}")
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.ERROR, stream=sys.stderr)
    try:
        return Upstream(args.upstream or os.environ.get("TENUTO_BASE_URL") or DEFAULT_BASE_URL, args.kind)
    except ValueError as error:
        parser.error(f"--upstream: {error}")


def connector(upstream: Upstream) -> Callable[[str | None], Client]:
    """Makes the SDK client that sends hints for an API key; all of them share this machine's pause history."""
    forecaster = PauseForecaster.open()

    def connect(key: str | None) -> Client:
        client = Client(upstream.url, api_key=key or "", forecaster=forecaster)
        client.hint_budget_s = HINT_BUDGET_S
        if upstream.hosted:
            client.services.sender = None  # a provider knows no hints; pauses are still learned from
        return client

    return connect


async def _run(args: argparse.Namespace, command: list[str], upstream: Upstream) -> int:
    key = os.environ.get("TENUTO_API_KEY") or None
    if not await upstream.probe():
        _say(f"{upstream.url} does not answer; starting anyway")
    model, context = await _served(upstream, key, args.model)
    given = key if upstream.hosted else key or LOCAL_KEY
    tracker = Tracker(connector(upstream), carry=upstream.kind == "tenuto", one_run=True, run_key=given)
    server = ProxyServer(upstream, tracker, HookSink(tracker, keep_s=args.keep, one_run=True), args.normalise)
    await server.start()
    try:
        agent = args.agent or agent_of(command)[0]
        hooked = agent == "claude" and not args.no_hooks and not upstream.hosted
        setting = Setting(
            server.url,
            key,
            model,
            context,
            hosted=upstream.name if upstream.hosted else None,
            hooks=claude_run_hooks(f"{server.url}/hook") if hooked else None,
        )
        start = prepare(command, setting, os.environ, agent)
        tracker.attended, tracker.agent = start.attended, start.agent
        if context is not None and context < SMALL_WINDOW and start.agent is not None:
            _say(f"{model} has a window of {context:,} tokens; the first prompt of an agent alone may be longer")
        for note in start.notes:
            _say(note)
        if args.show:
            _show(start.argv, start.env)
            return 0
        return await run_agent(start.argv, start.env)
    finally:
        await asyncio.to_thread(tracker.close, args.keep)
        await server.aclose()


async def _served(upstream: Upstream, key: str | None, model: str | None) -> tuple[str | None, int | None]:
    """The model to use and its context in tokens, as far as a server of one's own tells."""
    if upstream.hosted:
        return model, None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, h11.ProtocolError):
        status, body = await upstream.get("/v1/models", key)
        cards: list[Mapping[str, Any]] = json.loads(body)["data"] if status == 200 else []
        card = next((c for c in cards if model in (None, c.get("id"))), {})
        length = card.get("max_model_len")
        return model or card.get("id"), length if isinstance(length, int) else None
    return model, None


async def _serve(args: argparse.Namespace, upstream: Upstream, host: str, port: int) -> None:
    reachable = await upstream.probe()
    tracker = Tracker(connector(upstream), carry=upstream.kind == "tenuto")
    server = ProxyServer(upstream, tracker, HookSink(tracker, keep_s=args.keep), args.normalise)
    await server.start(host, port)
    print(f"tenuto proxy: {server.url} -> {upstream.url} ({upstream.kind})", flush=True)
    if not reachable:
        _say(f"{upstream.url} does not answer yet")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # no such handlers on this platform
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        # The clients live on and may speak to another proxy next: their sessions are not over.
        await asyncio.to_thread(lambda: tracker.close(end=False))
        await server.aclose()


def _show(argv: list[str], env: Mapping[str, str | None]) -> None:
    for name, value in sorted(env.items()):
        print(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    print(shlex.join(argv))


def _say(text: str) -> None:
    print(f"tenuto: {text}", file=sys.stderr)
