"""The commands that need the server: ``serve``, ``demo``, ``bench``. Owns the wiring of model, executor, engine and API.

Importing this module costs next to nothing, so that ``tenuto --help`` stays fast: torch and the web framework are imported
inside the functions that need them.

Exit status: 0 ended as asked, 1 could not start (the reason and what to do are on stderr), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import platform
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto_server.config import CacheConfig, EngineConfig, ServerConfig, parse_bytes
from tenuto_server.errors import ConfigError, TenutoServerError

if TYPE_CHECKING:
    from tenuto_server.api.service import Service
    from tenuto_server.model.load import LoadedModel
    from tenuto_server.runtime.disk import DiskTier
    from tenuto_server.runtime.executor import TorchExecutor

logger = logging.getLogger(__name__)

SECRET_CHARS_MIN = 16
DISK_BYTES_DEFAULT = 8 * 2**30
_DEVICE_BLOCKS_MIN = 8

Say = Callable[[str], None]


def serve(argv: list[str]) -> int:
    """``tenuto serve``."""
    args = _parser().parse_args(argv)
    try:
        config = config_from(args)
        _setup_logging(config)
        with _listener(config) as listener:
            _say(f"tenuto {_version()}: starting {config.model}")
            service = build_service(config, _say)
            return asyncio.run(_run(service, listener, getattr(args, "port_file", None), args.grace_s))
    except TenutoServerError as error:
        print(f"tenuto serve: {error}", file=sys.stderr)
        return 1


def demo(argv: list[str]) -> int:
    """``tenuto demo``."""
    from tenuto_server.bench.demo import main

    return int(main(argv) or 0)


def bench(argv: list[str]) -> int:
    """``tenuto bench``."""
    from importlib import import_module

    return int(import_module("tenuto_server.bench").main(argv) or 0)


# ---- settings ----------------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _key(text: str) -> tuple[str, str]:
    name, equals, key = text.partition("=")
    if not (name and equals and key):
        raise argparse.ArgumentTypeError("write NAME=KEY; NAME is the tenant")
    return name, key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto serve",
        description="Serve a model over an OpenAI-compatible API, keeping KV through the pauses of agents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    default = ServerConfig()
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default=default.model, help="GGUF file, safetensors folder, bundled name, hub id, or toy")
    add("--tool-format", help="how the model writes tool calls (default: what its chat template shows)")
    add("--dtype", default=default.dtype, choices=("bf16", "fp32"), help="storage precision of weights and KV")
    add("--device", default=default.device, help="auto, cpu, cuda or cuda:N")
    add("--threads", type=int, help="CPU threads of the model (default: torch's choice)")
    add("--max-context", type=int, dest="max_context_tokens", help="tokens of context (default: the model's)")
    add("--step-tokens", type=int, dest="step_tokens_max", help="tokens computed in one step")
    add("--invariant", action="store_true", help="make every result independent of its batch (slower; for tests)")
    group = parser.add_argument_group("KV tiers")
    add = group.add_argument
    add("--device-bytes", type=_size, default="512MiB", help="KV memory on the device")
    add("--host-bytes", type=_size, default="2GiB", help="KV memory on the host (0: none)")
    add("--disk-bytes", type=_size, help="KV space on disk (default: 8GiB where --disk-dir is given)")
    add("--disk-dir", type=Path, help="where KV is kept on disk; survives restarts")
    add("--host-bandwidth", type=_size, help="limit the host tier to so many bytes a second, to mimic other hardware")
    add("--disk-bandwidth", type=_size, help="limit the disk tier to so many bytes a second")
    add("--block-tokens", type=int, default=default.block_tokens, help="tokens in one KV block")
    add("--policy", default=default.policy, help="what decides how long KV is kept: tenuto, tenuto:none, lru, ...")
    group = parser.add_argument_group("network and access")
    add = group.add_argument
    add("--host", default=default.host, help="address to listen on")
    add("--port", type=int, default=default.port, help="port to listen on; 0 picks a free one")
    add("--port-file", type=Path, help="write the port there once the server is ready")
    add("--api-key", type=_key, action="append", dest="api_keys", metavar="NAME=KEY", help="may be repeated")
    add(
        "--secret",
        help="roots the block hashes, 16 characters or more (default: $TENUTO_SECRET, else kept in --disk-dir)",
    )
    add("--inbox", type=int, default=default.inbox_max, dest="inbox_max", help="turns that may wait; then 429")
    add("--max-body", type=_size, default="32MiB", dest="body_bytes_max", help="largest request body")
    add("--max-header", type=_size, default="32KiB", dest="header_bytes_max", help="largest request head")
    add(
        "--grace",
        type=float,
        default=10.0,
        dest="grace_s",
        metavar="S",
        help="seconds running turns may take at the end",
    )
    group = parser.add_argument_group("records")
    add = group.add_argument
    add("--journal", type=Path, dest="journal_path", help="append every decision there, one JSON line each")
    add("--log-level", default=default.log_level, choices=("debug", "info", "warning", "error"))
    return parser


def config_from(args: argparse.Namespace) -> ServerConfig:
    """The settings of a command line. Raises ``ConfigError`` for what cannot be."""
    known = {field.name for field in fields(ServerConfig)}
    given: dict[str, Any] = {key: value for key, value in vars(args).items() if key in known}
    given["api_keys"] = dict(given.get("api_keys", ()))
    given.setdefault("secret", os.environ.get("TENUTO_SECRET") or None)
    if given.get("disk_dir") is not None:
        given.setdefault("disk_bytes", DISK_BYTES_DEFAULT)
    config = ServerConfig(**given)
    if config.disk_bytes and config.disk_dir is None:
        raise ConfigError("--disk-bytes needs --disk-dir: say where the disk tier may live")
    if config.secret is not None and len(config.secret) < SECRET_CHARS_MIN:
        raise ConfigError(f"--secret must have at least {SECRET_CHARS_MIN} characters, got {len(config.secret)}")
    for name, least in (("block_tokens", 1), ("threads", 1), ("step_tokens_max", 1), ("max_context_tokens", 2)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {config.port}")
    return config


def _setup_logging(config: ServerConfig) -> None:
    from tenuto_server.telemetry import setup_logging

    setup_logging(config.log_level)


def secret_of(config: ServerConfig) -> bytes:
    """The server's secret, 32 bytes: the one that was set, else the one kept in the disk directory (made at first use),
    else a fresh one, since nothing then outlives the process. Raises ``ConfigError``."""
    if config.secret is not None:
        return hashlib.sha256(config.secret.encode()).digest()
    if config.disk_dir is None:
        return secrets.token_bytes(32)
    path = config.disk_dir / "secret"
    try:
        config.disk_dir.mkdir(parents=True, exist_ok=True)
        # Under another name first: a crash must not leave half a secret, which would lose all blocks at the next start.
        fresh = path.with_name(f"secret.{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    except OSError as error:
        if not path.exists():
            raise ConfigError(f"--disk-dir {config.disk_dir}: {error.strerror}; choose a writable directory") from None
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--disk-dir {config.disk_dir}: cannot read its secret ({error.strerror})") from None
    if len(secret) < SECRET_CHARS_MIN:
        raise ConfigError(f"{path} is damaged; remove it (cached blocks are then computed anew) or pass --secret")
    return secret


# ---- wiring ------------------------------------------------------------------------------------------------------


def build_service(config: ServerConfig, say: Say | None = None) -> Service:
    """Loads the model and connects everything. The loop is built but not started; ``Service.close`` undoes all of it.

    Raises ``ConfigError`` and ``ModelError``.
    """
    import torch

    from tenuto_server.engine.engine import Engine
    from tenuto_server.engine.loop import EngineLoop
    from tenuto_server.model.load import load_model
    from tenuto_server.policy import make_policy
    from tenuto_server.runtime.grammar import GrammarBook

    say = say or (lambda _: None)
    try:
        policy = make_policy(config.policy)
    except ValueError as error:
        raise ConfigError(f"--policy: {error}") from None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    secret = secret_of(config)
    began = time.perf_counter()
    if config.dtype not in ("bf16", "fp32"):
        raise ConfigError(f"--dtype must be bf16 or fp32, got {config.dtype!r}")
    precision: Any = config.dtype
    model = load_model(config.model, dtype=precision, device=device, invariant=config.invariant)
    say(f"  model    {model.name}, {config.dtype} on {device}, loaded in {time.perf_counter() - began:.1f} s")
    executor, engine_config, identity = _executor(config, model, secret, say)
    journal = _JournalFile(config.journal_path) if config.journal_path else None
    engine = Engine(engine_config, policy, identity, journal.write if journal else None)
    loop = EngineLoop(engine, executor, inbox_max=config.inbox_max)
    if executor.disk is not None:
        loop.post(executor.recovered())
    say(f"  policy   {policy.name}; context {engine_config.max_context_tokens} tokens")

    def close() -> None:
        executor.close()
        if journal is not None:
            journal.close()

    service = _service(config, model, engine_config, loop, device, close)
    service.grammars = executor.grammars = GrammarBook(
        model.tokenizer, model.config.vocab_size, model.config.eos_ids, service.shown_ids
    )
    return service


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {wanted!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {wanted}: this machine has no CUDA device that torch can use; try --device cpu")
    return wanted


def _executor(
    config: ServerConfig, model: LoadedModel, secret: bytes, say: Say
) -> tuple[TorchExecutor, EngineConfig, Any]:
    """The executor with its pools and disk, the engine's settings with measured costs, and the block identity."""
    from tenuto_kernels.layout import LAYOUT_VERSION
    from tenuto_server.cache.identity import RootIdentity
    from tenuto_server.runtime.costs import measure_costs
    from tenuto_server.runtime.executor import TorchExecutor

    layout = model.transformer.kv_layout(config.block_tokens)
    size = layout.block_bytes
    device_blocks, host_blocks = config.device_bytes // size, config.host_bytes // size
    if device_blocks < _DEVICE_BLOCKS_MIN:
        raise ConfigError(
            f"--device-bytes {config.device_bytes} holds {device_blocks} KV blocks of {size} bytes; "
            f"give at least {_DEVICE_BLOCKS_MIN * size}"
        )
    identity = RootIdentity(model.digest, "", config.dtype, LAYOUT_VERSION, config.block_tokens, secret)
    disk = _disk(config, identity.family(), size)
    try:
        executor = TorchExecutor(
            model.transformer,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            block_tokens=config.block_tokens,
            disk=disk,
            host_bytes_per_s=config.host_bandwidth,
            disk_bytes_per_s=config.disk_bandwidth,
        )
    except (RuntimeError, MemoryError) as error:
        if disk is not None:
            disk.close()
        reason = str(error).splitlines()[0]
        raise ConfigError(f"no memory for the KV pools ({reason}); lower --device-bytes or --host-bytes") from None
    context = min(model.config.max_position, config.max_context_tokens or model.config.max_position)
    costs = measure_costs(executor, max_context_tokens=context)
    tiers = [f"device {_mib(device_blocks * size)}", f"host {_mib(host_blocks * size)}"]
    tiers += [f"disk {_mib(disk.slots * size)} in {config.disk_dir}"] if disk is not None else []
    say(f"  KV       {', '.join(tiers)}; a token takes {layout.token_bytes} bytes")
    say(f"  measured {1 / costs.prefill_a_s:.0f} tokens/s prefill, in {costs.took_s:.1f} s")
    base = EngineConfig(CacheConfig(device_blocks))
    engine_config = EngineConfig(
        cache=CacheConfig(device_blocks, host_blocks, disk.slots if disk is not None else 0, config.block_tokens),
        policy=config.policy,
        max_context_tokens=context,
        step_tokens_max=config.step_tokens_max or base.step_tokens_max,
        prefill_a_s=costs.prefill_a_s,
        prefill_b_s=costs.prefill_b_s,
        host_bytes_per_s=costs.host_bytes_per_s or base.host_bytes_per_s,
        disk_bytes_per_s=costs.disk_bytes_per_s or base.disk_bytes_per_s,
        block_bytes=size,
    )
    return executor, engine_config, identity


