"""The bundled model, killed in the middle of an answer: its next life finds the KV on disk and says the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tenuto_server.errors import ModelError
from tenuto_server.model.load import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

# 737,280 bytes a block in fp32: 40 blocks on the device, so three prompts of 20 blocks push each other to disk.
TIERS = ("--device-bytes", "29491200", "--host-bytes", "0", "--disk-bytes", "96MiB", "--policy", "lru")
COUNT = 8


def prompt(number: int) -> list[int]:
    """320 token ids of the model's vocabulary, unlike those of any other number."""
    return [1000 + (number * 131 + n * n * (number + 3) + 7 * n) % 20_000 for n in range(320)]


def test_the_real_model_finds_its_kv_after_sigkill(serve: Any, tmp_path: Path) -> None:
    try:
        resolve_model("smollm2-135m")
    except ModelError as missing:
        pytest.skip(str(missing))
    options = ("--model", "smollm2-135m", "--dtype", "fp32", "--invariant", "--disk-dir", str(tmp_path / "kv"), *TIERS)
    server = serve(*options)
    said = []
    for number in range(3):
        answer = server.complete(prompt(number), COUNT, session_id=f"s{number}")
        assert answer["cached"] == {}
        said.append(answer["text"])
    with server.stream(prompt(3), 200) as pieces:
        assert "".join(itertools.islice(pieces, 3))
        server.kill()
        list(pieces)

    server = serve(*options)
    assert server.figure("tenuto_disk_blocks_recovered") >= 20
    found = 0
    for number, text in enumerate(said):
        answer = server.complete(prompt(number), COUNT, session_id=f"s{number}")
        assert answer["text"] == text, f"prompt {number}: {answer['cached']}"
        found += answer["cached"].get("disk", 0)
    assert found >= 160
    assert server.figure("tenuto_corrupt_blocks") == 0
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log
