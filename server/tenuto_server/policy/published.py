"""Retention rules of published systems, to compare with. Each says what its source needs and this interface lacks.

Formulas as their papers and released code give them; where the two differ, the name says which it is. None holds state.
A rule that pins for a time writes 1 / (that time) as its rate, so that the moment at which a pin ends can be read off an
extent: last use + 1 / rate. Of an extent with several users the rates add up, which lets the pin seem to end earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

from tenuto_server.policy.baselines import PROTECTED, Lru
from tenuto_server.policy.decision import Retention
from tenuto_server.policy.distributions import EVEN
from tenuto_server.policy.tiering import recompute_s
from tenuto_server.policy.views import ExtentView, PauseKnowledge, PauseView, SystemView, TierName

COLD_SAMPLES = 100
"""Continuum: a distribution with no more samples than this is not used."""
DEFAULT_PIN_S = 2.0
"""Continuum: pin while too little is known; in the released code also the only pin, and the longest mean that gets it."""
TURN_S = 9.7
"""Mean time of a turn (KVCT, API time) where turns are simulated without any."""
CYCLES = 5
"""MORI: idleness over this many turns and pauses."""


def _lost(pause: PauseView, system: SystemView) -> float:
    """Seconds to rebuild the context of a paused session, nobody else counted."""
    cost = system.cost
    tokens = max(1, pause.context_tokens)
    return tokens * (cost.prefill_a_s + 0.5 * cost.prefill_b_s * tokens)


def _pin(pause: PauseView, system: SystemView, pin_s: float, reason: str) -> Retention:
    """Kept until ``pin_s`` seconds into the pause, then like everything else."""
    left_s = pin_s - pause.elapsed_s
    if left_s <= 0.0 or pause.end_keep_s is not None:
        return Retention(0.0, inf, 0.0, system.tiers[-1].tier, None, f"{pause.kind}: no pin")
    return Retention(1.0 / pin_s, left_s, left_s, "device", None, reason)


@dataclass(frozen=True, slots=True)
class Continuum(Lru):
    """Continuum / CacheTTL, the paper (2511.02230): pin for the tau that maximises

        P(tau, f) * (Tq * eta + PrefillReload(r)) - tau      over 0 and the observed durations of tool f.

    P: the tool's own distribution from 100 samples on, below that all tools', below 100 in all a fixed 2 s. The stored
    distributions are 64 shrunk quantiles. eta = 1, the paper's default. Not in the interface: the mean queueing delay Tq
    of a returning request, taken as the queue times this request's own reload. No tool call: no pin. When a pinned
    context must go, the one pinned for longest from now goes first.
    """

    name: str = "continuum"
    learns: bool = True

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Pins for the best tau."""
        if pause.kind in ("human", "unknown"):
            return _pin(pause, system, 0.0, "")
        if knowledge.history(pause.tenant, pause.kind, None).n <= COLD_SAMPLES:
            return _pin(pause, system, DEFAULT_PIN_S, f"{pause.kind}: too few samples")
        own = knowledge.history(pause.tenant, pause.kind, pause.key).n > COLD_SAMPLES
        durations = knowledge.quantiles(pause.tenant, pause.kind, pause.key if own else None)[:EVEN]
        gain_s = _lost(pause, system) * (1.0 + system.cost.waiting)
        tau, best = 0.0, 0.0
        for i, duration in enumerate(durations):
            reward = (i + 0.5) / len(durations) * gain_s - duration
            if reward > best:
                tau, best = duration, reward
        return _pin(pause, system, tau, f"{pause.kind}: pinned for {tau:.1f}s, reward {best:.3g}s")

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """Last use; pinned ones after all others, and of those the pin that ends last first."""
        if extent.rate <= 0.0:
            return extent.last_used_s
        return PROTECTED - (extent.last_used_s + 1.0 / extent.rate)


