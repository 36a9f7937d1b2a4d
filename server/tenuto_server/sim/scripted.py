"""The real engine in virtual time for requests whose answers are known: what plays recorded sessions builds on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tenuto.wire import Envelope
from tenuto_server.config import EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import ForwardDone, HintBatch, Sampling, SubmitTurn, TokenArray
from tenuto_server.engine.plan import ForwardPlan
from tenuto_server.policy import make_policy
from tenuto_server.sim.costs import Clockwork, Machine
from tenuto_server.sim.machine import SimMachine
from tenuto_server.sim.study import identity
from tenuto_server.sim.world import Turn, World

TENANT = "default"


class _Scripted(SimMachine):
    """Answers what it is told to. ``scripts``: by sampling seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[int, tuple[int, ...]] = {}

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Completes a batch."""
        drawn = tuple((row.seq, self.scripts[row.sampling.seed][row.draw]) for row in plan.rows if row.sample)
        return ForwardDone(plan.step, drawn)


class ScriptedWorld(World):
    """A world of its own around a new engine; a forward keeps the engine's thread, as in the server."""

    def __init__(self, config: EngineConfig, policy: str, costs: Machine) -> None:
        block = config.cache.block_tokens
        engine = Engine(replace(config, policy=policy), make_policy(policy), identity(block))
        engine.core.costs.follow_queue = True
        clock = Clockwork(costs, 1, lambda: self.now_ns, block_tokens=block)
        self._scripted, self._asked = _Scripted(), 0
        super().__init__(
            engine,
            self._scripted,
            forward_s=clock.forward_s,
            transfer_s=clock.transfer_s,
            copy_s=clock.copy_s,
            blocking=True,
        )

    @property
    def prefilled(self) -> float:
        """Tokens of prompts computed so far."""
        return float(self.engine.core.counters["prefill_tokens"])

    def ask(
        self,
        prompt: TokenArray,
        answer: tuple[int, ...],
        *,
        session: str,
        parent: str | None,
        last_role: str | None,
        hints: Envelope | None,
        in_s: float,
        then: Callable[[Turn], None],
    ) -> None:
        """Schedules a request ``in_s`` seconds from now that will be answered so; ``then`` hears of its end."""
        self._asked += 1
        self._scripted.scripts[self._asked] = answer
        sampling = Sampling(len(answer), seed=self._asked, ignore_eos=True)
        turn = SubmitTurn(
            f"r{self._asked}",
            TENANT,
            prompt,
            sampling,
            session=session,
            parent=parent,
            last_role=last_role,
            hints=hints,
            inferred=True,
        )
        self.submit(turn, in_s=in_s, then=then)

    def hint(self, at_s: float, envelope: Envelope) -> None:
        """Schedules hints that come by themselves."""
        self.at(at_s, HintBatch(envelope.message_id, TENANT, envelope))


__all__ = ["ScriptedWorld", "TokenArray", "Turn"]
