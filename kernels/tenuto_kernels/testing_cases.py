"""What the suites of `testing` are made of: random choices, comparisons and their tolerances. Owns no state."""

import itertools
import random
from dataclasses import dataclass

import torch

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


def draw_case(seed: str, index: int, device: str, longest: int) -> "Draw":
    rng = random.Random(f"{seed} {index}")
    return Draw(rng, torch.Generator().manual_seed(rng.getrandbits(32)), device, index, longest)


@dataclass
class Draw:
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