@dataclass(frozen=True, slots=True)
class ContinuumReleased(Continuum):
    """Continuum's released code: 2 s for tools whose plain running mean is at most 2 s, nothing for others. A tool never
    seen counts as taking no time."""

    name: str = "continuum-released"

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Pins for 2 s or not at all."""
        if pause.kind in ("human", "unknown"):
            return _pin(pause, system, 0.0, "")
        mean_s = knowledge.history(pause.tenant, pause.kind, pause.key).mean_s
        pin_s = DEFAULT_PIN_S if mean_s <= DEFAULT_PIN_S else 0.0
        return _pin(pause, system, pin_s, f"{pause.kind}: pinned, mean {mean_s:.1f}s")


@dataclass(frozen=True, slots=True)
class InferCept(Lru):
    """InferCept (2402.01869): the least waste of memory over time, with the pause estimated as the time waited so far.

        WasteDiscard  = T_fwd(C) C + T_fwd(C) C_other      WastePreserve = elapsed C      WasteSwap = 2 T_swap(C) C_batch

    Preserve until elapsed = T_fwd(C) (1 + C_other / C), then discard; swap where that wastes least. Not in the interface:
    the context of the other running requests, taken as the queue times the same context. Recomputing in one piece.
    """

    name: str = "infercept"

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Preserves until waiting has wasted what a discard would."""
        hold_s = _lost(pause, system) * (1.0 + system.cost.waiting)
        return _pin(pause, system, hold_s, f"{pause.kind}: preserved up to {hold_s:.1f}s")

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """Requests are served by waste, the largest first, and the waste of keeping one grows with its wait until it is
        discarded: among the preserved, the one waiting for longest keeps its place."""
        if extent.rate <= 0.0:
            return extent.last_used_s
        return PROTECTED - extent.last_used_s

    def keep_below(self, extent: ExtentView, tier: TierName, system: SystemView) -> TierName | None:
        """Swapped where that wastes less than to discard."""
        target = Lru.keep_below(self, extent, tier, system)
        return (
            target
            if target is not None and self._swap_s(extent, target, system) < self._discard_s(extent, system)
            else None
        )

    def offload_early(self, extent: ExtentView, system: SystemView) -> bool:
        """Never: swapped when memory is short."""
        return False

    @staticmethod
    def _swap_s(extent: ExtentView, target: TierName, system: SystemView) -> float:
        view = system.tier(target)
        assert view is not None
        return 2.0 * view.load_s_per_block * extent.blocks * (1.0 + system.cost.waiting)

    @staticmethod
    def _discard_s(extent: ExtentView, system: SystemView) -> float:
        return recompute_s(extent.start, extent.blocks, system.cost)


@dataclass(frozen=True, slots=True)
class TokenCake(Lru):
    """TokenCake (2510.18586), released code: an offload gate on the predicted stall d and the round trip x, m = d - x.

        reject if  d <= x   or  m < max(.05, 2 x) without emergency   or  u < .60 and nobody waits
        emergency: u >= .85, m >= max(4 x, 5 s), somebody waits
        score = min(6, m / max(.25, x)) + 6 max(0, u - .60) + min(2, waiting / (b + 1)) + min(2, fitting / b)
                + (1 if d >= 2 x else -1) + 1;   offload if score >= 1 or in an emergency

    d = mean of the client's estimate and an EWMA (alpha .5), or the one that exists, or 1 s. Not in the interface: blocks
    of the waiting requests (taken as the queue times the extent's own), importance and completion (taken as 0). Upload
    max(.10, 1.25 load) before the predicted return. Without a lower tier nothing is left but LRU.
    """

    name: str = "tokencake"
    hears_hints: bool = True
    learns: bool = True

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Predicts the stall."""
        lowest = system.tiers[-1].tier
        if pause.end_keep_s is not None:
            return Retention(0.0, inf, 0.0, lowest, None, "ended")
        seen = knowledge.history(pause.tenant, pause.kind, pause.key)
        told = [pause.forecast_at_s + pause.forecast.p50_s] if pause.forecast is not None else []
        predictions = told + ([seen.ewma_s] if seen.n else [])
        stall_s = max(1e-3, sum(predictions) / len(predictions) if predictions else 1.0)
        prefetch_s = None
        if len(system.tiers) > 1:
            load_s = system.tiers[1].load_s_per_block * (pause.context_tokens / system.cost.block_tokens)
            prefetch_s = max(0.0, stall_s - max(0.10, 1.25 * load_s) - pause.elapsed_s)
        return Retention(
            1.0 / stall_s, inf, 0.0, lowest, prefetch_s, f"{pause.kind}: stall of {stall_s:.1f}s predicted"
        )

    def offload_early(self, extent: ExtentView, system: SystemView) -> bool:
        """The gate."""
        device, target = system.tier("device"), self.keep_below(extent, "device", system)
        if device is None or target is None or extent.rate <= 0.0:
            return False
        lower = system.tier(target)
        if lower is None or lower.free_blocks < extent.blocks:
            return False
        stall, trip = 1.0 / extent.rate, 2.0 * lower.load_s_per_block * extent.blocks
        margin, waiting = stall - trip, system.cost.waiting
        used = 1.0 - device.free_blocks / max(1, device.capacity_blocks)
        emergency = used >= 0.85 and margin >= max(4.0 * trip, 5.0) and waiting > 0.0
        if stall <= trip or (margin < max(0.05, 2.0 * trip) and not emergency) or waiting <= 0.0:
            return False
        score = min(6.0, margin / max(0.25, trip)) + 6.0 * max(0.0, used - 0.60) + 2.0 * min(2.0, waiting)
        return emergency or score + (1.0 if stall >= 2.0 * trip else -1.0) + 1.0 >= 1.0


KVFLOW_STEPS = {"tool": 1, "background": 1, "permission": 2, "subagent": 2, "unknown": 2, "human": 3}
_KVFLOW_BASE = 16.0
_KVFLOW_ENDED = 8


@dataclass(frozen=True, slots=True)
class KvFlow(Lru):
    """KVFlow (2507.07400): evicts the highest number of steps to execution first, suffix before prefix; a node that several
    agents share takes the least of them. Agents within two steps are prefetched.

    Not in the interface: the agent graph. The steps are taken from what the pause waits for: a tool (this agent is next) 1,
    another agent or a click 2, a person 3; an announced resumption 0.
    """

    name: str = "kvflow"
    hears_hints: bool = True

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Writes the steps s as 16 ** -s: in a sum over up to 15 users the least s still shows."""
        steps = _KVFLOW_ENDED if pause.end_keep_s is not None else KVFLOW_STEPS[pause.kind]
        if pause.resume_at_s is not None:
            steps = 0
        prefetch_s = 0.0 if steps <= 2 and len(system.tiers) > 1 else None
        return Retention(
            _KVFLOW_BASE**-steps, inf, 0.0, system.tiers[-1].tier, prefetch_s, f"{pause.kind}: {steps} steps"
        )

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """Fewest steps last, then last use."""
        # Slightly more than a whole power, so that rounding of the stored rate never loses a step.
        steps = -int(log(extent.rate) / log(_KVFLOW_BASE) - 0.999) if extent.rate > 0.0 else _KVFLOW_ENDED
        return extent.last_used_s - PROTECTED * steps


