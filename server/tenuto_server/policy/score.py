"""How well a client's forecasts did. A Score owns its figures; ``calibration.PauseStats`` holds one per level."""

from __future__ import annotations

from math import exp, log

from tenuto.wire import Forecast
from tenuto_server.policy.distributions import LogNormal

_LOGIT_FIRST = log(0.8 / 0.2)
"""A forecast from a client never scored before weighs 0.8: most forecasts are honest, and the first lies are cheap."""
_WEIGHT_MAX = 0.98
_WEIGHT_MIN = 0.02
_GAIN_DECAY = 0.98
_GAIN_RANGE = (-10.0, 8.0)
_K_SCORE = 4.0
_SCORE_WINDOW, _SCORE_WINDOW_DOUBTED = 400.0, 50.0
"""Scored pauses that shift and spread remember, of a client that does better than nothing and of any other. 50 leave a variance
uncertain by a fifth, and a look's precision is a difference of two such; a client that is doubted is learned afresh sooner."""


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
        pit = calibrated.cdf([exp(log_length)], [log_length])[0]
        stated = LogNormal.read(forecast)
        window = _SCORE_WINDOW if self.gain > 0.0 else _SCORE_WINDOW_DOUBTED
        rate = 1.0 / (min(self.n, window) + _K_SCORE + 1.0)
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
