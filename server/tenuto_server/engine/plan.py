"""What comes out of ``Engine.step``: the forward to run, the copies to make, and what to tell callers. Holds no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from tenuto.wire import CacheReport, Divergence, Lease, MissLabel, Receipt, SessionView
from tenuto_server.engine.events import Sampling, SlotArray, TokenArray

TierName: TypeAlias = Literal["device", "host", "disk"]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


class ForwardRow(NamedTuple):
    """One contiguous range of one sequence to compute.

    ``tokens``: int32 [n], at absolute positions ``start .. start + n``. ``blocks``: device slots int32 covering positions
    0 .. start + n. ``sample``: draw the next token after the last of them, as number ``draw`` of the turn. The last
    ``draft`` of the tokens are guesses: a token is drawn after the one before them (as number ``draw``) and, as long as what
    is drawn is what was guessed, after each guess. ``room``: so many tokens may the executor guess itself behind these, where
    it has a draft model; ``blocks`` covers them, and ``context`` is then the whole sequence up to the last of ``tokens``,
    which holds until the forward is done.
    """

    seq: int
    start: int
    tokens: TokenArray
    blocks: SlotArray
    sample: bool
    sampling: Sampling
    draw: int = 0
    draft: int = 0
    room: int = 0
    context: TokenArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPlan:
    """One batch. ``copies``: device block copies (source, destination) to make before anything else in it."""

    step: int
    rows: tuple[ForwardRow, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Copy blocks between tiers. Slots are int32 [n]; ``hashes``: n * 16 bytes, the chained hash of each block.

    Source and destination stay pinned until its ``TransferDone``. ``urgent``: a turn waits for it. A transfer may be
    reported late or failed, never not at all.
    """

    id: int
    src: TierName
    dst: TierName
    src_slots: SlotArray
    dst_slots: SlotArray
    hashes: bytes
    urgent: bool = False


class Report(NamedTuple):
    """Where the tokens of a turn's prompt came from; the fields of ``CacheReport``, which ``wire`` makes of it."""

    session: str | None = None
    prompt_tokens: int = 0
    cached: Mapping[TierName, int] = MappingProxyType({})
    recomputed: Mapping[MissLabel, int] = MappingProxyType({})
    restore_wait_s: float = 0.0
    queue_wait_s: float = 0.0
    ttft_s: float | None = None
    lease: Lease | None = None
    divergence: Divergence | None = None
    receipts: tuple[Receipt, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again, over all tiers."""
        return sum(self.cached.values())

    def wire(self) -> CacheReport:
        """As clients see it."""
        return CacheReport(
            session=self.session,
            prompt_tokens=self.prompt_tokens,
            cached=dict(self.cached),
            recomputed=dict(self.recomputed),
            restore_wait_s=self.restore_wait_s,
            queue_wait_s=self.queue_wait_s,
            ttft_s=self.ttft_s,
            lease=self.lease,
            divergence=self.divergence,
            receipts=self.receipts,
        )


class TurnStarted(NamedTuple):
    """The turn was admitted; ``report`` says where its prompt comes from."""

    request_id: str
    session: str
    report: Report


class TokensOut(NamedTuple):
    """Generated tokens, in order."""

    request_id: str
    tokens: tuple[int, ...]


class TurnDone(NamedTuple):
    """The turn ended. ``completion_tokens`` excludes a stop token. Always the last output of a request."""

    request_id: str
    reason: FinishReason
    completion_tokens: int
    report: Report
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TurnRejected:
    """The turn cannot be served: ``code`` names the limit, ``message`` tells the caller what to do."""

    request_id: str
    code: Literal["too_long", "too_many_sessions", "busy"]
    message: str


@dataclass(frozen=True, slots=True)
class HintsDone:
    """Receipts for a ``HintBatch``."""

    ticket: str
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class SessionsOut:
    """Answers a ``QuerySessions``."""

    ticket: str
    views: tuple[SessionView, ...]


Output: TypeAlias = TurnStarted | TokensOut | TurnDone | TurnRejected | HintsDone | SessionsOut


class StepPlan(NamedTuple):
    """Everything one step wants done. ``wake_ns``: step again by then even if nothing happens; None: no need.

    ``dropped_disk``: disk slots whose blocks were evicted, so that the index on disk forgets them.
    """

    forward: ForwardPlan | None
    transfers: tuple[Transfer, ...]
    outputs: tuple[Output, ...]
    wake_ns: int | None
    dropped_disk: tuple[int, ...] = ()
