"""What a policy may know: frozen views, filled by the engine from its tables. Nothing here holds state or reads a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy.index import Outlook
from tenuto_server.policy.pace import Rhythm

TierName: TypeAlias = Literal["device", "host", "disk"]


class Cycle(NamedTuple):
    """A pause that ended and the turn after it, both in seconds."""

    pause_s: float
    turn_s: float


@dataclass(frozen=True, slots=True)
class History:
    """``n`` observed pauses of one tenant, kind and key, their plain mean and their EWMA (alpha 0.5); 0 before any."""

    n: int = 0
    mean_s: float = 0.0
    ewma_s: float = 0.0


class PauseView(NamedTuple):
    """One paused session. ``elapsed_s``: seconds since its turn ended.

    ``kind`` "unknown": nothing tells what the pause is; ``kind_counts`` then says how many pauses of this session turned
    out to be of each kind. ``forecast`` was given ``forecast_at_s`` seconds into the pause and counts from there.
    ``resume_at_s``: the harness said that the return comes at this elapsed time. ``alive_until_s``: keepalives vouch for
    the session until this elapsed time. ``end_keep_s``: the harness ended the session but asked to keep it until this
    elapsed time (0 when not at all); None when it did not end. ``recent``: the session's last pauses of any kind, oldest
    first, a handful. ``rhythm``: with which earlier pauses it is filed (``pace.rhythm_of``). ``outlook``:
    ``Retention.outlook`` of the decision before this one, if nothing was said since.
    """

    tenant: str
    kind: PauseKind
    key: str | None
    elapsed_s: float
    kind_counts: tuple[tuple[PauseKind, int], ...] = ()
    forecast: Forecast | None = None
    forecast_at_s: float = 0.0
    resume_at_s: float | None = None
    alive_until_s: float = 0.0
    end_keep_s: float | None = None
    attended: bool = True
    turns: int = 0
    context_tokens: int = 0
    recent: tuple[Cycle, ...] = ()
    rhythm: Rhythm | None = None
    outlook: Outlook | None = None


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier. ``price``: lowest index held while it is full, 0 while it has room (index units: seconds of saved work
    per byte and second). ``load_s_per_block``: seconds to bring one block from here to the device (0 for the device).
    ``evicted``: the priority of what was evicted last. ``cleared``: the index up to which room was taken here lately, 0 if
    none was: what stays has to be worth more, whatever happens to be free now."""

    tier: TierName
    capacity_blocks: int
    free_blocks: int
    price: float
    load_s_per_block: float
    evicted: float = 0.0
    cleared: float = 0.0


@dataclass(frozen=True, slots=True)
class CostView:
    """The machine. Recomputing the token at position x takes ``prefill_a_s + prefill_b_s * x`` seconds.

    ``waiting``: mean number of turns running or waiting that a recompute would hold up. ``step_overhead_s``: what a forward of
    few tokens takes besides.
    """

    prefill_a_s: float
    prefill_b_s: float
    waiting: float
    block_tokens: int
    block_bytes: int
    step_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SystemView:
    """Tiers from fast to slow (only those that exist) and the machine's costs. ``trust``: how far the index is trusted
    (``safeguard``): 2 wholly, 1 without forecasts, 0 not at all."""

    tiers: tuple[TierView, ...]
    cost: CostView
    trust: float = 2.0

    def tier(self, name: TierName) -> TierView | None:
        """The view of that tier; None where it does not exist."""
        for tier in self.tiers:
            if tier.tier == name:
                return tier
        return None


class ExtentView(NamedTuple):
    """A run of blocks of one prefix. ``start``: token position of its first block; ``rate``: summed return rate (1/s) of
    the sessions that use it (``Retention.rate``); ``last_used_s``: when a turn last used it, in absolute seconds of the
    engine's clock (priorities are computed at different moments and must stay comparable); ``uses``: turns that used it;
    ``crowds``: tiers of which its tenant holds more than its share."""

    start: int
    blocks: int
    users: int
    rate: float
    last_used_s: float
    uses: int
    on: tuple[TierName, ...] = ()
    crowds: tuple[TierName, ...] = ()


class PauseKnowledge(Protocol):
    """Learned pause distributions, as a policy sees them. Owned and taught by the engine's session table."""

    def quantiles(self, tenant: str, kind: PauseKind, key: str | None, rhythm: Rhythm | None = None) -> Sequence[float]:
        """Pause lengths in seconds, ascending: at evenly spaced probabilities (i + 0.5) / n, n at most 64, and beyond the
        64th each where half of what was left has come. Shrunk (key, rhythm) -> key -> kind -> all."""
        ...

    def p_return(
        self,
        tenant: str,
        kind: PauseKind,
        key: str | None = None,
        rhythm: Rhythm | None = None,
        depth: int | None = None,
    ) -> float:
        """Learned probability that a session pausing in this way ever returns, its end not having been announced.
        ``depth``: size class of its context (``fates.depth_of``)."""
        ...

    def p_intact(self, kind: PauseKind, depth: int | None = None) -> float:
        """Learned share of a context of that size that the prompt after such a pause begins with."""
        ...

    def scale(self, tenant: str, kind: PauseKind) -> tuple[float, float]:
        """Mean and standard deviation of the log of the seconds of such pauses."""
        ...

    def p_return_ended(self, tenant: str) -> float:
        """Learned probability that it returns although its end was announced."""
        ...

    def trust(self, tenant: str, kind: PauseKind, key: str | None) -> tuple[float, float, float]:
        """Calibration of the client's forecasts: (weight 0..1 of the forecast against the empirical distribution,
        log-shift to add to its median, factor on its log-spread)."""
        ...

    def history(self, tenant: str, kind: PauseKind, key: str | None) -> History:
        """Plain figures of the pauses observed under exactly that key (None: under the kind)."""
        ...
