"""The suites of the operations between attentions: norm, rotation, SwiGLU, quantised products, sampling. Owns no state.

As in `testing`, every definition is written here in the most naive way, in float64, sharing no code with any backend.
"""

import math
from collections.abc import Callable

import torch

from tenuto_kernels.dispatch import Kernels
from tenuto_kernels.quant import QuantizedWeight
from tenuto_kernels.testing_cases import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_DIMS,
    TOLERANCE,
    CaseResult,
    Draw,
    assert_close,
    assert_same_bits,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.cpu().double()
    mean = wide.square().sum(-1, keepdim=True) / x.shape[-1]
    return wide / (mean + eps).sqrt() * weight.cpu().double()


def check_rms_norm(kernels: Kernels, draw: Draw) -> CaseResult:
    """Whole rows, or the heads of a slice of a wider projection, as a norm of queries sees them."""
    dtype, heads = _FLOATS[draw.index % 3], draw.rng.choice((1, 3))
    width, tokens = draw.rng.choice((16, 64, 100, 576)), draw.rng.randint(1, 5)
    fused = draw.normal(tokens, 2 * heads, width, dtype=dtype)
    x, weight = fused[:, heads:], draw.normal(width)
    name = f"case {draw.index}: norm {dtype} {list(x.shape)}"
    return assert_close(name, kernels.rms_norm(x, weight, 1e-5), _norm(x, weight, 1e-5), *TOLERANCE[dtype])


def check_add_rms_norm(kernels: Kernels, draw: Draw) -> CaseResult:
    """The sum must be that of the dtype to the bit: it is what later layers build on."""
    dtype, width, tokens = _FLOATS[draw.index % 3], draw.rng.choice((64, 100, 576)), draw.rng.randint(1, 5)
    x, delta = draw.normal(tokens, width, dtype=dtype), draw.normal(tokens, width, dtype=dtype)
    weight = draw.normal(width)
    name = f"case {draw.index}: add and norm {dtype} {list(x.shape)}"
    total, normed = kernels.add_rms_norm(x, delta, weight, 1e-6)
    assert_same_bits(name, total, (x.double() + delta.double()).to(dtype))
    return assert_close(name, normed, _norm(total, weight, 1e-6), *TOLERANCE[dtype])


