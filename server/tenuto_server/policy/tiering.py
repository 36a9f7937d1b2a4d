"""What a block saves by lying on a tier, and what follows: eviction order, offload, spill, split restore. Pure functions.

All costs are seconds. The index of an extent on a tier is (return rate) x (seconds saved per return) / bytes: seconds of
work saved per byte and second, the unit of tier prices.
"""

from __future__ import annotations

from math import sqrt

from tenuto_server.policy.views import CostView, ExtentView, SystemView, TierName, TierView

UNWANTED = -1e12
"""Nobody is expected back: such extents rank by last use, below every extent with a positive index (at this offset a
float still tells a tenth of a millisecond apart)."""
DISK_HORIZON_S = 4 * 3600.0
"""How soon an extent used only once must be expected back to be worth a write to disk: KVCT has 95 % of human gaps
within one hour and 98 % within four."""
CROWDING = 1e-12
"""Factor on the index of what lies on a tier of which its tenant holds more than its share: below anything that a tenant within
its share wants, and above what nobody does."""
EARLY_MARGIN = 2.0
"""Copy down early what lies within this factor of the price: it is next to go."""
EARLY_FREE_SHARE = 0.1
"""A tier with less free than this is about to have a price."""


def recompute_s(start: int, blocks: int, cost: CostView) -> float:
    """Seconds to compute ``blocks`` blocks from token ``start``, the delay of waiting turns included.

    Token x takes a + b * x, so n tokens from s take n * (a + b * (s + n / 2)).
    """
    tokens = blocks * cost.block_tokens
    return tokens * (cost.prefill_a_s + cost.prefill_b_s * (start + 0.5 * tokens)) * (1.0 + cost.waiting)


def saved_s(extent: ExtentView, tier: TierName, system: SystemView) -> float:
    """Seconds that a return saves if the extent is on ``tier`` rather than where it would land from there.

    Each cost is min(load, recompute). It lands on the next tier down that accepts it: has it already, or room for it, or
    holds something of a lower index. 0 for a tier that does not exist.
    """
    blocks, cost = extent.blocks, system.cost
    tokens = blocks * cost.block_tokens
    # recompute_s, written out: this is asked for every extent that changes.
    below = tokens * (cost.prefill_a_s + cost.prefill_b_s * (extent.start + 0.5 * tokens)) * (1.0 + cost.waiting)
    scale = extent.rate / (blocks * cost.block_bytes)
    # A load slower than recompute never gets below it, so min(load, recompute) needs no minimum.
    for view in reversed(system.tiers):
        saved = below - view.load_s_per_block * blocks
        if view.tier == tier:
            return saved if saved > 0.0 else 0.0
        if saved > 0.0 and _accepts(extent, view, saved * scale):
            below -= saved
    return 0.0


def saved_by_tier(extent: ExtentView, system: SystemView) -> list[float]:
    """``saved_s`` for every tier of ``system``, in its order, in one pass."""
    blocks = extent.blocks
    below = recompute_s(extent.start, blocks, system.cost)
    scale = extent.rate / (blocks * system.cost.block_bytes)
    out = []
    for view in reversed(system.tiers):
        saved = below - view.load_s_per_block * blocks
        if saved <= 0.0:
            out.append(0.0)
            continue
        out.append(saved)
        if _accepts(extent, view, saved * scale):
            below -= saved
    out.reverse()
    return out


def _accepts(extent: ExtentView, view: TierView, index: float) -> bool:
    if view.tier in extent.on:
        return True
    if view.tier == "disk" and not worth_disk(extent):
        return False
    if view.tier in extent.crowds:
        index *= CROWDING
    # A price below 0 is held by what nobody wants.
    return view.free_blocks >= extent.blocks or (index > view.price and index > 0.0)


def worth_disk(extent: ExtentView) -> bool:
    """The spill filter: used at least twice, or expected back within the disk's horizon."""
    return extent.uses >= 2 or extent.rate * DISK_HORIZON_S >= 1.0


