"""The suite every backend must pass. Owns no state.

`check_op(name, backend)` draws random cases from a seed, runs one operation on the backend and compares with a definition
written here in the most naive way, in float64, sharing no code with any backend. Every slot of a pool that an operation
has no business to read holds NaN.
"""

from collections.abc import Callable

import torch

from tenuto_kernels.dispatch import Backend, Kernels, load
from tenuto_kernels.testing_cases import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_DIMS,
    TOLERANCE,
    AttentionCase,
    CaseResult,
    Draw,
    assert_close,
    assert_same_bits,
    draw_case,
)
from tenuto_kernels.testing_dense import DENSE_OPS

__all__ = [
    "OPS",
    "TOLERANCE",
    "AttentionCase",
    "CaseResult",
    "assert_close",
    "assert_same_bits",
    "attention_case",
    "attention_reference",
    "check_op",
]


def check_op(
    name: str,
    backend: Backend | Kernels,
    *,
    cases: int = 16,
    longest: int = 120,
    seed: int = 0,
    device: str | None = None,
) -> list[CaseResult]:
    """Run the suite of one operation (a name in `OPS`) on one backend, given by name or as an implementation.

    `cases` random cases with contexts up to `longest` tokens (five times that for a lone decode token); the same
    arguments draw the same cases. Raises AssertionError naming the case with the first mismatches, ValueError for an unknown operation.
    """
    if name not in OPS:
        raise ValueError(f"no suite for {name!r}; there are {', '.join(OPS)}")
    kernels = load(backend) if isinstance(backend, str) else backend
    device = device or ("cuda" if backend == "gpu" else "cpu")
    return [OPS[name](kernels, draw_case(f"{name} {seed}", index, device, longest)) for index in range(cases)]


def attention_case(seed: int, index: int, *, device: str = "cpu", longest: int = 120) -> AttentionCase:
    """One random attention call; `index` walks over group sizes and head dimensions, so that a few cover all."""
    return draw_case(str(seed), index, device, longest).attention()


