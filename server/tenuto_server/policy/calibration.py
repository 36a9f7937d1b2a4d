"""What pauses have taught: their lengths by tenant, kind and key, whether they end, and how far forecasts can be trusted.

PauseStats owns all of it; the engine's session table holds one and teaches it. Memory is bounded, every observation costs
O(levels), and the same observations in the same order give the same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from math import log, sqrt
from operator import mul

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy.fates import Fates, depth_of
from tenuto_server.policy.histogram import BIN_LOG_WIDTH, BINS, Histogram, bin_edge, bin_of, masses_of, quantiles_of
from tenuto_server.policy.pace import Rhythm, Traits
from tenuto_server.policy.priors import KINDS, LENGTH, P_RETURN
from tenuto_server.policy.score import Score
from tenuto_server.policy.views import History

QUANTILES = 64
TAIL_HALVINGS = 6
"""What matters where memory is ample happens to the last per cent of the pauses: the tail is told down to 1 in 8,192."""
GIVE_UP_S = 3600.0
"""A pause this long counts as one that never ends, until it does (KVCT: three in four that have lasted an hour never end)."""
# Shrinkage: how many observations the level above counts for. Keys: 5 pseudo-calls (the optimum on AgentCgroup's
# tool + program keys is flat from 1 to 20). Tenants: 10 (KVCT, tool gaps: between-session log-sd 0.37 against 1.20 within).
_K_KEY, _K_RHYTHM, _K_TENANT, _K_KIND = 5.0, 5.0, 10.0, 20.0
_CAP_KEY, _CAP_RHYTHM, _CAP_TENANT, _CAP_KIND = 200.0, 1000.0, 4000.0, 4000.0
_K_RETURN, _K_ENDS = 20.0, 5.0
"""Whether pauses end: pauses that the level above counts for, and below the tenant as many as bring so many ends, since ends are
what is rare (one tool pause in a hundred: of twenty such, one end more or less says nothing)."""

_PRIOR: dict[PauseKind, tuple[float, ...]] = {kind: masses_of(LENGTH[kind]) for kind in KINDS}


def _hazard(masses: tuple[float, ...]) -> list[float]:
    """Each bin's share of the pauses that last that long; of the last bin all."""
    lasting = [*accumulate(reversed(masses))][::-1]
    return [*(mass / left if left > 0.0 else 1.0 for mass, left in zip(masses[:-1], lasting[:-1], strict=True)), 1.0]


_PRIOR_HAZARD = {kind: _hazard(mass) for kind, mass in _PRIOR.items()}
_LOGS = tuple(log(bin_edge(i)) + 0.5 * BIN_LOG_WIDTH for i in range(BINS))
_PRIOR_LOGS: dict[PauseKind, tuple[float, float]] = {
    kind: (sum(map(mul, mass, _LOGS)), sum(m * at * at for m, at in zip(mass, _LOGS, strict=True)))
    for kind, mass in _PRIOR.items()
}
"""Mean and mean square of the log of the lengths that are believed in first."""
LOG_FLOOR_S = 0.05
_CAP_LOGS = 4000.0

_TELLS = 3.0
"""Lengths that a step of a rhythm must have seen to be asked. Of fewer the step before says nearly the same, and costs no curve."""
_ENDS_ASSUMED, _ENDS_FALSE = 4.0, 0.2
"""Announced ends that are assumed of every tenant, and how many of them were false."""
INTACT_MIN = 0.05
"""A pause after which nothing was wanted still counts for its length a little: how long pauses last is asked too."""
GONE_BELOW = 0.1
"""Whoever is announced to have ended and comes back less often than this is gone."""


class _Word:
    """How often a tenant said a thing and how often it proved false; halved now and then, so that a name can mend."""

    __slots__ = ("false", "told")

    def __init__(self) -> None:
        self.told = self.false = 0.0

    def add(self, told: float, false: float) -> None:
        self.told += told
        self.false = min(self.told, self.false + false)
        if self.told > 200.0:
            self.told *= 0.5
            self.false *= 0.5


