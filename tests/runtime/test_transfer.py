"""Copies between real pools and a real disk: bit-equal or reported, in time, and nothing is touched after a report."""

import shutil
import threading
import time

import numpy as np
import pytest
import torch

from tenuto_kernels.layout import KVLayout
from tenuto_server.engine.plan import Transfer
from tenuto_server.errors import InvariantBroken
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.kv_store import KVStore, as_bytes
from tenuto_server.runtime.transfer import Transfers

FAMILY = "ab" * 16
BLOCKS = 24


SOURCE = [5, 6, 7, 0, 1, 30, 29, 28, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 40, 3, 9]
OTHER = [int(slot) for slot in np.random.default_rng(1).permutation(64)[:BLOCKS]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", [["host"], ["disk"], ["host", "disk"], ["disk", "host"]])
def test_every_way_there_and_back_is_bit_equal(open_rig, tmp_path, dtype, way):
    rig = open_rig(tmp_path, dtype=dtype)
    tiers = ["device", *way, "device"]
    slots = [SOURCE, OTHER, SOURCE, OTHER]
    for at in range(len(way)):
        assert rig.move(tiers[at], tiers[at + 1], slots[at], slots[at + 1]).ok
    rig.device[:] = 0
    done = rig.move(tiers[-2], "device", slots[len(way)], OTHER)
    assert (done.ok, done.bad) == (True, ())
    assert (rig.device[OTHER] == rig.original[SOURCE]).all()
    assert not rig.device[sorted(set(range(64)) - set(OTHER))].any()
    rig.transfers.close()


@pytest.mark.parametrize("piece", [1, 3])
def test_the_copies_of_a_gpu_are_those_of_a_cpu(rig, monkeypatch, piece):
    """Block copies of the kernels in the place of runs of bytes, and pieces smaller than a chunk."""
    monkeypatch.setattr(rig.store, "_device_bytes", None)
    monkeypatch.setattr("tenuto_server.runtime.transfer._PIECE_BYTES", piece * rig.store.layout.block_bytes)
    assert rig.move("device", "host", SOURCE, OTHER).ok
    rig.store.host_bytes[OTHER[4], 7] ^= 8
    rig.device[:] = 0
    assert rig.move("host", "disk", OTHER, SOURCE).bad == (4,)
    assert rig.move("host", "device", OTHER, SOURCE).bad == (4,)
    good = [at for at in range(BLOCKS) if at != 4]
    for slots in (SOURCE, OTHER):
        assert (rig.device[[slots[at] for at in good]] == rig.original[[SOURCE[at] for at in good]]).all()
        rig.device[:] = 0
        assert rig.move("disk", "device", [SOURCE[at] for at in good], [OTHER[at] for at in good], names=good).ok


@pytest.mark.parametrize("at", [0, 11, BLOCKS - 1])
@pytest.mark.parametrize("dst", ["device", "disk"])
def test_a_bit_flipped_in_host_memory_is_caught_every_time(rig, at, dst):
    slots = list(range(BLOCKS))
    rng = np.random.default_rng(at)
    for _ in range(20):
        assert rig.move("device", "host", slots, OTHER).ok
        rig.store.host_bytes[OTHER[at], rng.integers(rig.device.shape[1])] ^= 1 << rng.integers(8)
        done = rig.move("host", dst, OTHER, list(range(40, 64)))
        assert (done.ok, done.bad) == (True, (at,))
    if dst == "device":
        good = [i for i in slots if i != at]
        assert (rig.device[[40 + i for i in good]] == rig.original[good]).all()
        assert (rig.device[40 + at] == rig.original[40 + at]).all()


@pytest.mark.parametrize("at", [0, 11, BLOCKS - 1])
@pytest.mark.parametrize("dst", ["device", "host"])
def test_a_block_damaged_on_disk_is_the_only_one_lost(rig, tmp_path, at, dst):
    slots = list(range(BLOCKS))
    assert rig.move("device", "disk", slots, OTHER).ok
    path = tmp_path / FAMILY / "segment-00000"
    data = bytearray(path.read_bytes())
    data[OTHER[at] * rig.device.shape[1] + 100] ^= 4
    path.write_bytes(data)
    done = rig.move("disk", dst, OTHER, list(range(40, 64)))
    assert (done.ok, done.bad) == (True, (at,))
    target = rig.device if dst == "device" else rig.store.host_bytes
    good = [i for i in slots if i != at]
    assert (target[[40 + i for i in good]] == rig.original[good]).all()
    assert rig.transfers.health()["paths"][f"disk_{dst}"]["blocks_bad"] == 1
    assert rig.move("disk", dst, [OTHER[at]], [0], [at]).ok is False


def test_a_missing_file_fails_the_whole_transfer_and_nothing_is_written(rig, tmp_path):
    slots = list(range(BLOCKS))
    rig.move("device", "disk", slots, slots)
    (tmp_path / FAMILY / "segment-00000").unlink()
    rig.transfers._disk._files.clear()
    done = rig.move("disk", "device", slots, OTHER)
    assert (done.ok, done.bad) == (False, tuple(slots))
    assert (rig.device == rig.original).all()


class Broken(DiskTier):
    """Raises on the second read: a worker's own failure, not the world's."""

    reads = 0

    def read(self, *args):
        self.reads += 1
        if self.reads == 2:
            raise RuntimeError("worker bug")
        return super().read(*args)


def test_a_worker_exception_costs_its_chunk_only(open_rig, tmp_path):
    rig = open_rig(tmp_path, tier=Broken)
    slots = list(range(12))
    rig.move("device", "disk", slots, slots)
    done = rig.move("disk", "device", slots, list(range(40, 52)))
    assert (done.ok, done.bad, done.failed) == (True, (), (4, 5, 6, 7))
    assert "worker bug" in done.reason
    assert (rig.device[[40, 51]] == rig.original[[0, 11]]).all()
    rig.transfers.close()


class Stuck(DiskTier):
    """Hangs in reads, or after writes, while ``block`` is set."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.block, self.entered, self.release = False, threading.Event(), threading.Event()

    def hang(self) -> None:
        if self.block:
            self.entered.set()
            assert self.release.wait(10)

    def read(self, *args):
        self.hang()
        return super().read(*args)

    def write(self, slots, hashes, sums, data):
        bad = super().write(slots, hashes, sums, data)
        self.hang()
        return bad


def test_a_disk_that_does_not_answer_is_given_up_and_taken_back(open_rig, tmp_path):
    rig = open_rig(tmp_path, tier=Stuck, stuck_s=0.2)
    slots = list(range(8))
    rig.move("device", "disk", slots, slots)
    rig.disk.block = True
    first = rig.submit("disk", "device", slots, list(range(40, 48)))
    second = rig.submit("device", "disk", slots, list(range(20, 28)))
    for number in (first, second):
        done = rig.sink.wait(number, 2)
        assert (done.ok, done.reason) == (False, "the disk does not answer")
    started = time.monotonic()
    assert not rig.move("disk", "device", slots, list(range(50, 58))).ok
    assert time.monotonic() - started < 0.1
    assert rig.sink.tier() == [False]
    assert not rig.transfers.health()["disk"]["writable"]
    assert rig.move("device", "host", slots, slots).ok
    rig.disk.block = False
    rig.disk.release.set()
    deadline = time.monotonic() + 5
    while rig.sink.tier() != [False, True] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rig.sink.tier() == [False, True]
    assert (rig.device == rig.original).all(), "a read that came back late must not write"
    assert rig.move("disk", "device", slots, list(range(50, 58))).ok
    assert len(rig.sink.done(first)) == len(rig.sink.done(second)) == 1
    rig.transfers.close()


def test_a_write_given_up_leaves_no_block_behind(open_rig, tmp_path):
    rig = open_rig(tmp_path, tier=Stuck)
    rig.disk.block = True
    number = rig.submit("device", "disk", [1, 2], [1, 2])
    assert rig.disk.entered.wait(5)
    assert rig.transfers.cancel(number)
    assert not rig.sink.wait(number).ok
    assert not rig.transfers.cancel(number)
    rig.disk.block = False
    rig.disk.release.set()
    assert not rig.move("disk", "device", [1, 2], [1, 2]).ok
    assert (rig.device == rig.original).all()
    rig.transfers.close()


def test_a_queued_transfer_can_be_cancelled_and_touches_nothing(open_rig, tmp_path):
    rig = open_rig(tmp_path, host_bytes_per_s=64 * 2**10)
    slots = list(range(8))
    rig.submit("device", "host", slots, slots)
    waiting = rig.submit("device", "host", [9], [9])
    assert rig.transfers.cancel(waiting)
    done = rig.sink.wait(waiting)
    assert (done.ok, done.reason) == (False, "cancelled")
    rig.transfers.close()
    assert not rig.store.host_bytes[9].any()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_rate_limits_hold_and_urgent_copies_overtake(open_rig, tmp_path, tier):
    rate = 2 * 2**20
    rig = open_rig(tmp_path, **{f"{tier}_bytes_per_s": rate})
    slots = list(range(64))
    started = time.monotonic()
    bulk = rig.submit("device", tier, slots, slots)
    urgent = rig.submit("device", tier, [3], [3], [3], urgent=True)
    assert rig.sink.wait(urgent).ok
    overtaken = time.monotonic() - started
    assert not rig.sink.done(bulk)
    assert rig.sink.wait(bulk).ok
    took = time.monotonic() - started
    wanted = 65 * rig.device.shape[1] / rate
    assert wanted * 0.9 < took < wanted * 2 + 0.2
    assert overtaken < took / 2
    rig.transfers.close()


def test_a_dropped_slot_is_forgotten_before_it_is_written_again(rig):
    rig.move("device", "disk", [1], [7], [1])
    rig.transfers.forget_disk((7,))
    assert rig.move("device", "disk", [2], [7], [2]).ok
    assert rig.move("disk", "device", [7], [50], [2]).ok
    assert (rig.device[50] == rig.original[2]).all()
    rig.transfers.forget_disk((7,))
    assert not rig.move("disk", "device", [7], [51], [2]).ok


def test_an_unwritable_disk_is_announced_and_tried_again(rig, tmp_path):
    folder = tmp_path / FAMILY
    shutil.rmtree(folder)
    assert not rig.move("device", "disk", [1], [1]).ok
    assert not rig.move("device", "disk", [1], [1]).ok
    deadline = time.monotonic() + 5
    while rig.sink.tier() != [False] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rig.sink.tier() == [False]
    assert rig.transfers.health()["disk"]["write_errors"] == 1
    folder.mkdir()
    while rig.sink.tier() != [False, True] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rig.sink.tier() == [False, True]
    assert rig.move("device", "disk", [1], [1]).ok


def test_close_reports_what_is_open(open_rig, tmp_path):
    rig = open_rig(tmp_path, host_bytes_per_s=1024, disk_bytes_per_s=1024)
    numbers = [rig.submit("device", tier, list(range(8)), list(range(8))) for tier in ("host", "disk", "host", "disk")]
    rig.transfers.close()
    late = rig.submit("device", "host", [0], [0])
    for number in [*numbers, late]:
        assert not rig.sink.wait(number).ok
        assert len(rig.sink.done(number)) == 1


def test_a_transfer_that_fits_no_tier_is_our_bug(rig):
    for wrong in (
        ("device", "host", [64], [0]),
        ("device", "host", [0], [-1]),
        ("device", "disk", [0], [64]),
        ("device", "device", [0], [1]),
        ("device", "host", [], []),
        ("device", "host", [0, 1], [0]),
    ):
        with pytest.raises(InvariantBroken):
            rig.submit(*wrong)


def test_the_host_pool_serves_without_checksums_too(sink):
    store = KVStore(KVLayout(1, 1, 8, 4, torch.float32), device_blocks=4, host_blocks=4, checksums=False)
    as_bytes(store.device_pool)[:] = 7
    transfers = Transfers(store, None)
    transfers.set_sink(sink)
    slots = np.array([1], np.int32)
    transfers.submit(Transfer(1, "device", "host", slots, slots, b"h" * 16))
    assert sink.wait(1).ok
    as_bytes(store.device_pool)[:] = 0
    transfers.submit(Transfer(2, "host", "device", slots, slots, b"h" * 16))
    assert sink.wait(2).ok
    assert (as_bytes(store.device_pool)[1] == 7).all()
    transfers.close()


@pytest.mark.parametrize("seed", range(4))
def test_reading_ahead_over_jobs_that_mix_and_end_early_changes_no_byte(rig, seed):
    """Reads of several jobs, writes and cancellations between them: what is reported copied is what was stored."""
    rng = np.random.default_rng(seed)
    rig.move("device", "disk", list(range(32)), list(range(32)))
    rig.device[32:] = 0
    jobs = []
    for first, urgent in zip(range(0, 32, 8), rng.permutation([True, True, False, False]).tolist(), strict=True):
        slots = list(range(first, first + 8))
        jobs.append((slots, rig.submit("disk", "device", slots, [32 + at for at in slots], slots, urgent=urgent)))
        rig.submit("device", "disk", [first], [32 + first], [first], urgent=bool(rng.integers(2)))
    cancelled = jobs[int(rng.integers(4))][1]
    rig.transfers.cancel(cancelled)
    for slots, number in jobs:
        done = rig.sink.wait(number)
        assert done.bad == done.failed == ()
        assert done.ok or number == cancelled
        if done.ok:
            assert (rig.device[[32 + at for at in slots]] == rig.original[slots]).all()
