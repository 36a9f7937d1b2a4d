"""A laboratory for the equality test: the real engine over the real executor, with virtual time between them.

``Lab`` owns one engine, its pools and its conversations; ``Reference`` computes what an empty cache would have answered.
Copies are real and finish when they finish; the engine hears of them after the virtual time that a test gives them, so that
a run is the same every time.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.wire import AnyAction, Envelope, Receipt
from tenuto_server.cache.extent import DEVICE, DISK, HOST, TIERS, Extent
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.integrity import check
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Event, ForwardDone, HintBatch, Sampling, SubmitTurn, TransferDone
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, HintsDone, Transfer
from tenuto_server.errors import ModelError
from tenuto_server.model.load import LoadedModel, load_model
from tenuto_server.policy import make_policy
from tenuto_server.runtime.batch import BatchBuilder
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.executor import TorchExecutor
from tenuto_server.sim.world import Turn, World

BLOCK = 16
SECRET = b"0123456789abcdef"
COPY_S_MAX = 60.0


class Workshop:
    """A ``sim.world.Machine`` over a torch executor: waits for the copies of a step, and reports them in order."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: set[int] = set()
        executor.set_sink(self._events.put)

    def run(self, plan: ForwardPlan) -> ForwardDone:
        return self.executor.run(plan)

    def submit(self, transfer: Transfer) -> None:
        self._open.add(transfer.id)
        self.executor.submit(transfer)

    def take_events(self) -> list[Event]:
        found: list[Event] = []
        while self._open or not self._events.empty():
            event = self._events.get(timeout=COPY_S_MAX)
            if isinstance(event, TransferDone):
                self._open.discard(event.transfer)
            found.append(event)
        return sorted(found, key=lambda e: e.transfer if isinstance(e, TransferDone) else -1)

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        self.executor.forget_disk(slots)


@dataclass(frozen=True, eq=False)
class Answer:
    """Greedy ``tokens``, the lead of each over the runner-up's logit, and the KV of all full blocks under them."""

    tokens: list[int]
    margins: list[float]
    kv: torch.Tensor


