"""Batch-invariant attention: bitwise the same however a prefill is cut and whatever shares the batch."""

import random

import pytest
import torch

from tenuto_kernels import AttentionRows, KVLayout, paged_attention, store_kv
from tenuto_kernels.cpu.invariant import attend_row

HEADS, GROUP, DIM, BLOCK, CONTEXT = 2, 3, 64, 16, 300


def _pool(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool that holds one sequence, its block table and a query for every position."""
    torch.manual_seed(1)
    blocks = -(-CONTEXT // BLOCK)
    pool = KVLayout(1, HEADS, DIM, BLOCK, dtype).allocate(2 * blocks, "cpu")
    pool.normal_()
    table = torch.randperm(2 * blocks)[:blocks]
    positions = torch.arange(CONTEXT)
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    store_kv(pool, 0, torch.randn(CONTEXT, HEADS, DIM), torch.randn(CONTEXT, HEADS, DIM), slots)
    return pool, table.to(torch.int32), torch.randn(CONTEXT, HEADS * GROUP, DIM)


def _attend(
    pool: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    ranges: list[tuple[int, int]],
    window: int | None,
    definition: bool = False,
) -> torch.Tensor:
    """Through the entry point, or through the torch definition, which native operators hide where they exist."""
    if definition:
        parts = [attend_row(q[b:e], pool, 0, table, e, DIM**-0.5, window).to(q.dtype) for b, e in ranges]
        return torch.cat(parts)
    starts = [0]
    for begin, end in ranges:
        starts.append(starts[-1] + end - begin)
    rows = AttentionRows(tuple(starts), tuple(end for _, end in ranges), table.expand(len(ranges), -1))
    tokens = torch.cat([q[begin:end] for begin, end in ranges])
    return paged_attention(tokens, pool, 0, rows, DIM**-0.5, window=window, invariant=True)


@pytest.mark.parametrize(("window", "definition"), [(None, False), (None, True), (50, False)])
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_gives_the_same_bits(
    dtype: torch.dtype, q_dtype: torch.dtype, window: int | None, definition: bool
) -> None:
    pool, table, q = _pool(dtype)
    q = q.to(q_dtype)
    whole = _attend(pool, table, q, [(0, CONTEXT)], window, definition)
    rng = random.Random(0)
    for _ in range(6):
        cuts = sorted(rng.sample(range(1, CONTEXT), rng.randint(1, 12)))
        chunks = list(zip([0, *cuts], [*cuts, CONTEXT], strict=True))
        # One call for a chunk, a random batch of chunks, or all: the company changes as well as the cut.
        while chunks:
            batch = [chunks.pop(rng.randrange(len(chunks))) for _ in range(rng.randint(1, len(chunks)))]
            got = _attend(pool, table, q, batch, window, definition)
            assert torch.equal(got, torch.cat([whole[begin:end] for begin, end in batch]))


@pytest.mark.parametrize("definition", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_equals_part_of_a_prefill(dtype: torch.dtype, definition: bool) -> None:
    pool, table, q = _pool(dtype)
    whole = _attend(pool, table, q, [(0, CONTEXT)], None, definition)
    for position in [0, 1, 15, 16, 17, 127, 128, 255, CONTEXT - 1]:
        alone = _attend(pool, table, q, [(position, position + 1)], None, definition)
        assert torch.equal(alone[0], whole[position])


def test_keys_that_come_later_do_not_matter() -> None:
    pool, table, q = _pool(torch.float32)
    before = _attend(pool, table, q, [(0, 100)], None)
    for position in range(100, CONTEXT):
        pool[table[position // BLOCK], :, :, :, position % BLOCK] = float("nan")
    assert torch.equal(_attend(pool, table, q, [(0, 100)], None), before)


def test_the_fast_mode_is_within_rounding_of_it() -> None:
    pool, table, q = _pool(torch.float32)
    rows = AttentionRows((0, CONTEXT), (CONTEXT,), table[None])
    fast = paged_attention(q, pool, 0, rows, DIM**-0.5)
    torch.testing.assert_close(fast, _attend(pool, table, q, [(0, CONTEXT)], None), atol=2e-6, rtol=1e-5)
