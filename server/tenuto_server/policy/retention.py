"""How much a paused session's KV deserves to stay: from evidence to a pause distribution to index, lease and prefetch.

Pure functions of frozen views. The caches below hold results of pure functions only.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, floor, inf, log

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy.calibration import GIVE_UP_S, GONE_BELOW
from tenuto_server.policy.decision import Retention
from tenuto_server.policy.distributions import Component, Empirical, LogNormal, Looked, Part
from tenuto_server.policy.fates import depth_of
from tenuto_server.policy.index import Curve, Outlook, mixture
from tenuto_server.policy.priors import KIND_SHARE
from tenuto_server.policy.tiering import saved_by_tier
from tenuto_server.policy.views import ExtentView, PauseKnowledge, PauseView, SystemView, TierName, TierView

CHANGE = 1.2
"""A decision is worth revisiting when its index has moved by this factor (1.1: two looks in five more, the same misses)."""
REVISIT_MIN_S = 0.1
REVISIT_MIN_SHARE = 0.05
"""Never revisited sooner than this and this share of the time already waited."""
LOOK_AGAIN_S = 600.0
"""What pauses teach in general changes slowly: a curve serves a pause for so long, or until its wait has doubled."""
LEASE_MAX_S = 3600.0
LEASE_SHARE = 0.95
"""A lease ends when this share of the possible returns has come, even where room is free: what is promised must be meant."""
LEAD_FACTOR = 1.5
"""A prefetch starts this many restore times before the return: the link may be busy."""
PREFETCH_SHARE = 0.1
"""Prefetch is timed for the return at this quantile of what can still come."""
RESUME_SIGMA = 0.5
RESUME_LEAD_SHARE = 0.03
RESUME_LEAD_MIN_S = 1.0
"""A stated return: lognormal around the lead at which it was stated. A view that no longer shows it (it says when the
return comes, not when that was said) is read as the shortest plausible one, a share of the whole pause."""
LOOK_MIN = 0.02
"""A look of less than this share of the precision that its kind of pause has anyway is none."""
WEIGHT_MAX = 0.97
"""However good a client's forecasts were, some miss by far: what outlasts its forecast is worth what it would be without."""
_FIRST_BLOCK = ExtentView(0, 1, 1, 0.0, 0.0, 2)
P_RETURN_STATED = 0.99
P_RETURN_ENDED = 0.3
"""Assumed: a session that its harness ended but asked to keep comes back this often (no corpus records it)."""


def progress_forecast(elapsed_s: float, progress: float) -> Forecast:
    """Reads "a share ``progress`` is done after ``elapsed_s`` seconds" as a forecast of the rest of the pause.

    remaining = elapsed * (1 - q) / q, with a p90 of 1.15 times that at q = 0.9 (median error below 10 % there, "Ask the
    Tool, Don't Guess", 2609.18849) and wider the less is done. At q = 0 nothing is known: InferCept's remaining = elapsed.
    """
    if progress <= 0.01:
        return Forecast(p50_s=elapsed_s, p90_s=10.0 * elapsed_s)
    rest = elapsed_s * (1.0 - progress) / progress
    return Forecast(p50_s=rest, p90_s=rest * exp(0.15 + 2.0 * max(0.0, 0.9 - progress)))


# Parameters are rounded before they meet the caches: each step is small beside the uncertainty that it stands for.


@lru_cache(maxsize=4096)
def _round_share(step: int) -> float:
    return 1.0 / (1.0 + exp(-0.1 * step))


def _share(p: float) -> float:
    """A probability, rounded to a tenth of a logit (what is within a millionth of 0 or 1 becomes that)."""
    if p <= 1e-6 or p >= 1.0 - 1e-6:
        return 0.0 if p < 0.5 else 1.0
    return _round_share(floor(10.0 * log(p / (1.0 - p)) + 0.5))


def _forecast_part(log_median: float, sigma: float) -> LogNormal:
    """Spread rounded to 10 % steps, median to an eighth of the spread either way."""
    sigma = min(4.0, exp(0.1 * floor(10.0 * log(max(0.02, sigma)) + 0.5)))
    step = 0.25 * sigma
    return LogNormal(floor(log_median / step + 0.5) * step, sigma)


