"""A machine without arithmetic: whatever it is asked to compute or copy succeeds. Owns the completions not yet collected.

How long things take is the world's business (``costs.py``).
"""

from __future__ import annotations

from tenuto_server.engine.events import Event, ForwardDone, TransferDone
from tenuto_server.engine.plan import ForwardPlan, Transfer


class SimMachine:
    """See the module. Every sampled token is 0: the simulator decides beforehand what a session says next."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Completes a batch."""
        return ForwardDone(plan.step, tuple((row.seq, 0) for row in plan.rows if row.sample))

    def submit(self, transfer: Transfer) -> None:
        """Completes a copy."""
        self._events.append(TransferDone(transfer.id, True))

    def take_events(self) -> list[Event]:
        """What has completed since the last call."""
        events, self._events = self._events, []
        return events

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        """Nothing to forget: no bytes are kept."""
