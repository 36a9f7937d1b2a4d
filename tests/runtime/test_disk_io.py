"""Segment files: whatever is in the page cache and whatever is not, what is read is what was written."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tenuto_server.bench import page_cache
from tenuto_server.runtime.disk_io import ALIGNMENT, ReadAhead, SegmentFile, aligned

PAGES = 64


@pytest.fixture
def written(tmp_path: Path):
    """(an open file of 64 pages, its bytes, its folder), clean and out of the page cache."""
    data = aligned(PAGES * ALIGNMENT)
    data[:] = np.random.default_rng(0).integers(0, 256, len(data), dtype=np.uint8)
    file = SegmentFile(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    file.write(data, 0)
    page_cache.drop(tmp_path)
    yield file, data, tmp_path
    file.close()


@pytest.mark.parametrize(("first", "count"), [(0, PAGES), (3, 20), (PAGES - 1, 1)])
def test_aligned_reads_of_what_is_cold(written, first: int, count: int) -> None:
    file, data, _ = written
    out = aligned(count * ALIGNMENT)
    assert file.read(out, first * ALIGNMENT) == len(out)
    assert (out == data[first * ALIGNMENT : (first + count) * ALIGNMENT]).all()


def test_a_cold_aligned_read_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    size = 2048 * ALIGNMENT
    file = SegmentFile(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    file.write(aligned(size), 0)
    page_cache.drop(tmp_path)
    if page_cache.cached_share(tmp_path) in (None, 1.0):
        pytest.skip("this file system does not let pages go, or does not tell")
    assert file.read(aligned(size), 0) == size
    share = page_cache.cached_share(tmp_path)
    if not file._may_direct:
        pytest.skip("no O_DIRECT on this file system")
    assert share is not None
    assert share < 0.1  # asking whether they are there may bring in the first and the last page
    file.close()


def test_files_may_be_replaced_while_they_are_dropped_from_the_page_cache(tmp_path: Path) -> None:
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            (tmp_path / "new").write_bytes(b"x" * ALIGNMENT)
            (tmp_path / "new").replace(tmp_path / "old")

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(100):
            page_cache.drop(tmp_path)
            assert page_cache.cached_share(tmp_path) in (None, *(at / 2 for at in range(3)))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("offset", "count", "shift"), [(1, 5000, 0), (4096, 8192, 8), (4096, 8000, 0)])
def test_what_is_not_aligned_is_read_all_the_same(written, offset: int, count: int, shift: int) -> None:
    file, data, _ = written
    out = aligned(count + shift)[shift:]
    assert file.read(out, offset) == count
    assert (out == data[offset : offset + count]).all()


def test_a_partly_cached_range_and_bytes_not_yet_on_the_disk(written) -> None:
    """The front is in memory, the middle was just overwritten and not synced, the end is cold."""
    file, data, _ = written
    file.read(np.empty(5 * ALIGNMENT + 100, np.uint8), 0)
    data[9 * ALIGNMENT : 11 * ALIGNMENT] ^= 0xFF
    file.write(data[9 * ALIGNMENT : 11 * ALIGNMENT], 9 * ALIGNMENT)
    out = aligned(PAGES * ALIGNMENT)
    assert file.read(out, 0) == len(out)
    assert (out == data).all()


def test_the_end_of_the_file_ends_the_read(written) -> None:
    file, data, folder = written
    os.truncate(folder / "segment", 10 * ALIGNMENT + 123)
    out = aligned(PAGES * ALIGNMENT)
    assert file.read(out, 0) == 10 * ALIGNMENT + 123
    assert (out[: 10 * ALIGNMENT + 123] == data[: 10 * ALIGNMENT + 123]).all()
    assert file.read(out, 20 * ALIGNMENT) == 0


def test_read_ahead_gives_a_result_only_to_whom_it_was_begun_for() -> None:
    ahead: ReadAhead[str] = ReadAhead()
    assert ahead.take(("a",)) is None
    ahead.start(("a",), lambda: "result")
    assert ahead.take(("a",)) == "result"
    assert ahead.take(("a",)) is None
    ahead.start(("b",), lambda: "other")
    assert ahead.take(("a",)) is None
    assert ahead.take(("b",)) is None  # dropped: its buffer may hold something else by now
    assert ahead.close(1)


def test_read_ahead_is_waited_for_and_a_hanging_one_gives_up_in_time() -> None:
    ahead, begun, go = ReadAhead[str](), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait(10)
        return "late"

    ahead.start(("a",), work)
    assert begun.wait(5)
    assert not ahead.close(0.05)
    go.set()
    assert ahead.take(("a",)) == "late"
    assert ahead.close(1)