def attention_reference(case: AttentionCase) -> torch.Tensor:
    """softmax(scale * q k^T) v over the visible positions, one query and head at a time, in float64: `[T, Hq, D]`."""
    pool, rows = case.pool.cpu().double(), case.rows
    q = case.q.cpu().double()
    block_size, group = pool.shape[4], q.shape[1] // pool.shape[3]
    tables = rows.block_tables.tolist()
    out = torch.zeros_like(q)
    for row, context in enumerate(rows.context_len):
        pages = [(tables[row][p // block_size], p % block_size) for p in range(context)]
        keys = torch.stack([pool[b, case.layer, 0, :, o] for b, o in pages])
        values = torch.stack([pool[b, case.layer, 1, :, o] for b, o in pages])
        begin, end = rows.query_start[row], rows.query_start[row + 1]
        for token in range(begin, end):
            position = context - (end - token)
            oldest = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(q.shape[1]):
                seen = slice(oldest, position + 1)
                score = case.scale * (keys[seen, head // group] @ q[token, head])
                weight = torch.exp(score - score.max())
                out[token, head] = (weight / weight.sum()) @ values[seen, head // group]
    return out


def _check_attention(kernels: Kernels, draw: Draw, invariant: bool = False) -> CaseResult:
    case = draw.attention()
    actual = kernels.paged_attention(
        case.q, case.pool, case.layer, case.rows, case.scale, window=case.window, invariant=invariant
    )
    assert actual.dtype == case.q.dtype, f"{case.name}: result is {actual.dtype}"
    return assert_close(case.name, actual, attention_reference(case), *TOLERANCE[case.q.dtype])


def _check_attention_invariant(kernels: Kernels, draw: Draw) -> CaseResult:
    return _check_attention(kernels, draw, invariant=True)


def _check_store(kernels: Kernels, draw: Draw) -> CaseResult:
    dtype, pool_dtype = DTYPES[draw.index % len(DTYPES)]
    blocks, heads = draw.rng.randint(2, 6), draw.rng.choice((1, 2, 3))
    block_size, dim = draw.rng.choice(BLOCK_SIZES), draw.rng.choice(HEAD_DIMS)
    pool = draw.poisoned_pool(blocks, heads, block_size, dim, pool_dtype)
    layer = draw.rng.randrange(pool.shape[1])
    slots = draw.distinct(draw.rng.randint(1, blocks * block_size), blocks * block_size)
    # A view into a wider tensor, as keys and values are after a fused projection.
    fused = draw.normal(len(slots), 2 * heads, dim, dtype=dtype)
    k, v = fused[:, :heads], fused[:, heads:]
    expected = pool.clone()
    for token, slot in enumerate(slots):
        expected[slot // block_size, layer, 0, :, slot % block_size] = k[token].to(pool_dtype)
        expected[slot // block_size, layer, 1, :, slot % block_size] = v[token].to(pool_dtype)
    kernels.store_kv(pool, layer, k, v, torch.tensor(slots).to(draw.device))
    return assert_same_bits(f"case {draw.index}: store {dtype} -> {pool_dtype} {list(pool.shape)}", pool, expected)


def _blocks_case(draw: Draw) -> tuple[torch.Tensor, list[int], str]:
    pool_dtype = DTYPES[draw.index % len(DTYPES)][1]
    blocks = draw.rng.randint(2, 12)
    shape = (blocks, draw.rng.randint(1, 3), 2, draw.rng.randint(1, 3), draw.rng.choice(BLOCK_SIZES), 64)
    chosen = draw.distinct(draw.rng.randint(0, blocks), blocks)
    if draw.rng.random() < 0.5:
        chosen.sort()
    return draw.normal(*shape, dtype=pool_dtype), chosen, f"case {draw.index}: blocks {chosen} of {list(shape)}"


def _check_copy(kernels: Kernels, draw: Draw) -> CaseResult:
    pool, chosen, name = _blocks_case(draw)
    half = len(chosen) // 2
    src, dst = chosen[:half], chosen[half : 2 * half]
    expected = pool.clone()
    for source, target in zip(src, dst, strict=True):
        expected[target] = pool[source]
    kernels.copy_blocks(pool, _index(src, draw), _index(dst, draw))
    return assert_same_bits(name, pool, expected)


def _check_gather(kernels: Kernels, draw: Draw) -> CaseResult:
    pool, chosen, name = _blocks_case(draw)
    out = torch.full((len(chosen), *pool.shape[1:]), float("nan"), dtype=pool.dtype, device=draw.device)
    kernels.gather_blocks(pool, _index(chosen, draw), out)
    _synchronise(draw)
    expected = torch.stack([pool[block] for block in chosen]) if chosen else out
    return assert_same_bits(name, out, expected)


def _check_scatter(kernels: Kernels, draw: Draw) -> CaseResult:
    pool, chosen, name = _blocks_case(draw)
    src = draw.normal(len(chosen), *pool.shape[1:], dtype=pool.dtype)
    expected = pool.clone()
    for at, block in enumerate(chosen):
        expected[block] = src[at]
    kernels.scatter_blocks(pool, _index(chosen, draw), src)
    _synchronise(draw)
    return assert_same_bits(name, pool, expected)


def _index(blocks: list[int], draw: Draw) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=draw.device)


def _synchronise(draw: Draw) -> None:
    if draw.device.startswith("cuda"):
        torch.cuda.synchronize()


OPS: dict[str, Callable[[Kernels, Draw], CaseResult]] = {
    "store_kv": _check_store,
    "paged_attention": _check_attention,
    "paged_attention_invariant": _check_attention_invariant,
    "copy_blocks": _check_copy,
    "gather_blocks": _check_gather,
    "scatter_blocks": _check_scatter,
    **DENSE_OPS,
}
