"""Guesses in a batch: asked for while a forward has room for them, and what became of them when it is back.

Holds no state of its own: how well guesses went is the sequence's (``speculate.Guesser``), what is in flight the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenuto_server.cache.extent import DEVICE, TierName
from tenuto_server.engine.core import Core
from tenuto_server.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Planned:
    """A row of the forward in flight. ``draft``: how many of its last tokens are guesses, or room for them where ``modelled``:
    then the executor makes them."""

    sequence: Sequence
    start: int
    end: int
    sample: bool
    recomputes: TierName | None
    draft: int = 0
    modelled: bool = False


class Drafting:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def guess(self, sequence: Sequence, limit: int) -> tuple[int, int]:
        """Writes guesses behind the sequence's tokens, or leaves room for a draft model's, and takes blocks for them; how
        many of each. Nobody loses a block for them."""
        core, table, sampling = self._core, sequence.table, sequence.turn.sampling
        config = core.config
        assert table is not None
        left = min(sampling.max_tokens - sequence.generated, config.max_context_tokens - sequence.count) - 1
        limit = min(limit, left, config.speculate_tokens_max)
        if sampling.grammar or limit <= 0:
            return 0, 0
        guess = sequence.guesser.guess(sequence.tokens[: sequence.count], limit)
        room = sequence.drafter.count(min(limit, config.draft_tokens_max)) if not len(guess) else 0
        count, size = len(guess) + room, core.cache.block_tokens
        held = -(-sequence.count // size) * size - sequence.count
        if count > held and not core.cache.tiers.pools[DEVICE].free:
            count = held
        if not count or not core.cache.allocate(table, sequence.count + count, core.now_ns):
            return 0, 0
        sequence.room_for(count)
        if room:
            return 0, count
        sequence.tokens[sequence.count : sequence.count + count] = guess[:count]
        return count, 0

    def confirm(self, planned: Planned, drawn: list[int], made: int) -> None:
        """Only the guesses that were drawn, up to where the turn ends, count as computed. ``made``: guesses of a draft
        model."""
        if not planned.draft:
            return
        core, sequence, table = self._core, planned.sequence, planned.sequence.table
        assert table is not None
        drafted = made if planned.modelled else planned.draft
        confirmed = max(0, len(drawn) - 1)
        before = planned.end - planned.draft
        sequence.tokens[before : before + confirmed] = drawn[:confirmed]
        stops = sequence.turn.sampling.stop_ids if not sequence.turn.sampling.ignore_eos else frozenset()
        ended = next((at for at, token in enumerate(drawn) if token in stops), confirmed)
        core.count("drafted_tokens", drafted)
        core.count("confirmed_tokens", confirmed)
        guesser = sequence.drafter if planned.modelled else sequence.guesser
        guesser.judge(drafted, confirmed, core.config.speculate_tokens_max)
        sequence.session.drafted += drafted
        sequence.session.confirmed += confirmed
        leaving = sequence.cancelled or sequence.stop_at is not None
        planned.end = before + (0 if leaving else min(ended, confirmed))
        table.front = planned.end
