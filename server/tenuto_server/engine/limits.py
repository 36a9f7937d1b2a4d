"""How fast a tenant may send hints. Owner: the engine. Time is an argument."""

from __future__ import annotations

from collections import OrderedDict

_TENANTS_MAX = 4096


class RateLimits:
    """A token bucket per tenant: ``rate_per_s`` actions in the long run, ``burst`` at once."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate, self._burst = rate_per_s, float(burst)
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, tenant: str, count: int, now_ns: int) -> bool:
        """Whether ``count`` more actions are within the limit now; they are counted only if so."""
        level, then = self._buckets.get(tenant, (self._burst, now_ns))
        level = min(self._burst, level + (now_ns - then) / 1e9 * self._rate)
        allowed = level >= count
        self._buckets[tenant] = (level - count if allowed else level, now_ns)
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > _TENANTS_MAX:
            self._buckets.popitem(last=False)
        return allowed
