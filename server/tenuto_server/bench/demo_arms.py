"""The passes of the demonstration: the recording, and the replay under one arm. Each has a server process of its own.

``Arm`` and ``Sizes`` are values; a pass owns its server while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

import tenuto
from tenuto_server.bench.demo_record import RecordingPass
from tenuto_server.bench.demo_recording import Recording
from tenuto_server.bench.demo_replay import ReplayPass
from tenuto_server.bench.demo_server import ServerProcess, counted
from tenuto_server.bench.demo_tools import WorkFolder
from tenuto_server.bench.demo_turns import GREEDY, TurnLog
from tenuto_server.bench.report import Summary, TurnRow, summarise
from tenuto_server.bench.workload import AgentPlan, WorkloadSettings

AMPLE_BYTES = 1 << 30
PROBE_TOKENS = 500
HOST_TO_PREFILL = 30.0
DISK_TO_PREFILL = 6.0
"""Rate limits of the tiers, as multiples of the speed at which prefill makes KV: the middle of what PCIe 5 and NVMe give
against 7B to 32B models on one GPU (20 to 40, and 4 to 8; derived in docs/benchmarks.md)."""
_SETTLE_S = 0.5
TURN_LIMIT_S = 180.0
"""A turn that has not begun to answer by then never will: the demonstration ends with an error instead of waiting."""

OnRow = Callable[[TurnRow], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """How a recording is served. ``hints``: the agents use the SDK's hints; off, they only name their sessions. Not
    ``limited``: tiers without rate limits, for each agent's first session only, which takes half the time."""

    name: str
    policy: str
    hints: bool
    limited: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tier capacities (bytes), rate limits (bytes per second), and what they were derived from."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    host_bandwidth: int
    disk_bandwidth: int
    token_bytes: int
    prefill_tokens_per_s: float
    mean_live_tokens: float
    longest_context: int

    def flags(self, folder: Path, *, limited: bool) -> list[str]:
        """The server's flags. ``folder``: for the disk tier."""
        flags = ["--device-bytes", str(self.device_bytes), "--host-bytes", str(self.host_bytes)]
        if self.disk_bytes:
            flags += ["--disk-bytes", str(self.disk_bytes), "--disk-dir", str(folder / "disk")]
        if limited:
            flags += ["--host-bandwidth", str(self.host_bandwidth), "--disk-bandwidth", str(self.disk_bandwidth)]
        return flags


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recording pass found out. ``new_tokens``: prompt tokens never computed before, by (session, turn)."""

    rows: tuple[TurnRow, ...]
    new_tokens: Mapping[tuple[str, int], int]
    token_bytes: int
    prefill_tokens_per_s: float
    wall_s: float

    def save(self, path: Path, settings: WorkloadSettings) -> None:
        """Writes what a later replay of the same recording needs."""
        kept = asdict(self) | {"new_tokens": [[*key, tokens] for key, tokens in self.new_tokens.items()]}
        path.write_text(json.dumps({"recorded": kept, "settings": asdict(settings)}), "utf-8")

    @classmethod
    def load(cls, path: Path) -> tuple[Recorded, WorkloadSettings]:
        """Raises ``TraceError`` for a file that ``save`` did not write, ``OSError`` when it cannot be read."""
        text = path.read_text("utf-8")
        try:
            read = json.loads(text)
            kept, settings = read["recorded"], read["settings"]
            kept["rows"] = tuple(TurnRow(**row) for row in kept["rows"])
            kept["new_tokens"] = {(session, turn): tokens for session, turn, tokens in kept["new_tokens"]}
            settings["turns"] = tuple(settings["turns"])
            return cls(**kept), WorkloadSettings(**settings)
        except (ValueError, KeyError, TypeError) as error:
            raise tenuto.TraceError(f"{path} is not of a kept recording: {error}") from error


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What an arm did in one pass."""

    arm: Arm
    summary: Summary
    rows: tuple[TurnRow, ...]
    hints: dict[str, Any]
    command: tuple[str, ...]


def parse_arm(text: str) -> Arm:
    """An arm by the name of its policy; ``NAME@unlimited`` runs without rate limits. Only ``tenuto`` hears hints."""
    policy, _, option = text.partition("@")
    if option not in ("", "unlimited") or not policy:
        raise ValueError(f"cannot read the arm {text!r}; write a policy's name, or NAME@unlimited")
    return Arm(text, policy, policy == "tenuto", not option)


