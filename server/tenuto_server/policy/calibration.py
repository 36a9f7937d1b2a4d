"""What pauses have taught: their lengths by tenant, kind and key, whether they end, and how far forecasts can be trusted.

PauseStats owns all of it; the engine's session table holds one and teaches it. Memory is bounded, every observation costs
O(levels), and the same observations in the same order give the same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import exp, log

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy.histogram import BIN_LOG_WIDTH, BINS, Histogram, bin_of, masses_of, quantiles_of
from tenuto_server.policy.index import LogNormal
from tenuto_server.policy.priors import KINDS, LENGTH, P_RETURN
from tenuto_server.policy.views import History

QUANTILES = 64
# Shrinkage: how many observations the level above counts for. Keys: 5 pseudo-calls (the optimum on AgentCgroup's
# tool + program keys is flat from 1 to 20). Tenants: 10 (KVCT, tool gaps: between-session log-sd 0.37 against 1.20 within).
_K_KEY, _K_TENANT, _K_KIND = 5.0, 10.0, 20.0
_CAP_KEY, _CAP_TENANT, _CAP_KIND = 200.0, 1000.0, 4000.0
_K_RETURN = 20.0

_LOGIT_FIRST = log(0.8 / 0.2)
"""A forecast from a client never scored before weighs 0.8: most forecasts are honest, and the first lies are cheap."""
_WEIGHT_MAX = 0.95
_WEIGHT_MIN = 0.02
_GAIN_DECAY = 0.98
_GAIN_RANGE = (-10.0, 8.0)
_K_SCORE = 4.0
_SCORE_WINDOW = 50.0

_PRIOR: dict[PauseKind, tuple[float, ...]] = {kind: masses_of(LENGTH[kind]) for kind in KINDS}


def _clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


class Score:
    """How a stream of forecasts did: bias, spread, and log-score against the empirical distribution.

    ``shift``: mean log error of the median. ``spread2``: mean squared error in units of the stated spread. ``gain``:
    decayed sum of (log-score of the calibrated forecast - log-score of what was known without it), in nats.
    """

    __slots__ = ("gain", "n", "shift", "spread2")

    def __init__(self, parent: Score | None = None) -> None:
        self.n: float = 0.0
        self.shift: float = parent.shift if parent else 0.0
        self.spread2: float = parent.spread2 if parent else 1.0
        # A good name opens new keys only half-way; a bad one follows the tenant into every new key.
        self.gain: float = _clip(parent.gain, -8.0, 2.0) if parent else 0.0

    def trust(self) -> tuple[float, float, float]:
        """(weight, log-shift, spread factor), see ``PauseKnowledge.trust``."""
        # Two models mixed by past log-score: Bayesian model averaging with forgetting.
        weight = min(_WEIGHT_MAX, 1.0 / (1.0 + exp(-_LOGIT_FIRST - self.gain)))
        return (weight if weight >= _WEIGHT_MIN else 0.0), self.shift, self.spread2**0.5

    def add_length(self, forecast: Forecast, log_length: float, log_density_known: float) -> float:
        """Scores a pause that ended; returns the probability integral transform of its length, 0..1."""
        calibrated = LogNormal.read(forecast, self.shift, self.spread2**0.5)
        self._gain(calibrated.log_density(log_length) - log_density_known)
        pit = calibrated.cdf([exp(log_length)])[0]
        stated = LogNormal.read(forecast)
        rate = 1.0 / (min(self.n, _SCORE_WINDOW) + _K_SCORE + 1.0)
        error = log_length - stated.log_median - self.shift
        # Clipped, so that one pause of a wrong kind does not move the median of all.
        bound = 3.0 * max(stated.sigma * self.spread2**0.5, 0.5)
        self.shift = _clip(self.shift + rate * _clip(error, -bound, bound), -5.0, 5.0)
        self.spread2 = _clip(self.spread2 + rate * (min(64.0, (error / stated.sigma) ** 2) - self.spread2), 0.1, 64.0)
        self.n += 1.0
        return pit

    def add_return(self, claimed: float, known: float, returned: bool) -> None:
        """Scores a claimed probability of return against the learned one."""
        claimed, known = _clip(claimed, 0.01, 0.99), _clip(known, 0.01, 0.99)
        self._gain(log(claimed / known) if returned else log((1.0 - claimed) / (1.0 - known)))

    def _gain(self, nats: float) -> None:
        self.gain = _clip(self.gain * _GAIN_DECAY + _clip(nats, -4.0, 2.0), *_GAIN_RANGE)


class _Node:
    """What one level has seen: lengths, ends, and the quantiles last derived (valid for ``stamp``)."""

    __slots__ = ("ended", "ewma_s", "lengths", "mean_s", "n", "quantiles", "returned", "score", "stamp")

    def __init__(self, cap: float) -> None:
        self.lengths = Histogram(cap)
        self.returned = 0.0
        self.ended = 0.0
        self.score: Score | None = None
        self.quantiles: tuple[float, ...] = ()
        self.stamp: tuple[int, ...] = ()
        self.n = 0
        self.mean_s = self.ewma_s = 0.0

    def add(self, length_s: float) -> None:
        """A pause of this length was observed."""
        self.lengths.add(length_s)
        self.n += 1
        self.mean_s += (length_s - self.mean_s) / self.n
        self.ewma_s = length_s if self.n == 1 else 0.5 * (self.ewma_s + length_s)

    def count(self, returned: bool, cap: float) -> None:
        if returned:
            self.returned += 1.0
        else:
            self.ended += 1.0
        if self.returned + self.ended > cap:
            self.returned *= 0.5
            self.ended *= 0.5


class PauseStats:
    """Implements ``PauseKnowledge``. At most ``keys_max`` (tenant, kind, key) and ``tenants_max`` (tenant, kind) are
    remembered, the least recently taught forgotten first; one of each takes about a kilobyte."""

    def __init__(self, *, keys_max: int = 4096, tenants_max: int = 4096) -> None:
        self._keys_max = keys_max
        self._tenants_max = tenants_max
        self._kinds: dict[PauseKind, _Node] = {kind: _Node(_CAP_KIND) for kind in KINDS}
        self._tenants: OrderedDict[tuple[str, PauseKind], _Node] = OrderedDict()
        self._keys: OrderedDict[tuple[str, PauseKind, str], _Node] = OrderedDict()
        self._scores: OrderedDict[str, Score] = OrderedDict()
        self._pit = [0] * 10

    # --- what a policy asks (PauseKnowledge) ---

    def quantiles(self, tenant: str, kind: PauseKind, key: str | None) -> tuple[float, ...]:
        """Lengths in seconds at probabilities (i + 0.5) / 64, shrunk key -> (tenant, kind) -> kind -> prior.

        The same tuple is returned until a level below it has grown by about a tenth.
        """
        chain = [node for node, _ in self._chain(tenant, kind, key)]
        deepest = chain[-1]
        stamp = tuple(node.lengths.epoch for node in chain)
        if deepest.stamp != stamp:
            deepest.quantiles = quantiles_of(self._masses(tenant, kind, key), QUANTILES)
            deepest.stamp = stamp
        return deepest.quantiles

    def p_return(self, tenant: str, kind: PauseKind) -> float:
        """Learned probability of return, shrunk (tenant, kind) -> kind -> prior with 20 pseudo-pauses a level."""
        p = P_RETURN[kind]
        for node in (self._kinds[kind], self._tenants.get((tenant, kind))):
            if node is not None:
                p = (_K_RETURN * p + node.returned) / (_K_RETURN + node.returned + node.ended)
        return p

    def trust(self, tenant: str, kind: PauseKind, key: str | None) -> tuple[float, float, float]:
        """See ``PauseKnowledge``; a key never scored has the trust of its tenant for that kind, else of its tenant."""
        score = self._score_of(tenant, kind, key)
        return score.trust() if score else Score().trust()

    def history(self, tenant: str, kind: PauseKind, key: str | None) -> History:
        """See ``PauseKnowledge``."""
        node = self._tenants.get((tenant, kind)) if key is None else self._keys.get((tenant, kind, key))
        return History(node.n, node.mean_s, node.ewma_s) if node is not None else History()

    # --- what the engine teaches ---

    def observe(
        self,
        tenant: str,
        kind: PauseKind,
        key: str | None,
        length_s: float,
        forecast: Forecast | None = None,
        forecast_at_s: float = 0.0,
    ) -> None:
        """A pause ended after ``length_s`` seconds. ``forecast``: what the client said of it, ``forecast_at_s`` seconds
        into the pause (None: nothing). Of several forecasts of one pause the engine passes the first."""
        if forecast is not None and length_s > forecast_at_s:
            self._score_length(tenant, kind, key, length_s, forecast, forecast_at_s)
        key_node, tenant_node = self._nodes(tenant, kind, key)
        for node, cap in ((self._kinds[kind], _CAP_KIND), (tenant_node, _CAP_TENANT), (key_node, _CAP_KEY)):
            if node is not None:
                node.add(length_s)
                node.count(True, cap)

    def observe_censored(
        self,
        tenant: str,
        kind: PauseKind,
        elapsed_s: float,
        key: str | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        """A session ended, or was given up, ``elapsed_s`` seconds into a pause: it never returned.

        ``elapsed_s`` says nothing about the lengths of pauses that do end; a negative one is a caller's mistake.
        """
        assert elapsed_s >= 0.0
        if forecast is not None and forecast.p_return is not None:
            known = self.p_return(tenant, kind)
            for score in self._scores_for(tenant, kind, key):
                score.add_return(forecast.p_return, known, returned=False)
        _, tenant_node = self._nodes(tenant, kind, None)
        self._kinds[kind].count(False, _CAP_KIND)
        tenant_node.count(False, _CAP_TENANT)

    def metrics(self) -> dict[str, float | dict[str, float]]:
        """Sizes, pauses seen by kind, and the histogram of forecasts' probability integral transforms in ten bins: flat
        where forecasts are calibrated, high at the ends where they are too sure."""
        return {
            "pause_keys": float(len(self._keys)),
            "pause_tenants": float(len(self._tenants)),
            "pauses_returned": {kind: node.returned for kind, node in self._kinds.items()},
            "pauses_ended": {kind: node.ended for kind, node in self._kinds.items()},
            "forecast_pit": {f"{i / 10:.1f}": float(count) for i, count in enumerate(self._pit)},
        }

    # --- inside ---

    def _chain(self, tenant: str, kind: PauseKind, key: str | None) -> Iterator[tuple[_Node, float]]:
        """The levels that exist, from general to particular, with the pseudo-count of what lies above each."""
        yield self._kinds[kind], _K_KIND
        node = self._tenants.get((tenant, kind))
        if node is not None:
            yield node, _K_TENANT
        if key is not None:
            node = self._keys.get((tenant, kind, key))
            if node is not None:
                yield node, _K_KEY

    def _masses(self, tenant: str, kind: PauseKind, key: str | None) -> list[float]:
        masses = list(_PRIOR[kind])
        for node, k in self._chain(tenant, kind, key):
            scale = 1.0 / (k + node.lengths.total)
            masses = [(k * mass + count) * scale for mass, count in zip(masses, node.lengths.counts, strict=True)]
        return masses

    def _log_density(self, tenant: str, kind: PauseKind, key: str | None, length_s: float, after_s: float) -> float:
        """Log density of log(length - after) as known without a forecast, given that the pause outlives ``after_s``."""
        i = bin_of(length_s)
        if after_s <= 0.0:
            mass = _PRIOR[kind][i]
            for node, k in self._chain(tenant, kind, key):
                mass = (k * mass + node.lengths.counts[i]) / (k + node.lengths.total)
            return log(max(mass, 1e-9) / BIN_LOG_WIDTH)
        masses = self._masses(tenant, kind, key)
        left = max(sum(masses[bin_of(after_s) : BINS]), masses[i], 1e-9)
        return log(max(masses[i], 1e-9) / (left * BIN_LOG_WIDTH) * (length_s - after_s) / length_s)

    def _score_of(self, tenant: str, kind: PauseKind, key: str | None) -> Score | None:
        node = self._keys.get((tenant, kind, key)) if key is not None else None
        if node is not None and node.score is not None:
            return node.score
        node = self._tenants.get((tenant, kind))
        if node is not None and node.score is not None:
            return node.score
        return self._scores.get(tenant)

    def _scores_for(self, tenant: str, kind: PauseKind, key: str | None) -> list[Score]:
        """The scores of all levels, most particular first, made where missing."""
        top = self._scores.setdefault(tenant, Score())
        self._scores.move_to_end(tenant)
        if len(self._scores) > self._tenants_max:
            self._scores.popitem(last=False)
        key_node, tenant_node = self._nodes(tenant, kind, key)
        if tenant_node.score is None:
            tenant_node.score = Score(top)
        if key_node is None:
            return [tenant_node.score, top]
        if key_node.score is None:
            key_node.score = Score(tenant_node.score)
        return [key_node.score, tenant_node.score, top]

    def _score_length(
        self, tenant: str, kind: PauseKind, key: str | None, length_s: float, forecast: Forecast, after_s: float
    ) -> None:
        known = self._log_density(tenant, kind, key, length_s, after_s)
        log_length = log(max(length_s - after_s, 1e-3))
        scores = self._scores_for(tenant, kind, key)
        pits = [score.add_length(forecast, log_length, known) for score in scores]
        self._pit[min(9, int(pits[0] * 10))] += 1
        if forecast.p_return is not None:
            p = self.p_return(tenant, kind)
            for score in scores:
                score.add_return(forecast.p_return, p, returned=True)

    def _nodes(self, tenant: str, kind: PauseKind, key: str | None) -> tuple[_Node | None, _Node]:
        """The nodes of (tenant, kind, key) and (tenant, kind), made where missing and marked as recently taught."""
        tenant_node = self._tenants.get((tenant, kind))
        if tenant_node is None:
            tenant_node = self._tenants[tenant, kind] = _Node(_CAP_TENANT)
            if len(self._tenants) > self._tenants_max:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end((tenant, kind))
        if key is None:
            return None, tenant_node
        key_node = self._keys.get((tenant, kind, key))
        if key_node is None:
            key_node = self._keys[tenant, kind, key] = _Node(_CAP_KEY)
            if len(self._keys) > self._keys_max:
                self._keys.popitem(last=False)
        else:
            self._keys.move_to_end((tenant, kind, key))
        return key_node, tenant_node
