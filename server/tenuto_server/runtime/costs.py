"""What prefill and the tiers cost on this machine, measured once at start. Holds no state.

The engine weighs a restore against a recompute with these figures before it has any experience, and re-estimates them while
it serves. Runs before the engine does: the probe writes into device and host blocks that nobody owns yet.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tenuto_server.engine.events import Event, Sampling, TransferDone
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, TierName, Transfer
from tenuto_server.runtime.blocks import HASH_BYTES
from tenuto_server.runtime.disk_io import SegmentFile, aligned
from tenuto_server.runtime.executor import TorchExecutor

_CHUNK_TOKENS = 128
_WARM_TOKENS = 16
_FAR_TOKENS = 2048
_CHUNK_S = 0.3
_REPEAT_BELOW_S = 0.12
_COPY_BYTES = 32 * 2**20
_DISK_STEP_BYTES = 4 * 2**20
_DISK_WRITE_S = 0.15


@dataclass(frozen=True)
class Costs:
    """A token at position x takes ``prefill_a_s + prefill_b_s * x`` seconds in a chunk, and a forward of few tokens
    ``step_overhead_s`` more than that (the weights are read, however few they are); bandwidths in bytes per second.

    ``host_bytes_per_s``: host to device, the way a restore goes, checksums included. ``disk_bytes_per_s``: reading what is
    not in the page cache; ``disk_write_bytes_per_s``: synced. None: no such tier. Rate limits
    count: they are part of what a copy takes.
    """

    prefill_a_s: float
    prefill_b_s: float
    step_overhead_s: float
    host_bytes_per_s: float | None
    disk_bytes_per_s: float | None
    disk_write_bytes_per_s: float | None
    took_s: float


def measure_costs(executor: TorchExecutor, *, max_context_tokens: int) -> Costs:
    """Probe prefill near and far into a context, the host tier and the disk tier; about a second for a small model.

    Replaces the executor's sink while it runs.
    """
    began = time.perf_counter()
    a_s, b_s, overhead_s = _prefill(executor, max_context_tokens)
    host = _host(executor) if executor.store.host_pool is not None else None
    disk = write = None
    if executor.disk is not None and executor.disk.writable:
        with contextlib.suppress(OSError):
            write, disk = measure_disk(executor.disk.folder)
            limit = executor.transfers.disk_bytes_per_s
            if limit is not None:
                write, disk = min(write, limit), min(disk, limit)
            # A block below the device may take fewer bytes than on it, which is what bandwidths count in.
            packed = executor.store.layout.block_bytes / executor.store.lower_bytes
            write, disk = write * packed, disk * packed
    return Costs(a_s, b_s, overhead_s, host, disk, write, time.perf_counter() - began)


def measure_disk(folder: Path) -> tuple[float, float]:
    """(synced write, cold read) of a probe file in ``folder``, bytes per second. Raises ``OSError``."""
    path = folder / "probe-bandwidth"
    data = aligned(_DISK_STEP_BYTES)
    data[:] = np.random.default_rng(0).integers(0, 256, _DISK_STEP_BYTES, dtype=np.uint8)
    file = SegmentFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        began, written = time.perf_counter(), 0
        while written < 2 * _COPY_BYTES and (not written or time.perf_counter() - began < _DISK_WRITE_S):
            file.write(data, written)
            written += len(data)
        file.sync()
        write_s = time.perf_counter() - began
        # Only clean pages can be dropped, hence after the sync; without this the read would measure memory.
        file.forget_cached()
        began = time.perf_counter()
        for offset in range(0, written, len(data)):
            file.read(data, offset)
        return written / write_s, written / max(time.perf_counter() - began, 1e-9)
    finally:
        file.close()
        path.unlink()


def _prefill(executor: TorchExecutor, max_context_tokens: int) -> tuple[float, float, float]:
    """Fit the two coefficients through a chunk at the start and one far into a context, and what a small forward takes
    beyond them."""
    size = executor.store.layout.block_size
    room = min(max_context_tokens, len(executor.store.device_pool) * size)
    warm = min(_WARM_TOKENS, room)
    _chunk(executor, 0, warm, repeat=False)  # the first forward also builds what is built lazily
    warm_s = _chunk(executor, 0, warm)
    # A slow or busy machine must not make the start wait: there a smaller chunk has to do.
    count = min(_CHUNK_TOKENS, room, max(warm, int(warm * _CHUNK_S / warm_s)))
    near_s = _chunk(executor, 0, count)
    start = min(_FAR_TOKENS, room - count)
    if start <= 0:
        return near_s / count, 0.0, max(0.0, warm_s - warm * near_s / count)
    far_s = _chunk(executor, start, count)
    b_s = max(0.0, (far_s - near_s) / (count * start))
    a_s = max(near_s / count - b_s * count / 2, 0.1 * near_s / count)
    return a_s, b_s, max(0.0, warm_s - warm * a_s)


def _chunk(executor: TorchExecutor, start: int, count: int, *, repeat: bool = True) -> float:
    """Seconds for one row of ``count`` tokens after ``start``; the best of up to three where that is cheap."""
    size = executor.store.layout.block_size
    blocks = np.arange((start + count + size - 1) // size, dtype=np.int32)
    tokens = np.arange(count, dtype=np.int32) % executor.transformer.config.vocab_size
    plan = ForwardPlan(0, (ForwardRow(0, start, tokens, blocks, sample=False, sampling=Sampling(1)),))
    best = executor.run(plan).elapsed_ns
    for _ in range(2):
        if repeat and best < _REPEAT_BELOW_S * 1e9:
            best = min(best, executor.run(plan).elapsed_ns)
    return best / 1e9


def _host(executor: TorchExecutor) -> float | None:
    """Host to device, bytes per second, over blocks that were copied down first."""
    store, events = executor.store, queue.SimpleQueue[Event]()
    executor.set_sink(events.put)
    count = min(len(store.device_pool), len(store.host_sums), max(1, _COPY_BYTES // store.layout.block_bytes))
    slots, hashes = np.arange(count, dtype=np.int32), bytes(HASH_BYTES * count)

    def copy(number: int, src: TierName, dst: TierName) -> float | None:
        began = time.perf_counter()
        executor.submit(Transfer(number, src, dst, slots, slots, hashes, urgent=True))
        while not isinstance(done := events.get(), TransferDone):
            pass
        return count * store.layout.block_bytes / (time.perf_counter() - began) if done.ok else None

    copy(-1, "device", "host")
    return copy(-2, "host", "device")