class _Node:
    """What one level has seen: lengths, ends, and the quantiles last derived (valid for ``stamp``). ``logs``: number of
    lengths, sum of their logs and of the squares of these."""

    __slots__ = (
        "ended",
        "ewma_s",
        "lengths",
        "logs",
        "mean_s",
        "n",
        "quantiles",
        "returned",
        "score",
        "stamp",
    )

    def __init__(self, cap: float) -> None:
        self.lengths = Histogram(cap)
        self.returned = 0.0
        self.ended = 0.0
        self.score: Score | None = None
        self.quantiles: tuple[float, ...] = ()
        self.stamp: tuple[int, ...] = ()
        self.logs = [0.0, 0.0, 0.0]
        self.n = 0
        self.mean_s = self.ewma_s = 0.0

    def add(self, length_s: float, intact: float) -> None:
        """A pause of this length was observed, after which a share ``intact`` of the context was still wanted."""
        # Long pauses more often end in another prompt: what is learned is when something returns that was worth keeping.
        self.lengths.add(length_s, max(INTACT_MIN, intact))
        at, logs = log(max(length_s, LOG_FLOOR_S)), self.logs
        if logs[0] >= _CAP_LOGS:
            logs[:] = [0.5 * value for value in logs]
        logs[0] += 1.0
        logs[1] += at
        logs[2] += at * at
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


def _masses(kind: PauseKind, chain: list[tuple[_Node, float]]) -> list[float]:
    """Bin masses, level by level. What is shrunk is the hazard, each bin's share of the pauses that last that long: few of
    them do, and of how the longest go on a level knows little by itself."""
    hazard = _PRIOR_HAZARD[kind]
    for node, k in chain:
        counts, total = node.lengths.counts, k + node.lengths.total
        hazard = [
            (k * before + count) / (total - gone + count)
            for before, count, gone in zip(hazard, counts, accumulate(counts), strict=True)
        ]
    masses, left = [], 1.0
    for share in hazard:
        mass = left * share
        left -= mass
        masses.append(mass)
    return masses


