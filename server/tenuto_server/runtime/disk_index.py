"""The index of one disk directory: which slot holds which block, as an append-only file that survives any crash.

``DiskIndex`` owns the file and its image in memory. The file is a 32-byte header and 32-byte records, each with its own
CRC-32; a later record about a slot replaces an earlier one. A torn tail is cut off, a damaged record is skipped: what it
said is then unknown, which is harmless, because a block is believed only if its bytes match the sum of *its* record.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

MAGIC = b"tenutoKV"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQII")
_RECORD = struct.Struct("<II16sII")
_PUT, _FORGET = 0x2B, 0x2D
_SIZE = 32
_GARBAGE_MIN = 4096


class Stored(NamedTuple):
    """A block on disk: its chained hash and ``block_sum`` of its bytes."""

    block_hash: bytes
    check: int


class DiskIndex:
    """Opens or creates ``path``. ``block_bytes`` and ``segment_blocks`` are part of the header: under others, or if the
    header is damaged, nothing is recovered and the file starts anew. ``read_only``: what is written down is known, nothing
    can be added. Raises ``OSError`` if it cannot be read or created.
    """

    def __init__(self, path: Path, *, block_bytes: int, segment_blocks: int, read_only: bool = False) -> None:
        self.path = path
        self.entries: dict[int, Stored] = {}
        self.skipped = 0
        head = _HEADER.pack(MAGIC, _VERSION, segment_blocks, block_bytes, 0, 0)[:28]
        self._header = head + struct.pack("<I", zlib.crc32(head))
        self._records = 0
        self._read_only = read_only
        self._fd = os.open(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._length = self._load()
        except BaseException:
            os.close(self._fd)
            raise

    def put(self, blocks: Mapping[int, Stored]) -> None:
        """Record that these slots hold these blocks, whose bytes were written before. On ``OSError`` nothing counts."""
        self._append(b"".join(_record(_PUT, slot, stored) for slot, stored in blocks.items()))
        self.entries.update(blocks)

    def forget(self, slots: Iterable[int]) -> None:
        """Record that these slots hold nothing. On ``OSError`` memory forgets all the same: the file's stale word about a
        slot that is written again does not match the new bytes."""
        known = {slot: stored for slot in slots if (stored := self.entries.pop(slot, None)) is not None}
        if known:
            self._append(b"".join(_record(_FORGET, slot, stored) for slot, stored in known.items()))

    def compact(self) -> None:
        """Rewrite the file with live records only; the old one stays valid until the new one is complete and synced."""
        fresh = self.path.with_suffix(".new")
        body = self._header + b"".join(_record(_PUT, slot, stored) for slot, stored in self.entries.items())
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(fd, body, 0)
            os.fdatasync(fd)
            os.replace(fresh, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        os.close(self._fd)
        self._fd, self._length, self._records = fd, len(body), len(self.entries)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Sync and close."""
        with contextlib.suppress(OSError):
            os.fdatasync(self._fd)
        os.close(self._fd)

    def _append(self, records: bytes) -> None:
        # At an offset we keep, not in append mode: after a write that failed half-way the next one covers the remains.
        _write_all(self._fd, records, self._length)
        self._length += len(records)
        self._records += len(records) // _SIZE
        if self._records > 2 * len(self.entries) + _GARBAGE_MIN:
            self.compact()

    def _load(self) -> int:
        """Fill ``entries`` from the file; returns its usable length."""
        data = _read_all(self._fd)
        if data[:_SIZE] != self._header:
            if self._read_only:
                return 0
            os.ftruncate(self._fd, 0)
            _write_all(self._fd, self._header, 0)
            return _SIZE
        whole = len(data) // _SIZE * _SIZE
        for at in range(_SIZE, whole, _SIZE):
            kind, slot, block_hash, check, crc = _RECORD.unpack_from(data, at)
            if crc != zlib.crc32(data[at : at + 28]) or kind not in (_PUT, _FORGET):
                self.skipped += 1
            elif kind == _PUT:
                self.entries[slot] = Stored(block_hash, check)
            else:
                self.entries.pop(slot, None)
        self._records = whole // _SIZE - 1
        return whole


def _record(kind: int, slot: int, stored: Stored) -> bytes:
    head = _RECORD.pack(kind, slot, stored.block_hash, stored.check, 0)[:28]
    return head + struct.pack("<I", zlib.crc32(head))


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def _read_all(fd: int) -> bytes:
    size, parts, at = os.fstat(fd).st_size, [], 0
    while at < size and (part := os.pread(fd, size - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
