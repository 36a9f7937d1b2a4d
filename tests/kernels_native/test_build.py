import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tenuto_kernels.cpu import native, native_build

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(not native.available(), reason="no native CPU operators here")


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "kernels"), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_compiler
def test_racing_builders_share_one_build_and_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as racers:
        first, second = racers.map(native_build.build, [tmp_path / "cache"] * 2)
    assert first == second
    assert {path.name for path in first.parent.iterdir()} == {first.name, "native.lock"}
    before = first.stat().st_mtime_ns
    assert native_build.build(first.parent) == first
    assert first.stat().st_mtime_ns == before
    first.write_bytes(b"not a library")
    assert native_build.load(first).tn_panel_width() > 0


def test_disabled_by_the_environment_torch_serves() -> None:
    code = """
import torch
from tenuto_kernels.cpu import native
from tenuto_kernels.linear import pack_linear
assert not native.available()
out = torch.empty(1, 4)
native.silu_mul(torch.ones(1, 8), out)
assert abs(out[0, 0].item() - 0.7310586) < 1e-6
for dtype in (torch.float32, torch.bfloat16):
    for invariant in (False, True):
        packed = pack_linear(torch.eye(64), dtype=dtype, invariant=invariant)
        assert packed.kind != "native" and torch.equal(packed(torch.ones(3, 64)), torch.ones(3, 64))
"""
    done = _python(code, TENUTO_NATIVE="0")
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native_build.BuildError, match=r"no C\+\+ compiler"):
        native_build.build(tmp_path / "cache")


@pytest.mark.parametrize(("body", "limit_s", "reason"), [("exit 3", 20.0, "exit status 3"), ("sleep 5", 0.2, "longer")])
def test_a_failing_or_hanging_compiler_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, limit_s: float, reason: str
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{body}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native_build, "BUILD_LIMIT_S", limit_s)
    with pytest.raises(native_build.BuildError, match=reason):
        native_build.build(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize("architecture", ["x86-64", pytest.param("x86-64-v3", marks=pytest.mark.slow)])
def test_lesser_processors_compute_the_same(tmp_path: Path, architecture: str) -> None:
    code = """
import torch
from tenuto_kernels.cpu import native, native_torch
from tenuto_kernels.cpu.native_panels import Panels
assert native.available()
torch.manual_seed(0)
x, weight, bias = torch.randn(21, 77), torch.randn(101, 77).bfloat16(), torch.randn(101)
linear = Panels(weight, bias)
assert (linear(x) - (x.double() @ weight.double().T + bias)).abs().max() < 1e-4
assert all(torch.equal(linear(x[:n]), linear(x)[:n]) for n in (1, 2, 7, 20))
from tenuto_kernels.quant import quantize
for bits in (4, 8):
    weight = quantize(torch.randn(101, 96), bits)
    linear, x = Panels(weight), torch.randn(21, 96)
    assert (linear(x) - x.double() @ weight.dense(torch.float64).T).abs().max() < 1e-4
    assert all(torch.equal(linear(x[:n]), linear(x)[:n]) for n in (1, 2, 4, 5, 20))
pool, q = torch.randn(30, 1, 2, 3, 16, 64).bfloat16(), torch.randn(50, 9, 64)
table, out, expected = torch.randperm(30)[None].int(), torch.empty_like(q), torch.empty_like(q)
start, context = torch.tensor([0, 50], dtype=torch.int32), torch.tensor([400], dtype=torch.int32)
native.paged_prefill(q, pool, 0, start, table, context, 0.125, out)
native_torch.paged_prefill(q, pool, 0, start, table, context, 0.125, expected)
assert (out - expected).abs().max() < 1e-5
native.paged_decode(q[-1:], pool, 0, table, context, 0.125, out[:1])
assert (out[:1] - expected[-1:]).abs().max() < 1e-5
gate_up, out, expected = torch.randn(3, 90).bfloat16(), torch.empty(3, 45).bfloat16(), torch.empty(3, 45).bfloat16()
native.silu_mul(gate_up, out); native_torch.silu_mul(gate_up, expected)
assert (out.float() - expected.float()).abs().max() < 0.04
"""
    done = _python(code, TENUTO_NATIVE_ARCH=architecture, TENUTO_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