def _said_part(pause: PauseView, knowledge: PauseKnowledge, said: LogNormal, at_s: float, known: Part) -> Part:
    """The client's word as a distribution. A forecast made as the pause began is a posterior: what its kind of pause is known
    for, after a look at this one. The look - precision 1/said^2 - 1/kind^2 - is what it adds to everything the server knows
    itself; read as a whole, the kind's own spread would count twice. A forecast as wide as its kind adds nothing. ``known``:
    what is known without it."""
    if at_s > 0.0 or pause.resume_at_s is not None or pause.kind == "unknown" or not isinstance(known, Empirical):
        return _forecast_part(said.log_median, said.sigma)
    mean, sd = knowledge.scale(pause.tenant, pause.kind)
    quantiles = known.quantiles
    precision = 1.0 / (said.sigma * said.sigma) - 1.0 / (sd * sd)
    if precision * sd * sd < LOOK_MIN:
        return Empirical(quantiles)
    middle = (said.log_median / (said.sigma * said.sigma) - mean / (sd * sd)) / precision
    sigma = exp(0.05 * floor(10.0 * log(1.0 / precision) + 0.5))
    middle = floor(middle / (0.1 * sigma) + 0.5) * 0.1 * sigma
    if not Looked.fits(quantiles, middle, sigma):
        return _forecast_part(said.log_median, said.sigma)
    return Looked(quantiles, middle, sigma)


def _after(at_s: float) -> float:
    """From when on experience is conditioned, for a forecast given later than the pause's start: rounded to 5 %."""
    return exp(0.05 * floor(20.0 * log(at_s) + 0.5)) if at_s > 0.05 else 0.0


def kind_shares(pause: PauseView) -> list[tuple[float, PauseKind]]:
    """What the pause is, with probabilities: its kind if known, else the session's own history with a Laplace prior
    (one pseudo-pause, divided as KVCT's pauses are; counts of "unknown" tell nothing)."""
    if pause.kind != "unknown":
        return [(1.0, pause.kind)]
    counts: dict[PauseKind, float] = dict(KIND_SHARE)
    for kind, n in pause.kind_counts:
        if kind != "unknown":
            counts[kind] = counts.get(kind, 0.0) + n
    total = sum(counts.values())
    return [(share / total, kind) for kind, share in counts.items()]


def _known(pause: PauseView, knowledge: PauseKnowledge, at_s: float, weight: float) -> list[Component]:
    """What is known without the client, as of ``at_s`` seconds into the pause, with total weight ``weight``."""
    depth = depth_of(pause.context_tokens)
    if pause.kind != "unknown" and at_s <= 0.0:
        quantiles = knowledge.quantiles(pause.tenant, pause.kind, pause.key, pause.rhythm)
        part = Empirical(quantiles if isinstance(quantiles, tuple) else tuple(quantiles))
        return [(weight, _share(knowledge.p_return(pause.tenant, pause.kind, pause.key, pause.rhythm, depth)), part)]
    shares = kind_shares(pause)
    parts: list[Component] = []
    left = 0.0
    for share, kind in shares:
        key, rhythm = (pause.key, pause.rhythm) if len(shares) == 1 else (None, None)
        quantiles = knowledge.quantiles(pause.tenant, kind, key, rhythm)
        part = Empirical(quantiles if isinstance(quantiles, tuple) else tuple(quantiles), at_s)
        p_return = knowledge.p_return(pause.tenant, kind, key, rhythm, depth)
        if at_s > 0.0:
            # Bayes: having lasted at_s speaks for kinds that last, and for never returning.
            survival = part.survival()
            alive = p_return * survival + 1.0 - p_return
            p_return = p_return * survival / alive if alive > 0.0 else 0.0
            share *= alive
        left += share
        parts.append((share, p_return, part))
    scale = weight / left if left > 0.0 else 0.0
    if len(parts) == 1:
        return [(weight, _share(parts[0][1]), parts[0][2])]
    rounded = [(floor(share * scale * 64.0 + 0.5) / 64.0, _share(p), part) for share, p, part in parts]
    total = sum(share for share, _, _ in rounded)
    return [(share * weight / total, p, part) for share, p, part in rounded if share > 0.0]


