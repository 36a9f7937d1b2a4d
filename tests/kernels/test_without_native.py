"""The torch definitions alone, as they serve where the native operators are switched off or cannot be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tenuto_kernels.cpu import prefill

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

SUITE = """
from tenuto_kernels.cpu import native
from tenuto_kernels.testing import check_op
assert not native.available()
for op in ("paged_attention", "paged_attention_invariant"):
    print(op, len(check_op(op, "cpu", cases=16)))
"""


def test_suite_passes_without_native_operators() -> None:
    environment = {**os.environ, "TENUTO_NATIVE": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(KERNELS)}
    done = subprocess.run([sys.executable, "-c", SUITE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["paged_attention", "16", "paged_attention_invariant", "16"]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("n", "context"), [(1, 1), (64, 64), (100, 300), (129, 129)])
def test_bf16_tiles_match_float64(n: int, context: int, window: int | None) -> None:
    """The path of processors with bf16 arithmetic, which runs (slowly) on any."""
    torch.manual_seed(0)
    q = torch.randn(2, 3, n, 64).bfloat16()
    k, v = torch.randn(2, 2, context, 64).bfloat16()
    position = torch.arange(context - n, context)[:, None]
    key = torch.arange(context)
    seen = (key <= position) & (key > position - (window or context))
    scores = (q.double() @ k.double()[:, None].transpose(2, 3) / 8).masked_fill(~seen, float("-inf"))
    expected = scores.softmax(-1) @ v.double()[:, None]
    got = prefill.attend(q, k, v, 1 / 8, window)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=1.6e-2, rtol=1.6e-2)
