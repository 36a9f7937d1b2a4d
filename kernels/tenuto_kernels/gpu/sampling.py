# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Drawing one token a row on the device: one program a row, no sort. Owns no state.

The definition is `cpu.sampling`. Both filters look for the largest weight t such that the weights of at least t reach a
number (top-k) or a mass (top-p); positive floats are ordered as their bits are, so t is found three bits at a time, in ten
passes over a row that the cache holds. Sums are fp32 within a thread and fp64 across threads, where the definition has fp64
throughout: a draw that comes within some 1e-6 of the border between two tokens may fall to the other side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of one tile, and warps that share it: two columns a thread leave registers for eight sums of each.
BLOCK, WARPS = 1024, 16


@triton.jit
def _weights(
    row_ptr,
    start,
    vocab,
    best,
    temperature,
    BLOCK: tl.constexpr,
):
    """exp((logit - best) / temperature), in (0, 1] relative to the row's largest; 0 past the end."""
    column = start + tl.arange(0, BLOCK)
    logit = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
    return tl.exp((logit - best) / temperature)


@triton.jit
def _reached(
    row_ptr,
    vocab,
    best,
    temperature,
    least,
    MASS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each of `least` [LEVELS] the sum (MASS) or number of the weights that are not below it: fp64 [LEVELS]."""
    total = tl.zeros((BLOCK, LEVELS), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        weight = _weights(row_ptr, start, vocab, best, temperature, BLOCK)[:, None]
        if MASS:
            total += tl.where(weight >= least[None, :], weight, 0.0)
        else:
            total += (weight >= least[None, :]).to(tl.float32)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _threshold(
    row_ptr,
    vocab,
    best,
    temperature,
    floor,
    wanted,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t in [floor, 1] for which the weights >= t reach `wanted`."""
    bits = tl.full((1,), 0, tl.int32)
    digit = tl.arange(0, 8)
    for place in range(0, 10):  # 1.0, the largest weight, has its highest bit at 29
        shift = 27 - 3 * place
        least = tl.maximum((bits + (digit << shift)).to(tl.float32, bitcast=True), floor)
        reached = _reached(row_ptr, vocab, best, temperature, least, MASS, 8, BLOCK)
        bits += tl.max(tl.where(reached >= wanted, digit, 0), 0) << shift
    return tl.minimum(tl.maximum(bits.to(tl.float32, bitcast=True), floor), 1.0)


@triton.jit
def _drawn(
    row_ptr,
    vocab,
    best,
    temperature,
    floor,
    u,
    BLOCK: tl.constexpr,
):
    """The first column at which the cumulative weight exceeds u times the total, over the weights >= floor."""
    wanted = u * _reached(row_ptr, vocab, best, temperature, floor, True, 1, BLOCK)
    before = tl.full((1,), 0.0, tl.float64)
    token = tl.full((1,), 2147483647, tl.int32)
    last = tl.full((1,), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        weight = _weights(row_ptr, start, vocab, best, temperature, BLOCK)
        weight = tl.where(weight >= floor, weight, 0.0)
        column = start + tl.arange(0, BLOCK)
        cumulative = before + tl.cumsum(weight.to(tl.float64), 0)
        crossed = (cumulative > wanted) & (weight > 0.0)
        token = tl.minimum(token, tl.min(tl.where(crossed, column, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, column, 0), 0))
        before += tl.sum(weight, 0).to(tl.float64)
    # Sums in another order may differ in their last bit: never step past the last token that has any weight.
    return tl.minimum(token, last)


@triton.jit
def sample_kernel(
    logits_ptr,
    settings_ptr,
    out_ptr,
    rows,
    vocab,
    stride_logits,
    BLOCK: tl.constexpr,
):
    """`settings` fp64 [4, rows]: temperature, top_k, top_p, u; `out` int64 [rows], -1 for a row without a distribution."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_logits
    peak = tl.full((1,), float("-inf"), tl.float32)
    token = tl.full((1,), 0, tl.int32)
    wrong = tl.full((1,), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        wrong = tl.maximum(wrong, tl.max((logit != logit).to(tl.int32), 0))
        highest = tl.max(logit, 0)
        first = tl.min(tl.where(logit == highest, column, 2147483647), 0)
        token = tl.where(highest > peak, first, token)
        peak = tl.maximum(peak, highest)
    finite = tl.max(((wrong == 0) & (peak > float("-inf")) & (peak < float("inf"))).to(tl.int32), 0)

    temperature = tl.load(settings_ptr + row).to(tl.float32)
    top_k = tl.load(settings_ptr + rows + row)
    top_p = tl.load(settings_ptr + 2 * rows + row)
    u = tl.load(settings_ptr + 3 * rows + row)
    if (temperature > 0.0) & (finite > 0):
        floor = tl.full((1,), 0.0, tl.float32)
        if (top_k > 0.0) & (top_k < vocab):
            floor = _threshold(row_ptr, vocab, peak, temperature, floor, top_k, False, BLOCK)
        if top_p < 1.0:
            wanted = top_p * _reached(row_ptr, vocab, peak, temperature, floor, True, 1, BLOCK)
            floor = _threshold(row_ptr, vocab, peak, temperature, floor, wanted, True, BLOCK)
        token = _drawn(row_ptr, vocab, peak, temperature, floor, u, BLOCK)
    result = tl.where(finite > 0, token, -1).to(tl.int64)
    tl.store(out_ptr + row + tl.arange(0, 1), result)


def sample_tokens(logits: Tensor, settings: Tensor) -> Tensor:
    """See `ops.sample_tokens`."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        if logits.device.type == "cuda":
            settings = settings.pin_memory().to(logits.device, non_blocking=True)
        sample_kernel[(rows,)](logits, settings, out, rows, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    return out
