"""Which tokens of a batch attend to which KV blocks. Owned by whoever builds the batch; kernels only read it.

A batch is flat: the query tokens of all rows lie behind one another. One row is one contiguous range of query tokens of
one sequence; a sequence whose missing ranges have holes between them appears as several rows with the same block table.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """The rows of one forward pass, the same for all layers.

    - `query_start`: R+1 cumulative offsets into the flat token batch; row r owns tokens
      `query_start[r]:query_start[r+1]`.
    - `context_len`: R; the number of KV positions visible at the end of the row. The row's queries sit at the absolute
      positions `context_len - q_len ... context_len - 1` and attend causally.
    - `block_tables`: int32 `[R, max_blocks]`, the pool block of every block of the prefix, padded with 0, on the
      pool's device.
    - `device_context`: see `decoding`; None where `context_len` are the lengths.

    Raises ValueError where these contradict one another.
    """

    query_start: tuple[int, ...]
    context_len: tuple[int, ...]
    block_tables: torch.Tensor
    device_context: torch.Tensor | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        count = len(self.context_len)
        if len(self.query_start) != count + 1 or self.query_start[0] != 0:
            raise ValueError(f"query_start must be {count + 1} offsets from 0, got {self.query_start}")
        if self.block_tables.dtype != torch.int32 or self.block_tables.dim() != 2 or len(self.block_tables) != count:
            raise ValueError(
                f"block_tables must be int32 [{count}, max_blocks], got {self.block_tables.dtype} "
                f"{list(self.block_tables.shape)}"
            )
        for row in range(count):
            length = self.query_start[row + 1] - self.query_start[row]
            if length < 1 or length > self.context_len[row]:
                raise ValueError(f"row {row}: {length} query tokens do not fit a context of {self.context_len[row]}")

    @classmethod
    def decoding(cls, block_tables: torch.Tensor, device_context: torch.Tensor, longest: int) -> "AttentionRows":
        """Rows of one query each whose lengths, int32 [R], the Triton kernels read from the device when they run, so that a
        captured graph serves whatever is there. None may exceed `longest`; 0 is padding, whose result means nothing."""
        count = len(block_tables)
        return cls(tuple(range(count + 1)), (longest,) * count, block_tables, device_context)

    @property
    def num_rows(self) -> int:
        return len(self.context_len)

    @property
    def num_tokens(self) -> int:
        return self.query_start[-1]

    def query_len(self, row: int) -> int:
        return self.query_start[row + 1] - self.query_start[row]

    def once(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """What a backend derives from the rows, built at the first layer and read again by all the others."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]
