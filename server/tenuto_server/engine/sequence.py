"""A turn inside the engine: its tokens, its block table, how far it is. Owner: the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tenuto.wire import Divergence, MissLabel, Receipt
from tenuto_server.cache.extent import TierName
from tenuto_server.cache.table import BlockTable
from tenuto_server.engine.events import SubmitTurn, TokenArray
from tenuto_server.engine.plan import Report
from tenuto_server.engine.session import Session
from tenuto_server.engine.speculate import Guesser


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens[:count]`` is the prompt and what was generated so far; ``table`` is None while it waits.

    ``compute_until``: block index below which lower-tier blocks are computed rather than loaded (split restore). ``guesser``
    and ``drafter`` remember how guesses from the context and of a draft model went.
    """

    id: int
    turn: SubmitTurn
    session: Session
    tokens: TokenArray
    count: int
    arrived_ns: int
    reserve_tokens: int
    table: BlockTable | None = None
    generated: int = 0
    compute_until: int = 0
    compute_tokens: int = 0
    estimated: bool = False
    restore_blocks: int = 0
    waiting_since_ns: int = 0
    admitted_ns: int = 0
    stalled_since_ns: int = 0
    restore_wait_ns: int = 0
    started: bool = False
    cancelled: bool = False
    stop_at: int | None = None
    failures: int = 0
    first_token_ns: int | None = None
    guesser: Guesser = field(default_factory=Guesser)
    drafter: Guesser = field(default_factory=Guesser)
    preemptions: int = 0
    cached: dict[TierName, int] = field(default_factory=dict)
    recomputed: dict[MissLabel, int] = field(default_factory=dict)
    divergence: Divergence | None = None
    receipts: tuple[Receipt, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.turn.tokens)

    @property
    def decoding(self) -> bool:
        """Nothing is missing but the KV of the token sampled last."""
        return self.generated > 0 and self.table is not None and self.table.front == self.count - 1

    def append(self, token: int) -> None:
        """Adds a sampled token."""
        if self.count == len(self.tokens):
            self.room_for(1)
        self.tokens[self.count] = token
        self.count += 1
        self.generated += 1

    def room_for(self, more: int) -> None:
        """Makes ``tokens`` at least that much longer than ``count``."""
        if self.count + more > len(self.tokens):
            grown = np.empty(self.count + more + 256, np.int32)
            grown[: self.count] = self.tokens[: self.count]
            self.tokens = grown

    def report(self, session: Session, now_ns: int) -> Report:
        """What the answer tells about its cache."""
        ttft = None if self.first_token_ns is None else (self.first_token_ns - self.arrived_ns) / 1e9
        return Report(
            session=session.id,
            prompt_tokens=self.prompt_tokens,
            cached={tier: n for tier, n in self.cached.items() if n > 0},
            recomputed={label: n for label, n in self.recomputed.items() if n > 0},
            restore_wait_s=self.restore_wait_ns / 1e9,
            queue_wait_s=max(0, self.admitted_ns - self.arrived_ns) / 1e9,
            ttft_s=ttft,
            lease=session.lease(now_ns),
            divergence=self.divergence,
            receipts=self.receipts,
        )
