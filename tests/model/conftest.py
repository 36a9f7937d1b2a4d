"""Shared pieces of the model tests: the bundled weights, a paged runner, and a reference tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tenuto_kernels.rows import AttentionRows
from tenuto_server.errors import ModelError
from tenuto_server.model.load import LoadedModel, load_model, resolve_model
from tenuto_server.model.transformer import ForwardBatch, Transformer

BLOCK = 16


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Test models are tiny and test machines busy: threads that wait for each other only lose time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    try:
        path = resolve_model("smollm2-135m").path
    except ModelError as missing:
        pytest.skip(str(missing))
    assert path is not None
    return path


@pytest.fixture(scope="session")
def smollm_fp32(gguf_path: Path) -> LoadedModel:
    return load_model("smollm2-135m", dtype="fp32")


@pytest.fixture(scope="session")
def smollm_bf16(gguf_path: Path) -> LoadedModel:
    return load_model("smollm2-135m", dtype="bf16")


class PagedRunner:
    """Runs one transformer over a pool of its own. Each sequence gets scattered blocks, so that paging is exercised."""

    def __init__(self, transformer: Transformer, max_tokens: int = 512, sequences: int = 1) -> None:
        self.transformer = transformer
        per_sequence = -(-max_tokens // BLOCK)
        self.pool = transformer.kv_layout(BLOCK).allocate(per_sequence * sequences + 1, "cpu")
        order = torch.randperm(per_sequence * sequences, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.to(torch.int32).view(sequences, per_sequence)

    def __call__(self, *rows: tuple[int, int, Sequence[int]], all_logits: bool = False) -> torch.Tensor:
        """One forward over rows (sequence, start, tokens); logits of each row's last token, or of all tokens."""
        starts, contexts, positions, slots, tokens = [0], [], [], [], []
        for sequence, start, row in rows:
            position = torch.arange(start, start + len(row))
            table = self.tables[sequence].long()
            slots.append(table[position // BLOCK] * BLOCK + position % BLOCK)
            positions.append(position)
            tokens.extend(row)
            starts.append(starts[-1] + len(row))
            contexts.append(start + len(row))
        tables = self.tables[[sequence for sequence, _, _ in rows]]
        wanted = torch.arange(starts[-1]) if all_logits else torch.tensor(starts[1:]) - 1
        batch = ForwardBatch(
            torch.tensor(tokens),
            torch.cat(positions),
            torch.cat(slots),
            AttentionRows(tuple(starts), tuple(contexts), tables),
            wanted,
        )
        return self.transformer.forward(batch, self.pool)


@pytest.fixture(scope="session")
def paged_runner() -> type[PagedRunner]:
    return PagedRunner
