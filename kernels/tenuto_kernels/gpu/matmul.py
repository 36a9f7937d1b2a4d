# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Products with group-wise quantised weights (W8A16, W4A16): codes stay codes until they are in registers.

Owner of the state: each `QuantLinear` owns its packed weight. Codes are multiplied as they are (small integers are exact in
16 bits) and each group's sum is scaled in fp32, so that the weight is never rounded; the formula is that of `quant`:
y = sum over groups of scale * (x . codes) + minimum * sum(x).
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenuto_kernels.gpu.shared import INTERPRETED, narrow, power_of_two
from tenuto_kernels.quant import GROUP, QuantizedWeight

#: More parts than this cost more to add up than they gain, and a part should have this many groups at least.
SPLITS_MAX, SPLIT_GROUPS_MIN = 16, 4


@dataclass(frozen=True)
class MatmulConfig:
    """Tile sizes and launch options; `splits` parts of the groups are added up by a second kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int


def matmul_config(rows: int, outputs: int, inputs: int, bits: int, processors: int) -> MatmulConfig:
    """Up to 16 rows (decode) reading the weight once is all that counts: narrow tiles, split until the device is full.
    Above, tiles grow until the products dominate or, with 4 bits, registers would spill (held by a test)."""
    if rows > 64:
        return MatmulConfig(128, 128 if bits == 8 else 64, 8, 3, 1)
    block_m = 16 if rows <= 16 else 64
    programs = -(-outputs // 64)
    wanted = power_of_two(-(-2 * processors // programs))
    useful = max(1, inputs // (GROUP * SPLIT_GROUPS_MIN))
    splits = min(wanted, 1 << (useful.bit_length() - 1), SPLITS_MAX)
    return MatmulConfig(block_m, 64, 4, 4, splits)


@triton.jit
def _group(
    acc,
    codes,
    x_ptr,
    scale_ptr,
    minimum_ptr,
    group,
    row,
    output,
    rows,
    outputs,
    stride_x,
    BITS: tl.constexpr,
    FP32: tl.constexpr,
):
    """acc [M, N] + the product of one group of 32 inputs; `codes` [32, N]."""
    inside = output < outputs
    column = group * 32 + tl.arange(0, 32)
    x = tl.load(x_ptr + (row * stride_x)[:, None] + column[None, :], mask=(row < rows)[:, None], other=0.0)
    if FP32:
        x = x.to(tl.float32)
    scale = tl.load(scale_ptr + group * outputs + output, mask=inside, other=0.0).to(tl.float32)
    acc += tl.dot(x, codes.to(x.dtype), input_precision="ieee") * scale[None, :]
    if BITS == 4:
        minimum = tl.load(minimum_ptr + group * outputs + output, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum(x.to(tl.float32), 1)[:, None] * minimum[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    rows,
    outputs,
    stride_x,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    FP32: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tile (program 0: outputs, program 1: rows) of x [rows, 32 * GROUPS] times the weight; with several parts (program 2)
    the sums go to `part` [SPLITS, rows, outputs] in fp32. Codes are [outputs, 32 * GROUPS] or, with 4 bits, half as wide:
    the low nibble of column c is input c, the high one input c + 16 * GROUPS. Scales and minima: [GROUPS, outputs]."""
    # Of 4 bits, one load of codes serves two groups.
    LOADS: tl.constexpr = GROUPS if BITS == 8 else GROUPS // 2
    CHUNK: tl.constexpr = (LOADS + SPLITS - 1) // SPLITS
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    split = tl.program_id(2)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    at = codes_ptr + (output.to(tl.int64) * (LOADS * 32))[None, :] + tl.arange(0, 32)[:, None]
    inside = (output < outputs)[None, :]
    for load in range(split * CHUNK, tl.minimum(split * CHUNK + CHUNK, LOADS)):
        codes = tl.load(at + load * 32, mask=inside, other=0)
        if BITS == 8:
            acc = _group(
                acc, codes, x_ptr, scale_ptr, minimum_ptr, load, row, output, rows, outputs, stride_x, BITS, FP32
            )
        else:
            low, high = codes & 15, codes >> 4
            acc = _group(
                acc, low, x_ptr, scale_ptr, minimum_ptr, load, row, output, rows, outputs, stride_x, BITS, FP32
            )
            acc = _group(
                acc, high, x_ptr, scale_ptr, minimum_ptr, load + LOADS, row, output, rows, outputs, stride_x, BITS, FP32
            )
    where = row[:, None] * outputs + output[None, :]
    live = (row < rows)[:, None] & inside
    if SPLITS == 1:
        if BIAS:
            acc += tl.load(bias_ptr + output, mask=output < outputs, other=0.0)[None, :]
        tl.store(out_ptr + where, narrow(acc, out_ptr.dtype.element_ty), mask=live)
    else:
        tl.store(part_ptr + split.to(tl.int64) * rows * outputs + where, acc, mask=live)


