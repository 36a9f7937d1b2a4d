"""Meters of the HTTP side, and the engine's own figures, as Prometheus text. Owns the registry of one service."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tenuto_server.engine.loop import EngineLoop

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_GAP = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_LONG = (0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TIERS = frozenset({"device", "host", "disk"})
_LABELS = frozenset({"cold", "mutation", "retention", "capacity"})
Figures = Callable[[], Mapping[str, Any]]
_OUTCOMES = frozenset({"accepted", "clipped", "deferred", "rejected", "missing"})
_CLASSES = frozenset({"tool", "human", "subagent", "permission", "background", "unknown", "compaction"})


class Meters:
    """Histograms are filled by ``generation``; everything else is read when asked, from the loop's snapshot and from
    ``figures``: gauges and counters (``_total``) of the HTTP side by name, as the engine gives its own."""

    def __init__(self, loop: EngineLoop, figures: Figures = dict) -> None:
        self.registry = CollectorRegistry()
        all_in = self.registry
        self.ttft = Histogram("tenuto_ttft_seconds", "Arrival to first token.", buckets=_TTFT, registry=all_in)
        self.inter_token = QuickHistogram("tenuto_inter_token_seconds", "Between tokens.", _GAP)
        self.registry.register(self.inter_token)
        self.queue = Histogram("tenuto_queue_seconds", "Arrival to admission.", buckets=_TTFT, registry=all_in)
        self.request = Histogram(
            "tenuto_request_seconds", "Arrival to end, by outcome.", ["outcome"], buckets=_LONG, registry=all_in
        )
        self.responses = Counter(
            "tenuto_http_responses", "Answers by route and status.", ["route", "status"], registry=all_in
        )
        self.registry.register(_LoopCollector(loop, figures))

    def text(self) -> bytes:
        """The exposition format, UTF-8."""
        return generate_latest(self.registry)


class QuickHistogram(Collector):
    """A histogram for what happens at every token: filled by one thread, a tenth of the library's cost for each value.
    ``bounds``: the buckets' upper ends, rising, without infinity."""

    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """One value; a bucket holds its upper end."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return (HistogramMetricFamily(self._name, self._about),)

    def collect(self) -> Iterable[Metric]:
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = [(end, float(count)) for end, count in zip(ends, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class _LoopCollector(Collector):
    """Every number in the loop's snapshot as ``tenuto_<name>``; a nested mapping becomes one metric with a label."""

    def __init__(self, loop: EngineLoop, figures: Figures) -> None:
        self._loop, self._figures = loop, figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        snapshot = self._loop.snapshot()
        yield _metric("tenuto_engine_healthy", float(bool(snapshot.get("healthy"))))
        engine, executor = snapshot.pop("engine", {}), snapshot.pop("executor", {})
        rest = (("tenuto_loop_", snapshot), ("tenuto_executor_", executor), ("tenuto_", self._figures()))
        for prefix, figures in (("tenuto_", engine), *rest):
            for name, value in figures.items():
                yield from _metrics(prefix + _clean(name), value)


def _metrics(name: str, value: Any) -> Iterable[Metric]:
    if isinstance(value, (int, float)):
        yield _metric(name, float(value))
    elif isinstance(value, Mapping):
        flat = {str(key): item for key, item in value.items() if isinstance(item, (int, float))}
        if flat:
            yield _metric(name, flat)
        for key, item in value.items():
            if isinstance(item, Mapping):
                yield from _metrics(f"{name}_{_clean(str(key))}", item)


def _metric(name: str, value: float | Mapping[str, float]) -> Metric:
    """A counter where the name says so (``_total``), else a gauge."""
    labels = () if isinstance(value, float) else (_label(value),)
    family: CounterMetricFamily | GaugeMetricFamily
    if name.endswith("_total"):
        family = CounterMetricFamily(name.removesuffix("_total"), "From the engine.", labels=labels)
    else:
        family = GaugeMetricFamily(name, "From the engine.", labels=labels)
    for key, number in {"": value}.items() if isinstance(value, float) else value.items():
        family.add_metric([key] if labels else [], float(number))
    return family


def _label(value: Mapping[str, float]) -> str:
    keys = set(value)
    for name, known in (("tier", _TIERS), ("label", _LABELS), ("outcome", _OUTCOMES), ("class", _CLASSES)):
        if keys and keys <= known:
            return name
    return "kind"


def _clean(name: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char == "_") else "_" for char in name)
