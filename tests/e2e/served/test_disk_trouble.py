"""A disk that cannot be written: the server keeps serving, counts it, and says so; and uses the disk again when it can."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

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
