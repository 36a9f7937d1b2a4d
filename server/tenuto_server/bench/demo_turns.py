"""Turns of one pass, recorded or replayed: sends them, times them, keeps the rows. ``TurnLog`` owns the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tenuto
from tenuto_server.bench.report import TurnRow

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class TurnLog:
    """``new_tokens``: by (session, turn), from the recording pass; None in that pass itself, where what the server computed
    is what was new. ``on_row`` hears of every turn as it ends."""

    def __init__(
        self, on_row: Callable[[TurnRow], None], new_tokens: Mapping[tuple[str, int], int] | None = None
    ) -> None:
        self.rows: list[TurnRow] = []
        self._on_row = on_row
        self._new_tokens = new_tokens
        self._turns: defaultdict[str, int] = defaultdict(int)

    async def turn(
        self,
        session: tenuto.AsyncSession,
        messages: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
        *,
        after: str,
        pause_s: float | None = None,
        expected: str | None = None,
    ) -> tenuto.Turn:
        """One streamed turn. ``expected``: the recorded answer. Raises ``APIError`` and its kin."""
        async with session.stream(list(messages), **{**request, **GREEDY}) as stream:
            async for _ in stream:
                pass
        turn = stream.turn
        number = self._turns[session.id]
        self._turns[session.id] += 1
        usage, report = turn.usage, turn.usage.report
        cached = {tier: count for tier, count in usage.by_tier.items() if count and tier != "recompute"}
        computed = usage.prompt_tokens - usage.cached_tokens
        row = TurnRow(
            session=session.id,
            turn=number,
            after=after,
            pause_s=pause_s,
            prompt_tokens=usage.prompt_tokens,
            new_tokens=computed if self._new_tokens is None else self._new_tokens[session.id, number],
            cached=cached,
            misses={miss.label: miss.tokens for miss in usage.misses},
            ttft_s=turn.ttft_s if turn.ttft_s is not None else turn.duration_s,
            queue_wait_s=report.queue_wait_s if report is not None else 0.0,
            restore_wait_s=report.restore_wait_s if report is not None else 0.0,
            same=expected is None or turn.text == expected,
        )
        self.rows.append(row)
        self._on_row(row)
        return turn

    def computed(self) -> dict[tuple[str, int], int]:
        """Prompt tokens computed, by (session, turn)."""
        return {(row.session, row.turn): row.prefilled for row in self.rows}