def index_of(extent: ExtentView, tier: TierName, system: SystemView) -> float:
    """Eviction priority on ``tier``: the index where anybody is expected back, else last use (see UNWANTED).

    A copy below a faster one costs nothing to lose, as long as that one is there: 0, before whatever is the only one. Tenants
    above their share of the tier make way for those within theirs.
    """
    crowds = tier in extent.crowds
    if extent.rate <= 0.0:
        return (2.0 * UNWANTED if crowds else UNWANTED) + extent.last_used_s
    if extent.on and tier != "device":
        for view in system.tiers:
            if view.tier == tier:
                break
            if view.tier in extent.on:
                return 0.0
    index = extent.rate * saved_s(extent, tier, system) / (extent.blocks * system.cost.block_bytes)
    return index * CROWDING if crowds else index


def keep_below(extent: ExtentView, tier: TierName, system: SystemView) -> TierName | None:
    """The tier that an extent leaving ``tier`` under pressure should be copied to; None where the copy buys nothing:
    a lower tier has it, recompute is as fast, nobody comes back for it, or what lies there is worth more."""
    blocks = extent.blocks
    recompute = recompute_s(extent.start, blocks, system.cost)
    scale = extent.rate / (blocks * system.cost.block_bytes)
    below = False
    for view in system.tiers:
        if view.tier == tier:
            below = True
            continue
        if not below or view.capacity_blocks <= 0:
            continue
        if view.tier in extent.on:
            return None
        saved = recompute - view.load_s_per_block * blocks
        if saved <= 0.0:
            continue
        if system.trust <= 0.0:
            return view.tier  # no index is believed in: plain LRU, down from tier to tier
        if extent.rate <= 0.0:
            # Shared (a head, a sibling's prefix): it may serve a session that is still unknown, in spare room. Uses do not
            # tell: one session's turns are uses too, and what it leaves behind must not take links and room from the living.
            wanted = extent.users >= 2 and view.free_blocks >= blocks
        else:
            wanted = _accepts(extent, view, saved * scale)
        if wanted:
            return view.tier
    return None


def offload_early(extent: ExtentView, system: SystemView) -> bool:
    """True when the device will soon want this room and a lower tier deserves the copy now.

    Near the device's price (or, without one yet, short of room), with the return farther off than the round trip, and a
    lower tier that takes it and does not have it.
    """
    if extent.rate <= 0.0 or len(extent.on) > 1:
        return False
    device = system.tier("device")
    if device is None:
        return False
    target = keep_below(extent, "device", system)
    lower = system.tier(target) if target is not None else None
    if lower is None:
        return False
    if extent.rate * 2.0 * lower.load_s_per_block * extent.blocks >= 1.0:
        return False
    if device.price > 0.0:
        return index_of(extent, "device", system) <= device.price * EARLY_MARGIN
    return device.free_blocks < device.capacity_blocks * EARLY_FREE_SHARE


def split(start: int, blocks: int, tier: TierName, system: SystemView) -> int:
    """How many leading blocks to compute while the rest loads, so that the later of both ends soonest.

    With T tokens a block and L seconds to load one, s blocks compute in o + s*T*(a + b*(start + s*T/2)) and the others
    load in (blocks - s)*L; equating both gives a quadratic in s, whose root lies next to the best whole number. With q
    other turns held up by computing, one more block computed gains L and costs them q*T*(a + b*start): none where that is
    more.
    """
    view = system.tier(tier)
    if view is None or blocks <= 0:
        return max(0, blocks)
    cost, load = system.cost, view.load_s_per_block
    tokens = cost.block_tokens
    linear = tokens * (cost.prefill_a_s + cost.prefill_b_s * start)
    square = 0.5 * cost.prefill_b_s * tokens * tokens
    spare = blocks * load - cost.step_overhead_s
    if spare <= linear:
        # All of it is loaded before even one block could be computed.
        return 0
    if max(0.0, cost.waiting - 1.0) * linear >= load:
        # A block computed holds all others up, for longer in sum than this turn waits for one loaded.
        return 0
    # This form of the root loses nothing to cancellation where b is small or 0.
    both = linear + load
    root = 2.0 * spare / (both + sqrt(both * both + 4.0 * square * spare))
    low = min(blocks, int(root))
    high = min(blocks, low + 1)

    def ends(s: int) -> float:
        return max(cost.step_overhead_s + s * (linear + square * s) if s else 0.0, (blocks - s) * load)

    return low if ends(low) <= ends(high) else high
