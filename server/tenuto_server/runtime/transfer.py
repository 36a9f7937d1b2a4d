"""Copies between the tiers, off the critical path. ``Transfers`` owns the lanes, the staging buffers and the counters.

Lanes move blocks between device and host, one everything to and from the disk, through staging buffers: so a disk that hangs
holds only its own buffers, and can be given up at any time. Where "device" and host are both this machine's memory, copies that
a turn waits for are spread over two lanes, since one core does not fill the memory's bandwidth; bulk stays on the first and
leaves the other core to the model. On CUDA every copy waits for the compute that was enqueued when it was submitted, which
wrote its source and was the last to read its destination, and is complete before it is reported.

A block arrives on the host with the checksum of its bytes, keeps it on disk, and is compared whenever it leaves either.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tenuto_server.engine.events import Event, TierFailed, TransferDone
from tenuto_server.engine.plan import Transfer
from tenuto_server.errors import InvariantBroken
from tenuto_server.runtime.blocks import (
    HASH_BYTES,
    Bytes,
    Slots,
    block_sum,
    block_sums,
    copy_checked,
    copy_runs,
    copy_summed,
)
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.kv_store import KVStore, as_bytes
from tenuto_server.runtime.lane import Job, Lane, RateLimit

logger = logging.getLogger(__name__)

_PATHS = {
    ("device", "host"),
    ("host", "device"),
    ("device", "disk"),
    ("disk", "device"),
    ("host", "disk"),
    ("disk", "host"),
}
_PIECE_BYTES = 768 * 2**10
"""Beside a GPU, what is summed while the piece after it is on its way."""


class Transfers:
    """``host_bytes_per_s``, ``disk_bytes_per_s``: rate limits, None for none. ``chunk_bytes``, ``disk_chunk_bytes``: moved
    at once at most.

    ``stuck_s``: a disk that has not answered for so long fails all its transfers until it does.
    """

    def __init__(
        self,
        store: KVStore,
        disk: DiskTier | None,
        *,
        host_bytes_per_s: float | None = None,
        disk_bytes_per_s: float | None = None,
        chunk_bytes: int = 8 * 2**20,
        disk_chunk_bytes: int = 8 * 2**20,
        stuck_s: float = 30.0,
    ) -> None:
        self._store, self._disk, self._stuck_s = store, disk, stuck_s
        self.host_bytes_per_s, self.disk_bytes_per_s = host_bytes_per_s, disk_bytes_per_s
        self._sink: Callable[[Event], None] | None = None
        self._order = 0
        self._forgotten: list[int] = []
        self._announced = True
        self._counts_lock = threading.Lock()
        self._counts: dict[str, dict[str, int]] = {}
        size = store.lower_bytes
        spread = host_bytes_per_s is None and store.device.type == "cpu" and (os.cpu_count() or 1) > 1
        self._memory = [
            Lane(
                f"copy-{number}",
                copy=self._copy_memory,
                report=self._report,
                idle=lambda: None,
                rate=RateLimit(host_bytes_per_s),
                block_bytes=size,
                chunk_bytes=chunk_bytes,
            )
            for number in range(2 if spread else 1)
        ]
        self._lanes = [*self._memory]
        self._closing = threading.Event()
        if disk is not None:
            rate = RateLimit(disk_bytes_per_s)
            # Two: while one is checked and copied from, the disk fills the other.
            self._staging = [store.staging(rate.chunk_blocks(size, disk_chunk_bytes)) for _ in range(2)]
            self._front, self._expected = 0, (0, 0)
            self._disk_lane = Lane(
                "disk",
                copy=self._copy_disk,
                report=self._report,
                idle=self._tend_disk,
                rate=rate,
                block_bytes=size,
                chunk_bytes=disk_chunk_bytes,
            )
            self._lanes.append(self._disk_lane)
            self._watch = threading.Thread(target=self._watch_disk, name="tenuto-disk-watch", daemon=True)
            self._watch.start()

    def set_sink(self, sink: Callable[[Event], None]) -> None:
        """Where ``TransferDone`` and ``TierFailed`` go, from the worker threads."""
        self._sink = sink

    def submit(self, transfer: Transfer) -> None:
        """Queue a copy. Raises ``InvariantBroken`` for one that no tier could make."""
        self._check(transfer)
        self._order += 1
        job = Job(transfer, self._order, self._store.compute_event())
        if "disk" in (transfer.src, transfer.dst):
            self._disk_lane.submit(job)
        elif transfer.urgent:
            min(self._memory, key=lambda lane: lane.waiting).submit(job)
        else:
            self._memory[0].submit(job)

    def cancel(self, transfer_id: int) -> bool:
        """Give a transfer up; it is reported failed. False if it was reported already."""
        return any(lane.cancel(transfer_id) for lane in self._lanes)

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        """Queue the slots for the disk worker, which forgets them before its next copy."""
        if self._disk is not None and slots:
            with self._counts_lock:
                self._forgotten.extend(slots)
            self._disk_lane.notify()

    def health(self) -> dict[str, Any]:
        """Per path: transfers, failures, blocks, bad blocks, failed blocks, bytes, nanoseconds; the disk's own state."""
        with self._counts_lock:
            paths = {name: dict(counts) for name, counts in self._counts.items()}
        result: dict[str, Any] = {"paths": paths, "waiting": sum(lane.waiting for lane in self._lanes)}
        if self._disk is not None:
            disk = self._disk.health()
            if self._disk_lane.stuck:
                disk |= {"writable": False, "reason": "the disk does not answer"}
            result["disk"] = disk
        return result

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what is queued, stop the workers, close the disk unless it hangs."""
        self._closing.set()
        ended = [lane.close(timeout_s) for lane in self._lanes]
        if self._disk is not None:
            self._watch.join(timeout_s)
            if ended[-1]:
                self._forget_pending(self._disk)
                self._disk.close()

    def _check(self, transfer: Transfer) -> None:
        count = len(transfer.src_slots)
        disk_slots = self._disk.slots if self._disk is not None else 0
        room = {"device": len(self._store.device_pool), "host": len(self._store.host_sums), "disk": disk_slots}
        sides = ((transfer.src, transfer.src_slots), (transfer.dst, transfer.dst_slots))
        inside = all(
            len(slots) == count and slots.min() >= 0 and slots.max() < room[tier] for tier, slots in sides if count
        )
        if (
            (transfer.src, transfer.dst) not in _PATHS
            or len(transfer.hashes) != HASH_BYTES * count
            or not (count and inside)
        ):
            raise InvariantBroken(
                f"transfer {transfer.id} of {count} blocks {transfer.src} -> {transfer.dst} does not fit tiers of {room}"
            )

    # The copy workers.

    def _copy_memory(self, job: Job, first: int, last: int) -> tuple[list[int], list[int]]:
        """On a GPU piece by piece: some are checked while others are on their way. Within this machine's memory, each block is
        summed and copied in one go."""
        assert job.lane is not None
        device = self._store.device_bytes if self._store.checksums else None
        with job.lane.touch(job) as allowed:
            if not allowed:
                return [], []
            if device is not None:
                return self._copy_within(device, job.transfer, first, last), []
            piece = last - first if self._store.plain else max(1, _PIECE_BYTES // self._store.lower_bytes)
            if job.transfer.dst == "host":
                self._offload(job, first, last, piece)
                return [], []
            return self._restore(job, first, last, piece), []

    def _copy_within(self, device: Bytes, transfer: Transfer, first: int, last: int) -> list[int]:
        """Returns the positions whose source is not what was stored."""
        store, src, dst = self._store, transfer.src_slots[first:last], transfer.dst_slots[first:last]
        hashes = transfer.hashes[HASH_BYTES * first : HASH_BYTES * last]
        assert store.host_bytes is not None
        if transfer.dst == "host":
            store.host_sums[dst] = copy_summed(device, src, store.host_bytes, dst, hashes)
            return []
        wrong = copy_checked(store.host_bytes, src, device, dst, hashes, store.host_sums[src])
        return [first + at for at in wrong]

    def _offload(self, job: Job, first: int, last: int, piece: int) -> None:
        store, transfer = self._store, job.transfer
        assert store.host_pool is not None
        assert store.host_bytes is not None
        dst = transfer.dst_slots[first:last]
        for begin, end in store.arriving(transfer.src_slots[first:last], store.host_pool, dst, job.after, piece):
            if store.checksums:
                store.host_sums[dst[begin:end]] = [
                    block_sum(_hash(transfer, first + at), store.host_bytes[dst[at]]) for at in range(begin, end)
                ]

    def _restore(self, job: Job, first: int, last: int, piece: int) -> list[int]:
        """Returns the positions whose source is not what was stored."""
        store, transfer, bad = self._store, job.transfer, list[int]()
        assert store.host_pool is not None
        assert store.host_bytes is not None
        with store.settled():
            for begin in range(first, last, piece):
                end = min(begin + piece, last)
                src, dst = transfer.src_slots[begin:end], transfer.dst_slots[begin:end]
                wrong = self._changed(transfer, begin, src)
                if wrong:
                    good = np.setdiff1d(np.arange(len(src)), wrong)
                    src, dst = src[good], dst[good]
                    bad += [begin + at for at in wrong]
                store.send(store.host_pool, src, dst, job.after)
        return bad

    def _changed(self, transfer: Transfer, begin: int, src: Slots) -> list[int]:
        """Which of the host blocks ``src``, at positions from ``begin`` on, are not what was stored."""
        store = self._store
        if not store.checksums:
            return []
        assert store.host_bytes is not None
        data, sums = store.host_bytes, store.host_sums[src].tolist()
        return [
            at for at, slot in enumerate(src.tolist()) if block_sum(_hash(transfer, begin + at), data[slot]) != sums[at]
        ]

    # The disk worker.

    def _copy_disk(self, job: Job, first: int, last: int) -> tuple[list[int], list[int]]:
        assert self._disk is not None
        # What was dropped before this job was submitted may be one of its destinations.
        self._forget_pending(self._disk)
        copy = self._to_disk if job.transfer.dst == "disk" else self._from_disk
        bad, failed = copy(job, first, last)
        return [first + at for at in bad], [first + at for at in failed]

    def _to_disk(self, job: Job, first: int, last: int) -> tuple[list[int], list[int]]:
        disk, store, transfer, count = self._disk, self._store, job.transfer, last - first
        assert disk is not None
        src, dst = transfer.src_slots[first:last], transfer.dst_slots[first:last]
        hashes = transfer.hashes[HASH_BYTES * first : HASH_BYTES * last]
        if not disk.writable:
            job.reason = disk.reason
            return [], list(range(count))
        stage = self._staging[self._front][:count]
        data = as_bytes(stage)
        with self._disk_lane.touch(job) as allowed:
            if not allowed:
                return [], []
            if transfer.src == "device":
                store.from_device(src, stage, None, job.after)
            else:
                assert store.host_bytes is not None
                copy_runs(store.host_bytes, src, data, None)
        sums = block_sums(hashes, data)
        checked = transfer.src == "host" and store.checksums
        bad = [at for at in range(count) if checked and sums[at] != int(store.host_sums[src[at]])]
        good = [at for at in range(count) if at not in set(bad)]
        if bad:
            data = data[good]
            hashes = b"".join(_hash(transfer, first + at) for at in good)
        failed = disk.write(dst[good], hashes, [sums[at] for at in good], data) if good else []
        if failed:
            job.reason = disk.reason
        if job.reported:
            # Given up while the disk hung: the engine may use these slots for something else.
            disk.forget(dst.tolist())
        return bad, [good[at] for at in failed]

    def _from_disk(self, job: Job, first: int, last: int) -> tuple[list[int], list[int]]:
        disk, store, transfer, count = self._disk, self._store, job.transfer, last - first
        assert disk is not None
        src, dst = transfer.src_slots[first:last], transfer.dst_slots[first:last]
        hashes = transfer.hashes[HASH_BYTES * first : HASH_BYTES * last]
        if self._expected == (transfer.id, first):
            self._front ^= 1  # it is being read there already
        self._expected = (0, 0)
        stage, expected = self._staging[self._front], self._next_read(job, last)
        data, ahead = as_bytes(stage), None
        if expected is not None:
            slots = expected[0].transfer.src_slots[expected[1] : expected[1] + self._disk_lane.chunk_blocks]
            ahead = (slots, as_bytes(self._staging[self._front ^ 1])[: len(slots)])
        bad, failed, sums = disk.read(src, hashes, data[:count], ahead)
        if expected is not None:
            self._expected = (expected[0].transfer.id, expected[1])
        lacking = {*bad, *failed}
        good = np.array([at for at in range(count) if at not in lacking], dtype=np.int32)
        if lacking:
            job.reason = f"{len(failed)} blocks could not be read, {len(bad)} were damaged or gone"
        with self._disk_lane.touch(job) as allowed:
            if allowed and len(good):
                if transfer.dst == "device":
                    store.to_device(stage, good, dst[good], job.after)
                else:
                    assert store.host_bytes is not None
                    copy_runs(data, good, store.host_bytes, dst[good])
                    store.host_sums[dst[good]] = np.array(sums, dtype=np.uint32)[good]
        return bad, failed

    def _next_read(self, job: Job, first: int) -> tuple[Job, int] | None:
        """What the lane will most likely read after this chunk: the job's next one, or the first of the next job."""
        following = job if first < len(job) and not job.cancelled else self._disk_lane.following(job)
        if following is None or following.transfer.src != "disk":
            return None
        return following, first if following is job else following.done

    def _tend_disk(self) -> float | None:
        """Between copies: forget what was dropped, try a failed disk again, tell the engine when its state changed."""
        disk = self._disk
        assert disk is not None
        self._forget_pending(disk)
        disk.probe()
        self._announce(disk.writable, disk.reason)
        return None if disk.writable else 0.25

    def _forget_pending(self, disk: DiskTier) -> None:
        with self._counts_lock:
            slots, self._forgotten = self._forgotten, []
        if slots:
            disk.forget(slots)

    def _watch_disk(self) -> None:
        while not self._closing.wait(min(1.0, self._stuck_s / 4)):
            if self._disk_lane.find_stuck(self._stuck_s):
                logger.warning("disk tier has not answered for %.1f s; its transfers fail until it does", self._stuck_s)
                # First the tier, then its transfers: the engine must not plan the next one in between.
                self._announce(False, "the disk does not answer")
                self._disk_lane.fail_all("the disk does not answer")
                # If the disk came back meanwhile, its worker did so before it could announce anything.
                self._disk_lane.notify()

    def _announce(self, writable: bool, reason: str) -> None:
        with self._counts_lock:
            changed = writable != self._announced and self._sink is not None
            if changed:
                self._announced = writable
        if changed and self._sink is not None:
            self._sink(TierFailed("disk", writable, reason))

    def _report(self, job: Job, done: TransferDone) -> None:
        transfer = job.transfer
        moved = len(job) - len(done.bad) - len(done.failed) if done.ok else 0
        added = {
            "transfers": 1,
            "failed": int(not done.ok),
            "blocks": moved,
            "blocks_bad": len(done.bad),
            "blocks_failed": len(done.failed),
            "bytes": moved * self._store.lower_bytes,
            "elapsed_ns": done.elapsed_ns,
        }
        with self._counts_lock:
            counts = self._counts.setdefault(f"{transfer.src}_{transfer.dst}", dict.fromkeys(added, 0))
            for name, value in added.items():
                counts[name] += value
        if self._sink is not None:
            self._sink(done)


def _hash(transfer: Transfer, at: int) -> bytes:
    return transfer.hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)]
