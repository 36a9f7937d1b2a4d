"""Reading and writing segment files: from the page cache where it has the bytes, past it where it does not.

``SegmentFile`` owns its descriptors, ``ReadAhead`` its thread and the one read in flight. What a turn waits for has seldom been
touched since it was written, and a buffered read of it costs a copy, the search for pages and a read-ahead window that
knows nothing of what is wanted. So ``read`` first asks whether it is in memory (RWF_NOWAIT), and takes it with O_DIRECT if not,
where buffer and place are aligned to pages and the file system allows it; everywhere else it reads as usual.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from tenuto_server.runtime.blocks import Bytes

ALIGNMENT = 4096
_HUGE_PAGE = 2 << 20
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_DIRECT: int | None = getattr(os, "O_DIRECT", None)

Result = TypeVar("Result")


def aligned(count: int) -> Bytes:
    """``count`` zero bytes, resident, beginning on a page: what O_DIRECT reads into. Many of them on huge pages where the system
    grants them: a disk takes a request in so many pieces of memory at most, and of pages of 4 KiB that is soon reached."""
    if count < _HUGE_PAGE:
        array = np.frombuffer(mmap.mmap(-1, count), np.uint8)
    else:
        region = mmap.mmap(-1, count + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(region, np.uint8)
        skip = -whole.ctypes.data % _HUGE_PAGE
        array = whole[skip : skip + count]
    array[:] = 0
    return array


class SegmentFile:
    """One file, opened with ``flags``. Raises ``OSError`` as ``os.open`` does."""

    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        self._fd = os.open(path, flags, 0o600)
        self._direct: int | None = None
        self._may_direct, self._may_ask = _DIRECT is not None, _NOWAIT is not None
        if _DIRECT is not None:
            # Whoever reads here says how much: to guess at more would bring in what nobody wants, asking included.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def write(self, data: Bytes, offset: int) -> None:
        """All of ``data``, through the page cache. Raises ``OSError``."""
        view = data.data.cast("B")
        while view:
            written = os.pwrite(self._fd, view, offset)
            if written == 0:
                raise OSError(errno.EIO, "the disk accepted no bytes")
            offset += written
            view = view[written:]

    def read(self, out: Bytes, offset: int) -> int:
        """Fills ``out``; returns the bytes read: fewer than asked for at the end of the file only. Raises ``OSError``."""
        view, got = out.data.cast("B"), 0
        if not self._in_memory(view, offset):
            got = self._read_direct(view, out.ctypes.data, offset)
        while got < len(view) and (count := os.preadv(self._fd, [view[got:]], offset + got)):
            got += count
        return got

    def _in_memory(self, view: memoryview, offset: int) -> bool:
        """Whether the page cache has the first and the last page, which tells well enough whether it has all of them."""
        if not self._may_ask or len(view) < ALIGNMENT:
            return True
        assert _NOWAIT is not None
        try:
            return all(
                os.preadv(self._fd, [view[at : at + ALIGNMENT]], offset + at, _NOWAIT) == ALIGNMENT
                for at in (0, len(view) - ALIGNMENT)
            )
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL):
                raise
            self._may_ask = False
            return True

    def _read_direct(self, view: memoryview, address: int, offset: int) -> int:
        """Past the page cache, as far as alignment and file system allow; how far it is filled then."""
        at = 0
        if not self._may_direct or (address | offset | len(view)) % ALIGNMENT:
            return at
        try:
            if self._direct is None:
                assert _DIRECT is not None
                self._direct = os.open(self._path, os.O_RDONLY | _DIRECT)
            while at < len(view) and (count := os.preadv(self._direct, [view[at:]], offset + at)):
                at += count
                if count % ALIGNMENT:
                    break  # the end of the file
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._may_direct = False
        return at

    def sync(self) -> None:
        """What was written is on the disk when this returns. Raises ``OSError``."""
        os.fdatasync(self._fd)

    def forget_cached(self) -> None:
        """Asks the page cache to let go of what is clean."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes both descriptors."""
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


class ReadAhead(Generic[Result]):
    """Does one piece of work at a time on a thread of its own, so that the disk reads while its caller computes sums.

    For one caller; the thread starts with the first work and is a daemon: a disk that hangs keeps nobody.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._key: Sequence[object] | None = None
        self._work: Callable[[], Result] | None = None
        self._result: Result | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, key: Sequence[object], work: Callable[[], Result]) -> None:
        """Begins ``work``, under a name to take it by. ``work`` must not raise. What is in flight must have been taken."""
        with self._wake:
            assert self._key is None
            self._key, self._work, self._result = key, work, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tenuto-read-ahead", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def take(self, key: Sequence[object]) -> Result | None:
        """The result, waited for, of work begun under this name; None where it was other work, whose end is waited for."""
        with self._wake:
            self._wake.wait_for(lambda: self._work is None)
            mine, result = self._key == key and self._key is not None, self._result
            self._key = self._result = None
            return result if mine else None

    def close(self, timeout_s: float) -> bool:
        """Ends the thread; False if its work does not end in time."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._work is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._work is not None or self._closed)
                work = self._work
            if work is None:
                return
            result = work()
            with self._wake:
                self._work, self._result = None, result
                self._wake.notify_all()