def pause_curve(
    pause: PauseView, knowledge: PauseKnowledge, *, hear: bool, trust: float = 1.0
) -> tuple[Curve, float, float]:
    """The pause as (curve, the pause's elapsed time on it, weight of the client's words).

    The curve starts when the client last spoke of the pause's length, or with the pause. ``hear`` False ignores it;
    ``trust`` is a factor on the weight it has earned.
    """
    said: LogNormal | None = None
    weight, at_s, p_said = 0.0, 0.0, P_RETURN_STATED
    if hear and (pause.resume_at_s is not None or pause.forecast is not None):
        weight, shift, factor = knowledge.trust(pause.tenant, pause.kind, pause.key)
        if pause.resume_at_s is not None:
            lead = max(RESUME_LEAD_MIN_S, RESUME_LEAD_SHARE * pause.resume_at_s, pause.resume_at_s - pause.elapsed_s)
            at_s = max(0.0, pause.resume_at_s - lead)
            said = LogNormal(log(max(1e-3, pause.resume_at_s - at_s)), RESUME_SIGMA)
        elif pause.forecast is not None:
            at_s = min(pause.forecast_at_s, pause.elapsed_s)
            said = LogNormal.read(pause.forecast, shift, factor)
            if pause.forecast.confidence is not None:
                weight *= pause.forecast.confidence
            if pause.forecast.p_return is not None:
                p_said = pause.forecast.p_return
    weight = min(WEIGHT_MAX, floor(weight * trust * 20.0 + 0.5) / 20.0)
    if said is None or weight <= 0.0:
        weight, at_s = 0.0, 0.0
    x = max(0.0, pause.elapsed_s - at_s)
    components = _known(pause, knowledge, _after(at_s), 1.0 - weight)
    if weight > 0.0 and said is not None:
        if pause.resume_at_s is None and pause.forecast is not None and pause.forecast.p_return is None:
            known = sum(share * p for share, p, _ in components)
            p_said = known / (1.0 - weight) if weight < 1.0 else P_RETURN_STATED
        components.append((weight, _share(p_said), _said_part(pause, knowledge, said, at_s, components[0][2])))
    if pause.end_keep_s is not None and hear:
        # Asked to be kept, or announced by somebody whose announcements proved false.
        back = P_RETURN_ENDED if pause.end_keep_s > pause.elapsed_s else knowledge.p_return_ended(pause.tenant)
        components = [(share, _share(p * back), part) for share, p, part in components]
    curve = mixture(tuple(components))
    alive_x = min(pause.alive_until_s, pause.elapsed_s) - at_s if hear else 0.0
    if alive_x > 0.0 and curve.total > 0.0 and curve.end_mass > 0.0:
        # Alive at alive_x: never returning is as likely then as at the start, instead of grown by the wait.
        end = curve.end_mass * (curve.total - curve.mass_at(alive_x)) / curve.total
        curve = mixture(tuple(components), exp(0.1 * floor(10.0 * log(max(end, 1e-6)) + 0.5)))
    return curve, x, weight


def _look(pause: PauseView, knowledge: PauseKnowledge, *, hear: bool, trust: float) -> Outlook:
    """The pause's curve: the one it was last looked at with, while nothing was said since and the wait is not much longer."""
    last, elapsed_s = pause.outlook, pause.elapsed_s
    if last is not None and last.trust == trust and elapsed_s < last.until_s:
        return last
    curve, x, weight = pause_curve(pause, knowledge, hear=hear, trust=trust)
    moving = pause.resume_at_s is not None or pause.alive_until_s > 0.0 or pause.end_keep_s is not None
    until_s = elapsed_s if moving else elapsed_s + max(LOOK_AGAIN_S, elapsed_s)
    return Outlook(curve, elapsed_s - x, weight, trust, until_s)


