"""The memory of the KV tiers: the device pool, the host pool, and a checksum for every block on the host.

``KVStore`` owns both pools. The executor's thread writes the device pool by computing; the transfer workers write what
a transfer names as its destination, which nobody else touches while the engine keeps it pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from tenuto_kernels.cpu.native_build import library
from tenuto_kernels.layout import KVLayout
from tenuto_kernels.lower import LowerForm
from tenuto_kernels.ops import gather_blocks, scatter_blocks
from tenuto_server.runtime.blocks import Bytes, Slots, copy_runs, runs
from tenuto_server.runtime.disk_io import aligned


class KVStore:
    """Pools of ``device_blocks`` on ``device`` and ``host_blocks`` in host memory (page-locked beside CUDA; may be 0).

    ``checksums``: keep a sum for every block that arrives on the host and compare it when the block leaves. ``lower``: the
    form of blocks below the device; None: as they are. Host memory and staging then hold packed blocks of ``lower_bytes``.
    Raises ``ValueError`` for a size below one and ``torch.OutOfMemoryError`` or ``RuntimeError`` if memory lacks.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        device_blocks: int,
        host_blocks: int = 0,
        device: torch.device | str = "cpu",
        checksums: bool = True,
        lower: LowerForm | None = None,
    ) -> None:
        self.layout, self.lower = layout, lower
        self.lower_bytes = layout.block_bytes if lower is None else lower.block_bytes
        self.device = torch.device(device)
        self.checksums = checksums
        self.device_pool = layout.allocate(device_blocks, self.device)
        self.host_pool = (lower or layout).allocate(host_blocks, "cpu", pin=True) if host_blocks else None
        self.host_sums = np.zeros(host_blocks, dtype=np.uint32)
        library()  # built here if it must be, not by the first copy that a turn waits for
        self.host_bytes = as_bytes(self.host_pool) if self.host_pool is not None else None
        # On a CPU "device" both pools are plain memory: NumPy copies run by run on the calling thread alone, where a
        # torch copy would start a second team of OpenMP threads beside the one that computes.
        self._device_bytes = as_bytes(self.device_pool) if self.device.type == "cpu" else None
        self.stream = _new_stream(self.device) if self.device.type == "cuda" else None

    @property
    def device_bytes(self) -> Bytes | None:
        """The device pool, where it is ordinary memory of this machine and blocks keep their form below it."""
        return self._device_bytes if self.lower is None else None

    @property
    def plain(self) -> bool:
        """The device pool is ordinary memory of this machine, and its blocks are copied as runs of bytes."""
        return self._device_bytes is not None

    def staging(self, blocks: int) -> torch.Tensor:
        """A host buffer of that many blocks, page-locked beside CUDA, beginning on a page."""
        if self.device.type == "cuda":
            return (self.lower or self.layout).allocate(blocks, "cpu", pin=True)
        buffer = torch.from_numpy(aligned(blocks * self.lower_bytes)).view(blocks, self.lower_bytes)
        return (
            buffer if self.lower is not None else buffer.view(self.layout.dtype).view(blocks, *self.layout.block_shape)
        )

    def from_device(
        self, slots: Slots, out: torch.Tensor, out_slots: Slots | None, after: torch.cuda.Event | None
    ) -> None:
        """Copy device blocks to blocks ``out_slots`` (None: 0, 1, ...) of host memory ``out``; returns when they are there.

        ``after``: recorded on the compute stream once everything that wrote these blocks was enqueued.
        """
        for _ in self.arriving(slots, out, out_slots, after, max(1, len(slots))):
            pass

    def arriving(
        self, slots: Slots, out: torch.Tensor, out_slots: Slots | None, after: torch.cuda.Event | None, piece: int
    ) -> Iterator[tuple[int, int]]:
        """``from_device`` in pieces of so many blocks: yields each range [first, last) of ``slots`` when it is there. On CUDA
        those behind it are on their way meanwhile; everything is there when the iteration ends."""
        pieces = [(at, min(at + piece, len(slots))) for at in range(0, len(slots), piece)]
        into = np.arange(len(slots), dtype=np.int32) if out_slots is None else out_slots
        targets = [into[first:last] for first, last in pieces]
        if self._device_bytes is not None:
            for (first, last), target in zip(pieces, targets, strict=True):
                if self.lower is None:
                    copy_runs(self._device_bytes, slots[first:last], as_bytes(out), target)
                else:
                    for source, to in zip(slots[first:last].tolist(), target.tolist(), strict=True):
                        self.lower.pack(self.device_pool[source : source + 1], out[to : to + 1])
                yield first, last
            return
        marks = []
        with self.settled():
            with self._side_stream(after):
                for (first, _), target in zip(pieces, targets, strict=True):
                    for begin, end, at in _host_runs(target):
                        index = _index(slots[first + begin : first + end])
                        self._gather(index, out[at : at + end - begin])
                    marks.append(self._mark(self.stream))
            for (first, last), mark in zip(pieces, marks, strict=True):
                if mark is not None:
                    mark.synchronize()
                yield first, last

    def to_device(self, src: torch.Tensor, src_slots: Slots, slots: Slots, after: torch.cuda.Event | None) -> None:
        """Copy blocks ``src_slots`` of host memory into device blocks; returns when they may be read.

        ``after``: recorded on the compute stream once the last reader of these blocks was enqueued.
        """
        with self.settled():
            self.send(src, src_slots, slots, after)

    def send(self, src: torch.Tensor, src_slots: Slots, slots: Slots, after: torch.cuda.Event | None) -> None:
        """``to_device`` that, on CUDA, only sets the copies going: call it within ``settled``."""
        if self._device_bytes is not None:
            if self.lower is None:
                copy_runs(as_bytes(src), src_slots, self._device_bytes, slots)
                return
            for source, to in zip(src_slots.tolist(), slots.tolist(), strict=True):
                self.lower.unpack(src[source : source + 1], self.device_pool[to : to + 1])
            return
        with self._side_stream(after):
            for first, last, at in _host_runs(src_slots):
                self._scatter(_index(slots[first:last]), src[at : at + last - first])

    def _gather(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """Device blocks to host memory, packed on the device where there is a lower form; on the current stream."""
        if self.lower is None:
            gather_blocks(self.device_pool, index, out)
            return
        packed = torch.zeros(out.shape, dtype=torch.uint8, device=self.device)
        self.lower.pack(self.device_pool[index.to(self.device, non_blocking=True)], packed)
        out.copy_(packed, non_blocking=True)

    def _scatter(self, index: torch.Tensor, src: torch.Tensor) -> None:
        if self.lower is None:
            scatter_blocks(self.device_pool, index, src)
            return
        shape = (len(src), *self.layout.block_shape)
        blocks = torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        self.lower.unpack(src.to(self.device, non_blocking=True), blocks)
        self.device_pool.index_copy_(0, index.to(self.device, non_blocking=True), blocks)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """What was set going in here is complete when it is left, however it is left."""
        try:
            yield
        finally:
            if self.stream is not None:
                self.stream.synchronize()

    @contextlib.contextmanager
    def _side_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Copies in here run beside the forward, after ``after``."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            yield

    def compute_event(self) -> torch.cuda.Event | None:
        """Marks what the calling thread has enqueued on the device so far; None where nothing is asynchronous."""
        return self._mark(torch.cuda.current_stream(self.device) if self.stream is not None else None)

    @staticmethod
    def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def as_bytes(blocks: torch.Tensor) -> Bytes:
    """A contiguous host tensor of blocks as uint8 [n, block_bytes], sharing its memory."""
    return blocks.view(len(blocks), -1).view(torch.uint8).numpy()


def _index(slots: Slots) -> torch.Tensor:
    """Stays on the host: its values steer copies, and reading them back from the device would wait for it."""
    return torch.from_numpy(slots.astype(np.int64))


def _host_runs(host_slots: Slots) -> list[tuple[int, int, int]]:
    """(first, last, host slot of the first) of every run that is consecutive in host memory."""
    return [(first, last, int(host_slots[first])) for first, last in runs(host_slots)]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
