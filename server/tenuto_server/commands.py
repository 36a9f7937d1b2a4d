"""The commands that need the server: ``serve``, ``demo``, ``bench``. Owns the wiring of model, executor, engine and API.

Importing this module costs next to nothing, so that ``tenuto --help`` stays fast: torch and the web framework are imported
inside the functions that need them.

Exit status: 0 ended as asked, 1 could not start (the reason and what to do are on stderr), 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto_server.config import CacheConfig, EngineConfig, ServerConfig
from tenuto_server.errors import ConfigError, TenutoServerError
from tenuto_server.options import config_from, secret_of, serve_parser

if TYPE_CHECKING:
    from tenuto_server.api.service import Service
    from tenuto_server.engine.engine import Engine
    from tenuto_server.learned import LearnedFile
    from tenuto_server.model.load import LoadedModel
    from tenuto_server.runtime.disk import DiskTier
    from tenuto_server.runtime.draft import DraftModel
    from tenuto_server.runtime.executor import TorchExecutor

logger = logging.getLogger(__name__)

_DEVICE_BLOCKS_MIN = 8

Say = Callable[[str], None]


def serve(argv: list[str]) -> int:
    """``tenuto serve``."""
    args = serve_parser().parse_args(argv)
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


def _setup_logging(config: ServerConfig) -> None:
    from tenuto_server.telemetry import setup_logging

    setup_logging(config.log_level)


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
    form: Any = config.weights
    model = load_model(config.model, dtype=precision, device=device, invariant=config.invariant, weights=form)
    say(
        f"  model    {model.name}, {_precision(config, model)} on {device}, loaded in {time.perf_counter() - began:.1f} s"
    )
    executor, engine_config, identity = _executor(config, model, secret, say)
    if config.draft_model is not None:
        executor.drafter = _drafter(config, model, device, say)
    journal = _JournalFile(config.journal_path) if config.journal_path else None
    engine = Engine(engine_config, policy, identity, journal.write if journal else None)
    recorder = None
    if config.recorder_path is not None:
        from tenuto_server.recording import TrafficRecorder

        limit = config.recorder_bytes_max
        recorder = TrafficRecorder(engine, config.recorder_path, model=model.name, bytes_max=limit)
        say(f"  recorder {recorder.path}")
    learned = _learned(engine, executor, secret, say)
    rest = learned.tend if learned is not None else (lambda: None)
    loop = EngineLoop(recorder or engine, executor, inbox_max=config.inbox_max, at_rest=rest)
    if executor.disk is not None:
        loop.post(executor.recovered())
    say(f"  policy   {policy.name}; context {engine_config.max_context_tokens} tokens")

    def close() -> None:
        if learned is not None and not loop.healthy:
            learned.close()  # before the directory is given up
        executor.close()
        for record in (recorder, journal):
            if record is not None:
                record.close()

    service = _service(config, model, engine_config, loop, device, close)
    service.grammars = executor.grammars = GrammarBook(
        model.tokenizer, model.config.vocab_size, model.config.eos_ids, service.shown_ids
    )
    return service


def _learned(engine: Engine, executor: TorchExecutor, secret: bytes, say: Say) -> LearnedFile | None:
    """What pauses have taught before, if there is a disk directory to keep it in."""
    from tenuto_server.learned import LearnedFile, alias_of
    from tenuto_server.policy.learned import Learned

    if executor.disk is None:
        return None
    engine.core.learned = Learned(engine.core.knowledge, alias_of(secret))
    file = LearnedFile(executor.disk.folder / "learned.json", engine.core.learned)
    if file.load():
        say("  pauses   what earlier runs have learned of them is known")
    return file


def _precision(config: ServerConfig, model: LoadedModel) -> str:
    """The numbers the KV was made with, as part of every block's identity."""
    form = model.transformer.weights_form
    made = config.dtype if form == "dense" else f"{config.dtype}, {form} weights"
    return made if config.lower_kv == "native" else f"{made}, {config.lower_kv} below the device"


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
    from tenuto_kernels.lower import LowerForm
    from tenuto_server.cache.identity import RootIdentity
    from tenuto_server.runtime.costs import measure_costs
    from tenuto_server.runtime.executor import TorchExecutor

    layout = model.transformer.kv_layout(config.block_tokens)
    kind: Any = config.lower_kv
    lower = LowerForm(layout, kind) if config.lower_kv != "native" else None
    size, below = layout.block_bytes, layout.block_bytes if lower is None else lower.block_bytes
    device_blocks, host_blocks = config.device_bytes // size, config.host_bytes // below
    if device_blocks < _DEVICE_BLOCKS_MIN:
        raise ConfigError(
            f"--device-bytes {config.device_bytes} holds {device_blocks} KV blocks of {size} bytes; "
            f"give at least {_DEVICE_BLOCKS_MIN * size}"
        )
    identity = RootIdentity(model.digest, "", _precision(config, model), LAYOUT_VERSION, config.block_tokens, secret)
    disk = _disk(config, identity.family(), below)
    try:
        executor = TorchExecutor(
            model.transformer,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            block_tokens=config.block_tokens,
            disk=disk,
            host_bytes_per_s=config.host_bandwidth,
            disk_bytes_per_s=config.disk_bandwidth,
            lower=lower,
        )
    except (RuntimeError, MemoryError) as error:
        if disk is not None:
            disk.close()
        reason = str(error).splitlines()[0]
        raise ConfigError(f"no memory for the KV pools ({reason}); lower --device-bytes or --host-bytes") from None
    context = min(model.config.max_position, config.max_context_tokens or model.config.max_position)
    costs = measure_costs(executor, max_context_tokens=context)
    tiers = [f"device {_mib(device_blocks * size)}", f"host {_mib(host_blocks * below)}"]
    tiers += [f"disk {_mib(disk.slots * below)} in {config.disk_dir}"] if disk is not None else []
    told = f"; below the device in {config.lower_kv}, {below / size:.0%} of the bytes" if lower is not None else ""
    say(f"  KV       {', '.join(tiers)}; a token takes {layout.token_bytes} bytes{told}")
    say(f"  measured {1 / costs.prefill_a_s:.0f} tokens/s prefill, in {costs.took_s:.1f} s")
    base = EngineConfig(CacheConfig(device_blocks))
    engine_config = EngineConfig(
        cache=CacheConfig(device_blocks, host_blocks, disk.slots if disk is not None else 0, config.block_tokens),
        policy=config.policy,
        max_context_tokens=context,
        step_tokens_max=config.step_tokens_max or base.step_tokens_max,
        speculate_tokens_max=config.speculate,
        draft_tokens_max=config.speculate if config.draft_model is not None else 0,
        prefill_a_s=costs.prefill_a_s,
        prefill_b_s=costs.prefill_b_s,
        step_overhead_s=costs.step_overhead_s,
        host_bytes_per_s=costs.host_bytes_per_s or base.host_bytes_per_s,
        disk_bytes_per_s=costs.disk_bytes_per_s or base.disk_bytes_per_s,
        block_bytes=size,
    )
    return executor, engine_config, identity


def _drafter(config: ServerConfig, served: LoadedModel, device: str, say: Say) -> DraftModel:
    from tenuto_server.model.load import load_model
    from tenuto_server.runtime.draft import DraftModel

    assert config.draft_model is not None
    precision: Any = config.dtype
    form: Any = config.weights
    model = load_model(config.draft_model, dtype=precision, device=device, invariant=config.invariant, weights=form)
    drafter = DraftModel(model, served, pool_bytes=config.draft_bytes, block_tokens=config.block_tokens)
    say(f"  draft    {model.name}, {_mib(config.draft_bytes)} of KV; guesses up to {config.speculate} tokens ahead")
    return drafter


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

    from tenuto_server.api.app import WEBSOCKETS, create_app
    from tenuto_server.api.limits import HttpProtocol

    settings = uvicorn.Config(
        create_app(service),
        http=HttpProtocol,
        ws=WEBSOCKETS,
        ws_max_size=service.config.body_bytes_max,
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
    # What is there now stays as long as the server: the collector need not go through it again and again, with all threads waiting.
    gc.collect()
    gc.freeze()
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