def _values(pause: PauseView, rate: float, system: SystemView) -> list[tuple[TierView, float, float]]:
    """For each tier: (tier, seconds saved per byte by one return, seconds to restore the session from it)."""
    blocks = max(1, pause.context_tokens // system.cost.block_tokens)
    # As an extent that the tiers below would take: whether they do is the question at the next tier's turn.
    extent = ExtentView(0, blocks, 1, rate, 0.0, 2)
    size = blocks * system.cost.block_bytes
    return [
        (view, saved / size, view.load_s_per_block * blocks)
        for view, saved in zip(system.tiers, saved_by_tier(extent, system), strict=True)
    ]


def decide(pause: PauseView, knowledge: PauseKnowledge, system: SystemView, *, hear: bool) -> Retention:
    """Index, revisit time, lease and prefetch of a paused session.

    The rate is the Gittins index times the share of the KV that the next prompt is expected to begin with.
    """
    keep_s = pause.end_keep_s if hear else None
    if keep_s is not None and pause.elapsed_s >= keep_s and knowledge.p_return_ended(pause.tenant) < GONE_BELOW:
        # Asked about once more: whether the word was true is judged then.
        valid_s = GIVE_UP_S - pause.elapsed_s if pause.elapsed_s < GIVE_UP_S else inf
        return Retention(0.0, valid_s, 0.0, system.tiers[-1].tier, None, "ended")
    trust = floor(system.trust * 20.0 + 0.5) / 20.0
    if trust <= 0.0:
        # A rate of 0 for all leaves the order of last use.
        return Retention(0.0, inf, 0.0, system.tiers[-1].tier, None, "plain LRU does better")
    outlook = _look(pause, knowledge, hear=hear, trust=max(0.0, min(1.0, trust - 1.0)))
    curve, weight, x = outlook.curve, outlook.weight, max(0.0, pause.elapsed_s - outlook.from_s)
    index, before = curve.at(x)
    intact = knowledge.p_intact(pause.kind, depth_of(pause.context_tokens))
    valid_s = curve.next_change(x, index, CHANGE) - x if index > 0.0 else inf
    # The rate stands until the next look: it is what the index is half-way.
    rate = (curve.index_at(x + 0.5 * valid_s) if valid_s < inf else index) * intact
    if trust < 1.0 and index > 0.0:
        # 1 / (time since the last use) orders like LRU: a geometric mean of both, since only ratios matter.
        rate = rate**trust * (1.0 + pause.elapsed_s) ** (trust - 1.0)
    soonest = REVISIT_MIN_S + REVISIT_MIN_SHARE * pause.elapsed_s
    if trust < 1.0:
        valid_s = min(valid_s, 0.25 * (1.0 + pause.elapsed_s))
    if valid_s < soonest:
        valid_s = soonest
    until_s = LEASE_MAX_S
    if pause.elapsed_s < GIVE_UP_S:
        # The engine counts it as one that never ends then; it must be asked to do so.
        valid_s = min(valid_s, max(soonest, GIVE_UP_S - pause.elapsed_s))
    if keep_s is not None and keep_s > pause.elapsed_s:
        until_s = keep_s - pause.elapsed_s
        valid_s = min(valid_s, until_s)
    values = _values(pause, rate, system)
    # The extents' rate, as a power of the index, is what meets the prices of the tiers.
    scale = (1.0 + pause.elapsed_s) ** (1.0 - trust) if trust < 1.0 else 1.0
    lease_s, lease_tier = _lease(curve, x, index, before, (intact, scale, min(1.0, trust)), values, system)
    prefetch_s = _prefetch(curve, x, before, intact, values) if weight > 0.0 else None
    reason = f"{pause.kind} {pause.elapsed_s:.1f}s: index {index:.3g}/s, gone {curve.p_end(x, before):.2f}, said {weight:.2f}"
    return Retention(rate, valid_s, min(lease_s, until_s), lease_tier, prefetch_s, reason, outlook)


def _lease(
    curve: Curve,
    x: float,
    index: float,
    before: float,
    reading: tuple[float, float, float],
    values: list[tuple[TierView, float, float]],
    system: SystemView,
) -> tuple[float, TierName]:
    """(seconds, tier): how long the index stays above the price of the highest tier that it clears now.

    The price is what room there has cost lately, not the lowest index held, which is 0 while a slot happens to be free;
    and what is promised is the whole context, so its first block must clear it, which saves least (recompute of a token
    costs more the later it stands). ``reading``: an index i counts for rate = (i * intact) ** trust / scale.
    """
    intact, scale, trust = reading
    first: list[float] | None = None
    for i, (view, value, _) in enumerate(values):
        if value <= 0.0:
            continue  # nothing is kept where loading takes as long as computing
        threshold, price = 0.0, max(view.price, view.cleared)
        if price > 0.0:
            first = saved_by_tier(_FIRST_BLOCK, system) if first is None else first
            least = min(value, first[i] / system.cost.block_bytes) if first[i] > 0.0 else value
            threshold = (price / least * scale) ** (1.0 / trust) / intact
        if index > threshold:
            limit_s = min(x + LEASE_MAX_S, curve.return_by(x, LEASE_SHARE, before))
            gap_s = values[i + 1][2] if i + 1 < len(values) else 0.0
            return min(limit_s, curve.above_until(x, threshold, gap_s, limit_s)) - x, view.tier
    return 0.0, values[-1][0].tier if values else "device"


def _prefetch(
    curve: Curve, x: float, before: float, intact: float, values: list[tuple[TierView, float, float]]
) -> float | None:
    """Seconds until lower-tier KV should start to come up; None where there is none, or the device's price forbids it."""
    if len(values) < 2 or values[0][1] <= 0.0:
        return None
    lead = LEAD_FACTOR * values[1][2]
    threshold = max(0.0, values[0][0].price) / (values[0][1] * intact)
    due = max(x + lead, curve.return_by(x, PREFETCH_SHARE, before))
    from_s = curve.first_above(due, threshold)
    if from_s is None:
        return None
    return max(0.0, from_s - lead - x)
