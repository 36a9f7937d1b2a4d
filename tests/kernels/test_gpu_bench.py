"""`bench/gpu.py`: what it says without a GPU, and its steps in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TENUTO_"))}
    path = os.pathsep.join(str(ROOT / part) for part in ("harness", "server", "kernels"))
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "bench/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do() -> None:
    done = _bench()
    assert done.returncode == 2
    assert "torch sees no CUDA device" in done.stderr
    assert "--interpret --quick" in done.stderr


def test_its_steps_run_in_the_interpreter_and_what_is_wrong_is_told(tmp_path: Path) -> None:
    out, table = tmp_path / "gpu.json", tmp_path / "gpu.md"
    some = ("--checks", "silu_mul,softmax", "--only", "decode,products,blocks")
    done = _bench("--interpret", "--quick", *some, "--json", str(out), "--markdown", str(table))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: softmax" in done.stdout
    report = json.loads(out.read_text())
    good, wrong = report["checks"]
    assert (good["op"], good["ok"], wrong["op"], wrong["ok"]) == ("silu_mul", True, "softmax", False)
    assert "no suite for 'softmax'" in wrong["error"]
    assert {row["section"] for row in report["timings"]} == {"device", "decode", "products", "blocks"}
    assert all(row["ms"] > 0 for row in report["timings"] if row["section"] != "device")
    assert "times mean nothing" in table.read_text()
    assert "| decode | decode attention, 2 rows at 20 |" in table.read_text()
