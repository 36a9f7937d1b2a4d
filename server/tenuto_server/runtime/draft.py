"""A small model that guesses what the served one will say. ``DraftModel`` owns its KV pool and what every sequence has in it.

It follows each sequence by the longest common prefix: what the served model refused is overwritten, a sequence that it has not
seen is caught up with a few hundred tokens a step, so that nobody waits for a draft. A guess is drawn with the random
number that the served model's own draw will use, which makes the two agree as often as their distributions allow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto_server.engine.events import TokenArray
from tenuto_server.engine.plan import ForwardPlan, ForwardRow
from tenuto_server.errors import ConfigError
from tenuto_server.model.load import LoadedModel
from tenuto_server.runtime.batch import BatchBuilder
from tenuto_server.runtime.graphs import decode_graphs, forward
from tenuto_server.runtime.sampler import sample

CATCH_UP_TOKENS = 256
"""So much of a sequence that is new to it is computed in one step."""


@dataclass(slots=True, eq=False)
class _Known:
    """The tokens whose KV is in ``blocks``."""

    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    blocks: list[int] = field(default_factory=list)


class DraftModel:
    """``pool_bytes``: for its KV; the sequence that was idle for longest loses its blocks first. Raises ``ConfigError`` for
    a model of another vocabulary, or a pool of less than two blocks."""

    def __init__(self, model: LoadedModel, served: LoadedModel, *, pool_bytes: int, block_tokens: int = 16) -> None:
        _check_vocabulary(model, served)
        self._transformer = model.transformer
        layout = model.transformer.kv_layout(block_tokens)
        count = pool_bytes // layout.block_bytes
        if count < 2:
            raise ConfigError(f"--draft-bytes {pool_bytes} holds {count} KV blocks of {layout.block_bytes} bytes")
        self._pool = layout.allocate(count, model.transformer.device)
        self._graphs = decode_graphs(model.transformer, self._pool)
        self._batches = BatchBuilder(block_tokens, count, model.transformer.device)
        self._size, self._positions = block_tokens, model.config.max_position
        self._free = list(range(count - 1, -1, -1))
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._counts = {"forwards": 0, "guesses": 0, "tokens_caught_up": 0}

    def propose(self, rows: Sequence[ForwardRow]) -> list[TokenArray]:
        """Up to ``row.room`` tokens behind each row's context; none where its KV has no room or must be caught up with."""
        guesses: list[list[int]] = [[] for _ in rows]
        active: dict[int, TokenArray] = {}
        for at, row in enumerate(rows):
            assert row.context is not None
            if row.room and (todo := self._follow(row, rows)) is not None:
                active[at] = todo
        depth = 0
        while active:
            drawn = self._forward([(rows[at], todo) for at, todo in active.items()], depth)
            going = {}
            for at, token in zip(list(active), drawn, strict=True):
                if token is not None:
                    guesses[at].append(token)
                    if len(guesses[at]) < rows[at].room:
                        going[at] = np.array([token], np.int32)
            active, depth = going, depth + 1
        self._counts["guesses"] += sum(map(len, guesses))
        return [np.array(tokens, np.int32) for tokens in guesses]

    def health(self) -> dict[str, Any]:
        """Counters, and how much of the pool is taken."""
        return {"sequences": len(self._known), "free_blocks": len(self._free), **self._counts}

    def _follow(self, row: ForwardRow, rows: Sequence[ForwardRow]) -> TokenArray | None:
        """Brings what is known of a sequence in line with its context; the tokens to compute next, None if there is no
        room."""
        context, room = row.context, row.room
        assert context is not None
        known = self._known.setdefault(row.seq, _Known())
        self._known.move_to_end(row.seq)
        if len(context) + room > self._positions or not self._take(known, len(context) + room, rows):
            return None
        width = min(len(known.tokens), len(context) - 1)
        differ = np.flatnonzero(known.tokens[:width] != context[:width])
        common = int(differ[0]) if len(differ) else width
        known.tokens = context[:common].copy()
        return context[common : common + CATCH_UP_TOKENS]

    def _take(self, known: _Known, tokens: int, rows: Sequence[ForwardRow]) -> bool:
        """Blocks for that many tokens, from sequences that are not in this batch if need be."""
        wanted = -(-tokens // self._size) - len(known.blocks)
        busy = {row.seq for row in rows}
        while wanted > len(self._free):
            idle = next((seq for seq in self._known if seq not in busy), None)
            if idle is None:
                return False
            self._free.extend(self._known.pop(idle).blocks)
        known.blocks.extend(self._free.pop() for _ in range(max(0, wanted)))
        return True

    def _forward(self, work: list[tuple[ForwardRow, TokenArray]], depth: int) -> list[int | None]:
        """Computes the tokens of each sequence behind what is known of it; the next one of those that are caught up with."""
        plans = []
        for row, todo in work:
            assert row.context is not None
            known = self._known[row.seq]
            start = len(known.tokens)
            known.tokens = np.concatenate([known.tokens, todo])
            behind = len(known.tokens) < len(row.context)
            self._counts["tokens_caught_up"] += len(todo) if behind else 0
            blocks = np.array(known.blocks[: -(-len(known.tokens) // self._size)], np.int32)
            plans.append(ForwardRow(row.seq, start, todo, blocks, not behind, row.sampling, row.draw + depth))
        batch = self._batches.build(ForwardPlan(0, tuple(plans)))
        logits = forward(self._transformer, self._graphs, batch, self._pool)
        self._counts["forwards"] += 1
        asked = [plan for plan in plans if plan.sample]
        drawn = iter(sample(logits, [plan.sampling for plan in asked], [plan.draw for plan in asked]))
        return [next(drawn) if plan.sample else None for plan in plans]


def _check_vocabulary(model: LoadedModel, served: LoadedModel) -> None:
    size = served.config.vocab_size
    same = model.config.vocab_size == size and all(
        model.tokenizer.token_bytes(token) == served.tokenizer.token_bytes(token) for token in range(size)
    )
    if not same:
        raise ConfigError(f"--draft-model {model.name}: its vocabulary is not that of {served.name}")
