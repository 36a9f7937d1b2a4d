"""A server that dies and comes back to the same disk directory: it finds what is whole, and never believes what is not.

The cold answers come from another server, which has no disk and is asked each prompt for the first time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COUNT = 24
# 12 KiB a block of the toy in fp32: 43 blocks on the device, 30 on the host, so six prompts of 25 blocks reach the disk.
TIERS = ("--device-bytes", "530KiB", "--host-bytes", "370KiB", "--disk-bytes", "8MiB", "--policy", "lru")


def prompt(number: int) -> list[int]:
    """400 token ids, unlike those of any other number."""
    return [3 + (number * 131 + n * n * (number + 3) + 7 * n) % 500 for n in range(400)]


@pytest.fixture(scope="session")
def cold(plain: Any) -> Callable[[int, int], str]:
    """What a server without any cache answers to a prompt."""
    known: dict[tuple[int, int], str] = {}

    def answer(number: int, count: int = COUNT) -> str:
        if (number, count) not in known:
            # A salt of its own makes every question a new one.
            got = plain.complete(prompt(number), count, cache_salt=f"cold-{number}-{count}")
            assert got["cached"] == {}
            known[number, count] = got["text"]
        return known[number, count]

    return answer


def ask_all(server: Any, cold: Callable[..., str], numbers: range = range(6)) -> dict[str, int]:
    """Asks for every prompt, compares the answers, and returns the cached tokens by tier."""
    cached: dict[str, int] = {}
    for number in numbers:
        answer = server.complete(prompt(number), COUNT, session_id=f"s{number}")
        assert answer["text"] == cold(number), f"prompt {number}: {answer['cached']}"
        for tier, tokens in answer["cached"].items():
            cached[tier] = cached.get(tier, 0) + tokens
    return cached


def test_killed_again_and_again(serve: Any, cold: Any, tmp_path: Path) -> None:
    """Three deaths in the middle of an answer, each with copies under way; every life reuses blocks of the one before."""
    options = (*TIERS, "--disk-dir", str(tmp_path / "kv"))
    found = []
    for life in range(4):
        server = serve(*options)
        cached = ask_all(server, cold)
        found.append(cached.get("disk", 0))
        assert server.figure("tenuto_corrupt_blocks") == 0
        if life == 3:
            assert server.stop() == 0, server.log
            break
        with server.stream(prompt(9), 3000) as pieces:
            text = "".join(itertools.islice(pieces, 5 + 10 * life))
            server.kill()
            text += "".join(pieces)
        assert text
        assert cold(9, 400).startswith(text[:300])
    first, *later = found
    assert all(tokens > max(first, 400) for tokens in later), found


def test_damage_between_lives(serve: Any, cold: Any, tmp_path: Path) -> None:
    """A flipped byte is told by its checksum; a truncated segment, a torn index and garbage in it by their form."""
    folder = tmp_path / "kv"
    options = (*TIERS, "--disk-dir", str(folder))
    server = serve(*options)
    ask_all(server, cold)
    assert server.stop() == 0
    (segment,) = folder.glob("*/segment-*")
    index = segment.with_name("index")
    whole = segment.read_bytes()
    data = bytearray(whole)
    for at in range(5000, len(data), 3 * 12288):  # one byte in every third block
        data[at] ^= 0x10
    segment.write_bytes(data)

    server = serve(*options)
    found = server.figure("tenuto_disk_blocks_recovered")
    assert found > 60
    cached = ask_all(server, cold)
    assert cached["disk"] > 0
    bad = server.figure("tenuto_corrupt_blocks", "disk")
    assert bad > 0
    assert server.figure("tenuto_executor_disk", "checksum_errors") == bad
    assert server.figure("tenuto_transfers_failed", "disk>device") > 0
    assert server.health()["status"] == "ok"
    assert server.stop() == 0

    # Half of the blocks are gone, the last one torn; the index ends in half a record and has one of noise.
    size = segment.stat().st_size
    with segment.open("r+b") as file:
        file.truncate(size // 2 + 5000)
    data = bytearray(index.read_bytes())
    data[32 * 20 : 32 * 21] = bytes(range(32))
    index.write_bytes(data + b"half a record")
    server = serve(*options)
    assert 0 < server.figure("tenuto_disk_blocks_recovered") < found
    assert ask_all(server, cold)["disk"] > 0
    assert server.figure("tenuto_corrupt_blocks") == 0

    # Truncated under a running server: what it reads then is short.
    with segment.open("r+b") as file:
        file.truncate(12288 * 2)
    ask_all(server, cold)
    assert server.figure("tenuto_corrupt_blocks", "disk") > 0
    server.at_rest()
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_what_pauses_taught_survives_and_damage_to_it_does_not_matter(serve: Any, tmp_path: Path) -> None:
    options = (*TIERS, "--policy", "tenuto", "--disk-dir", str(tmp_path / "kv"))  # lru learns nothing

    def live(*, known: bool) -> int:
        """One life with two pauses of a session; how many its file tells of."""
        server = serve(*options)
        assert ("what earlier runs have learned" in server.log) is known
        for turn in range(3):
            server.complete(prompt(0)[: 100 + 50 * turn], 4, session_id="s")
        assert server.stop() == 0, server.log
        (file,) = (tmp_path / "kv").glob("*/learned.json")
        kinds = json.loads(file.read_bytes().splitlines()[1])["kinds"]
        return sum(kind["n"] for kind in kinds.values())

    assert [live(known=False), live(known=True)] == [2, 4]
    (file,) = (tmp_path / "kv").glob("*/learned.json")
    file.write_bytes(file.read_bytes()[:-100])
    server = serve(*options)
    assert "learned.json is ignored, pauses are learned anew: it is damaged" in server.log
    assert server.health()["status"] == "ok"
