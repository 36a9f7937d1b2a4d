"""Summed copies: the sums are zlib's, the bytes are the source's, and what is wrong is not copied, natively and without."""

import zlib

import numpy as np
import pytest

from tenuto_server.runtime import blocks
from tenuto_server.runtime.blocks import HASH_BYTES, block_sums, copy_checked, copy_runs, copy_summed
from tenuto_server.runtime.disk_io import aligned

COUNT = 5


@pytest.fixture(params=["native", "definition"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "definition":
        monkeypatch.setattr(blocks, "library", lambda: None)


def pool(size: int, shift: int, seed: int) -> np.ndarray:
    """COUNT + 3 random blocks that begin ``shift`` bytes after a page."""
    bytes_ = aligned((COUNT + 3) * size + shift)[shift:].reshape(COUNT + 3, size)
    bytes_[:] = np.random.default_rng(seed).integers(0, 256, bytes_.shape, dtype=np.uint8)
    return bytes_


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 1000, 4096, 73728 + 16])
def test_sums_and_copies_of_any_size_and_place(size: int, shift: int) -> None:
    src, dst = pool(size, shift, 0), pool(size, shift, 1)
    from_, to = np.array([6, 0, 1, 2, 7], np.int32), np.array([3, 4, 0, 6, 1], np.int32)
    hashes = bytes(range(HASH_BYTES * COUNT))
    wanted = [
        zlib.crc32(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)] + src[slot].tobytes())
        for at, slot in enumerate(from_.tolist())
    ]
    before = dst.copy()
    assert copy_summed(src, from_, dst, to, hashes).tolist() == wanted
    assert (dst[to] == src[from_]).all()
    assert (dst[[2, 5, 7]] == before[[2, 5, 7]]).all()
    assert block_sums(hashes, dst[to]) == wanted

    dst[:] = before
    sums = np.array(wanted, np.uint32)
    src[from_[3], size // 2] ^= 1
    sums[0] ^= 1 << 31
    kept = sums.copy()
    assert copy_checked(src, from_, dst, to, hashes, sums) == [0, 3]
    assert (sums == kept).all()
    good = [1, 2, 4]
    assert (dst[to[good]] == src[from_[good]]).all()
    assert (dst[[2, 5, 7, *to[[0, 3]]]] == before[[2, 5, 7, *to[[0, 3]]]]).all()


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("size", [1, 64, 4096, 1000])
def test_copies_from_and_to_the_front(size: int, shift: int) -> None:
    src, dst = pool(size, shift, 0), pool(size, shift, 1)
    slots, before = np.array([6, 0, 1, 2, 7], np.int32), dst.copy()
    copy_runs(src, slots, dst, None)
    assert (dst[:COUNT] == src[slots]).all()
    assert (dst[COUNT:] == before[COUNT:]).all()
    dst[:] = before
    copy_runs(src, None, dst, slots)
    assert (dst[slots] == src[:COUNT]).all()
    assert (dst[[3, 4, 5]] == before[[3, 4, 5]]).all()


def test_nothing_is_nothing() -> None:
    none, data = np.array([], np.int32), pool(64, 0, 0)
    assert copy_summed(data, none, data, none, b"").tolist() == []
    assert copy_checked(data, none, data, none, b"", np.array([], np.uint32)) == []
    assert block_sums(b"", data[:0]) == []


def test_large_buffers_are_pages_of_zeros_that_can_be_written() -> None:
    for count in (1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3):
        buffer = aligned(count)
        assert buffer.shape == (count,)
        assert buffer.ctypes.data % 4096 == 0
        assert not buffer.any()
        buffer[-1] = 1
