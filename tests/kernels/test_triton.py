"""The Triton kernels without a GPU: the suite in Triton's interpreter, and compilation for two architectures.

Both in processes of their own: the decorator binds a kernel to the interpreter or the compiler when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

SUITE = """
import warnings
warnings.simplefilter("error")
from tenuto_kernels.testing import check_op
for op, cases, longest in (
    ("store_kv", 6, 40), ("copy_blocks", 6, 40), ("gather_blocks", 6, 40), ("scatter_blocks", 6, 40),
    ("rms_norm", 6, 60), ("add_rms_norm", 3, 60), ("silu_mul", 4, 60), ("rope_store", 6, 60),
    ("quant_linear", 8, 60), ("sample_tokens", 8, 60),
    ("paged_attention", 10, 60), ("paged_attention_invariant", 4, 60),
):
    print(op, len(check_op(op, "interpret", cases=cases, longest=longest)))
"""

INVARIANT = """
import numpy as np
import torch
# The interpreter multiplies tiles with numpy, which on some processors rounds a row by where in the tile it stands.
np.matmul = lambda a, b, dtype=None: (a[..., :, :, None].astype(dtype) * b[..., None, :, :].astype(dtype)).sum(-2, dtype)
from tenuto_kernels.dispatch import backend
from tenuto_kernels import AttentionRows, KVLayout, paged_attention
assert backend() == "interpret"
torch.manual_seed(0)
pool = KVLayout(1, 1, 64, 16, torch.bfloat16).allocate(4, "cpu").normal_()
table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
q = torch.randn(45, 3, 64)
whole = paged_attention(q, pool, 0, AttentionRows((0, 45), (45,), table), 0.1, invariant=True)
for cuts in ((0, 20, 21, 45), (0, 7, 33, 44, 45)):
    lengths = tuple(zip(cuts, cuts[1:]))
    rows = AttentionRows(cuts, tuple(end for _, end in lengths), table.expand(len(lengths), -1))
    assert torch.equal(paged_attention(q, pool, 0, rows, 0.1, invariant=True), whole)
for at in (0, 31, 44):
    rows = AttentionRows((0, 1), (at + 1,), table)
    assert torch.equal(paged_attention(q[at : at + 1], pool, 0, rows, 0.1, invariant=True)[0], whole[at])
from tenuto_kernels.gpu import quant_linear
from tenuto_kernels.quant import quantize
for bits in (8, 4):
    product = quant_linear(quantize(torch.randn(70, 128), bits), None, invariant=True)
    x = torch.randn(20, 128)
    assert torch.equal(torch.cat([product(x[:1]), product(x[1:3]), product(x[3:])]), product(x))