class PauseStats:
    """Implements ``PauseKnowledge``. At most ``keys_max`` (tenant, kind, key) and ``tenants_max`` (tenant, kind) are
    remembered, the least recently taught forgotten first; one of each takes about a kilobyte."""

    def __init__(self, *, keys_max: int = 8192, tenants_max: int = 4096) -> None:
        self._keys_max = keys_max
        self._tenants_max = tenants_max
        self._kinds: dict[PauseKind, _Node] = {kind: _Node(_CAP_KIND) for kind in KINDS}
        self._tenants: OrderedDict[tuple[str, PauseKind], _Node] = OrderedDict()
        self._keys: OrderedDict[tuple[str, PauseKind, str], _Node] = OrderedDict()
        self._scores: OrderedDict[str, Score] = OrderedDict()
        self._words: OrderedDict[tuple[str, str], _Word] = OrderedDict()
        self._pit = [0] * 10
        self._fates = Fates()

    # --- what a policy asks (PauseKnowledge) ---

    def quantiles(
        self, tenant: str, kind: PauseKind, key: str | None, rhythm: Rhythm | None = None
    ) -> tuple[float, ...]:
        """Lengths in seconds at probabilities (i + 0.5) / 64, then where each time half of what is left has come; shrunk
        (key, rhythm) -> key -> (tenant, kind) -> kind -> prior, the rhythm from its last step to its first.

        The same tuple is returned until one of its levels has grown by about a quarter. Of the rhythm's steps
        those are asked that have been seen at least ``_TELLS`` times.
        """
        chain = self._chain(tenant, kind, key, rhythm, _TELLS)
        deepest = chain[-1][0]
        stamp = tuple([node.lengths.epoch for node, _ in chain])
        if deepest.stamp != stamp:
            deepest.quantiles = quantiles_of(_masses(kind, chain), QUANTILES, TAIL_HALVINGS)
            deepest.stamp = stamp
        return deepest.quantiles

    def scale(self, tenant: str, kind: PauseKind) -> tuple[float, float]:
        """Mean and standard deviation of the log of a tenant's pauses of a kind, whatever they brought back: the same scale
        as that of a client, who knows nothing of contexts."""
        mean, square = _PRIOR_LOGS[kind]
        for node, k in self._chain(tenant, kind, None):
            total = k + node.logs[0]
            mean, square = (k * mean + node.logs[1]) / total, (k * square + node.logs[2]) / total
        return mean, sqrt(max(square - mean * mean, 0.01))

    def p_intact(self, kind: PauseKind, depth: int | None = None) -> float:
        """Learned share of a context of that size that the prompt after such a pause begins with."""
        return self._fates.p_intact(kind, depth)

    def p_return(
        self,
        tenant: str,
        kind: PauseKind,
        key: str | None = None,
        rhythm: Rhythm | None = None,
        depth: int | None = None,
    ) -> float:
        """Learned probability of return where nobody announced the session's end, shrunk like ``quantiles`` with 20
        pseudo-pauses a level, below the tenant with those that 5 ends take. Contexts of its size multiply the odds by what they
        do to those of its kind."""
        p = P_RETURN[kind]
        for node, k in self._chain(tenant, kind, key, rhythm):
            k = _K_RETURN if k >= _K_TENANT else max(_K_RETURN, _K_ENDS / max(1.0 - p, 1e-3))
            p = (k * p + node.returned) / (k + node.returned + node.ended)
        if depth is not None and (factor := self._fates.end_odds(kind, depth)) != 1.0:
            p = p / (p + (1.0 - p) * factor)
        return p

    def trust(self, tenant: str, kind: PauseKind, key: str | None) -> tuple[float, float, float]:
        """See ``PauseKnowledge``; a key never scored has the trust of its tenant for that kind, else of its tenant."""
        score = self._score_of(tenant, kind, key)
        return score.trust() if score else Score().trust()

    def p_return_ended(self, tenant: str) -> float:
        """Probability that a session of the tenant comes back although its end was announced; one in twenty before any
        announcement was judged."""
        word = self._words.get((tenant, "end"))
        if word is None:
            return _ENDS_FALSE / _ENDS_ASSUMED
        # What is assumed of ends counts as far as what was told of them was true: nothing of it is left of who always lies.
        true = word.told - word.false
        assumed = (_ENDS_ASSUMED - _ENDS_FALSE) * (true + 1.0) / (word.told + 1.0)
        return (_ENDS_FALSE + word.false) / (_ENDS_FALSE + word.false + true + assumed)

    def believes_compaction(self, tenant: str) -> bool:
        """Whether most of the tenant's announced compactions came; one that did not weighs against two that are assumed."""
        word = self._words.get((tenant, "compaction"))
        return word is None or (0.5 + word.false) / (2.0 + word.told) < 0.5

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
        *,
        rhythm: Rhythm | None = None,
        given_up: bool = False,
        traits: Traits | None = None,
        intact: float | None = None,
    ) -> None:
        """A pause ended after ``length_s`` seconds. ``forecast``: what the client said of it, ``forecast_at_s`` seconds
        into the pause (None: nothing). Of several forecasts of one pause the engine passes the first. ``given_up``: it has
        been counted by ``observe_censored`` and now turns out to end after all. ``intact``: share of the context that the
        next prompt begins with, where known."""
        if forecast is not None and length_s > forecast_at_s:
            self._score_length(tenant, kind, key, length_s, forecast, forecast_at_s)
        if traits is not None:
            self._fates.returned(kind, depth_of(traits.context_tokens), 1.0 if intact is None else intact, given_up)
        for node, cap in self._taught(tenant, kind, key, rhythm):
            node.add(length_s, 1.0 if intact is None else intact)
            if given_up:
                node.ended = max(0.0, node.ended - 1.0)
            node.count(True, cap)

    def _taught(
        self, tenant: str, kind: PauseKind, key: str | None, rhythm: Rhythm | None
    ) -> Iterator[tuple[_Node, float]]:
        """The levels that a pause teaches, made where missing, each with its cap."""
        yield self._kinds[kind], _CAP_KIND
        key_node, tenant_node = self._nodes(tenant, kind, key)
        yield tenant_node, _CAP_TENANT
        if key_node is not None:
            yield key_node, _CAP_KEY
        if rhythm is not None:
            for name in rhythm:
                node, _ = self._nodes(tenant, kind, name if key is None else key + name)
                assert node is not None
                yield node, _CAP_RHYTHM

    def observe_end(self, tenant: str, kind: PauseKind, key: str | None, forecast: Forecast | None = None) -> None:
        """A session whose end was announced has been silent for ``GIVE_UP_S``: it was true. Not before: of announcements that
        are open many a false one has only not come back yet."""
        self._score_end(tenant, kind, key, forecast)
        self._word(tenant, "end").add(1.0, 0.0)

    def observe_false_end(self, tenant: str, *, proved: bool = False) -> None:
        """A session came back although its end had been announced. ``proved``: it had been counted by ``observe_end``."""
        self._word(tenant, "end").add(0.0 if proved else 1.0, 1.0)

    def observe_compaction(self, tenant: str, came: bool) -> None:
        """The prompt after an announced compaction: whether it was shorter than the one before."""
        self._word(tenant, "compaction").add(1.0, 0.0 if came else 1.0)

    def _word(self, tenant: str, of: str) -> _Word:
        word = self._words.setdefault((tenant, of), _Word())
        self._words.move_to_end((tenant, of))
        if len(self._words) > 2 * self._tenants_max:
            self._words.popitem(last=False)
        return word

    def _score_end(self, tenant: str, kind: PauseKind, key: str | None, forecast: Forecast | None) -> None:
        if forecast is not None and forecast.p_return is not None:
            known = self.p_return(tenant, kind)
            for score in self._scores_for(tenant, kind, key):
                score.add_return(forecast.p_return, known, returned=False)

    def observe_censored(
        self,
        tenant: str,
        kind: PauseKind,
        elapsed_s: float,
        key: str | None = None,
        forecast: Forecast | None = None,
        *,
        rhythm: Rhythm | None = None,
        traits: Traits | None = None,
    ) -> None:
        """Nobody announced an end, and a session was given up ``elapsed_s`` seconds into a pause: it never returned.

        ``elapsed_s`` says nothing about the lengths of pauses that do end; a negative one is a caller's mistake.
        """
        assert elapsed_s >= 0.0
        self._score_end(tenant, kind, key, forecast)
        if traits is not None:
            self._fates.ended(kind, depth_of(traits.context_tokens))
        for node, cap in self._taught(tenant, kind, key, rhythm):
            node.count(False, cap)

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

    def _chain(
        self, tenant: str, kind: PauseKind, key: str | None, rhythm: Rhythm | None = None, least: float = 0.0
    ) -> list[tuple[_Node, float]]:
        """The levels that exist, from general to particular, with the pseudo-count of what lies above each; of the rhythm's
        those that have seen at least ``least`` lengths."""
        chain = [(self._kinds[kind], _K_KIND)]
        node = self._tenants.get((tenant, kind))
        if node is not None:
            chain.append((node, _K_TENANT))
        if key is not None:
            node = self._keys.get((tenant, kind, key))
            if node is not None:
                chain.append((node, _K_KEY))
        if rhythm is not None:
            for name in rhythm:
                node = self._keys.get((tenant, kind, name if key is None else key + name))
                if node is not None and node.lengths.total >= least:
                    chain.append((node, _K_RHYTHM))
        return chain

    def _log_density(self, tenant: str, kind: PauseKind, key: str | None, length_s: float, after_s: float) -> float:
        """Log density of log(length - after) as known without a forecast, given that the pause outlives ``after_s``."""
        i = bin_of(length_s)
        if after_s <= 0.0:
            mass = _PRIOR[kind][i]
            for node, k in self._chain(tenant, kind, key):
                mass = (k * mass + node.lengths.counts[i]) / (k + node.lengths.total)
            return log(max(mass, 1e-9) / BIN_LOG_WIDTH)
        masses = _masses(kind, self._chain(tenant, kind, key))
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
