"""Files out of the page cache, so that reading them measures the disk, or into it; and the disk alone. Holds no state.

``drop`` syncs a file (only clean pages can go) and asks with posix_fadvise(DONTNEED). ``cached_share`` tells whether it worked:
it maps a file and asks with mincore(2) which of its pages are in memory. To try a read instead (RWF_NOWAIT) would not do: newer
kernels begin to fetch what such a read misses, so that asking twice would find all of it. Where a system lacks one of them,
``drop`` does nothing, ``cached_share`` and ``read_past_s`` are None, and what is measured is the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_DROPS_MAX, _LEFT_MAX = 5, 0.02
_PIECE, _IN_FLIGHT = 4 << 20, 2


def drop(folder: Path) -> None:
    """All files under ``folder``."""
    if not hasattr(os, "posix_fadvise"):
        return
    for attempt in range(_DROPS_MAX):
        for fd in _opened(folder):
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        # Pages that another core has just touched are passed over; on a busy machine that can be most of a new file.
        if (cached_share(folder) or 0.0) < _LEFT_MAX:
            return
        time.sleep(0.02 * (attempt + 1))


def load(folder: Path) -> None:
    """All files under ``folder`` into memory."""
    for fd in _opened(folder):
        at = 0
        while got := len(os.pread(fd, _PIECE, at)):
            at += got


def read_past_s(folder: Path, count: int) -> float | None:
    """Seconds that it takes to read ``count`` bytes of the files under ``folder`` past the page cache (O_DIRECT), pieces of 4 MiB,
    two of them in flight; None where that cannot be done, or there are not so many bytes."""
    pieces: list[tuple[Path, int]] = []
    for path in sorted(folder.rglob("segment-*")):
        pieces += [(path, at) for at in range(0, path.stat().st_size - _PIECE + 1, _PIECE)]
    wanted = pieces[: -(-count // _PIECE)]
    if not hasattr(os, "O_DIRECT") or not count or len(wanted) * _PIECE < count:
        return None
    opened: dict[Path, int] = {}
    buffers = [mmap.mmap(-1, _PIECE) for _ in range(_IN_FLIGHT)]
    for buffer in buffers:
        buffer.write(bytes(_PIECE))

    def read(worker: int) -> None:
        for path, at in wanted[worker::_IN_FLIGHT]:
            os.preadv(opened[path], [buffers[worker]], at)

    try:
        for path, _ in wanted:
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with ThreadPoolExecutor(_IN_FLIGHT) as pool:
            list(pool.map(int, range(_IN_FLIGHT)))  # its threads run
            began = time.perf_counter()
            list(pool.map(read, range(_IN_FLIGHT)))
            return (time.perf_counter() - began) * count / (len(wanted) * _PIECE)
    except OSError:  # a file system without it
        return None
    finally:
        for fd in opened.values():
            os.close(fd)


def cached_share(folder: Path) -> float | None:
    """Share of the pages under ``folder`` that are in memory; None where nothing can tell, or there are none. Brings none in."""
    ask = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None
    if ask is None:
        return None
    ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found = asked = 0
    for fd in _opened(folder):
        try:
            pages = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError:  # emptied since it was opened
            continue
        except OSError:  # a file system that maps nothing
            return None
        with pages:
            told = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
            whole = np.frombuffer(pages, np.uint8)
            refused = ask(whole.ctypes.data, len(pages), told.ctypes.data)
            del whole  # a map that is looked into cannot be closed
        if refused:
            return None
        asked += len(told)
        found += int((told & 1).sum())
    return found / asked if asked else None


def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of each file that is not empty, for as long as it is looked at. The server is alive: what it replaces or
    removes meanwhile is passed over."""
    for path in sorted(folder.rglob("*")):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            about = os.fstat(fd)
            if stat.S_ISREG(about.st_mode) and about.st_size:
                yield fd
        finally:
            os.close(fd)