def _disk(config: ServerConfig, family: str, block_bytes: int) -> DiskTier | None:
    from tenuto_server.runtime.disk import DiskTier

    if config.disk_dir is None or not config.disk_bytes:
        return None
    slots = config.disk_bytes // block_bytes
    if slots < 1:
        raise ConfigError(f"--disk-bytes {config.disk_bytes} is less than one KV block of {block_bytes} bytes")
    return DiskTier(config.disk_dir, family, block_bytes=block_bytes, slots=slots)


def _service(
    config: ServerConfig, model: LoadedModel, engine: EngineConfig, loop: Any, device: str, close: Callable[[], None]
) -> Service:
    import torch

    from tenuto_kernels.dispatch import backend
    from tenuto_server.api.service import ServedModel, Service

    # What a prompt may have is the smaller of the model's context and what the device can hold at all.
    room = min(engine.max_context_tokens, (engine.cache.device_blocks - 2) * engine.cache.block_tokens)
    served = ServedModel(
        name=model.name,
        tokenizer=model.tokenizer,
        chat=model.chat,
        eos_ids=model.config.eos_ids,
        max_context_tokens=room,
        default_max_tokens=engine.reserve_tokens_max,
        aliases=(config.model,),
        created=int(time.time()),
    )
    about = {
        "tenuto": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": backend(),
        "device": device,
        "dtype": config.dtype,
        "threads": str(torch.get_num_threads()),
        "policy": config.policy,
        "weights": model.digest[:16],
    }
    return Service(loop, served, config, about, close)


