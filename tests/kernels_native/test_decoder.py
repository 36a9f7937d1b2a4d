"""A whole native forward pass against the same decoder written out in float64, layer by layer."""

from dataclasses import dataclass

import pytest
import torch

from tenuto_kernels.cpu import native
from tenuto_kernels.cpu.native_decoder import DecoderLayer, NativeDecoder
from tenuto_kernels.linear import PackedLinear
from tenuto_kernels.rows import AttentionRows

pytestmark = pytest.mark.skipif(not native.available(), reason="no native CPU operators here")

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, HEADS, KV_HEADS, DIM, VOCABULARY, LAYERS, BLOCK, BLOCKS = 56, 6, 2, 16, 101, 2, 8, 24
EPS, SCALE = 1e-5, 0.25


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype = FP32
    intermediate: int = 96  # two panels of the widest kind: gate and up side by side
    bias: bool = False
    head_norms: bool = False


SHAPES = [Shape(), Shape(BF16), Shape(BF16, 80, True, True), Shape(FP32, 96, True, True)]


class Model:
    """Random weights, the native decoder over them, and its definition."""

    def __init__(self, shape: Shape, invariant: bool = False) -> None:
        torch.manual_seed(3)
        self.shape = shape
        wide = (HEADS + 2 * KV_HEADS) * DIM
        sizes = {
            "qkv": (wide, HIDDEN),
            "o": (HIDDEN, HEADS * DIM),
            "gate_up": (2 * shape.intermediate, HIDDEN),
            "down": (HIDDEN, shape.intermediate),
        }
        self.weights = [{name: self._weight(*size) for name, size in sizes.items()} for _ in range(LAYERS)]
        self.biases = [
            {name: torch.randn(size[0]) if shape.bias else None for name, size in sizes.items()} for _ in range(LAYERS)
        ]
        self.norms = [[torch.rand(HIDDEN) + 0.5, torch.rand(HIDDEN) + 0.5] for _ in range(LAYERS)]
        head_norms = [torch.rand(DIM) + 0.5 if shape.head_norms else None for _ in range(2 * LAYERS)]
        self.head_norms = [head_norms[:LAYERS], head_norms[LAYERS:]]
        self.norm, self.head = torch.rand(HIDDEN) + 0.5, self._weight(VOCABULARY, HIDDEN)
        layers = [
            DecoderLayer(*self.norms[n], self.head_norms[0][n], self.head_norms[1][n], **self._packed(n))
            for n in range(LAYERS)
        ]
        self.native = NativeDecoder(
            layers,
            self.norm,
            PackedLinear(self.head, None, "native"),
            q_heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            eps=EPS,
            scale=SCALE,
            invariant=invariant,
        )

    def _weight(self, outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs) / inputs**0.5).to(self.shape.dtype)

    def _packed(self, n: int) -> dict[str, PackedLinear]:
        weights, biases = self.weights[n], self.biases[n]
        return {name: PackedLinear(weight, biases[name], "native") for name, weight in weights.items()}

    def _product(self, n: int, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.biases[n][name]
        out = x @ self.weights[n][name].double().T
        return out if bias is None else out + bias.double()

    def define(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Logits of every token of one sequence whose embeddings are x, without any cache."""
        x = x.double()
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        for n in range(LAYERS):
            fused = self._product(n, "qkv", _normed(x, self.norms[n][0]))
            q, k, v = fused.view(len(x), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            q, k = (
                _turned(_normed(part, norm[n]), cos, sin) for part, norm in zip((q, k), self.head_norms, strict=True)
            )
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k).mul(SCALE).masked_fill(later, float("-inf"))
            x = x + self._product(n, "o", torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
            gate, up = self._product(n, "gate_up", _normed(x, self.norms[n][1])).chunk(2, dim=1)
            x = x + self._product(n, "down", torch.nn.functional.silu(gate) * up)
        return _normed(x, self.norm) @ self.head.double().T


def _normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Cache:
    """Two sequences of scattered blocks in one pool; `run` computes ranges of them in one native forward."""

    def __init__(self, model: Model, pool_dtype: torch.dtype = FP32) -> None:
        self.model = model
        self.pool = torch.zeros(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK, DIM, dtype=pool_dtype)
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.tables = order.view(2, -1)
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(2, BLOCKS // 2 * BLOCK, HIDDEN, generator=generator)
        self.angles = torch.arange(BLOCKS // 2 * BLOCK)[:, None] * torch.rand(DIM // 2, generator=generator)

    def run(self, *ranges: tuple[int, int, int], wanted: list[int] | None = None) -> torch.Tensor:
        """Ranges (sequence, from, to) -> logits of the tokens `wanted` of the batch (default: all)."""
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in ranges])
        tables = torch.stack([self.tables[sequence] for sequence, _, _ in ranges])
        starts = [0]
        for _, begin, end in ranges:
            starts.append(starts[-1] + end - begin)
        owner = torch.cat([torch.full((end - begin,), sequence) for sequence, begin, end in ranges])
        slots = self.tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        angles = self.angles[positions]
        index = torch.arange(len(positions)) if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        rows = AttentionRows(tuple(starts), tuple(end for _, _, end in ranges), tables)
        x = self.x[owner, positions].clone()
        return self.model.native.forward(x, angles.cos(), angles.sin(), self.pool, slots, rows, index)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_forward_equals_its_definition(shape: Shape, tokens: int) -> None:
    cache = Cache(Model(shape))
    got = cache.run((0, 0, tokens))
    expected = cache.model.define(cache.x[0, :tokens], cache.angles[:tokens])
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_rows_and_ranges_share_a_batch(shape: Shape) -> None:
    cache = Cache(Model(shape))
    cache.run((0, 0, 20), (1, 0, 33))
    got = cache.run((0, 20, 21), (1, 33, 50), (0, 21, 22), (0, 22, 30), wanted=[26, 0, 18])
    first = cache.model.define(cache.x[0, :30], cache.angles[:30])
    second = cache.model.define(cache.x[1, :50], cache.angles[:50])
    expected = torch.stack([first[29], first[20], first[21]])
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    again = cache.run((1, 49, 50))
    torch.testing.assert_close(again[0].double(), second[49], atol=2e-5, rtol=2e-5)


def test_without_wanted_tokens_only_the_kv_is_written() -> None:
    cache, other = Cache(Model(Shape())), Cache(Model(Shape()))
    assert cache.run((0, 0, 12), wanted=[]).shape == (0, VOCABULARY)
    other.run((0, 0, 12))
    assert torch.equal(cache.pool, other.pool)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_in_invariant_mode_neither_cut_nor_company_changes_a_bit(dtype: torch.dtype) -> None:
    model = Model(Shape(dtype), invariant=True)
    whole, cut = Cache(model, dtype), Cache(model, dtype)
    expected = whole.run((0, 0, 45))
    parts = [cut.run((0, 0, 1)), cut.run((1, 0, 30), (0, 1, 19))[30:], cut.run((0, 19, 44)), cut.run((0, 44, 45))]
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("wrong", ["slot", "table", "index", "pool"])
def test_a_batch_that_does_not_fit_is_an_error(wrong: str) -> None:
    cache = Cache(Model(Shape()))
    if wrong == "pool":
        cache.pool = cache.pool[:, :1].contiguous()
    if wrong == "table":
        cache.tables = cache.tables.clone()
        cache.tables[0, 0] = BLOCKS
    if wrong == "slot":
        cache.tables = cache.tables.clone()
        cache.tables[1, 1] = -1  # read by nobody, written by the second row
    with pytest.raises(ValueError, match="fit"):
        cache.run((0, 0, 4), (1, 8, 9), wanted=[5] if wrong == "index" else None)


def test_a_projection_packed_otherwise_is_refused() -> None:
    model = Model(Shape())
    layers, norm, _ = model.native._kept
    other = PackedLinear(model.head, None, "torch")
    assert not NativeDecoder.takes(layers, other)
    with pytest.raises(ValueError, match="natively"):
        NativeDecoder(layers, norm, other, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, eps=EPS, scale=SCALE)
