"""The torch definitions pass the suite, and the suite notices when an operation is wrong."""

import pytest
import torch

from tenuto_kernels import AttentionRows, cpu
from tenuto_kernels.testing import OPS, assert_close, attention_case, attention_reference, check_op


class Torch:
    """The torch definitions as an object, to be broken one method at a time."""

    store_kv = staticmethod(cpu.store_kv)
    paged_attention = staticmethod(cpu.paged_attention)
    copy_blocks = staticmethod(cpu.copy_blocks)
    gather_blocks = staticmethod(cpu.gather_blocks)
    scatter_blocks = staticmethod(cpu.scatter_blocks)


@pytest.mark.parametrize("op", sorted(OPS))
def test_torch_definition_passes(op: str) -> None:
    results = check_op(op, "cpu", cases=24)
    assert len(results) == 24


def test_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="no suite for 'softmax'"):
        check_op("softmax", "cpu")


class WrongScale(Torch):
    def paged_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        rows: AttentionRows,
        scale: float,
        *,
        window: int | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        return super().paged_attention(q, pool, layer, rows, scale * 1.01, window=window, invariant=invariant)


class WrongLayer(Torch):
    def store_kv(self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().store_kv(pool, (layer + 1) % pool.shape[1], k, v, slots)


class ForgetsTheLast(Torch):
    def scatter_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, src: torch.Tensor) -> None:
        super().scatter_blocks(pool, blocks[:-1], src[:-1])


def test_suite_catches_a_wrong_scale() -> None:
    with pytest.raises(AssertionError, match=r"values differ .*first:\n  \[\d+, \d+, \d+\]: got"):
        check_op("paged_attention", WrongScale(), cases=8)


def test_suite_catches_a_store_to_the_wrong_layer() -> None:
    with pytest.raises(AssertionError, match="values differ"):
        check_op("store_kv", WrongLayer(), cases=8)


def test_suite_catches_a_forgotten_block() -> None:
    with pytest.raises(AssertionError, match="values differ"):
        check_op("scatter_blocks", ForgetsTheLast(), cases=8)


def test_nan_never_counts_as_close() -> None:
    with pytest.raises(AssertionError, match="got nan"):
        assert_close("case", torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), 1e9, 0.0)


def test_reference_agrees_with_torch_on_an_unpaged_case() -> None:
    case = attention_case(seed=3, index=1, longest=40)
    begin, context = case.rows.query_start[0], case.rows.context_len[0]
    end = case.rows.query_start[1]
    table = case.rows.block_tables[0].tolist()
    size = case.pool.shape[4]
    kv = torch.stack([case.pool[table[p // size], case.layer, :, :, p % size] for p in range(context)], dim=2).double()
    position = torch.arange(context - (end - begin), context)[:, None]
    key = torch.arange(context)
    mask = key <= position
    if case.window is not None:
        mask &= key > position - case.window
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q[begin:end].double().transpose(0, 1)[None],
        kv[0][None],
        kv[1][None],
        attn_mask=mask,
        scale=case.scale,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(attention_reference(case)[begin:end], expected, rtol=1e-12, atol=1e-12)
