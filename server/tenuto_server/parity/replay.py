"""What a live run decided, decided again: from the events it was given, and from a model of what things cost. Holds no state.

The first must agree to the last digit, or the engine has looked at something that it was not given. The second differs where
the model of costs is wrong, and tells by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import ForwardDone, TransferDone
from tenuto_server.parity.live import Step
from tenuto_server.policy import Policy
from tenuto_server.sim.costs import Clockwork, Machine
from tenuto_server.sim.harness import Harness, Script, Sent, Stage
from tenuto_server.sim.knowledge import Delivery, Knowledge, PauseScale
from tenuto_server.sim.machine import SimMachine
from tenuto_server.sim.workload import Workload
from tenuto_server.sim.world import World


@dataclass(frozen=True, slots=True)
class Play:
    """Everything that the live and the simulated run have in common."""

    config: EngineConfig
    policy: Policy
    identity: RootIdentity
    workload: Workload
    knowledge: Knowledge
    delivery: Delivery
    scale: PauseScale
    until_s: float

    def engine(self, journal: list[str]) -> Engine:
        """A fresh engine that writes its decisions to ``journal``."""
        return Engine(self.config, self.policy, self.identity, journal.append)

    def agents(self, world: Stage, script: Script, record: Callable[[Sent], None]) -> Harness:
        """The agents, in either world."""
        given = (self.workload, self.knowledge, self.delivery, self.scale)
        return Harness(world, script, *given, 1, record, answers=True)


def replay(play: Play, steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """(journal, complaints) of a fresh engine that is given the same events at the same times. A complaint: the live run
    finished a forward or a copy that this engine never asked for."""
    journal: list[str] = []
    complaints: list[str] = []
    engine = play.engine(journal)
    asked_forward, asked_copies = 0, set[int]()
    for number, (now_ns, events) in enumerate(steps):
        for event in events:
            if isinstance(event, ForwardDone) and event.step != asked_forward:
                complaints.append(f"step {number}: forward {event.step} ended, {asked_forward} was asked for last")
            elif isinstance(event, TransferDone) and event.transfer not in asked_copies:
                complaints.append(f"step {number}: copy {event.transfer} ended and was never asked for")
        plan = engine.step(now_ns, events)
        asked_copies.update(transfer.id for transfer in plan.transfers)
        if plan.forward is not None:
            asked_forward = plan.forward.step
    return journal, complaints


def model(play: Play, machine: Machine, record: Callable[[Sent], None]) -> list[str]:
    """The journal of the same agents in the simulator, on a machine that costs what ``machine`` says."""
    journal: list[str] = []
    executor = SimMachine()
    clockwork = Clockwork(machine, 1, lambda: world.now_ns, block_tokens=play.config.cache.block_tokens)
    world = World(
        play.engine(journal),
        executor,
        forward_s=clockwork.forward_s,
        transfer_s=clockwork.transfer_s,
        copy_s=clockwork.copy_s,
        remember=False,
    )
    play.agents(world, executor, record).start()
    world.run(until_s=play.until_s, steps_max=1 << 30)
    return journal
