"""The disk tier: what it gives back is what was stored, or it says so; across crashes, damage and a full disk."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from tenuto_server.errors import ConfigError
from tenuto_server.runtime.blocks import block_sum
from tenuto_server.runtime.disk import DiskTier, family_name

BLOCK = 5000
FAMILY = "0123456789abcdef" * 2
REPOSITORY = Path(__file__).parents[2]


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(block_hash: bytes, size: int = BLOCK) -> np.ndarray:
    """The bytes that belong to a hash, so that any reader can tell whether a block is intact."""
    return np.frombuffer(hashlib.shake_128(block_hash).digest(size), np.uint8)


def open_tier(root: Path, slots: int = 64, **settings) -> DiskTier:
    return DiskTier(root, FAMILY, block_bytes=BLOCK, slots=slots, segment_bytes=16 * BLOCK, **settings)


def store(tier: DiskTier, slots: list[int], numbers: list[int]) -> list[int]:
    names = [name_of(number) for number in numbers]
    data = np.stack([content(name) for name in names])
    sums = [block_sum(name, row) for name, row in zip(names, data, strict=True)]
    return tier.write(np.array(slots, np.int32), b"".join(names), sums, data)


def load(tier: DiskTier, slots: list[int], numbers: list[int]) -> tuple[list[int], np.ndarray]:
    out = np.full((len(slots), BLOCK), 0xEE, np.uint8)
    bad, failed, _ = tier.read(np.array(slots, np.int32), b"".join(map(name_of, numbers)), out)
    bad = sorted({*bad, *failed})
    for at, number in enumerate(numbers):
        if at not in bad:
            assert (out[at] == content(name_of(number))).all()
    return bad, out


def test_blocks_come_back_and_survive_a_restart(tmp_path):
    tier = open_tier(tmp_path)
    slots = random.Random(0).sample(range(64), 40)
    assert store(tier, slots, list(range(40))) == []
    assert load(tier, slots, list(range(40)))[0] == []
    tier.forget([slots[0]])
    assert store(tier, [slots[1]], [100]) == []
    tier.close()
    again = open_tier(tmp_path)
    found = dict(zip(*again.recovered(), strict=True))
    assert found == {name_of(n): slots[n] for n in range(2, 40)} | {name_of(100): slots[1]}
    assert load(again, list(found.values()), [int.from_bytes(name, "little") for name in found])[0] == []
    again.close()


def test_another_block_in_the_slot_is_never_served(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, [3, 4], [3, 4])
    assert load(tier, [3, 4, 5], [3, 5, 5])[0] == [1, 2]
    assert load(tier, [4], [4])[0] == []
    assert tier.counts["missing"] == 2
    tier.close()


@pytest.mark.parametrize("at", [0, 7, 15])
def test_every_flipped_bit_is_caught_and_the_block_dropped(tmp_path, at):
    tier = open_tier(tmp_path)
    slots, rng = list(range(16)), random.Random(at)
    path = tmp_path / FAMILY / "segment-00000"
    for _ in range(40):
        assert store(tier, slots, slots) == []
        damaged = bytearray(path.read_bytes())
        damaged[at * BLOCK + rng.randrange(BLOCK)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert load(tier, slots, slots)[0] == [at]
    assert tier.counts["checksum_errors"] == 40
    assert tier.health()["blocks"] == 15
    tier.close()


def test_a_truncated_segment_loses_only_what_is_gone(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, list(range(32)), list(range(32)))
    os.truncate(tmp_path / FAMILY / "segment-00001", 5 * BLOCK + 17)
    assert load(tier, list(range(32)), list(range(32)))[0] == list(range(21, 32))
    store(tier, [30], [30])
    tier.close()
    os.truncate(tmp_path / FAMILY / "segment-00000", 3 * BLOCK - 1)
    (tmp_path / FAMILY / "segment-00001").unlink()
    again = open_tier(tmp_path)
    assert sorted(again.recovered()[1]) == [0, 1]
    assert load(again, [0, 1], [0, 1])[0] == []
    again.close()


def test_a_damaged_index_costs_records_never_a_wrong_block(tmp_path):
    rng = random.Random(5)
    for trial in range(30):
        root = tmp_path / str(trial)
        tier = open_tier(root)
        store(tier, list(range(20)), list(range(20)))
        store(tier, list(range(10)), list(range(100, 110)))
        tier.close()
        index = root / FAMILY / "index"
        data = bytearray(index.read_bytes())
        for _ in range(3):
            data[rng.randrange(32, len(data))] ^= 1 << rng.randrange(8)
        index.write_bytes(data[: rng.randrange(len(data) - 40, len(data))])
        again = open_tier(root)
        names, slots = again.recovered()
        assert len(names) >= 14
        numbers = [int.from_bytes(name, "little") for name in names]
        load(again, list(slots), numbers)
        assert store(again, list(range(20)), list(range(200, 220))) == []
        again.close()
        third = open_tier(root)
        assert len(third.recovered()[0]) == 20
        third.close()


def test_a_foreign_or_broken_header_recovers_nothing(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, [0], [0])
    tier.close()
    other = DiskTier(tmp_path, FAMILY, block_bytes=BLOCK // 2, slots=64, segment_bytes=16 * BLOCK)
    assert other.recovered() == ((), ())
    other.close()
    index = tmp_path / FAMILY / "index"
    index.write_bytes(b"\0" * 500)
    tier = open_tier(tmp_path)
    assert tier.recovered() == ((), ())
    assert store(tier, [0], [0]) == []
    tier.close()


def test_the_index_is_compacted_and_keeps_what_lives(tmp_path):
    tier = open_tier(tmp_path)
    index = tmp_path / FAMILY / "index"
    largest = 0
    for turn in range(400):
        store(tier, list(range(16)), list(range(turn * 16, turn * 16 + 16)))
        largest = max(largest, index.stat().st_size)
    assert largest < 32 * (2 * 16 + 4096 + 64)
    assert index.stat().st_size < largest
    tier.close()
    again = open_tier(tmp_path)
    assert sorted(again.recovered()[0]) == sorted(name_of(n) for n in range(399 * 16, 400 * 16))
    again.close()


def test_a_family_is_made_of_everything_that_changes_a_block():
    base = {
        "weights_digest": "ab",
        "kv_dtype": "bfloat16",
        "layout_version": 1,
        "block_tokens": 16,
        "block_bytes": 4096,
        "secret": b"s",
    }
    changes = {
        "weights_digest": "abc",
        "kv_dtype": "float32",
        "layout_version": 2,
        "block_tokens": 32,
        "block_bytes": 8192,
        "secret": b"t",
    }
    names = [family_name(**base)] + [family_name(**(base | {key: value})) for key, value in changes.items()]
    assert len(set(names)) == 7
    assert family_name(**base) == names[0]


def test_another_family_sees_nothing_and_makes_way_when_room_is_needed(tmp_path):
    first = open_tier(tmp_path, slots=16)
    store(first, list(range(16)), list(range(16)))
    first.close()
    keep = tmp_path / "notes"
    keep.mkdir()
    (keep / "index").write_bytes(b"mine")
    second = DiskTier(tmp_path, "f" * 32, block_bytes=BLOCK, slots=16, segment_bytes=16 * BLOCK)
    assert second.recovered() == ((), ())
    assert (tmp_path / FAMILY).exists()
    assert store(second, [0], [0]) == []
    assert not (tmp_path / FAMILY).exists()
    assert (keep / "index").read_bytes() == b"mine"
    third = open_tier(tmp_path, slots=16)
    assert store(third, [0], [0]) == []
    assert load(second, [0], [0])[0] == []
    second.close()
    third.close()


def test_a_smaller_limit_drops_what_lies_beyond(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, list(range(64)), list(range(64)))
    tier.close()
    small = open_tier(tmp_path, slots=20)
    assert sorted(small.recovered()[1]) == list(range(20))
    assert sorted(path.name for path in (tmp_path / FAMILY).glob("segment-*")) == ["segment-00000", "segment-00001"]
    small.close()


def test_two_servers_cannot_share_a_directory(tmp_path):
    tier = open_tier(tmp_path)
    with pytest.raises(ConfigError, match="in use by another server"):
        open_tier(tmp_path)
    tier.close()
    open_tier(tmp_path).close()


def test_a_path_that_is_no_directory_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="disk_dir"):
        open_tier(tmp_path / "file")


def test_a_directory_that_disappears_fails_writes_and_comes_back(tmp_path):
    now = [0.0]
    tier = open_tier(tmp_path, clock=lambda: now[0])
    store(tier, [0], [0])
    shutil.rmtree(tmp_path / FAMILY)
    assert store(tier, [20, 21], [1, 2]) == [0, 1]
    assert (tier.writable, tier.counts["write_errors"]) == (False, 2)
    assert "ENOENT" in tier.reason
    assert load(tier, [0, 40], [0, 9])[0] == [1]
    now[0] = 0.9
    (tmp_path / FAMILY).mkdir()
    assert not tier.probe()
    now[0] = 1.1
    assert tier.probe()
    assert store(tier, [20], [1]) == []
    tier.close()


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_disk
resource.setrlimit(resource.RLIMIT_FSIZE, (6 * test_disk.BLOCK + 100, resource.RLIM_INFINITY))
now = [0.0]
tier = test_disk.open_tier(Path(sys.argv[1]), clock=lambda: now[0])
assert test_disk.store(tier, [0, 1], [0, 1]) == []
assert test_disk.store(tier, list(range(2, 10)), list(range(2, 10))) == list(range(8)), "one run, one failed call"
assert not tier.writable and "EFBIG" in tier.reason, tier.reason
assert tier.counts["write_errors"] == 8
assert test_disk.load(tier, list(range(10)), list(range(10)))[0] == list(range(2, 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
now[0] = 2.0
assert tier.probe()
assert test_disk.store(tier, [8], [8]) == []
tier.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
tier = test_disk.open_tier(Path(sys.argv[1]))
assert not tier.writable and "EFBIG" in tier.reason, "full from the start: opens, reads, does not accept writes"
assert test_disk.load(tier, [0, 1, 8], [0, 1, 8])[0] == []
tier.close()
"""


