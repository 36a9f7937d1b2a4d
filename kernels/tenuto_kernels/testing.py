"""The suite every backend must pass. Owns no state.

`check_op(name, backend)` draws random cases from a seed, runs one operation on the backend and compares with a definition
written here in the most naive way, in float64, sharing no code with any backend. Every slot of a pool that an operation
has no business to read holds NaN.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tenuto_kernels.dispatch import Backend, Kernels, load
from tenuto_kernels.rows import AttentionRows

#: Absolute and relative tolerance of attention by the dtype of q: a few times the rounding of that dtype, since weights
#: and (for 16 bits) products are rounded to it. Moves of data have none: they must be exact.
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}

#: Query heads per KV head, head dimensions and block sizes that every attention backend must handle.
GROUPS = (1, 3, 4, 8)
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (8, 16, 32)
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)


@dataclass(frozen=True)
class CaseResult:
    """One case that passed: what it was and the largest absolute difference."""

    case: str
    max_error: float


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of one attention call and a readable name."""

    name: str
    q: torch.Tensor
    pool: torch.Tensor
    layer: int
    rows: AttentionRows
    scale: float
    window: int | None


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
    return [OPS[name](kernels, _draw(f"{name} {seed}", index, device, longest)) for index in range(cases)]


def attention_case(seed: int, index: int, *, device: str = "cpu", longest: int = 120) -> AttentionCase:
    """One random attention call; `index` walks over group sizes and head dimensions, so that a few cover all."""
    return _draw(str(seed), index, device, longest).attention()