@dataclass(frozen=True, slots=True)
class Mori(Lru):
    """MORI (2606.00866): the idlest goes first, by the idleness

        iota = T_acting / (T_reasoning + T_acting)   over the last 5 cycles, the running pause's elapsed time included.

    Ranked anew every 5 s; here when iota has moved by a twentieth. Turns that took no time count with the mean of recorded
    ones. No prefetch. Not in the interface: typed eviction by tier (busy or inactive programs), promotion by finished tool.
    """

    name: str = "mori"

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Writes the activity 1 - iota as the rate."""
        cycles = pause.recent[-(CYCLES - 1) :]
        acting_s = sum(cycle.pause_s for cycle in cycles) + pause.elapsed_s
        reasoning_s = sum(cycle.turn_s if cycle.turn_s > 0.0 else TURN_S for cycle in cycles) + TURN_S
        activity = reasoning_s / (reasoning_s + acting_s)
        # activity falls to a 20th less after so much more acting
        valid_s = max(5.0, 0.05 * (reasoning_s + acting_s))
        if pause.end_keep_s is not None:
            activity, valid_s = 0.0, inf
        return Retention(activity, valid_s, 0.0, system.tiers[-1].tier, None, f"idleness {1.0 - activity:.3f}")

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """Least active first."""
        return extent.rate


@dataclass(frozen=True, slots=True)
class Gdsf(Lru):
    """Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1): priority = L + frequency * cost / size, L being the priority of
    what was evicted last when the entry was last used. Cost: seconds to recompute; size: bytes; both of the whole context."""

    name: str = "gdsf"

    def retention(self, pause: PauseView, knowledge: PauseKnowledge, system: SystemView) -> Retention:
        """Asked once per pause: the rate carries the priority."""
        size = max(1, pause.context_tokens // system.cost.block_tokens) * system.cost.block_bytes
        worth = max(1, pause.turns) * _lost(pause, system) / size
        device = system.tier("device")
        inflation = device.evicted if device is not None else 0.0
        return Retention(
            inflation + worth, inf, 0.0, system.tiers[-1].tier, None, f"gdsf {inflation:.3g} + {worth:.3g}"
        )

    def priority(self, extent: ExtentView, tier: TierName, system: SystemView) -> float:
        """As written at the last use; what nobody uses any more goes first."""
        return extent.rate
