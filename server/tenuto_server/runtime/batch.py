"""From a ``ForwardPlan`` to the model's ``ForwardBatch``. ``BatchBuilder`` owns the buffers and reuses them every step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenuto_kernels.rows import AttentionRows
from tenuto_server.engine.plan import ForwardPlan
from tenuto_server.errors import InvariantBroken
from tenuto_server.model.transformer import ForwardBatch


class BatchBuilder:
    """Builds one batch at a time; a batch is valid until the next ``build``, since both share the buffers."""

    def __init__(self, block_tokens: int, device_blocks: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._device_blocks = device_blocks
        self._device = device
        self._flat = np.empty((3, 512), dtype=np.int64)
        self._table = np.empty(1024, dtype=np.int32)

    def build(self, plan: ForwardPlan) -> ForwardBatch:
        """The batch of a plan's rows, in their order. Raises ``InvariantBroken`` for a row that its blocks do not cover."""
        rows = plan.rows
        lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        widths = np.array([len(row.blocks) for row in rows], dtype=np.int64)
        ends = starts + lengths
        self._check(plan, lengths, ends, widths)
        query_start = np.concatenate([[0], np.cumsum(lengths)])
        count = int(query_start[-1])
        tokens, positions, slots = self._room(count)
        np.concatenate([row.tokens for row in rows], out=tokens, casting="same_kind")
        table = self._tables(plan, int(widths.max()))
        owner = np.repeat(np.arange(len(rows)), lengths)
        np.add(np.arange(count), (starts - query_start[:-1])[owner], out=positions)
        block, offset = np.divmod(positions, self._block_tokens)
        np.multiply(table[owner, block], self._block_tokens, out=slots, dtype=np.int64, casting="same_kind")
        slots += offset
        ends_at = query_start[1:].tolist()
        sampled = [
            at for end, row in zip(ends_at, rows, strict=True) if row.sample for at in range(end - 1 - row.draft, end)
        ]
        attention = AttentionRows(tuple(query_start.tolist()), tuple(ends.tolist()), self._tensor(table))
        return ForwardBatch(
            self._tensor(tokens),
            self._tensor(positions),
            self._tensor(slots),
            attention,
            self._tensor(np.array(sampled, dtype=np.int64)),
        )

    def _check(
        self, plan: ForwardPlan, lengths: NDArray[np.int64], ends: NDArray[np.int64], widths: NDArray[np.int64]
    ) -> None:
        wrong = (lengths < 1) | (ends > widths * self._block_tokens)
        if wrong.any():
            row = plan.rows[int(wrong.argmax())]
            raise InvariantBroken(
                f"step {plan.step}: sequence {row.seq} computes {len(row.tokens)} tokens from {row.start} "
                f"with {len(row.blocks)} blocks of {self._block_tokens}"
            )

    def _room(self, count: int) -> NDArray[np.int64]:
        if count > self._flat.shape[1]:
            self._flat = np.empty((3, 2 * count), dtype=np.int64)
        return self._flat[:, :count]

    def _tables(self, plan: ForwardPlan, width: int) -> NDArray[np.int32]:
        """int32 [R, width], padded with block 0."""
        size = len(plan.rows) * width
        if size > len(self._table):
            self._table = np.empty(2 * size, dtype=np.int32)
        table = self._table[:size].reshape(len(plan.rows), width)
        for index, row in enumerate(plan.rows):
            table[index, : len(row.blocks)] = row.blocks
            table[index, len(row.blocks) :] = 0
        # A slot outside the pool would be a stray write into other memory.
        if int(table.min()) < 0 or int(table.max()) >= self._device_blocks:
            raise InvariantBroken(f"step {plan.step} names a block outside the pool of {self._device_blocks}")
        return table

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        if (
            self._device.type == "cuda"
        ):  # through page-locked memory the copy waits for nothing, and the buffer is free at once
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)