class _JournalFile:
    """Appends journal lines. Owned by the engine thread until ``close``. A full disk costs lines, never the engine."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--journal {path}: {error.strerror}") from None
        self._lost = 0

    def write(self, line: str) -> None:
        """One line."""
        try:
            self._file.write(line + "\n")
        except (OSError, ValueError) as error:
            if not self._lost:
                logger.warning("journal: %s; decisions are no longer recorded", error)
            self._lost += 1

    def close(self) -> None:
        """Flushes."""
        try:
            self._file.close()
        except OSError as error:
            logger.warning("journal: %s", error)


# ---- running -----------------------------------------------------------------------------------------------------


@contextmanager
def _listener(config: ServerConfig) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet: a port in use is found before the model is loaded, and clients are refused
    rather than kept waiting until the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host}: {error.strerror}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another --port (0: any free one)"
            ) from None
        yield listener


async def _run(service: Service, listener: socket.socket, port_file: Path | None, grace_s: float) -> int:
    """Serves until SIGTERM or SIGINT; a second one does not wait for running turns."""
    import uvicorn

    from tenuto_server.api.app import create_app
    from tenuto_server.api.limits import HttpProtocol

    settings = uvicorn.Config(
        create_app(service),
        http=HttpProtocol,
        h11_max_incomplete_event_size=4 * service.config.header_bytes_max,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )

    class Server(uvicorn.Server):
        """uvicorn's server with its signal handling replaced: ours ends with a flush and a status of 0."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        def ask_to_stop(self) -> None:
            """Stop accepting and finish; at the second call, at once."""
            self.force_exit = self.should_exit
            self.should_exit = True

    server = Server(settings)
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, server.ask_to_stop)
    service.loop.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            _announce(service, listener, port_file)
        await serving
    finally:
        _say("stopping: finishing what runs, flushing the disk tier")
        stopped = service.close(grace_s)
        if port_file is not None:
            port_file.unlink(missing_ok=True)
    _say("stopped" if stopped else "stopped, though the engine was still busy")
    return 0


def _announce(service: Service, listener: socket.socket, port_file: Path | None) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _say(f"ready    http://{shown}:{port}/v1  (model {service.model.name!r}; stop with Ctrl-C)")
    if port_file is not None:
        partial = port_file.with_name(port_file.name + ".partial")
        partial.write_text(f"{port}\n")
        partial.replace(port_file)


def _say(text: str) -> None:
    print(text, flush=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tenuto")
    except PackageNotFoundError:
        return "(not installed)"
