"""Compiling every kernel ahead of time, without a GPU: does it compile, and what does it cost the device.

`python -m tenuto_kernels.gpu.aot` prints a table, with `--markdown` the one of docs/benchmarks.md, with `--json` one JSON list. The variants are the shapes of models the
server knows; launch options are those the wrappers use. Owns no state.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tenuto_kernels.gpu.blocks import WORDS, move_kernel
from tenuto_kernels.gpu.decode import combine_kernel, decode_config, decode_kernel
from tenuto_kernels.gpu.matmul import add_parts_kernel, matmul_config, matmul_kernel
from tenuto_kernels.gpu.prefill import prefill_config, prefill_kernel
from tenuto_kernels.gpu.rowwise import COLUMNS, norm_warps, rms_norm_kernel, rope_store_kernel, silu_mul_kernel
from tenuto_kernels.gpu.sampling import BLOCK, WARPS, sample_kernel
from tenuto_kernels.gpu.shared import power_of_two
from tenuto_kernels.gpu.store import store_kernel
from tenuto_kernels.quant import GROUP

ARCHITECTURES = (80, 90)

#: (query heads per KV head, KV heads, D): SmolLM2-135M, Qwen 2.5 Coder 7B, Llama 3.1 8B, Qwen 3 32B.
MODELS = ((3, 3, 64), (7, 4, 128), (4, 8, 128), (8, 8, 128))
BLOCK_SIZE = 16

_POINTERS = {
    "table": "*i32",
    "row": "*i32",
    "start": "*i32",
    "context": "*i32",
    "tile_row": "*i32",
    "tile_first": "*i32",
    "part": "*fp32",
    "lse": "*fp32",
    "slots": "*i64",
    "weight": "*fp32",
    "bias": "*fp32",
    "cos": "*fp32",
    "sin": "*fp32",
    "scale": "*fp16",
    "minimum": "*fp16",
    "logits": "*fp32",
    "settings": "*fp64",
}
_INTS = ("window", "stride_table", "stride_q", "words", "rows", "outputs", "width", "vocab", "count")
_SCALARS = {"scale_log2": "fp32", "eps": "fp32", **dict.fromkeys(_INTS, "i32")}
#: Arguments that are multiples of 16 in every model, which the just-in-time compiler notices and makes use of.
_MULTIPLES = ("stride", "layer", "outputs", "width")


@dataclass(frozen=True)
class Variant:
    """One specialisation of one kernel."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Cost:
    """What a compiled kernel takes: registers a thread, static and dynamic shared memory, bytes spilled a thread."""

    name: str
    architecture: int
    registers: int
    shared_bytes: int
    spill_bytes: int


def variants() -> Iterator[Variant]:
    """Every kernel in the shapes it is launched with."""
    for group, heads, dim in MODELS:
        for dtype in ("bf16", "fp32"):
            yield _attention("prefill", group, heads, dim, dtype)
            yield _attention("decode", group, heads, dim, dtype)
    yield _attention("prefill", 4, 8, 128, "bf16", windowed=True)
    yield _attention("decode", 4, 8, 128, "bf16", windowed=True)
    yield _variant("combine", combine_kernel, {"out": "*bf16"}, {"HQ": 32, "D": 128, "DP": 128, "SPLITS": 8})
    dtypes = {"pool": "*bf16", "k": "*bf16", "v": "*bf16"}
    yield _variant("store", store_kernel, dtypes, {"HKV": 8, "D": 128, "BS": BLOCK_SIZE, "BLOCK": 1024})
    dtypes = {"src": "*i32", "dst": "*i32", "src_index": "*i64", "dst_index": "*i64"}
    for name, source, target in (("gather", True, False), ("scatter", False, True), ("copy", True, True)):
        constants: dict[str, Any] = {"SRC_INDEXED": source, "DST_INDEXED": target, "WORDS": WORDS}
        yield _variant(name, move_kernel, dtypes, constants)
    yield from _rowwise()
    for bits in (8, 4):
        for rows in (16, 64, 128):
            yield _matmul(bits, rows, "bf16")
        yield _matmul(bits, 16, "fp32")
    yield _variant("add parts", add_parts_kernel, {"out": "*bf16"}, {"BIAS": True, "SPLITS": 8, "BLOCK": 1024})
    yield _variant("sample", sample_kernel, {"out": "*i64"}, {"BLOCK": BLOCK}, {"num_warps": WARPS})