def assert_close(case: str, actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> CaseResult:
    """Compare in float64; an AssertionError lists the first ten mismatches with their indices."""
    assert actual.shape == expected.shape, f"{case}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    error = (got - want).abs()
    # Written so that a NaN on either side counts as a mismatch.
    bad = ~(error <= atol + rtol * want.abs())
    if bad.any():
        where = bad.nonzero()[:10].tolist()
        lines = [f"  {at}: got {got[tuple(at)].item():.8g}, expected {want[tuple(at)].item():.8g}" for at in where]
        count, total = int(bad.sum()), bad.numel()
        raise AssertionError(
            f"{case}: {count} of {total} values differ (atol {atol}, rtol {rtol}); first:\n" + "\n".join(lines)
        )
    return CaseResult(case, float(error.max()) if error.numel() else 0.0)


def assert_same_bits(case: str, actual: torch.Tensor, expected: torch.Tensor) -> CaseResult:
    """Equal to the bit, NaN included."""
    as_int = {2: torch.int16, 4: torch.int32}[actual.itemsize]
    got, want = actual.cpu().contiguous().view(as_int), expected.cpu().contiguous().view(as_int)
    return assert_close(case, got, want, 0.0, 0.0)


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


def _draw(seed: str, index: int, device: str, longest: int) -> "_Draw":
    rng = random.Random(f"{seed} {index}")
    return _Draw(rng, torch.Generator().manual_seed(rng.getrandbits(32)), device, index, longest)


@dataclass
class _Draw:
    """The random choices of one case."""

    rng: random.Random
    torch_rng: torch.Generator
    device: str
    index: int
    longest: int

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch_rng).to(dtype).to(self.device)

    def distinct(self, count: int, below: int) -> list[int]:
        return self.rng.sample(range(below), count)

    def poisoned_pool(self, blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        layers = self.rng.randint(1, 3)
        shape = (blocks, layers, 2, heads, block_size, dim)
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def attention(self) -> AttentionCase:
        """Several sequences, each as one or more rows: decode, whole prefill, a chunk, or ranges with holes between."""
        group, dim = GROUPS[self.index % 4], HEAD_DIMS[self.index // 4 % 2]
        q_dtype, pool_dtype = DTYPES[0] if self.index < 4 else self.rng.choice(DTYPES)
        block_size, heads = self.rng.choice(BLOCK_SIZES), self.rng.choice((1, 2, 3))
        kinds = [self.rng.choice(("decode", "whole", "chunk", "holes")) for _ in range(self.rng.randint(1, 4))]
        # One query against a long context is cheap to check, and the case that kernels split over the keys.
        lengths = [self.rng.randint(1, self.longest * (5 if kind == "decode" else 1)) for kind in kinds]
        widest = -(-max(lengths) // block_size)
        blocks = self.distinct(widest * len(lengths), widest * len(lengths) + 3)
        pool = self.poisoned_pool(len(blocks) + 3, heads, block_size, dim, pool_dtype)
        layer = self.rng.randrange(pool.shape[1])
        starts, contexts, tables = [0], [], []
        for number, length in enumerate(lengths):
            table = blocks[number * widest : (number + 1) * widest]
            used = -(-length // block_size)
            for position in range(length):
                page = pool[table[position // block_size], layer]
                page[:, :, position % block_size] = self.normal(2, heads, dim, dtype=pool_dtype)
            for begin, end in self.ranges(kinds[number], length):
                starts.append(starts[-1] + end - begin)
                contexts.append(end)
                tables.append(table[:used] + [0] * (widest - used))
        rows = AttentionRows(tuple(starts), tuple(contexts), torch.tensor(tables, dtype=torch.int32).to(self.device))
        window = self.rng.choice((None, None, self.rng.randint(1, self.longest)))
        name = (
            f"case {self.index}: q {q_dtype}, pool {pool_dtype}, group {group}, D {dim}, Hkv {heads}, block "
            f"{block_size}, rows {[e - b for b, e in itertools.pairwise(starts)]} at {contexts}, "
            f"window {window}"
        )
        q = self.normal(starts[-1], heads * group, dim, dtype=q_dtype)
        return AttentionCase(name, q, pool, layer, rows, dim**-0.5, window)

    def ranges(self, kind: str, length: int) -> list[tuple[int, int]]:
        if kind == "decode" or length < 8:
            return [(length - 1, length)]
        if kind == "whole":
            return [(0, length)]
        if kind == "chunk":
            return [(self.rng.randint(1, length - 1), length)]
        cuts = sorted(self.rng.sample(range(length), 4))
        return [(cuts[0], cuts[1]), (cuts[2], cuts[3])]


def _check_attention(kernels: Kernels, draw: _Draw, invariant: bool = False) -> CaseResult:
    case = draw.attention()
    actual = kernels.paged_attention(
        case.q, case.pool, case.layer, case.rows, case.scale, window=case.window, invariant=invariant
    )
    assert actual.dtype == case.q.dtype, f"{case.name}: result is {actual.dtype}"
    return assert_close(case.name, actual, attention_reference(case), *TOLERANCE[case.q.dtype])


def _check_attention_invariant(kernels: Kernels, draw: _Draw) -> CaseResult:
    return _check_attention(kernels, draw, invariant=True)


def _check_store(kernels: Kernels, draw: _Draw) -> CaseResult:
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


def _blocks_case(draw: _Draw) -> tuple[torch.Tensor, list[int], str]:
    pool_dtype = DTYPES[draw.index % len(DTYPES)][1]
    blocks = draw.rng.randint(2, 12)
    shape = (blocks, draw.rng.randint(1, 3), 2, draw.rng.randint(1, 3), draw.rng.choice(BLOCK_SIZES), 64)
    chosen = draw.distinct(draw.rng.randint(0, blocks), blocks)
    if draw.rng.random() < 0.5:
        chosen.sort()
    return draw.normal(*shape, dtype=pool_dtype), chosen, f"case {draw.index}: blocks {chosen} of {list(shape)}"


def _check_copy(kernels: Kernels, draw: _Draw) -> CaseResult:
    pool, chosen, name = _blocks_case(draw)
    half = len(chosen) // 2
    src, dst = chosen[:half], chosen[half : 2 * half]
    expected = pool.clone()
    for source, target in zip(src, dst, strict=True):
        expected[target] = pool[source]
    kernels.copy_blocks(pool, _index(src, draw), _index(dst, draw))
    return assert_same_bits(name, pool, expected)


def _check_gather(kernels: Kernels, draw: _Draw) -> CaseResult:
    pool, chosen, name = _blocks_case(draw)
    out = torch.full((len(chosen), *pool.shape[1:]), float("nan"), dtype=pool.dtype, device=draw.device)
    kernels.gather_blocks(pool, _index(chosen, draw), out)
    _synchronise(draw)
    expected = torch.stack([pool[block] for block in chosen]) if chosen else out
    return assert_same_bits(name, out, expected)


def _check_scatter(kernels: Kernels, draw: _Draw) -> CaseResult:
    pool, chosen, name = _blocks_case(draw)
    src = draw.normal(len(chosen), *pool.shape[1:], dtype=pool.dtype)
    expected = pool.clone()
    for at, block in enumerate(chosen):
        expected[block] = src[at]
    kernels.scatter_blocks(pool, _index(chosen, draw), src)
    _synchronise(draw)
    return assert_same_bits(name, pool, expected)


def _index(blocks: list[int], draw: _Draw) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=draw.device)


def _synchronise(draw: _Draw) -> None:
    if draw.device.startswith("cuda"):
        torch.cuda.synchronize()


OPS: dict[str, Callable[[Kernels, _Draw], CaseResult]] = {
    "store_kv": _check_store,
    "paged_attention": _check_attention,
    "paged_attention_invariant": _check_attention_invariant,
    "copy_blocks": _check_copy,
    "gather_blocks": _check_gather,
    "scatter_blocks": _check_scatter,
}
