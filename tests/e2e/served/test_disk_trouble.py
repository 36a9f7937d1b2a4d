"""A disk that cannot be written: the server keeps serving, counts it, and says so; and uses the disk again when it can."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COUNT = 16
FILE_BYTES = 256 * 1024
TIERS = ("--device-bytes", "530KiB", "--host-bytes", "370KiB", "--disk-bytes", "16MiB", "--policy", "lru")


def prompt(number: int) -> list[int]:
    return [3 + (number * 37 + n * n * (number + 5) + 11 * n) % 500 for n in range(400)]


def test_full_and_free_again(serve: Any, plain: Any, tools: Any, tmp_path: Path) -> None:
    """No file of the server may grow beyond a limit that is reached while it serves; later the limit is lifted."""
    cold = {n: plain.complete(prompt(n), COUNT, cache_salt=f"disk trouble {n}")["text"] for n in range(6)}
    server = serve(*TIERS, "--disk-dir", str(tmp_path / "kv"))

    def ask_all() -> None:
        for number, text in cold.items():
            assert server.complete(prompt(number), COUNT, session_id=f"s{number}")["text"] == text

    assert server.health()["problems"] == []
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    ask_all()
    tools.eventually(lambda: server.health()["status"] == "degraded", "the trouble to be told")
    health = server.health()
    assert health["detail"]["tiers"]["disk"]["writable"] is False
    assert "EFBIG" in health["detail"]["tiers"]["disk"]["reason"]
    assert any("disk" in problem and "EFBIG" in problem for problem in health["problems"])
    tools.eventually(lambda: server.figure("tenuto_tier_writable", "disk") == 0, "the engine to know")
    assert server.figure("tenuto_tier_failures", "disk") >= 1
    assert server.figure("tenuto_executor_disk", "write_errors") > 0
    ask_all()
    assert server.request("GET", "/health")[0] == 200

    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    tools.eventually(lambda: server.health()["status"] == "ok", "the disk to be tried again", 60)
    written = server.figure("tenuto_executor_disk", "blocks_written")
    ask_all()
    assert server.figure("tenuto_executor_disk", "blocks_written") > written
    for tier in ("host", "disk"):  # a copy that could not be written says nothing against its source
        assert server.figure("tenuto_corrupt_blocks", tier) == 0
    server.at_rest()
    assert server.stop() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("stocked", [False, True])
def test_a_directory_that_cannot_be_written_at_the_start(
    serve: Any, plain: Any, tools: Any, tmp_path: Path, stocked: bool
) -> None:
    """The server starts and serves, tells what is wrong, reads what an earlier life left there, and writes when it may."""
    folder = tmp_path / "kv"
    cold = {n: plain.complete(prompt(n), COUNT, cache_salt=f"read-only {n}")["text"] for n in range(6)}
    options = (*TIERS, "--disk-dir", str(folder))

    def ask_all(server: Any) -> int:
        found = 0
        for number, text in cold.items():
            answer = server.complete(prompt(number), COUNT, session_id=f"s{number}")
            assert answer["text"] == text
            found += answer["cached"].get("disk", 0)
        return found

    folder.mkdir()
    if stocked:
        server = serve(*options)
        ask_all(server)
        assert server.stop() == 0
    with unwritable(folder):
        server = serve(*options, bound=True)
        found = ask_all(server)
        assert (found > 0) == stocked
        assert server.figure("tenuto_disk_blocks_recovered") > 0 or not stocked
        tools.eventually(lambda: server.health()["status"] == "degraded", "the trouble to be told")
        health = server.health()
        assert health["detail"]["tiers"]["disk"]["writable"] is False
        assert any("disk" in problem and "EACCES" in problem for problem in health["problems"])
        tools.eventually(lambda: server.figure("tenuto_tier_writable", "disk") == 0, "the engine to know")
        assert server.figure("tenuto_tier_failures", "disk") >= 1
        assert server.figure("tenuto_executor_disk", "blocks_written") == 0
    tools.eventually(lambda: server.health()["status"] == "ok", "the disk to be tried again", 60)
    ask_all(server)
    assert server.figure("tenuto_executor_disk", "blocks_written") > 0
    assert server.figure("tenuto_corrupt_blocks") == 0
    server.at_rest()
    assert server.stop() == 0
    assert "Traceback" not in server.log


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Everything below the folder, and the folder, may only be read."""
    everything = [folder, *folder.rglob("*")]
    before = [(path, path.stat().st_mode) for path in everything]
    for path, mode in before:
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in before:
            path.chmod(mode)


def test_a_place_that_is_no_directory(serve: Any, tmp_path: Path) -> None:
    """Refused at once, by name: a wrong path is the user's, and not to be found out hours later."""
    wrong = tmp_path / "file"
    wrong.write_text("in the way")
    began = time.monotonic()
    server = serve("--disk-dir", str(wrong / "kv"), wait=False)
    assert server.process.wait(60) == 1
    (told,) = [line for line in server.log.splitlines() if line.startswith("tenuto serve: ")]
    assert "--disk-dir" in told
    assert str(wrong) in told
    assert time.monotonic() - began < 60
    assert wrong.read_text() == "in the way"
