"""A real store, real transfers and a real disk tier for copies between them, and a sink for their reports."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tenuto_kernels.layout import KVLayout
from tenuto_kernels.lower import LowerForm, LowerKind
from tenuto_server.engine.events import TierFailed, TransferDone
from tenuto_server.engine.plan import Transfer
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.kv_store import KVStore, as_bytes
from tenuto_server.runtime.transfer import Transfers

FAMILY = "ab" * 16


class Sink:
    """Collects events from any thread; ``wait`` for the report of a transfer."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._news = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait(self, number: int, timeout_s: float = 10) -> TransferDone:
        with self._news:
            assert self._news.wait_for(lambda: self.done(number), timeout_s), f"transfer {number} was not reported"
            (report,) = self.done(number)
            return report

    def done(self, number: int) -> list[TransferDone]:
        return [event for event in self.events if isinstance(event, TransferDone) and event.transfer == number]

    def tier(self) -> list[bool]:
        return [event.writable for event in self.events if isinstance(event, TierFailed)]


class Rig:
    """A store whose device blocks hold random numbers, its transfers, and a sink."""

    def __init__(
        self,
        folder,
        *,
        dtype=torch.bfloat16,
        tier: type[DiskTier] = DiskTier,
        lower: LowerKind | None = None,
        **settings,
    ) -> None:
        layout = KVLayout(2, 2, 16, 16, dtype)
        form = None if lower is None else LowerForm(layout, lower)
        self.store = KVStore(layout, device_blocks=64, host_blocks=64, lower=form)
        self.disk = tier(folder, FAMILY, block_bytes=self.store.lower_bytes, slots=64, retry_s=0.05)
        self.sink = Sink()
        chunk = 4 * self.store.lower_bytes
        self.transfers = Transfers(self.store, self.disk, chunk_bytes=chunk, disk_chunk_bytes=chunk, **settings)
        self.transfers.set_sink(self.sink)
        self.device = as_bytes(self.store.device_pool)
        self.device[:] = np.random.default_rng(0).integers(0, 256, self.device.shape)
        self.original = self.device.copy()
        self._number = 0

    def submit(self, src, dst, src_slots, dst_slots, names=None, urgent=False) -> int:
        self._number += 1
        names = range(len(src_slots)) if names is None else names
        hashes = b"".join(int(name).to_bytes(16, "little") for name in names)
        slots = (np.array(src_slots, np.int32), np.array(dst_slots, np.int32))
        self.transfers.submit(Transfer(self._number, src, dst, *slots, hashes, urgent))
        return self._number

    def move(self, *args, **kwargs) -> TransferDone:
        return self.sink.wait(self.submit(*args, **kwargs))


@pytest.fixture
def open_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs and closes them."""
    rigs: list[Rig] = []

    def start(folder: Path, **settings: Any) -> Rig:
        rigs.append(Rig(folder, **settings))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.transfers.close()


@pytest.fixture
def rig(open_rig: Callable[..., Rig], tmp_path: Path) -> Rig:
    return open_rig(tmp_path)


@pytest.fixture
def sink() -> Sink:
    return Sink()
