"""Every setting of the server: frozen, unit-suffixed. Read once at start, never changed after."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tenuto_server.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes from ``512MiB``, ``2GB``, ``1.5G`` or a plain number. Raises ``ConfigError``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(f"cannot read {text!r} as a size; write for example 512MiB, 2GiB or 8000000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The prefix cache. Capacities are in blocks; ``extent_blocks_max`` bounds how long a merged extent may grow."""

    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    block_tokens: int = 16
    tombstone_blocks_max: int = 1_000_000
    extent_blocks_max: int = 4096
    transfer_blocks_max: int = 64
    transfers_inflight_max: int = 16
    transfer_patience_s: float = 5.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The control plane. Each limit has a metric of the same meaning."""

    cache: CacheConfig
    policy: str = "tenuto"
    max_context_tokens: int = 8192
    step_tokens_max: int = 512
    speculate_tokens_max: int = 8
    draft_tokens_max: int = 0
    speculate_batch_max: int = 16
    running_max: int = 32
    reserve_tokens_max: int = 2048
    waiting_max: int = 1024
    sessions_per_tenant_max: int = 10_000
    session_idle_forget_s: float = 7 * 86400.0
    lease_max_s: float = 3600.0
    keepalive_max_s: float = 3600.0
    hint_actions_max: int = 64
    hint_rate_per_s: float = 200.0
    hint_burst: int = 400
    journal_entries_max: int = 100_000
    prefill_a_s: float = 1e-3
    prefill_b_s: float = 1e-7
    step_overhead_s: float = 0.0
    restore_deadline_factor: float = 4.0
    host_bytes_per_s: float = 5e9
    disk_bytes_per_s: float = 5e8
    block_bytes: int = 1


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What ``tenuto serve`` was asked for, resolved. Sizes in bytes, times in seconds, bandwidths in bytes per second.

    ``model_aliases``: patterns of model names that are answered by the one model served here, since clients ask for their
    vendor's by name. ``strip_attribution``: lines that name a client's build stay out of prompts.
    """

    model: str = "smollm2-135m"
    tool_format: str | None = None
    dtype: str = "bf16"
    weights: str = "auto"
    device: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "tenuto"
    device_bytes: int = 512 * 2**20
    host_bytes: int = 2 * 2**30
    disk_bytes: int = 0
    disk_dir: Path | None = None
    block_tokens: int = 16
    lower_kv: str = "native"
    host_bandwidth: float | None = None
    disk_bandwidth: float | None = None
    step_tokens_max: int | None = None
    max_context_tokens: int | None = None
    speculate: int = 8
    draft_model: str | None = None
    draft_bytes: int = 256 * 2**20
    invariant: bool = False
    threads: int | None = None
    api_keys: dict[str, str] = field(default_factory=dict)
    secret: str | None = None
    inbox_max: int = 256
    body_bytes_max: int = 32 * 2**20
    header_bytes_max: int = 32 * 2**10
    prompt_memory_bytes: int = 256 * 2**20
    stored_responses_bytes: int = 64 * 2**20
    strip_attribution: bool = True
    model_aliases: tuple[str, ...] = ("claude-*", "gpt-*", "codex-*", "o[1-9]*", "gemini-*")
    journal_path: Path | None = None
    recorder_path: Path | None = None
    recorder_bytes_max: int = 2**30
    log_level: str = "info"
