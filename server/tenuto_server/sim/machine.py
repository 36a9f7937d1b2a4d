"""A machine without arithmetic: whatever it is asked to compute or copy succeeds. Owns the completions not yet collected.

How long things take is the world's business (``costs.py``).
"""

from __future__ import annotations

from tenuto_server.engine.events import Event, ForwardDone, TransferDone
from tenuto_server.engine.plan import ForwardPlan, Transfer


class SimMachine:
    """See the module. ``answers``: by sampling seed, the id of the first token of an answer, which then counts up."""

    def __init__(self) -> None:
        self.answers: dict[int, int] = {}
        self._events: list[Event] = []

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Completes a batch."""
        answers = self.answers
        sampled = tuple((row.seq, answers[row.sampling.seed] + row.draw) for row in plan.rows if row.sample)
        return ForwardDone(plan.step, sampled)

    def submit(self, transfer: Transfer) -> None:
        """Completes a copy."""
        self._events.append(TransferDone(transfer.id, True))

    def take_events(self) -> list[Event]:
        """What has completed since the last call."""
        events, self._events = self._events, []
        return events

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        """Nothing to forget: no bytes are kept."""