def size_tiers(
    recorded: Recorded,
    mean_live_tokens: float,
    longest: int,
    fractions: tuple[float, float, float],
) -> Sizes:
    """Capacities as fractions (device, host, disk) of the mean live KV. The device holds the longest context at least."""
    size = recorded.token_bytes
    device, host, disk = (int(fraction * mean_live_tokens) * size for fraction in fractions)
    kv_per_s = recorded.prefill_tokens_per_s * size
    return Sizes(
        device_bytes=max(device, (longest + 8 * 16) * size),
        host_bytes=host,
        disk_bytes=disk,
        host_bandwidth=int(HOST_TO_PREFILL * kv_per_s),
        disk_bandwidth=int(DISK_TO_PREFILL * kv_per_s),
        token_bytes=size,
        prefill_tokens_per_s=recorded.prefill_tokens_per_s,
        mean_live_tokens=mean_live_tokens,
        longest_context=longest,
    )


def record(
    model_flags: list[str],
    folder: Path,
    work: WorkFolder,
    plans: list[AgentPlan],
    settings: WorkloadSettings,
    on_row: OnRow,
) -> Recorded:
    """Runs the agents once, with memory for everything, and writes ``recording.jsonl``."""
    flags = [*model_flags, "--policy", "lru", "--device-bytes", str(AMPLE_BYTES), "--host-bytes", "0"]
    log = TurnLog(on_row)
    with ServerProcess(flags, folder / "record") as server:
        speed = max(anyio.run(_probe, server.url, name) for name in ("probe-1", "probe-2"))
        token_bytes = _token_bytes(server)

        async def run() -> None:
            recorder = tenuto.Recorder(folder / "recording.jsonl", content=True)
            with recorder:
                async with tenuto.connect(
                    server.url, forecaster=tenuto.PauseForecaster(), recorder=recorder, timeout=TURN_LIMIT_S
                ) as client:
                    passing = RecordingPass(client, work, log, settings.answer_tokens)
                    await passing.run(plans, settings)

        began = time.monotonic()
        anyio.run(run)
        wall_s = time.monotonic() - began
    return Recorded(tuple(log.rows), log.computed(), token_bytes, speed, wall_s)


def played(arm: Arm, recording: Recording) -> Recording:
    """What an arm plays of a recording."""
    return recording if arm.limited else recording.first_of_each()


def replay(
    arm: Arm,
    model_flags: list[str],
    folder: Path,
    recording: Recording,
    recorded: Recorded,
    sizes: Sizes,
    on_row: OnRow,
) -> ArmResult:
    """Plays what ``played`` says of the recording against a fresh server under one arm."""
    place = folder / arm.name.replace(":", "-").replace("@", "-")
    place.mkdir(parents=True, exist_ok=True)
    flags = [*model_flags, "--policy", arm.policy, *sizes.flags(place, limited=arm.limited)]
    flags += ["--journal", str(place / "journal.jsonl")]
    log = TurnLog(on_row, recorded.new_tokens)
    hints: dict[str, Any] = {}
    with ServerProcess(flags, place) as server:
        anyio.run(_probe, server.url, "warm-up")

        async def run() -> None:
            with _hints(arm.hints):
                # It knows none of these pauses beforehand and learns as they end.
                client = tenuto.connect(server.url, forecaster=tenuto.PauseForecaster(), timeout=TURN_LIMIT_S)
            async with client:
                await ReplayPass(client, played(arm, recording), log).run()
                await anyio.to_thread.run_sync(client.hints.flush)
            hints.update(asdict(client.hints.stats))

        time.sleep(_SETTLE_S)  # the server's figures are a fraction of a second old
        before = server.metrics()
        began = time.monotonic()
        anyio.run(run)
        wall_s = time.monotonic() - began
        time.sleep(_SETTLE_S)
        counters = counted(before, server.metrics())
        command = tuple(server.command)
    shutil.rmtree(place / "disk", ignore_errors=True)
    return ArmResult(arm, summarise(log.rows, counters, wall_s), tuple(log.rows), hints, command)


async def _probe(url: str, name: str) -> float:
    """Prefill speed in tokens per second, by the first token of a prompt that nobody shares; also warms the server up."""
    words = " ".join(f"{name} {n}" for n in range(PROBE_TOKENS // 5))
    async with (
        tenuto.connect(url, forecaster=tenuto.PauseForecaster()) as client,
        client.session(name) as session,
        session.stream([tenuto.user(words)], max_tokens=1, **GREEDY) as stream,
    ):
        async for _ in stream:
            pass
    usage, report = stream.turn.usage, stream.turn.usage.report
    took = report.ttft_s if report is not None and report.ttft_s else stream.turn.duration_s
    return (usage.prompt_tokens - usage.cached_tokens) / took


def _token_bytes(server: ServerProcess) -> int:
    figures = server.metrics()
    return int(figures["tenuto_executor_block_bytes", None]) // 16


@contextlib.contextmanager
def _hints(on: bool) -> Iterator[None]:
    """The SDK's own switch, set while a client is made."""
    before = os.environ.get("TENUTO_DISABLED")
    os.environ["TENUTO_DISABLED"] = "0" if on else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TENUTO_DISABLED"]
        else:
            os.environ["TENUTO_DISABLED"] = before
