"""Each operator, native and torch, against float64 definitions written here."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from tenuto_kernels.cpu import native, native_torch
from tenuto_kernels.cpu.native_panels import Panels

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {FP32: 3e-6, BF16: 2**-7}


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch":
        return native_torch
    if not native.available():
        pytest.skip("no native CPU operators here")
    return native


def _near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def _attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, table: torch.Tensor, position: int, scale: float
) -> torch.Tensor:
    """One query [Hq, D] at `position`: softmax over positions 0..position in float64."""
    size, group = pool.shape[4], q.shape[0] // pool.shape[3]
    at = torch.arange(position + 1)
    keys, values = pool.double()[table[at // size].long(), layer, :, :, at % size].unbind(1)  # [context, Hkv, D]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    weights = (torch.einsum("thd,hd->ht", keys, q.double()) * scale).softmax(1)
    return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1, 576), (20, 576), (3, 77)])
def test_rms_norm(ops: ModuleType, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[1]) + 0.5
    wide = x.double()
    expected = wide / (wide.square().sum(1, keepdim=True) / shape[1] + 1e-5).sqrt() * weight.double()
    out = torch.empty_like(x)
    ops.rms_norm(x, weight, 1e-5, out)
    _near(out, expected)
    ops.rms_norm(x, weight, 1e-5, x)  # in place
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_silu_mul(ops: ModuleType, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -90, -88, -20, -1, -0.0, 1e-3, 1, 20, 88, 1e4] * 9).to(dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None].repeat(9, 1)
    out = torch.empty(9, gate.numel(), dtype=dtype)
    ops.silu_mul(gate_up, out)
    wide = gate.double()
    _near(out, (wide / (1 + torch.exp(-wide))).expand(9, -1))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("pool_dtype", [FP32, BF16])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 1), (64, 11), (80, 9), (24, 3)])
def test_rope_store(ops: ModuleType, dtype: torch.dtype, pool_dtype: torch.dtype, dim: int, tokens: int) -> None:
    q_heads, kv_heads, size = 6, 2, 4
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = (part.view(tokens, -1, dim) for part in qkv.split([q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    angle = torch.rand(tokens, dim // 2) * 100
    slots = torch.randperm(20)[:tokens]
    pool = torch.zeros(5, 3, 2, kv_heads, size, dim, dtype=pool_dtype)

    def rotated(heads: torch.Tensor) -> torch.Tensor:  # (a + ib) * exp(i * angle)
        pairs = torch.complex(heads[..., : dim // 2].double(), heads[..., dim // 2 :].double())
        turned = pairs * torch.polar(torch.ones(()), angle).to(torch.complex128)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    expected_q, expected_k = rotated(q), rotated(k)
    ops.rope_store(q, k, v, angle.cos(), angle.sin(), pool, 1, slots)
    _near(q, expected_q)
    _near(k, expected_k)
    for t, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // size, 1, 0, :, slot % size], k[t].to(pool_dtype))
        assert torch.equal(pool[slot // size, 1, 1, :, slot % size], v[t].to(pool_dtype))
    assert not pool[:, [0, 2]].any()
    assert pool.count_nonzero() == tokens * 2 * kv_heads * dim


def _pool(dim: int, heads: int, dtype: torch.dtype, blocks: int = 80, size: int = 16) -> torch.Tensor:
    return torch.randn(blocks, 2, 2, heads, size, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)


@pytest.mark.parametrize("pool_dtype", [FP32, BF16])
@pytest.mark.parametrize(("dim", "heads", "group"), [(64, 3, 3), (128, 1, 8), (80, 2, 4), (16, 2, 1), (64, 1, 5)])
def test_paged_decode(ops: ModuleType, pool_dtype: torch.dtype, dim: int, heads: int, group: int) -> None:
    pool = _pool(dim, heads, pool_dtype)
    contexts = [1, 15, 16, 33, 256, 257, 600]
    tables = torch.stack([torch.randperm(80)[:40] for _ in contexts]).int()
    for dtype in (FP32, BF16):
        q = (torch.randn(len(contexts), heads * group, dim) * 2).to(dtype)
        out = torch.empty_like(q)
        ops.paged_decode(q, pool, 1, tables, torch.tensor(contexts, dtype=torch.int32), 1 / math.sqrt(dim), out)
        for row, context in enumerate(contexts):
            expected = _attention(q[row], pool, 1, tables[row], context - 1, 1 / math.sqrt(dim))
            _near(out[row], expected)


@pytest.mark.parametrize("pool_dtype", [FP32, BF16])
@pytest.mark.parametrize(("dim", "heads", "group"), [(64, 3, 3), (128, 1, 8), (80, 2, 4), (16, 2, 1), (32, 1, 50)])
def test_paged_prefill(ops: ModuleType, pool_dtype: torch.dtype, dim: int, heads: int, group: int) -> None:
    pool = _pool(dim, heads, pool_dtype)
    pool[79] = float("nan")  # a block no table names must never be read
    lengths, contexts = [1, 7, 40, 0, 90], [1, 30, 40, 5, 300]
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    tables = torch.stack([torch.randperm(79)[:20] for _ in contexts]).int()
    q = torch.randn(sum(lengths), heads * group, dim) * 2
    out = torch.empty_like(q)
    context_len = torch.tensor(contexts, dtype=torch.int32)
    ops.paged_prefill(q, pool, 0, start, tables, context_len, 1 / math.sqrt(dim), out)
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        for i in {0, length // 2, length - 1} if length else ():
            at = int(start[row]) + i
            position = context - length + i
            expected = _attention(q[at], pool, 0, tables[row], position, 1 / math.sqrt(dim))
            _near(out[at], expected)


@pytest.mark.parametrize("pool_dtype", [FP32, BF16])
def test_prefill_bits_do_not_depend_on_the_chunking(pool_dtype: torch.dtype) -> None:
    if not native.available():
        pytest.skip("no native CPU operators here")
    generator = torch.Generator().manual_seed(3)
    total, pool = 700, _pool(64, 3, pool_dtype)
    q = torch.randn(total, 9, 64, generator=generator)
    table = torch.randperm(80, generator=generator)[:44].int()

    def run(cuts: list[int], rows_together: bool) -> torch.Tensor:
        out = torch.empty_like(q)
        pairs = list(itertools.pairwise(cuts))
        for group in [pairs] if rows_together else [[pair] for pair in pairs]:
            begin, end = group[0][0], group[-1][1]
            start = torch.tensor([begin, *(stop for _, stop in group)], dtype=torch.int32) - begin
            contexts = torch.tensor([stop for _, stop in group], dtype=torch.int32)
            tables = table.repeat(len(group), 1)
            native.paged_prefill(q[begin:end], pool, 1, start, tables, contexts, 0.125, out[begin:end])
        return out

    whole = run([0, total], rows_together=True)
    for trial in range(8):
        cuts = sorted({0, total, *torch.randint(1, total, (2 + 3 * trial,), generator=generator).tolist()})
        assert torch.equal(run(cuts, rows_together=bool(trial % 2)), whole)
    assert torch.equal(run([0, total - 1, total], rows_together=False), whole)  # the last token as a decode step


def test_decode_bits_do_not_depend_on_the_batch_or_threads() -> None:
    if not native.available():
        pytest.skip("no native CPU operators here")
    pool = _pool(64, 3, BF16)
    tables = torch.stack([torch.randperm(80)[:70] for _ in range(5)]).int()
    contexts = torch.tensor([1, 300, 512, 700, 1100], dtype=torch.int32)
    q = torch.randn(5, 9, 64)
    together, alone = torch.empty_like(q), torch.empty_like(q)
    native.paged_decode(q, pool, 0, tables, contexts, 0.125, together)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for r in range(5):
            one = slice(r, r + 1)
            native.paged_decode(q[one], pool, 0, tables[one], contexts[one], 0.125, alone[one])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)


def test_callers_on_several_threads_get_right_answers() -> None:
    if not native.available():
        pytest.skip("no native CPU operators here")
    weight, x = torch.randn(300, 200), torch.randn(40, 200)
    linear = Panels(weight)
    expected = linear(x)

    def calls(rows: int) -> bool:
        return all(torch.equal(linear(x[:rows]), expected[:rows]) for _ in range(200))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(calls, (1, 7, 20, 40)))


def test_a_row_without_context_yields_zeros(ops: ModuleType) -> None:
    out = torch.ones(1, 3, 64)
    ops.paged_decode(
        torch.ones(1, 3, 64),
        _pool(64, 3, FP32, blocks=2),
        0,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        1.0,
        out,
    )
    assert not out.any()


def test_a_table_outside_the_pool_is_an_error() -> None:
    if not native.available():
        pytest.skip("no native CPU operators here")
    pool, q, start = _pool(64, 3, FP32, blocks=2), torch.ones(1, 3, 64), torch.tensor([0, 1], dtype=torch.int32)
    for entry, context in ((2, 1), (-1, 1), (0, 17), (0, -1)):
        table = torch.full((1, 1), entry, dtype=torch.int32)
        length = torch.tensor([context], dtype=torch.int32)
        with pytest.raises(ValueError, match="does not fit the pool"):
            native.paged_decode(q, pool, 0, table, length, 1.0, torch.empty_like(q))
        with pytest.raises(ValueError, match="does not fit the pool"):
            native.paged_prefill(q, pool, 0, start, table, length, 1.0, torch.empty_like(q))
    angle = torch.zeros(1, 32)
    for slot in (-1, 32):
        with pytest.raises(ValueError, match="outside the pool"):
            native.rope_store(q, q.clone(), q.clone(), angle, angle, pool, 0, torch.tensor([slot]))


def test_tensors_the_native_code_does_not_take_go_to_torch() -> None:
    x, weight = torch.randn(4, 64, dtype=torch.float64), torch.ones(64)
    out = torch.empty(4, 64, dtype=torch.float64)
    native.rms_norm(x, weight, 0.0, out)
    torch.testing.assert_close(out.square().mean(1), torch.ones(4, dtype=torch.float64), atol=1e-5, rtol=1e-5)