@triton.jit(do_not_specialize=["count"])
def add_parts_kernel(
    part_ptr,
    bias_ptr,
    out_ptr,
    count,
    outputs,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [count] = the sum of `part` [SPLITS, count], always in the same order, and the bias of its column."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + split * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % outputs, mask=inside, other=0.0)
    tl.store(out_ptr + at, narrow(total, out_ptr.dtype.element_ty), mask=inside)


class QuantLinear:
    """`y = x @ weight.T + bias` for x [T, I] in fp32, bf16 or fp16; y [T, O] in x's dtype.

    `invariant`: a row's bits do not depend on how many rows share the call. Raises ValueError for 4 bits and an odd number
    of groups: two codes share a byte, and each half of a row must be whole groups.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, invariant: bool = False) -> None:
        if weight.bits == 4 and weight.shape[1] % (2 * GROUP):
            raise ValueError(f"{weight.shape[1]} inputs of 4 bits are no even number of groups of {GROUP}")
        self._outputs, self._inputs = int(weight.shape[0]), int(weight.shape[1])
        self._bits, self._invariant = weight.bits, invariant
        codes = weight.codes
        if weight.bits == 4:
            half = self._inputs // 2
            codes = codes[:, :half] | (codes[:, half:] << 4)
        self._codes = codes.contiguous()
        # Transposed, so that neighbouring outputs, which are computed together, lie side by side.
        self._scale = weight.scale.t().contiguous()
        self._minimum = None if weight.minimum is None else weight.minimum.t().contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty((rows, self._outputs), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        # One shape of tile for all where a row must not notice its company.
        assumed = 17 if self._invariant else rows
        tiles = matmul_config(assumed, self._outputs, self._inputs, self._bits, _processors(x.device))
        shape = (tiles.splits, rows, self._outputs)
        part = torch.empty(shape, dtype=torch.float32, device=x.device) if tiles.splits > 1 else out
        grid = (triton.cdiv(self._outputs, tiles.block_n), triton.cdiv(rows, tiles.block_m), tiles.splits)
        minimum = self._minimum if self._minimum is not None else self._scale
        bias = self._bias if self._bias is not None else self._scale
        flags = {"BIAS": self._bias is not None, "SPLITS": tiles.splits}
        matmul_kernel[grid](
            x, self._codes, self._scale, minimum, bias, out, part, rows, self._outputs, x.stride(0),
            GROUPS=self._inputs // GROUP, BITS=self._bits, FP32=INTERPRETED or x.dtype == torch.float32,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, **flags,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if tiles.splits > 1:
            count = out.numel()
            add_parts_kernel[(triton.cdiv(count, 1024),)](part, bias, out, count, self._outputs, **flags, BLOCK=1024)
        return out


def quant_linear(weight: QuantizedWeight, bias: Tensor | None, *, invariant: bool = False) -> QuantLinear:
    """See `dispatch.Kernels.quant_linear`."""
    return QuantLinear(weight, bias, invariant=invariant)


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter takes the place of a small device, so that parts are tested too."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
