"""Every direction of a copy with every way it can fail: what is wrong at its source is told from what merely did not arrive.

A copy that failed for a reason of its destination, or of the way, must not cost its source: the cache drops what is reported
``bad`` and keeps what is reported ``failed``. So each case ends with the cause removed and the same copy made again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tenuto_server.runtime import transfer
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.disk_io import SegmentFile

FAMILY = "ab" * 16
COUNT = 8
SLOTS, TARGETS = list(range(10, 10 + COUNT)), list(range(40, 40 + COUNT))
PATHS = [(src, dst) for src in ("device", "host", "disk") for dst in ("device", "host", "disk") if src != dst]
SECOND_CHUNK = (4, 5, 6, 7)


class Breakable(DiskTier):
    """Its second call from now on raises what no disk raises, once: a fault of the worker itself."""

    calls = 0

    def _maybe(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("worker fault")

    def read(self, *args):
        self._maybe()
        return super().read(*args)

    def write(self, *args):
        self._maybe()
        return super().write(*args)


@pytest.fixture
def stocked(open_rig, tmp_path):
    """Eight blocks at the same slots of all three tiers."""
    rig = open_rig(tmp_path, tier=Breakable)
    for tier in ("host", "disk"):
        assert rig.move("device", tier, SLOTS, SLOTS).ok
    return rig


def bytes_on(rig, tier, slots):
    """What the blocks in ``slots`` are; for the disk, as a read into free host slots gives them."""
    if tier == "disk":
        assert rig.move("disk", "host", slots, list(range(56, 64))).ok
        return rig.store.host_bytes[56:64]
    return (rig.device if tier == "device" else rig.store.host_bytes)[slots]


def copy_again(rig, src, dst):
    """The source of a failed copy is as good as before."""
    done = rig.move(src, dst, SLOTS, TARGETS)
    assert (done.ok, done.bad, done.failed) == (True, (), ())
    assert (bytes_on(rig, dst, TARGETS) == rig.original[SLOTS]).all()


@contextlib.contextmanager
def opened_for(rig, flags: int) -> Iterator[None]:
    """The segment file takes no reads (``O_WRONLY``) or no writes (``O_RDONLY``): the kernel refuses them."""
    (number, file) = next(iter(rig.disk._files.items()))
    rig.disk._files[number] = SegmentFile(rig.disk._path(number), flags)
    yield
    rig.disk._files[number].close()
    rig.disk._files[number] = file


@pytest.mark.parametrize(("src", "dst"), [path for path in PATHS if path[1] == "disk"])
def test_a_disk_that_refuses_the_bytes_costs_no_source(stocked, src, dst):
    with opened_for(stocked, os.O_RDONLY):
        done = stocked.move(src, dst, SLOTS, TARGETS)
        assert (done.ok, done.bad, done.failed) == (False, (), tuple(range(COUNT)))
        assert "EBADF" in done.reason
    assert stocked.disk.counts["write_errors"] == 4, "after the first chunk the tier is closed for writing"
    stocked.disk.probe()
    assert stocked.transfers.health()["paths"][f"{src}_disk"]["blocks_bad"] == 0
    stocked.disk.writable = True
    copy_again(stocked, src, dst)


@pytest.mark.parametrize(("src", "dst"), [path for path in PATHS if path[1] == "disk"])
def test_an_index_that_refuses_the_record_costs_no_source(stocked, src, dst):
    index = stocked.disk._index
    fd, index._fd = index._fd, os.open(index.path, os.O_RDONLY)
    done = stocked.move(src, dst, SLOTS, TARGETS)
    assert (done.ok, done.bad, done.failed) == (False, (), tuple(range(COUNT)))
    os.close(index._fd)
    index._fd, stocked.disk.writable = fd, True
    copy_again(stocked, src, dst)


@pytest.mark.parametrize(("src", "dst"), [path for path in PATHS if path[1] == "disk"])
def test_a_tier_closed_for_writing_costs_no_source(stocked, src, dst):
    stocked.disk._backoff_s = 60.0
    stocked.disk._close_for_writing(OSError(28, "No space left on device"))
    done = stocked.move(src, dst, SLOTS, TARGETS)
    assert (done.ok, done.bad, done.failed) == (False, (), tuple(range(COUNT)))
    assert "ENOSPC" in done.reason
    stocked.disk.writable = True
    copy_again(stocked, src, dst)


@pytest.mark.parametrize(("src", "dst"), [path for path in PATHS if path[0] == "disk"])
def test_a_disk_that_cannot_be_read_now_keeps_its_blocks(stocked, src, dst):
    before = stocked.disk.health()["blocks"]
    with opened_for(stocked, os.O_WRONLY):
        done = stocked.move(src, dst, SLOTS, TARGETS)
        assert (done.ok, done.bad, done.failed) == (False, (), tuple(range(COUNT)))
    assert (stocked.disk.counts["read_errors"], stocked.disk.counts["checksum_errors"]) == (COUNT, 0)
    assert stocked.disk.health()["blocks"] == before
    copy_again(stocked, src, dst)


@pytest.mark.parametrize("lost", ["flipped", "cut off", "forgotten"])
@pytest.mark.parametrize(("src", "dst"), [path for path in PATHS if path[0] == "disk"])
def test_what_the_disk_no_longer_has_is_bad(stocked, src, dst, lost):
    path = stocked.disk.folder / "segment-00000"
    size = stocked.device.shape[1]
    if lost == "flipped":
        data = bytearray(path.read_bytes())
        data[SLOTS[-1] * size + 7] ^= 1
        path.write_bytes(data)
    elif lost == "cut off":
        os.truncate(path, SLOTS[-1] * size + 7)
    else:
        stocked.disk.forget([SLOTS[-1]])
    done = stocked.move(src, dst, SLOTS, TARGETS)
    assert (done.ok, done.bad, done.failed) == (True, (COUNT - 1,), ())


@pytest.mark.parametrize(("src", "dst"), [path for path in PATHS if path[0] == "host"])
def test_a_host_block_that_changed_is_bad_and_the_only_one(stocked, src, dst):
    stocked.store.host_bytes[SLOTS[3], 5] ^= 16
    done = stocked.move(src, dst, SLOTS, TARGETS)
    assert (done.ok, done.bad, done.failed) == (True, (3,), ())


def test_a_changed_host_block_and_a_refusing_disk_are_told_apart(stocked):
    stocked.store.host_bytes[SLOTS[3], 5] ^= 16
    with opened_for(stocked, os.O_RDONLY):
        done = stocked.move("host", "disk", SLOTS, TARGETS)
    assert (done.ok, done.bad) == (False, (3,))
    assert set(done.failed) == set(range(COUNT)) - {3}


@pytest.mark.parametrize(("src", "dst"), PATHS)
def test_a_fault_of_the_worker_costs_its_chunk_and_no_source(stocked, monkeypatch, src, dst):
    if "disk" in (src, dst):
        stocked.disk.calls = 2
    else:
        name = "copy_summed" if src == "device" else "copy_checked"
        real, calls = getattr(transfer, name), []

        def second_fails(*args):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("worker fault")
            return real(*args)

        monkeypatch.setattr(transfer, name, second_fails)
    done = stocked.move(src, dst, SLOTS, TARGETS)
    assert (done.ok, done.bad, done.failed) == (True, (), SECOND_CHUNK)
    assert "worker fault" in done.reason
    counts = stocked.transfers.health()["paths"][f"{src}_{dst}"]
    assert counts["blocks_failed"] == len(SECOND_CHUNK)
    copy_again(stocked, src, dst)


@pytest.mark.parametrize(("src", "dst"), PATHS)
def test_a_cancelled_copy_costs_no_source(open_rig, tmp_path, src, dst):
    # At this rate a copy takes an eighth of a second: it is cancelled long before its end.
    rig = open_rig(tmp_path, host_bytes_per_s=2**18, disk_bytes_per_s=2**18)
    if src != "device":
        assert rig.move("device", src, SLOTS, SLOTS).ok
    first = rig.submit(src, dst, SLOTS, TARGETS)
    assert rig.transfers.cancel(first)
    done = rig.sink.wait(first)
    assert (done.ok, done.bad, done.failed, done.reason) == (False, (), (), "cancelled")
    copy_again(rig, src, dst)