def _rowwise() -> Iterator[Variant]:
    row = {"x": "*bf16", "delta": "*bf16", "sum": "*bf16", "out": "*bf16"}
    for name, width, add in (("add norm 4096", 4096, True), ("norm 128", 128, False)):
        constants: dict[str, Any] = {"WIDTH": width, "BLOCK": power_of_two(width), "ADD": add}
        yield _variant(name, rms_norm_kernel, row, constants, {"num_warps": norm_warps(width)})
    yield _variant("swiglu", silu_mul_kernel, {"gate_up": "*bf16", "out": "*bf16"}, {"BLOCK": COLUMNS})
    projected = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "pool": "*bf16"}
    for group, heads, dim in MODELS:
        constants = {"HQ": group * heads, "HKV": heads, "D": dim, "BS": BLOCK_SIZE, "PAIRS": power_of_two(dim // 2)}
        constants |= {"HQP": power_of_two(group * heads), "HKVP": power_of_two(heads)}
        yield _variant(f"rope store D{dim} G{group}", rope_store_kernel, projected, constants)


def _matmul(bits: int, rows: int, dtype: str) -> Variant:
    """A square product of 4096 on a device of 132 processors."""
    tiles = matmul_config(rows, 4096, 4096, bits, 132)
    constants = {"GROUPS": 4096 // GROUP, "BITS": bits, "BIAS": False, "FP32": dtype == "fp32", "SPLITS": tiles.splits}
    constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    dtypes = {"x": f"*{dtype}", "out": f"*{dtype}", "codes": "*i8" if bits == 8 else "*u8"}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return _variant(f"W{bits} {dtype} M{tiles.block_m}", matmul_kernel, dtypes, constants, options)


def compile_variant(variant: Variant, architecture: int) -> Cost:
    """Compile for one architecture (80, 90) with the compiler and assembler that come with Triton."""
    names = list(variant.signature)
    # What the just-in-time compiler learns from the arguments: 16-byte aligned pointers and strides.
    aligned = [n for n, kind in variant.signature.items() if kind.startswith("*") or n.startswith(_MULTIPLES)]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(variant.kernel, variant.signature, variant.constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=variant.options)
    registers, spilled = resources(compiled.asm["cubin"])
    return Cost(variant.name, architecture, registers, compiled.metadata.shared, spilled)


def _attention(kind: str, group: int, heads: int, dim: int, dtype: str, windowed: bool = False) -> Variant:
    fp32 = dtype == "fp32"
    constants: dict[str, Any] = {"HKV": heads, "GROUP": group, "D": dim, "DP": power_of_two(dim), "BS": BLOCK_SIZE}
    constants |= {"FP32": fp32, "WINDOWED": windowed}
    if kind == "prefill":
        kernel = prefill_kernel
        tiles = prefill_config(dim, group, fp32)
        constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    else:
        kernel = decode_kernel
        rows = decode_config(dim, group, fp32)
        constants |= {"BLOCK_G": rows.block_g, "BLOCK_N": rows.block_n, "SPLITS": 8}
        options = {"num_warps": rows.num_warps, "num_stages": rows.num_stages}
    dtypes = {"q": f"*{dtype}", "pool": f"*{dtype}", "out": f"*{dtype}"}
    name = f"{kind} {dtype} D{dim} G{group}{' window' if windowed else ''}"
    return _variant(name, kernel, dtypes, constants, options)


def _variant(
    name: str, kernel: Any, dtypes: dict[str, str], constants: dict[str, Any], options: dict[str, int] | None = None
) -> Variant:
    """`dtypes`: the pointers whose element type varies, by name without `_ptr`."""
    types: dict[str, str] = {}
    for argument in kernel.arg_names:
        if argument in constants:
            types[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            short = argument.removesuffix("_ptr")
            types[argument] = dtypes.get(short) or _POINTERS[short]
        else:
            types[argument] = _SCALARS.get(argument, "i64")
    return Variant(name, kernel, types, constants, options or {})


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory (no kernel here has local arrays, so all of it is spills)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _markdown(costs: list[Cost]) -> str:
    """One line a kernel, one pair of columns an architecture."""
    lines = ["| kernel | registers | shared memory, KiB | spilled bytes |", "| --- | ---: | ---: | ---: |"]
    for name in dict.fromkeys(cost.name for cost in costs):
        of = [cost for cost in costs if cost.name == name]
        cells = [
            " / ".join(str(cost.registers) for cost in of),
            " / ".join(f"{cost.shared_bytes / 1024:.3g}" for cost in of),
            " / ".join(str(cost.spill_bytes) for cost in of),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tenuto_kernels.gpu.aot", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--markdown", action="store_true", help="a table for a document instead")
    parser.add_argument("--only", metavar="REGEX", default="", help="the kernels whose whole name matches")
    options = parser.parse_args()
    chosen = [v for v in variants() if not options.only or re.fullmatch(options.only, v.name)]
    costs = [compile_variant(variant, arch) for variant in chosen for arch in ARCHITECTURES]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs]))
        return
    if options.markdown:
        print(_markdown(costs))
        return
    print(f"{'kernel':28} {'arch':>5} {'registers':>9} {'shared':>8} {'spilled':>8}")
    for cost in costs:
        arch = f"sm_{cost.architecture}"
        print(f"{cost.name:28} {arch:>5} {cost.registers:9} {cost.shared_bytes:8} {cost.spill_bytes:8}")


if __name__ == "__main__":
    main()