print("same bits")
"""

SPLITS = """
import torch
from tenuto_kernels import AttentionRows, KVLayout, paged_attention
from tenuto_kernels.testing import TOLERANCE, AttentionCase, assert_close, attention_reference
torch.manual_seed(0)
pool = KVLayout(1, 1, 64, 16, torch.float32).allocate(70, "cpu").normal_()
tables = torch.stack([torch.randperm(70)[:69] for _ in range(3)]).int()
rows = AttentionRows((0, 1, 2, 3), (1100, 40, 577), tables)
case = AttentionCase("three rows, most parts of one empty", torch.randn(3, 3, 64), pool, 0, rows, 0.125, None)
out = paged_attention(case.q, pool, 0, rows, case.scale)
print(assert_close(case.name, out, attention_reference(case), *TOLERANCE[torch.float32]).case)
"""

# The wrappers with their own arguments, compiled as on a device of either generation instead of launched.
LAUNCHES = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from tenuto_kernels import AttentionRows, KVLayout, gpu
from tenuto_kernels.gpu.aot import resources
from tenuto_kernels.quant import quantize

class Device:
    architecture = 0
    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)
    def get_current_device(self):
        return self.architecture
    def get_current_stream(self, device=None):
        return 0

costs = []
def compile_instead(kernel, grid):
    def launch(*arguments, **options):
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        registers, spilled = resources(compiled.asm["cubin"])
        costs.append((kernel.fn.__name__, device.architecture, registers, compiled.metadata.shared, spilled))
    return launch

device = Device()
driver.set_active(device)
JITFunction.__getitem__ = compile_instead
pool = KVLayout(1, 8, 128, 16, torch.bfloat16).allocate(4, "cpu")
fused, angle = torch.randn(5, 48, 128).bfloat16(), torch.rand(5, 64)
q, k, v = torch.split(fused, [32, 8, 8], dim=1)
x, weight = torch.randn(5, 4096).bfloat16(), torch.ones(4096)
product = gpu.quant_linear(quantize(torch.randn(64, 512), 4), torch.zeros(64))
tables = torch.zeros(2, 70, dtype=torch.int32)
for device.architecture in (80, 90):
    gpu.rope_store(q, k, v, angle, angle, pool, 0, torch.arange(5))
    gpu.paged_attention(q[:2], pool, 0, AttentionRows.decoding(tables, torch.ones(2, dtype=torch.int32), 1100), 0.1)
    gpu.rms_norm(q, torch.ones(128), 1e-5)
    gpu.add_rms_norm(x, x, weight, 1e-5)
    gpu.silu_mul(x)
    product(torch.randn(1, 512).bfloat16())
    gpu.copy_blocks(pool, torch.tensor([0]), torch.tensor([1]))
    gpu.sample_tokens(torch.randn(2, 5000), torch.zeros(4, 2, dtype=torch.float64))
print(json.dumps(costs))
"""

WRONG_ORDER = """
from tenuto_kernels import dispatch
import tenuto_kernels.gpu
dispatch.load("interpret")
"""


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TENUTO_"))}
    inherited |= {"PYTHONPATH": str(KERNELS), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=600)


def test_suite_passes_in_the_interpreter() -> None:
    done = _python("-c", SUITE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["paged_attention 10", "paged_attention_invariant 4"]


def test_invariant_mode_gives_the_same_bits_for_any_cut() -> None:
    done = _python("-c", INVARIANT, TENUTO_KERNELS="interpret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same bits"


def test_keys_split_over_many_parts_some_of_them_empty() -> None:
    done = _python("-c", SPLITS, TENUTO_KERNELS="interpret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "three rows, most parts of one empty"


def test_interpreter_after_the_compiler_is_refused() -> None:
    done = _python("-c", WRONG_ORDER)
    assert "RuntimeError: backend 'interpret' asked for, but this process bound" in done.stderr


@pytest.mark.slow
def test_what_the_wrappers_launch_compiles_for_two_architectures() -> None:
    done = _python("-c", LAUNCHES)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = {}
    for name, architecture, registers, shared, spilled in json.loads(done.stdout):
        assert 0 < registers <= 255
        assert (shared <= 99 * 1024, spilled) == (True, 0), (name, architecture, shared, spilled)
        found.setdefault(name, set()).add(architecture)
    kernels = ["rope_store", "decode", "combine", "rms_norm", "silu_mul", "matmul", "add_parts", "move", "sample"]
    assert found == {f"{name}_kernel": {80, 90} for name in kernels}


@pytest.mark.slow
def test_kernels_compile_for_two_architectures_without_spills() -> None:
    """One model of each head dimension, an odd group among them; the variants that are the largest."""
    only = "(prefill|decode) (bf16 D64 G3|bf16 D128 G7|fp32 D128 G7)|decode.*window|store"
    only += "|W8 bf16 M128|W4 (bf16 M128|fp32 M16)"
    done = _python("-m", "tenuto_kernels.gpu.aot", "--json", "--only", only)
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)
    print(done.stdout)
    assert {cost["architecture"] for cost in costs} == {80, 90}
    assert len(costs) == 22
    for cost in costs:
        assert 0 < cost["registers"] <= 255, cost
        assert cost["shared_bytes"] <= 99 * 1024, f"does not fit every device of the generation: {cost}"
        assert cost["spill_bytes"] == 0, cost