def check_silu_mul(kernels: Kernels, draw: Draw) -> CaseResult:
    """Widths below, at and above what one program of a kernel takes."""
    dtype = _FLOATS[draw.index % 3]
    tokens, width = draw.rng.randint(1, 4), draw.rng.choice((1, 128, 1024, 1500))
    gate_up = draw.normal(tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.cpu().double()[:, :width], gate_up.cpu().double()[:, width:]
    expected = gate / (1 + (-gate).exp()) * up
    return assert_close(
        f"case {draw.index}: SwiGLU {dtype} {[tokens, width]}", kernels.silu_mul(gate_up), expected, *TOLERANCE[dtype]
    )


def check_rope_store(kernels: Kernels, draw: Draw) -> CaseResult:
    """Slices of one projection in; rotated queries out, rotated keys and untouched values in the pool and nowhere else."""
    dtype, pool_dtype = DTYPES[draw.index % len(DTYPES)]
    blocks, heads, group = draw.rng.randint(2, 5), draw.rng.choice((1, 2, 3)), draw.rng.choice((1, 3, 4))
    block_size, dim = draw.rng.choice(BLOCK_SIZES), draw.rng.choice((16, *HEAD_DIMS))
    pool = draw.poisoned_pool(blocks, heads, block_size, dim, pool_dtype)
    layer = draw.rng.randrange(pool.shape[1])
    slots = draw.distinct(draw.rng.randint(1, 6), blocks * block_size)
    fused = draw.normal(len(slots), (group + 2) * heads, dim, dtype=dtype)
    q, k, v = torch.split(fused.clone(), [group * heads, heads, heads], dim=1)
    angle = [[slot * 10000.0 ** (-2 * pair / dim) for pair in range(dim // 2)] for slot in slots]
    angles = torch.tensor(angle, dtype=torch.float64)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.cpu().double()[..., : dim // 2], x.cpu().double()[..., dim // 2 :]
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        result = torch.complex(first, second) * turn
        return torch.cat((result.real, result.imag), dim=-1)

    expected_q, expected_k = rotated(q), rotated(k)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        expected[slot // block_size, layer, 1, :, slot % block_size] = v[token].to(pool_dtype)
    where = torch.tensor(slots).to(draw.device)
    cos, sin = angles.cos().float().to(draw.device), angles.sin().float().to(draw.device)
    name = f"case {draw.index}: rotate {dtype} -> {pool_dtype} {list(pool.shape)}, {group * heads} query heads"
    got_q = kernels.rope_store(q, k, v, cos, sin, pool, layer, where)
    got_k = pool[where // block_size, layer, 0, :, where % block_size]
    pool[where // block_size, layer, 0, :, where % block_size] = float("nan")
    assert_same_bits(name, pool, expected)
    assert_close(name, got_k, expected_k, *TOLERANCE[pool_dtype if dtype != torch.bfloat16 else dtype])
    return assert_close(name, got_q, expected_q, *TOLERANCE[dtype])


def check_quant_linear(kernels: Kernels, draw: Draw) -> CaseResult:
    """Decode-sized and prefill-sized batches, outputs that fill no tile, 8 and 4 bits, with and without a bias."""
    dtype, bits = _FLOATS[draw.index % 3], (8, 4)[draw.index // 3 % 2]
    rows = draw.rng.choice((1, 5, 16, 17, 80)) if draw.longest > 100 else (1, 17, 5, 70)[draw.index % 4]
    groups, outputs = 2 * draw.rng.randint(1, 12), draw.rng.choice((24, 64, 200))
    generator, shape = draw.torch_rng, (outputs, 32 * groups)
    scale = (torch.rand((outputs, groups), generator=generator) / 8).half()
    if bits == 4:
        codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
        minimum = -scale * 7
    else:
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        scale, minimum = scale / 16, None
    wide = codes.double().view(outputs, groups, 32) * scale.double()[:, :, None]
    if minimum is not None:
        wide = wide + minimum.double()[:, :, None]
    bias = draw.normal(outputs) if draw.rng.random() < 0.5 else None
    on = [None if part is None else part.to(draw.device) for part in (codes, scale, minimum)]
    assert on[0] is not None
    assert on[1] is not None
    x = draw.normal(rows, 32 * groups, dtype=dtype)
    expected = x.cpu().double() @ wide.view(shape).T
    if bias is not None:
        expected += bias.cpu().double()
    name = f"case {draw.index}: {bits} bits, x {dtype} {list(x.shape)}, {outputs} outputs, bias {bias is not None}"
    got = kernels.quant_linear(QuantizedWeight(on[0], on[1], on[2]), bias, invariant=draw.index % 5 == 4)(x)
    assert got.dtype == dtype, f"{name}: result is {got.dtype}"
    # The sum of many terms: what rounding there is grows with its spread, not with the one value.
    spread = math.sqrt(32 * groups)
    return assert_close(name, got, expected, TOLERANCE[dtype][0] * spread, TOLERANCE[dtype][1])


def check_sample_tokens(kernels: Kernels, draw: Draw) -> CaseResult:
    """Against the definition token by token. A draw that lies at a border between two tokens, where rounding decides, may
    fall on either side."""
    rows, vocab = draw.rng.randint(1, 4), draw.rng.choice((7, 300, 2500))
    logits = draw.normal(rows, vocab) * draw.rng.choice((0.5, 3.0))
    if draw.rng.random() < 0.3:
        logits = (logits * 2).round() / 2  # ties
    settings = torch.zeros(4, rows, dtype=torch.float64)
    allowed = []
    for row in range(rows):
        temperature = draw.rng.choice((0.0, 0.7, 1.0, 2.0))
        top_k, top_p = draw.rng.choice((0, 1, 20, 10000)), draw.rng.choice((1.0, 0.9, 0.3, 1e-9))
        settings[:, row] = torch.tensor([temperature, top_k, top_p, draw.rng.random()], dtype=torch.float64)
        allowed.append(_right_tokens(logits[row].cpu(), temperature, top_k, top_p, float(settings[3, row])))
    if draw.index % 4 == 3:
        logits[0, -1], allowed[0] = draw.rng.choice((math.nan, math.inf)), {-1}
    name = f"case {draw.index}: sample {[rows, vocab]}, settings {settings.tolist()}"
    got = kernels.sample_tokens(logits, settings).tolist()
    for row, token in enumerate(got):
        assert token in allowed[row], f"{name}: row {row} drew {token}, not one of {sorted(allowed[row])}"
    return CaseResult(name, 0.0)


def _right_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, u: float) -> set[int]:
    values = logits.double().tolist()
    best = max(values)
    if temperature == 0:
        return {values.index(best)}
    weights = [math.exp((value - best) / temperature) for value in values]
    order = sorted(weights, reverse=True)
    if 0 < top_k < len(weights):
        weights = [w if w >= order[top_k - 1] else 0.0 for w in weights]
    found = set()
    for nudge in (-1e-6, 0.0, 1e-6):
        kept = list(weights)
        if top_p < 1:
            mass, floor = 0.0, 0.0
            wanted = (top_p + nudge) * sum(weights)
            for weight in sorted(weights, reverse=True):
                if mass >= wanted and mass > 0:
                    break
                mass, floor = mass + weight, weight
            kept = [w if w >= floor else 0.0 for w in weights]
        for aside in (-1e-6, 0.0, 1e-6):
            at, cumulative = (u + aside) * sum(kept), 0.0
            token = 0
            for index, weight in enumerate(kept):
                cumulative += weight
                if weight > 0:
                    token = index
                if cumulative > at and weight > 0:
                    break
            found.add(token)
    return found


DENSE_OPS: dict[str, Callable[[Kernels, Draw], CaseResult]] = {
    "rms_norm": check_rms_norm,
    "add_rms_norm": check_add_rms_norm,
    "silu_mul": check_silu_mul,
    "rope_store": check_rope_store,
    "quant_linear": check_quant_linear,
    "sample_tokens": check_sample_tokens,
}