def test_a_full_disk_keeps_what_it_has_and_recovers(tmp_path):
    script = FULL_DISK.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment(), timeout=60)
    tier = open_tier(tmp_path)
    assert sorted(tier.recovered()[1]) == [0, 1, 8]
    assert load(tier, [0, 1, 8], [0, 1, 8])[0] == []
    tier.close()


CRASHING = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_disk

def write_until_killed(seed):
    rng = random.Random(seed)
    tier = test_disk.open_tier(Path(sys.argv[1]))
    while os.getppid() == parent:  # no longer than anybody is there to kill it
        slots = rng.sample(range(64), rng.randrange(1, 17))
        if rng.random() < 0.1:
            tier.forget(slots)
        else:
            assert test_disk.store(tier, slots, [rng.randrange(10**9) for _ in slots]) == []

parent = os.getpid()
rng = random.Random(0)
for trial in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        write_until_killed(trial)
        os._exit(0)
    time.sleep(rng.uniform(0.005, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tier = test_disk.open_tier(Path(sys.argv[1]))
    names, slots = tier.recovered()
    bad, _ = test_disk.load(tier, list(slots), [int.from_bytes(name, "little") for name in names])
    assert bad == [] and tier.counts["checksum_errors"] == 0, (trial, bad, tier.counts)
    print(len(names), flush=True)
    tier.close()
"""


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("harness", "server", "kernels"))
    }


def test_killed_while_writing_every_recovered_block_is_intact(tmp_path):
    script, trials = CRASHING.format(tests=str(Path(__file__).parent)), 60
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(trials)],
        stdout=subprocess.PIPE,
        env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    found = [int(line) for line in done.stdout.split()]
    assert len(found) == trials
    assert max(found) > 30


def test_the_checksum_is_plain_crc32_whoever_computes_it():
    """So that a directory written with the fast library is read without it, and the other way round."""
    rng = random.Random(3)
    for size in (0, 1, 15, 4096, 368_640):
        data = np.frombuffer(rng.randbytes(size), np.uint8)
        assert block_sum(b"hash", data) == zlib.crc32(b"hash" + data.tobytes())
    assert block_sum(b"", np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926  # the check value of CRC-32


def test_the_checksum_differs_for_every_single_bit():
    data = np.frombuffer(random.Random(4).randbytes(2048), np.uint8).copy()
    whole = block_sum(b"name", data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << (bit % 8)
        assert block_sum(b"name", data) != whole
        data[bit // 8] ^= 1 << (bit % 8)
