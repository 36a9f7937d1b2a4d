"""Layout arithmetic, the checks of the entry points, the choice of backend and the public names."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tenuto_kernels
from tenuto_kernels import (
    AttentionRows,
    KVLayout,
    copy_blocks,
    gather_blocks,
    paged_attention,
    scatter_blocks,
    store_kv,
)

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=16, block_size=4, dtype=torch.bfloat16)


def _table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_layout_of_smollm2_has_the_documented_size() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    assert layout.block_shape == (30, 2, 3, 16, 64)
    assert layout.token_bytes == 23_040
    assert layout.block_bytes == 360 * 1024


def test_one_block_is_one_contiguous_range() -> None:
    pool = LAYOUT.allocate(5, "cpu")
    assert pool.shape == (5, *LAYOUT.block_shape)
    assert not pool.any()
    assert pool[2].is_contiguous()
    assert pool[2].numel() * pool.itemsize == LAYOUT.block_bytes
    assert pool.stride(0) * pool.itemsize == LAYOUT.block_bytes


@pytest.mark.parametrize(
    ("change", "message"), [({"block_size": 0}, "block_size must be at least 1"), ({"dtype": torch.int8}, "dtype must")]
)
def test_layout_names_the_bad_field(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, "dtype": torch.float32
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        KVLayout(**{**fields, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "contexts", "table", "message"),
    [
        ((0, 3), (2,), _table([0]), "3 query tokens do not fit a context of 2"),
        ((0, 0), (2,), _table([0]), "0 query tokens"),
        ((1, 3), (2,), _table([0]), "offsets from 0"),
        ((0, 1, 2), (2,), _table([0]), "must be 2 offsets"),
        ((0, 1), (2,), _table([0], [1]), r"int32 \[1, max_blocks\]"),
        ((0, 1), (2,), _table([0]).long(), "torch.int64"),
    ],
)
def test_rows_that_contradict_themselves(
    starts: tuple[int, ...], contexts: tuple[int, ...], table: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionRows(starts, contexts, table)


def _attend(**change: object) -> torch.Tensor:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 6, 16),
        "pool": LAYOUT.allocate(3, "cpu"),
        "layer": 1,
        "rows": AttentionRows((0, 2), (6,), _table([0, 1])),
        "scale": 1.0,
    }
    return paged_attention(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 16)}, "a multiple of 3, 16"),
        ({"q": torch.zeros(2, 6, 8)}, "a multiple of 3, 16"),
        ({"q": torch.zeros(3, 6, 16)}, "q has 3 tokens, rows describe 2"),
        ({"q": torch.zeros(2, 6, 16, dtype=torch.float64)}, "torch.float64"),
        ({"layer": 2}, "layer 2 is outside the pool's 2 layers"),
        ({"window": 0}, "window must be at least 1"),
        ({"rows": AttentionRows((0, 2), (9,), _table([0, 1]))}, "a context of 9 does not fit 2 blocks of 4"),
        ({"pool": LAYOUT.allocate(3, "cpu").transpose(0, 1)}, "contiguous"),
    ],
)
def test_attention_names_the_bad_argument(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _attend(**change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: store_kv(p, 0, torch.zeros(2, 3, 16), torch.zeros(2, 3, 8), torch.arange(2)), r"v must be \[2, 3"),
        (lambda p: store_kv(p, 0, p[:2, 0, 0, :, 0], p[:2, 0, 1, :, 0], torch.arange(2).int()), "slots must be int64"),
        (lambda p: copy_blocks(p, torch.tensor([0]), torch.tensor([1, 2])), "1 sources for 2"),
        (lambda p: gather_blocks(p, torch.tensor([0]), torch.zeros(2, *LAYOUT.block_shape)), "out must be"),
        (lambda p: scatter_blocks(p, torch.tensor([0.0]), p[:1]), "blocks must be int64"),
    ],
)
def test_stores_and_moves_name_the_bad_argument(call: Callable[[torch.Tensor], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(LAYOUT.allocate(3, "cpu"))


def test_mixed_batch_equals_its_rows_alone() -> None:
    """A decode row between two prefill rows of other sequences, attended together and one by one."""
    torch.manual_seed(0)
    pool = LAYOUT.allocate(9, "cpu").normal_()
    spans = [(5, 10, [0, 1, 2]), (6, 7, [3, 4, 0]), (0, 12, [5, 6, 7])]
    starts, q = [0], torch.randn(18, 6, 16)
    for begin, end, _ in spans:
        starts.append(starts[-1] + end - begin)
    rows = AttentionRows(tuple(starts), tuple(end for _, end, _ in spans), _table(*(blocks for *_, blocks in spans)))
    together = paged_attention(q, pool, 1, rows, 0.25)
    for number, (begin, end, blocks) in enumerate(spans):
        alone = AttentionRows((0, end - begin), (end,), _table(blocks))
        part = slice(starts[number], starts[number + 1])
        torch.testing.assert_close(together[part], paged_attention(q[part], pool, 1, alone, 0.25))


def test_public_names_are_importable() -> None:
    for name in tenuto_kernels.__all__:
        assert getattr(tenuto_kernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tenuto_kernels.nothing


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(KERNELS), **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    done = _python("import sys, tenuto_kernels; print('torch' in sys.modules, 'triton' in sys.modules)")
    assert done.stdout.split() == ["False", "False"]


def test_backend_is_chosen_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    tenuto_kernels.backend.cache_clear()
    with caplog.at_level(logging.INFO, "tenuto.kernels"):
        assert tenuto_kernels.backend() == tenuto_kernels.backend()
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        f"kernel backend: {tenuto_kernels.backend()}"
    ]


def test_unknown_backend_is_named() -> None:
    done = _python("import tenuto_kernels; tenuto_kernels.backend()", TENUTO_KERNELS="opencl")
    assert "ValueError: TENUTO_KERNELS must be one of cpu, interpret, gpu, got 'opencl'" in done.stderr
