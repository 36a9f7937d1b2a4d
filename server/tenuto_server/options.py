"""The options of ``tenuto serve``: the command line, the configuration it resolves to, and the server's secret.

Owns no state. Importing it costs next to nothing, as ``commands`` promises.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any

from tenuto_server.config import ServerConfig, parse_bytes
from tenuto_server.errors import UNWRITABLE, ConfigError

logger = logging.getLogger(__name__)

SECRET_CHARS_MIN = 16
DISK_BYTES_DEFAULT = 8 * 2**30


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


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenuto serve",
        description="Serve a model over an OpenAI-compatible API, keeping KV through the pauses of agents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    default = ServerConfig()
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--model",
        default=default.model,
        help="GGUF file, safetensors folder, bundled name, hub id, toy, or scripted[:FILE]",
    )
    add("--dtype", default=default.dtype, choices=("bf16", "fp32"), help="storage precision of KV and dense weights")
    add(
        "--weights",
        default=default.weights,
        choices=("auto", "dense", "stored", "int8", "int4"),
        help="dense in --dtype, as a quantised file stores them, or quantised at load (auto: stored where that is faster)",
    )
    add("--device", default=default.device, help="auto, cpu, cuda or cuda:N")
    add("--threads", type=int, help="CPU threads of the model (default: torch's choice)")
    add("--max-context", type=int, dest="max_context_tokens", help="tokens of context (default: the model's)")
    add("--step-tokens", type=int, dest="step_tokens_max", help="tokens computed in one step")
    add(
        "--speculate",
        type=int,
        metavar="N",
        default=default.speculate,
        help="tokens to guess ahead from the context; exact, and 0 turns it off",
    )
    add(
        "--draft-model",
        metavar="NAME",
        help="a smaller model of the same vocabulary that guesses where the context does not",
    )
    add("--draft-bytes", type=_size, default="256MiB", help="KV memory of the draft model")
    add("--invariant", action="store_true", help="make every result independent of its batch (slower; for tests)")
    _add_dialects(parser)
    _add_tiers(parser, default)
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
    _add_records(parser, default)
    return parser


def _add_tiers(parser: argparse.ArgumentParser, default: ServerConfig) -> None:
    group = parser.add_argument_group("KV tiers")
    add = group.add_argument
    add("--device-bytes", type=_size, default="512MiB", help="KV memory on the device")
    add("--host-bytes", type=_size, default="2GiB", help="KV memory on the host (0: none)")
    add("--disk-bytes", type=_size, help="KV space on disk (default: 8GiB where --disk-dir is given)")
    add("--disk-dir", type=Path, help="where KV is kept on disk; survives restarts")
    add("--host-bandwidth", type=_size, help="limit the host tier to so many bytes a second, to mimic other hardware")
    add("--disk-bandwidth", type=_size, help="limit the disk tier to so many bytes a second")
    add(
        "--lower-kv",
        default=default.lower_kv,
        choices=("native", "int8", "fp8"),
        help="KV on host and disk as it is, or in eight bits: nearly twice as much fits, and tokens may differ",
    )
    add("--block-tokens", type=int, default=default.block_tokens, help="tokens in one KV block")
    add("--policy", default=default.policy, help="what decides how long KV is kept: tenuto, tenuto:none, lru, ...")


def _add_records(parser: argparse.ArgumentParser, default: ServerConfig) -> None:
    group = parser.add_argument_group("records")
    add = group.add_argument
    add("--journal", type=Path, dest="journal_path", help="append every decision there, one JSON line each")
    add(
        "--recorder",
        type=Path,
        dest="recorder_path",
        metavar="PATH",
        help="write the traffic there as a trace for tenuto simulate: times and token counts, no text; a new file, or a folder",
    )
    add("--recorder-bytes", type=_size, default="1GiB", dest="recorder_bytes_max", help="largest recording")
    add("--log-level", default=default.log_level, choices=("debug", "info", "warning", "error"))


def _add_dialects(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dialects")
    add = group.add_argument
    add(
        "--model-alias",
        action="append",
        dest="model_aliases",
        metavar="PATTERN",
        help="more names that requests may use for the model, besides those of other vendors; may be repeated",
    )
    add(
        "--keep-attribution",
        action="store_false",
        dest="strip_attribution",
        help="leave lines that name a client's build in system prompts, though they end the prefix that sessions share",
    )
    add("--tool-format", help="how the model writes tool calls (default: what its chat template shows)")
    add("--prompt-memory", type=_size, default="256MiB", dest="prompt_memory_bytes", help="for rendered prompts")
    add("--stored-responses", type=_size, default="64MiB", dest="stored_responses_bytes", help="for /v1/responses")


def config_from(args: argparse.Namespace) -> ServerConfig:
    """The settings of a command line. Raises ``ConfigError`` for what cannot be."""
    known = {field.name for field in fields(ServerConfig)}
    given: dict[str, Any] = {key: value for key, value in vars(args).items() if key in known}
    given["api_keys"] = dict(given.get("api_keys", ()))
    given["model_aliases"] = (*ServerConfig().model_aliases, *given.get("model_aliases", ()))
    given.setdefault("secret", os.environ.get("TENUTO_SECRET") or None)
    if given.get("disk_dir") is not None:
        given.setdefault("disk_bytes", DISK_BYTES_DEFAULT)
    config = ServerConfig(**given)
    if config.disk_bytes and config.disk_dir is None:
        raise ConfigError("--disk-bytes needs --disk-dir: say where the disk tier may live")
    if config.draft_model is not None and not config.speculate:
        raise ConfigError("--draft-model guesses nothing with --speculate 0; leave one of them out")
    if config.secret is not None and len(config.secret) < SECRET_CHARS_MIN:
        raise ConfigError(f"--secret must have at least {SECRET_CHARS_MIN} characters, got {len(config.secret)}")
    for name, least in (
        ("block_tokens", 1),
        ("threads", 1),
        ("speculate", 0),
        ("step_tokens_max", 1),
        ("max_context_tokens", 2),
    ):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {config.port}")
    return config


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
        if not path.exists() and config.disk_dir.is_dir() and error.errno in UNWRITABLE:
            logger.warning("--disk-dir %s: %s; the secret is not kept", config.disk_dir, error.strerror)
            return secrets.token_bytes(32)  # nothing is stored under it either
        if not path.exists():
            raise ConfigError(f"--disk-dir {config.disk_dir}: {error.strerror}; choose a writable directory") from None
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--disk-dir {config.disk_dir}: cannot read its secret ({error.strerror})") from None
    if len(secret) < SECRET_CHARS_MIN:
        raise ConfigError(f"{path} is damaged; remove it (cached blocks are then computed anew) or pass --secret")
    return secret
