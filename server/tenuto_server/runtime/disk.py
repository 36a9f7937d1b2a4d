"""The disk tier: blocks in fixed slots of large segment files, every block under a checksum.

``DiskTier`` owns one directory, ``<root>/<family>/``, under an exclusive lock: ``index`` (see ``disk_index``), ``segment-N``
and ``lock``. One thread uses it at a time (the disk worker); ``health`` is safe from any.

Order of a write: the index forgets what the slots held, the bytes are written, the index records them. So a process killed
at any moment leaves no record of a block that is not whole. Nothing is synced on the way: a power cut may lose or tear
recent blocks, which their checksums then tell. Runs of consecutive slots go in one call; what the page cache does not have
is read past it (``disk_io``), and the next chunk of a transfer is read while this one is checked and copied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tenuto_server.errors import UNWRITABLE, ConfigError
from tenuto_server.runtime.blocks import HASH_BYTES, Bytes, Slots, block_sums, runs
from tenuto_server.runtime.disk_index import MAGIC, DiskIndex, Stored
from tenuto_server.runtime.disk_io import ReadAhead, SegmentFile

logger = logging.getLogger(__name__)

_FAMILY = re.compile(r"[0-9a-f]{32}")
_OPEN_SEGMENTS_MAX = 64
_READ_ERRORS_MAX = 3
_CLOSE_S = 1.0

# Positions [first, last) of a read, and the bytes that came, or why none did.
_Fetched = tuple[int, int, int | OSError]


def family_name(
    *, weights_digest: str, kv_dtype: str, layout_version: int, block_tokens: int, block_bytes: int, secret: bytes
) -> str:
    """The directory name under which blocks may be found again: 32 hex digits.

    It changes with anything that changes what a block's bytes mean, and with the secret that roots the block hashes, of
    which it reveals nothing (HMAC).
    """
    tag = hmac.new(secret, b"tenuto disk family", hashlib.sha256).digest()
    parts = (weights_digest, kv_dtype, str(layout_version), str(block_tokens), str(block_bytes), tag.hex())
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


class DiskTier:
    """``slots`` blocks of ``block_bytes`` below ``root``, which they fill at most together with what other families left
    there: the families unused for longest are removed as room is needed, never one that another server has open.

    Raises ``ConfigError`` if the directory cannot be used or another server uses this family. Failed writes do not raise:
    they are returned, counted, and close the tier for writing until ``probe`` succeeds. A directory that is there and cannot
    be written at the start is the same: what it holds is read, and ``probe`` opens it in full when it can.
    """

    def __init__(
        self,
        root: Path,
        family: str,
        *,
        block_bytes: int,
        slots: int,
        segment_bytes: int = 256 * 2**20,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if slots < 1 or block_bytes < 1 or not _FAMILY.fullmatch(family):
            raise ValueError(
                f"slots {slots}, block_bytes {block_bytes} must be positive, family {family!r} 32 hex digits"
            )
        self.root, self.folder = root, root / family
        self.block_bytes, self.slots = block_bytes, slots
        self._segment_blocks = max(1, segment_bytes // block_bytes)
        self._files: OrderedDict[int, SegmentFile] = OrderedDict()
        self._ahead: ReadAhead[list[_Fetched]] = ReadAhead()
        self._retry_s, self._backoff_s, self._clock = retry_s, retry_s, clock
        self._retry_at = 0.0
        self._read_errors_in_row = 0
        self.writable, self.reason = True, ""
        self.counts = dict.fromkeys(
            (
                "blocks_read",
                "blocks_written",
                "read_errors",
                "write_errors",
                "checksum_errors",
                "missing",
                "index_errors",
            ),
            0,
        )
        self._lock: int | None = None
        self._index: DiskIndex | None = None
        self._in_full = False
        try:
            self._open()
            self._round_trip()
        except OSError as error:
            if not (self._in_full or (error.errno in UNWRITABLE and root.is_dir())):
                self.close()
                raise ConfigError(f"disk_dir {str(root)!r} cannot be used: {error.strerror or error}") from None
            self._open_to_read()
            self._close_for_writing(error)

    def _open(self) -> None:
        """Lock, index and segments, for reading and writing. Raises ``OSError``, and ``ConfigError`` if another has them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock(os.O_RDWR | os.O_CREAT)
        path = self.folder / "index"
        self._index = DiskIndex(path, block_bytes=self.block_bytes, segment_blocks=self._segment_blocks)
        self._in_full = True
        self._recover()

    def _open_to_read(self) -> None:
        """As far as it goes where nothing can be written: without any of it the tier is empty."""
        with contextlib.suppress(OSError):
            self._take_lock(os.O_RDONLY)
            if self._index is None:
                path, size = self.folder / "index", self.block_bytes
                self._index = DiskIndex(path, block_bytes=size, segment_blocks=self._segment_blocks, read_only=True)
                self._recover()

    def _take_lock(self, flags: int) -> None:
        if self._lock is None:
            self._lock = _lock(self.folder / "lock", flags)
            if self._lock is None:
                raise ConfigError(
                    f"disk_dir {str(self.root)!r} is in use by another server with the same model; "
                    "give each its own directory"
                )

    @property
    def _entries(self) -> dict[int, Stored]:
        return self._index.entries if self._index is not None else {}

    def recovered(self) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """(hashes, slots) of the blocks the directory holds; each is checked when it is read."""
        entries = self._entries
        return tuple(stored.block_hash for stored in entries.values()), tuple(entries)

    def write(self, slots: Slots, hashes: bytes, sums: list[int], data: Bytes) -> list[int]:
        """Store ``data`` [n, block_bytes] in ``slots``; ``sums``: ``block_sum`` of each. Returns the positions that failed."""
        everything = list(range(len(slots)))
        assert self._index is not None, "a tier that was never opened is closed for writing"
        try:
            self._index.forget(slots.tolist())
        except OSError as error:
            self._writes_failed(error, len(slots))
            return everything
        bad: list[int] = []
        for first, last, segment, offset in self._pieces(slots):
            try:
                self._file(segment, create=True).write(data[first:last], offset)
            except OSError as error:
                self._writes_failed(error, last - first)
                bad.extend(range(first, last))
        failed = set(bad)
        stored = {
            int(slots[at]): Stored(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)], sums[at])
            for at in everything
            if at not in failed
        }
        try:
            if stored:
                self._index.put(stored)
        except OSError as error:
            self._writes_failed(error, len(stored))
            return everything
        self.counts["blocks_written"] += len(stored)
        return bad

    def read(
        self, slots: Slots, hashes: bytes, out: Bytes, ahead: tuple[Slots, Bytes] | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Read ``slots`` into ``out`` [n, block_bytes]. Returns the positions that do not hold their block (short file,
        another block, wrong checksum), those that could not be read, and the sum of each block. The tier forgets what is
        damaged; what could not be read may be readable later. ``ahead``: what will be read next and where to, which begins
        while this is checked; its buffer is the tier's until then."""
        bad: set[int] = set()
        failed: set[int] = set()
        damaged: list[int] = []
        fetched = self._ahead.take(_key(slots, out))
        if fetched is None:
            fetched = self._plan(slots, out)()
        if ahead is not None:
            self._ahead.start(_key(*ahead), self._plan(*ahead))
        for first, last, got in fetched:
            if not isinstance(got, OSError):
                self._read_errors_in_row = 0
            elif isinstance(got, FileNotFoundError):
                got = 0
            else:
                self._reads_failed(got, last - first)
                failed.update(range(first, last))
                continue
            damaged.extend(range(first + got // self.block_bytes, last))
        sums = [0] * len(slots)
        short, found = set(damaged), block_sums(hashes, out)
        for at in range(len(slots)):
            if at in failed:
                continue
            wanted = hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)]
            stored = self._entries.get(int(slots[at]))
            if stored is None or stored.block_hash != wanted:
                # Not damage: the slot holds another block, or none, and what it holds stays.
                self.counts["missing"] += 1
                bad.add(at)
                short.discard(at)
            elif at in short or found[at] != stored.check:
                self.counts["checksum_errors"] += 1
                bad.add(at)
                short.add(at)
            else:
                sums[at] = stored.check
        if short:
            self.forget([int(slots[at]) for at in sorted(short)])
        self.counts["blocks_read"] += len(slots) - len(bad) - len(failed)
        return sorted(bad), sorted(failed), sums

    def _plan(self, slots: Slots, out: Bytes) -> Callable[[], list[_Fetched]]:
        """The work of reading ``slots``, for any thread: the files are opened here."""
        work: list[tuple[int, int, int, SegmentFile | OSError]] = []
        for first, last, segment, offset in self._pieces(slots):
            try:
                work.append((first, last, offset, self._file(segment, create=False)))
            except OSError as error:
                work.append((first, last, offset, error))
        return lambda: [_fetch(first, last, offset, file, out) for first, last, offset, file in work]

    def forget(self, slots: list[int]) -> None:
        """These slots hold nothing any more."""
        try:
            if self._index is not None:
                self._index.forget(slots)
        except OSError as error:
            self.counts["index_errors"] += 1
            self._close_for_writing(error)

    def probe(self) -> bool:
        """Whether writing works again; tries at most once per back-off (doubling to 60 s)."""
        if self.writable or self._clock() < self._retry_at:
            return self.writable
        try:
            if not self._in_full:
                self._reopen()
            self._round_trip()
        except OSError as error:
            self._backoff_s = min(2 * self._backoff_s, 60.0)
            self._close_for_writing(error)
            return False
        self.writable, self.reason, self._backoff_s, self._read_errors_in_row = True, "", self._retry_s, 0
        logger.info("disk tier accepts writes again")
        return True

    def health(self) -> dict[str, Any]:
        """Counters and state."""
        blocks = len(self._entries)
        return {"writable": self.writable, "reason": self.reason, "blocks": blocks, "slots": self.slots, **self.counts}

    def close(self) -> None:
        """Sync the index, close the files, release the lock."""
        if self._ahead.close(_CLOSE_S):
            for file in self._files.values():
                file.close()
        self._files.clear()
        if self._index is not None:
            self._index.close()
        if self._lock is not None:
            os.close(self._lock)
        self._index = self._lock = None

    def _reopen(self) -> None:
        """From reading to writing. What the index knows and the engine does not is overwritten when its slot is used."""
        read_only = self._index
        try:
            self._open()
        except ConfigError as error:  # another server was faster
            raise OSError(errno.EBUSY, str(error)) from None
        if read_only is not None and read_only is not self._index:
            read_only.close()
        self._ahead.take(())
        for file in self._files.values():  # they are open for reading only
            file.close()
        self._files.clear()

    def _recover(self) -> None:
        """Keep what can be whole: slots within the limit and inside their file, each block in one slot only."""
        assert self._index is not None
        sizes = {path: path.stat().st_size for path in self.folder.glob("segment-*")}
        newest: dict[bytes, int] = {}
        drop: list[int] = []
        for slot, stored in self._index.entries.items():
            segment, at = divmod(slot, self._segment_blocks)
            if slot >= self.slots or sizes.get(self._path(segment), 0) < (at + 1) * self.block_bytes:
                drop.append(slot)
            elif (older := newest.get(stored.block_hash)) is not None:
                drop.append(older)
                newest[stored.block_hash] = slot
            else:
                newest[stored.block_hash] = slot
        with contextlib.suppress(OSError):  # a full disk: what is dropped here is found again at the next start
            self._index.forget(drop)
        used = {slot // self._segment_blocks for slot in self._index.entries}
        with contextlib.suppress(OSError):
            for path in sizes:
                if path not in {self._path(segment) for segment in used}:
                    path.unlink(missing_ok=True)
        found = len(self._index.entries)
        if found or drop or self._index.skipped:
            logger.info(
                "disk tier: %d blocks found, %d dropped, %d index records damaged",
                found,
                len(drop),
                self._index.skipped,
            )

    def _round_trip(self) -> None:
        """Write one block, read it back, compare. Raises ``OSError``."""
        path, block = self.folder / "probe", np.arange(self.block_bytes, dtype=np.uint64).astype(np.uint8)
        back = np.zeros_like(block)
        file = SegmentFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            file.write(block, 0)
            file.sync()
            if file.read(back, 0) != len(block) or not np.array_equal(block, back):
                raise OSError(errno.EIO, "the disk gives back other bytes than were written")
        finally:
            file.close()
            path.unlink()

    def _pieces(self, slots: Slots) -> list[tuple[int, int, int, int]]:
        """(first, last, segment, byte offset) of every run of slots that is one range of one file."""
        pieces = []
        for first, last in runs(slots):
            while first < last:
                segment, at = divmod(int(slots[first]), self._segment_blocks)
                count = min(last - first, self._segment_blocks - at)
                pieces.append((first, first + count, segment, at * self.block_bytes))
                first += count
        return pieces

    def _path(self, segment: int) -> Path:
        return self.folder / f"segment-{segment:05d}"

    def _file(self, segment: int, *, create: bool) -> SegmentFile:
        file = self._files.get(segment)
        if file is None:
            path = self._path(segment)
            if create and not path.exists():
                self._make_room()
            flags = os.O_RDWR | (os.O_CREAT if create else 0) if self._in_full or create else os.O_RDONLY
            file = self._files[segment] = SegmentFile(path, flags)
            if len(self._files) > _OPEN_SEGMENTS_MAX:
                self._ahead.take(())
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(segment)
        return file

    def _make_room(self) -> None:
        """Remove families unused for longest while one more segment would exceed the limit of the whole root."""
        limit = self.slots * self.block_bytes
        own = sum(path.stat().st_size for path in self.folder.glob("segment-*"))
        own = min(own + self._segment_blocks * self.block_bytes, limit)
        others = [path for path in self.root.iterdir() if path != self.folder and _FAMILY.fullmatch(path.name)]
        others = [path for path in others if _is_family(path)]
        sizes = {path: sum(file.stat().st_size for file in path.glob("segment-*")) for path in others}
        for path in sorted(others, key=lambda path: (path / "index").stat().st_mtime):
            if own + sum(sizes.values()) <= limit:
                break
            if _remove(path):
                logger.info("disk tier: removed the blocks of an unused model or setting, %d bytes", sizes[path])
            del sizes[path]

    def _writes_failed(self, error: OSError, blocks: int) -> None:
        self.counts["write_errors"] += blocks
        self._close_for_writing(error)

    def _reads_failed(self, error: OSError, blocks: int) -> None:
        self.counts["read_errors"] += blocks
        self._read_errors_in_row += 1
        if self._read_errors_in_row >= _READ_ERRORS_MAX:
            self._close_for_writing(error)

    def _close_for_writing(self, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "error")
        if self.writable:
            logger.warning("disk tier closed for writing: %s (%s)", error.strerror or error, name)
        self.writable, self.reason = False, f"{name}: {error.strerror or error}"
        self._retry_at = self._clock() + self._backoff_s


def _lock(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """The locked file, or None if somebody else holds it. The kernel releases it however the holder ends."""
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _is_family(folder: Path) -> bool:
    """Whether we wrote this directory; nothing else is ever removed."""
    try:
        with (folder / "index").open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _remove(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        fd = _lock(folder / "lock")
        if fd is None:
            return False
        try:
            for path in [*folder.glob("segment-*"), folder / "index", folder / "index.new", folder / "probe"]:
                path.unlink(missing_ok=True)
            (folder / "lock").unlink()
            folder.rmdir()
            return True
        finally:
            os.close(fd)
    return False


def _key(slots: Slots, out: Bytes) -> tuple[bytes, int]:
    """What tells one read from another: the slots, and where they go."""
    return slots.tobytes(), out.ctypes.data


def _fetch(first: int, last: int, offset: int, file: SegmentFile | OSError, out: Bytes) -> _Fetched:
    try:
        return first, last, file if isinstance(file, OSError) else file.read(out[first:last], offset)
    except OSError as error:
        return first, last, error
