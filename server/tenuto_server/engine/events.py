"""What goes into ``Engine.step``: requests, hints, and completions, as frozen values. Holds no state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tenuto.wire import Envelope, PauseKind

TokenArray: TypeAlias = NDArray[np.int32]
SlotArray: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off.

    Token number ``i`` of a turn is drawn from a counter-based generator keyed by (``seed``, i), so that preemption,
    batching and caching cannot change it. ``grammar``: number of the grammar that the runtime holds the answer to; 0: none.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    grammar: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SubmitTurn:
    """A request to generate. ``tokens``: the whole prompt, int32 [n], n >= 1.

    ``session`` None: the longest-prefix chain names the session. ``last_role``: role of the prompt's last message, which
    tells in hindsight what the pause before it was. ``hints`` rode on the request. ``warm``: nobody waits for an answer,
    the prompt is only to be made ready (``sampling.max_tokens`` 0): it ends no pause and teaches nothing. ``inferred``: a
    ``PauseInferred`` follows the answer at once, before anything else; the decision about the pause waits for it.
    ``model``: the name that the client asked for. ``side``: a call that is no turn of any session: it is shown nowhere, no
    prompt continues it, and its KV goes first.
    """

    request_id: str
    tenant: str
    tokens: TokenArray
    sampling: Sampling
    session: str | None = None
    parent: str | None = None
    salt: str = ""
    agent: str | None = None
    attended: bool | None = None
    priority: float = 0.0
    last_role: str | None = None
    hints: Envelope | None = None
    final: bool = False
    warm: bool = False
    inferred: bool = False
    model: str | None = None
    side: bool = False


@dataclass(frozen=True, slots=True)
class StopTurn:
    """The API saw a stop string: end the turn. ``keep_tokens`` generated tokens belong to the answer."""

    request_id: str
    keep_tokens: int


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """The client went away: free what the turn holds. The pause stays open and the prefix is kept."""

    request_id: str


class PauseInferred(NamedTuple):
    """What the server reads off an answer's end (stop reason, tool names), without any hint. ``answer_tokens``: the answer's
    length where it is not what the engine generated."""

    tenant: str
    session: str
    kind: PauseKind
    tool: str | None = None
    program: str | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class HintBatch:
    """An envelope that arrived on its own. The receipts come back as ``HintsDone`` under the same ``ticket``."""

    ticket: str
    tenant: str
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class QuerySessions:
    """Asks for the views of a tenant's sessions (or one of them); answered by ``SessionsOut``."""

    ticket: str
    tenant: str
    session: str | None = None


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """The forward of ``step`` ended. ``sampled``: (sequence, token) for every row that asked for one; for a row with
    guesses one more for each guess that was confirmed, in order. ``drafted``: (sequence, guesses) of rows with ``room``.

    ``failed`` carries a reason when nothing of it may be trusted; its rows are computed again or failed.
    """

    step: int
    sampled: tuple[tuple[int, int], ...]
    elapsed_ns: int = 0
    failed: str | None = None
    drafted: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A copy ended. ``bad``: positions within the transfer whose *source* is known to be wrong (a checksum, another block,
    a missing file). ``failed``: positions that were not copied for any other reason (a full disk, an I/O error, a worker's
    own fault), which says nothing against their source.

    ``ok`` False means that nothing was copied, whether ``failed`` lists it or not. A block counts as copied only when this
    report covers it.
    """

    transfer: int
    ok: bool
    bad: tuple[int, ...] = ()
    failed: tuple[int, ...] = field(default=(), kw_only=True)
    elapsed_ns: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TierFailed:
    """A tier stopped accepting writes (disk full, unwritable) or came back; the engine stops storing there."""

    tier: str
    writable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class DiskRecovered:
    """What a disk directory of the same root family held at start-up: chained block hashes and their slots."""

    hashes: tuple[bytes, ...] = ()
    slots: tuple[int, ...] = field(default=())


Event: TypeAlias = (
    SubmitTurn
    | StopTurn
    | CancelTurn
    | PauseInferred
    | HintBatch
    | QuerySessions
    | ForwardDone
    | TransferDone
    | TierFailed
    | DiskRecovered
)
