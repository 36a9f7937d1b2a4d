"""The examples against a real server process with the toy model: real tiers, receipts and cache reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START_S_MAX = 120.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    port, log = folder / "port", folder / "log"
    options = ["--model", "toy", "--port", "0", "--port-file", str(port), "--disk-bytes", "0", "--threads", "1"]
    with log.open("w") as output:
        command = [sys.executable, "-m", "tenuto", "serve", *options]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            give_up = time.monotonic() + START_S_MAX
            while not (port.exists() and port.read_text().strip()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < give_up, log.read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port.read_text().strip()}"
        finally:
            process.terminate()
            process.wait(30)


def run(name: str, url: str, *args: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), "--base-url", url, *args]
    environment = {**os.environ, "TENUTO_HISTORY": "off"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(url: str) -> None:
    output = run("quickstart.py", url)
    device = re.search(r"'device': (\d+)", output)
    assert device is not None
    assert int(device[1]) > 0
    assert "'accepted'" in output
    assert "'rejected'" not in output


def test_coding_agent(url: str) -> None:
    output = run("coding_agent.py", url)
    ratio = re.search(r"hit ratio (\d\.\d+)", output)
    assert ratio is not None
    assert float(ratio[1]) > 0.3  # three of four prompts extend the one before


def test_subagents(url: str) -> None:
    shares = re.findall(r"(\d+) of (\d+) tokens were the parent's", run("subagents.py", url))
    assert len(shares) == 3
    assert all(int(cached) / int(total) > 0.9 for cached, total in shares)


def test_compaction(url: str) -> None:
    output = run("compaction.py", url, "--think-s", "0.2")
    summary = re.search(r"summary call: (\d+) tokens, (\d+) cached", output)
    assert summary is not None
    assert int(summary[2]) / int(summary[1]) > 0.8