class Reference:
    """Uncached answers: the whole prompt in one row, then token by token, in a pool of its own. Remembers them."""

    def __init__(self, model: LoadedModel, blocks: int = 64) -> None:
        self._transformer = model.transformer
        self._pool = model.transformer.kv_layout(BLOCK).allocate(blocks, "cpu")
        self._batches = BatchBuilder(BLOCK, blocks, torch.device("cpu"))
        self._known: dict[tuple[int, ...], Answer] = {}

    def __call__(self, prompt: Sequence[int], count: int) -> Answer:
        known = self._known.get((count, *prompt))
        if known is None:
            known = self._known[(count, *prompt)] = self._answer(list(prompt), count)
        return known

    def _answer(self, tokens: list[int], count: int) -> Answer:
        start, out, margins = 0, [], []
        for _ in range(count):
            logits = self._forward(tokens, start)
            best = torch.topk(logits, 2)
            margins.append(float(best.values[0] - best.values[1]))
            out.append(int(best.indices[0]))
            start, tokens = len(tokens), [*tokens, out[-1]]
        return Answer(out, margins, self._pool[: start // BLOCK].clone())

    def _forward(self, tokens: list[int], start: int) -> torch.Tensor:
        blocks = np.arange(-(-len(tokens) // BLOCK), dtype=np.int32)
        row = ForwardRow(1, start, np.array(tokens[start:], np.int32), blocks, True, Sampling(1))
        return self._transformer.forward(self._batches.build(ForwardPlan(0, (row,))), self._pool)[0]


@dataclass
class Verdict:
    """Compares answers with the reference. ``epsilon``: in bf16 a token may differ where the reference's own lead is
    smaller; the rest of that answer is then another text, and not compared. None: no token may ever differ."""

    reference: Reference
    epsilon: float | None = None
    bitwise: bool = False
    answers: int = 0
    tokens: int = 0
    escapes: list[float] = field(default_factory=list)

    def same(self, prompt: Sequence[int], got: Sequence[int], count: int) -> bool:
        """True: all equal. False: the escape was used. Fails otherwise."""
        expected = self.reference(prompt, count)
        assert len(got) == count
        first = next((i for i, pair in enumerate(zip(got, expected.tokens, strict=True)) if pair[0] != pair[1]), None)
        self.answers += 1
        self.tokens += count if first is None else first + 1
        if first is None:
            return True
        assert self.epsilon is not None, (
            f"token {first} is {got[first]}, without a cache it is {expected.tokens[first]}"
        )
        assert expected.margins[first] < self.epsilon, (
            f"token {first} differs at a lead of {expected.margins[first]:.3f}"
        )
        self.escapes.append(expected.margins[first])
        return False


class Lab:
    """An engine with tiers of ``device``, ``host`` and ``disk`` blocks over a loaded model.

    ``copy_s``: virtual seconds to copy one block to or from the named tier. ``settings``: of ``EngineConfig``.
    """

    def __init__(
        self,
        verdict: Verdict,
        model: LoadedModel,
        folder: Path,
        *,
        device: int = 64,
        host: int = 64,
        disk: int = 64,
        policy: str = "lru",
        copy_s: dict[str, float] | None = None,
        secret: bytes = SECRET,
        **settings: Any,
    ) -> None:
        layout = model.transformer.kv_layout(BLOCK)
        copy_s = {"device": 0.0, "host": 1e-3, "disk": 2e-3, **(copy_s or {})}
        size = layout.block_bytes
        dtype = "bf16" if model.transformer.dtype == torch.bfloat16 else "fp32"
        self.identity = RootIdentity(model.digest, "", dtype, 1, BLOCK, secret)
        tier = DiskTier(folder, self.identity.family(), block_bytes=size, slots=disk) if disk else None
        self.executor = TorchExecutor(
            model.transformer, device_blocks=device, host_blocks=host, block_tokens=BLOCK, disk=tier
        )
        config = EngineConfig(
            CacheConfig(device, host, disk, BLOCK),
            policy,
            block_bytes=size,
            **{
                "max_context_tokens": 1024,
                "step_tokens_max": 64,
                "prefill_a_s": 1e-3,
                "host_bytes_per_s": size / copy_s["host"],
                "disk_bytes_per_s": size / copy_s["disk"],
                **settings,
            },
        )
        self.engine = Engine(config, make_policy(policy), self.identity)
        self.cache = self.engine.core.cache
        self.world = World(
            self.engine,
            Workshop(self.executor),
            forward_s=lambda plan: 1e-3 * sum(len(row.tokens) for row in plan.rows) + 1e-3,
            transfer_s=lambda t: len(t.src_slots) * max(copy_s[t.src], copy_s[t.dst]),
            after_step=lambda: check(self.cache, deep=True),
        )
        self.verdict = verdict
        self.closed = False
        self._number = 0
        self.world.at(0.0, self.executor.recovered())

    # ---- conversations -------------------------------------------------------------------------------------------

    def submit(self, session: str, prompt: Sequence[int], count: int, **fields: Any) -> Turn:
        """A turn to be run; ``ask`` runs it too."""
        self._number += 1
        then: Callable[[Turn], None] | None = fields.pop("then", None)
        in_s: float = fields.pop("in_s", 0.0)
        tokens, sampling = np.array(prompt, np.int32), Sampling(count, ignore_eos=True)
        tenant = fields.pop("tenant", "t")
        turn = SubmitTurn(f"{session}-{self._number}", tenant, tokens, sampling, session=session, **fields)
        return self.world.submit(turn, in_s=in_s, then=then)

    def ask(self, session: str, prompt: Sequence[int], count: int, **fields: Any) -> Turn:
        """Runs a turn to its end and compares its answer."""
        turn = self.submit(session, prompt, count, **fields)
        self.world.run()
        self.judge(turn, prompt, count)
        return turn

    def judge(self, turn: Turn, prompt: Sequence[int], count: int) -> None:
        """Compares an answer; where KV must be bit-equal, that of the session's whole context too."""
        assert turn.done is not None, turn.rejected
        assert turn.done.reason == "length", turn.done
        report = turn.done.report
        assert sum(report.cached.values()) + sum(report.recomputed.values()) == len(prompt)
        same = self.verdict.same(prompt, turn.tokens, count)
        if same and self.verdict.bitwise and (kv := self.kv(turn.request_id.rpartition("-")[0])) is not None:
            expected = self.verdict.reference(prompt, count).kv[: len(kv)]
            assert torch.equal(kv, expected), "the KV of an answer differs from that of an uncached one"

    def hint(self, *actions: AnyAction) -> tuple[Receipt, ...]:
        """Sends hints now and returns their receipts."""
        self._number += 1
        ticket = f"h{self._number}"
        self.world.at(self.world.now_s, HintBatch(ticket, "t", Envelope.of(actions)))
        self.world.run()
        return next(o.receipts for o in self.world.outputs if isinstance(o, HintsDone) and o.ticket == ticket)

    def wait(self, seconds: float, step_s: float = 0.25) -> None:
        """Lets virtual time pass, so that leases end and prefetches start."""
        until = self.world.now_s + seconds
        for at in np.arange(self.world.now_s, until + step_s, step_s):
            self.world.at(float(at), None)
        self.world.run()
        self.poison()

    # ---- residency -----------------------------------------------------------------------------------------------

    def handle(self, session: str) -> int:
        found = self.engine.core.sessions.find("t", session)
        assert found is not None
        return found.handle

    def place(self, session: str, *ranges: tuple[int, int, str | None]) -> None:
        """Leaves blocks [first, end) of a session's context on one tier alone (None: on none)."""
        handle = self.handle(session)
        for first, end, name in ranges:
            for at in (first, end):
                for extent in self.cache.context(handle):
                    if extent.start < at < extent.end:
                        self.cache.cut(extent, at - extent.start)
            for extent in self.cache.context(handle):
                if first <= extent.start and extent.end <= end and name != "device":
                    self._leave(extent, None if name is None else TIERS.index(name))
        self.world.at(self.world.now_s, None)
        self.world.run()
        self.poison()

    def _leave(self, extent: Extent, tier: int | None) -> None:
        tiers = self.cache.tiers
        if tier is not None and extent.slots[tier] is None:
            assert tiers.begin_move(extent, DEVICE, tier, "offload", self.world.now_ns, drop_source=True)
            return
        for other in (DEVICE, HOST, DISK):
            if other != tier and extent.slots[other] is not None:
                tiers.drop(extent, other)

    def poison(self) -> None:
        """Overwrites every free slot of both pools, so that nobody can live on what was lost."""
        store = self.executor.store
        for tier, pool in ((DEVICE, store.device_pool), (HOST, store.host_pool)):
            if pool is not None:
                pool[self.cache.tiers.pools[tier].free_slots()] = 9.0

    def resident(self, session: str) -> dict[str, int]:
        """Tokens of a session's context by the fastest tier that has them."""
        return self.cache.resident_tokens(self.handle(session))

    def kv(self, session: str) -> torch.Tensor | None:
        """The full blocks of a session's context; None where some of them are not on the device any more."""
        slots: list[int] = []
        for extent in self.cache.context(self.handle(session)):
            here = extent.slots[DEVICE]
            if here is None:
                return None
            if not extent.fill:
                slots += here.tolist()
        return self.executor.store.device_pool[slots]

    def count(self, name: str) -> float:
        """An engine counter, summed over its labels."""
        value = self.engine.metrics().get(name, 0.0)
        return sum(value.values()) if isinstance(value, dict) else value

    def close(self) -> None:
        """Ends it; what ran must have let go of everything. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self.executor.close()
        assert not self.cache.tables
        assert (self.cache.private_blocks, self.cache.tiers.pinned_device_blocks) == (0, 0)


@pytest.fixture(scope="session")
def load() -> Iterator[Callable[[str, str, bool], LoadedModel]]:
    """Loads models, each once. One thread: threads that wait for each other on a busy machine only lose time."""
    loaded: dict[tuple[str, str, bool], LoadedModel] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def get(name: str, dtype: Any, invariant: bool) -> LoadedModel:
        if (name, dtype, invariant) not in loaded:
            try:
                loaded[name, dtype, invariant] = load_model(name, dtype=dtype, invariant=invariant)
            except ModelError as missing:
                pytest.skip(str(missing))
        return loaded[name, dtype, invariant]

    yield get
    torch.set_num_threads(threads)


@pytest.fixture
def labs() -> Iterator[Callable[..., Lab]]:
    """Makes laboratories, and closes them at the end of the test."""
    made: list[Lab] = []

    def make(*args: Any, **fields: Any) -> Lab:
        made.append(Lab(*args, **fields))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The classes that tests build from."""
    return SimpleNamespace(Lab=Lab, Reference=Reference, Verdict=Verdict, BLOCK=BLOCK)
