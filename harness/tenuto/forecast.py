"""Pause prediction from this machine's own history. ``PauseForecaster`` owns the history; everything else is a value.

A history is one bounded sketch of log-durations for every key, in levels from coarse to fine: kind, tool class, tool,
program, first argument. The forecast of a level is the posterior predictive of a Dirichlet process whose base is the
level above it, with concentration K = 5 pseudo-calls (4 for the session's own history of the program, 8 for its own
people), the estimator that predicted best out of sample on real tool calls. Pauses without a tool's name are also filed by
the session's recent rhythm, people by the time of day. The coarsest base is ``tenuto.priors``. Waiting sharpens a forecast
through the conditional distribution given the time already elapsed.

Only the standard library is imported here: the server's policies use this module too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from tenuto.distribution import (
    GRID_BINS,
    SKETCH_WEIGHT_MAX,
    LogSketch,
    PauseDistribution,
    bin_of,
    posterior,
    prior_masses,
)
from tenuto.pause_key import PauseKey
from tenuto.priors import KIND, P_RETURN, PROGRAM, TOOL, TOOL_CLASS, Knots, tool_class

FORECAST_MAX_S = 30 * 86400.0
SHRINKAGE = 5.0
SHRINKAGE_SESSION, SHRINKAGE_SESSION_HUMAN = 4.0, 8.0
# People, and pauses without a name: by the time of day they begin, and by the session's recent rhythm.
SHRINKAGE_HOUR, SHRINKAGE_RHYTHM = 30.0, 15.0
HOURS = 4
"""Hours of a time of day; working days and weekends are kept apart."""
PACE, PACE_STEP, PACE_STEPS = 0.25, 0.4, 8
"""A session's rhythm: an exponentially weighted mean of its log lengths, in so many steps of so much around the prior's."""
RETURN_PSEUDO = 20.0
HISTORY_VERSION = 1
_PENDING_MAX = 4096
_SESSION_KEYS_MAX = 256
_FILE_BYTES_MAX = 16 << 20

_Stored: TypeAlias = "tuple[str, OrderedDict[str, LogSketch], dict[str, list[float]]]"


@dataclass(frozen=True, slots=True)
class PauseForecast:
    """Quantiles of a pause (seconds, given that it ends), the probability that it ends at all, and a confidence.

    ``confidence``: 0..1, the share of the forecast that rests on pauses observed here rather than on built-in priors.
    """

    p50_s: float
    p90_s: float
    p_return: float = 1.0
    confidence: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The fields as they go on the wire."""
        return {
            "p50_s": self.p50_s,
            "p90_s": self.p90_s,
            "p_return": self.p_return,
            "confidence": self.confidence,
        }


class PauseForecaster:
    """Predicts pauses and learns from them. Thread-safe; never does more work than a few hundred additions a call.

    ``path``: JSON file that keeps the history between runs; None keeps it in memory. ``keys_max`` bounds the number
    of keys, the least recently used go first. A missing, foreign or corrupt file counts as no history. ``clock``: Unix
    time, whose local hour people are judged by.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        keys_max: int = 2048,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.keys_max = keys_max
        self._clock = clock
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._sketches: OrderedDict[str, LogSketch] = OrderedDict()
        self._returns: dict[str, list[float]] = {}
        self._own: OrderedDict[tuple[str, str], LogSketch] = OrderedDict()
        self._paces: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._pending: list[tuple[tuple[str, ...], float | None]] = []
        self._secret = secrets.token_hex(16)
        self._known_paths: dict[PauseKey, tuple[str, ...]] = {}
        stored = _read(self.path) if self.path is not None else None
        if stored is not None:
            self._adopt(stored)

    @classmethod
    def open(cls) -> PauseForecaster:
        """The user's history: ``TENUTO_HISTORY`` if set (``off`` or empty: memory only), else the user's cache folder."""
        return cls(history_path())

    @property
    def unsaved(self) -> int:
        """Observations that ``save`` has not written yet."""
        return len(self._pending)

    def __len__(self) -> int:
        return len(self._sketches)

    def predict(self, key: PauseKey, *, elapsed_s: float = 0.0, session: str | None = None) -> PauseForecast:
        """The remaining time of a pause that began ``elapsed_s`` ago; at 0, its whole length.

        ``session``: weighs this session's own pauses of the same program more. The probability of a return falls
        with the time elapsed: p S(e) / (p S(e) + 1 - p), with S the survival of pauses that do return.
        """
        elapsed_s = max(0.0, elapsed_s)
        with self._lock:
            distribution, confidence = self._predictive(key, session, elapsed_s)
            p_return = self._p_return(key.kind)
        survival = p_return * distribution.survival(elapsed_s)
        total = survival + 1.0 - p_return
        p50 = min(distribution.quantile(0.5, elapsed_s=elapsed_s) - elapsed_s, FORECAST_MAX_S)
        p90 = min(distribution.quantile(0.9, elapsed_s=elapsed_s) - elapsed_s, FORECAST_MAX_S)
        return PauseForecast(p50, max(p50, p90), survival / total if total > 0.0 else 0.0, confidence)

    def distribution(self, key: PauseKey, *, session: str | None = None) -> PauseDistribution:
        """The whole distribution behind ``predict``."""
        with self._lock:
            return self._predictive(key, session)[0]

    def observe(self, key: PauseKey, duration_s: float, *, session: str | None = None) -> None:
        """Learns that a pause of this key ended after ``duration_s``. Values that are no duration are ignored."""
        if not math.isfinite(duration_s) or duration_s < 0.0:
            return
        with self._lock:
            paths = self._paths(key)
            taught = (*paths, *self._circumstances(key, session, duration_s))
            self._learn(taught, duration_s)
            self._remember((taught, duration_s))
            if session is not None:
                at = session, _own_path(paths)
                if at not in self._own:
                    self._own[at] = _sketch(paths[-1])
                self._own.move_to_end(at)
                self._own[at].add(duration_s)
                before = self._paces.pop((session, key.kind), None)
                length = math.log(max(duration_s, 1.0))
                centre = _centre(key.kind) if before is None else before
                self._paces[session, key.kind] = centre + PACE * (length - centre)
                for table in (self._own, self._paces):
                    while len(table) > _SESSION_KEYS_MAX:
                        table.popitem(last=False)

    def observe_no_return(self, kind: str) -> None:
        """Learns that a session ended in a pause of this kind instead of returning."""
        with self._lock:
            self._learn((kind,), None)
            self._remember(((kind,), None))

    def save(self) -> bool:
        """Writes the history atomically, merged with what other processes wrote meanwhile; False if it could not.

        Never raises: history is worth less than the caller's run. Two processes that save in the same instant may
        lose one batch of observations.
        """
        if self.path is None:
            return True
        with self._saving:  # files are read and written without the lock that predict() needs
            stored = _read(self.path)
            with self._lock:
                if not self._pending:
                    return True
                pending, self._pending = self._pending, []
                if stored is not None:  # another process may have learned since: replay ours on top of its state
                    same = stored[0] == self._secret
                    self._adopt(stored)
                    for paths, duration_s in pending:
                        # Hashes made under another secret name nothing in the shared file.
                        self._learn(tuple(p for p in paths if same or "/#" not in p), duration_s)
                text = self._dump()
            try:
                _write_atomically(self.path, text)
            except OSError:
                with self._lock:
                    self._pending = (pending + self._pending)[-_PENDING_MAX:]
                return False
            return True

    # -- below: called with the lock held ---------------------------------------------------------------------------

    def _remember(self, item: tuple[tuple[str, ...], float | None]) -> None:
        if self.path is not None:
            self._pending.append(item)
            del self._pending[:-_PENDING_MAX]

    def _learn(self, paths: tuple[str, ...], duration_s: float | None) -> None:
        counts = self._returns.setdefault(paths[0], [0.0, 0.0])
        counts[0 if duration_s is not None else 1] += 1.0
        if sum(counts) > SKETCH_WEIGHT_MAX:
            counts[:] = [counts[0] / 2, counts[1] / 2]
        if duration_s is None:
            return
        index = bin_of(duration_s)
        for path in reversed(paths):  # coarse levels last, so that they are the most recently used
            sketch = self._sketches.get(path)
            if sketch is None:
                sketch = self._sketches[path] = _sketch(path)
            else:
                self._sketches.move_to_end(path)
            sketch.add_bin(index)
        while len(self._sketches) > self.keys_max:
            self._sketches.popitem(last=False)

    def _p_return(self, kind: str) -> float:
        returned, ended = self._returns.get(kind, (0.0, 0.0))
        prior = P_RETURN.get(kind, P_RETURN["unknown"])
        return (returned + RETURN_PSEUDO * prior) / (returned + ended + RETURN_PSEUDO)

    def _predictive(
        self, key: PauseKey, session: str | None, elapsed_s: float = 0.0
    ) -> tuple[PauseDistribution, float]:
        paths = self._paths(key)
        masses, learned = list(prior_masses(KIND.get(key.kind, KIND["unknown"]))), 0.0
        for path, builtin in zip(paths, self._builtins(key), strict=True):
            if builtin is not None and path != paths[0]:
                # Data of the coarser level mixes other programs, the built-in prior other machines: trust each half
                # once there is data.
                weight = learned / 2
                masses = [weight * m + (1.0 - weight) * b for m, b in zip(masses, prior_masses(builtin), strict=True)]
                learned *= weight
            masses, learned = posterior(masses, learned, self._sketches.get(path), SHRINKAGE)
            if path == paths[-1]:
                for circumstance in self._circumstances(key, session, elapsed_s):
                    pseudo = SHRINKAGE_HOUR if "/@" in circumstance else SHRINKAGE_RHYTHM
                    masses, _ = posterior(masses, learned, self._sketches.get(circumstance), pseudo)
            if session is not None and path == _own_path(paths):
                pseudo = SHRINKAGE_SESSION_HUMAN if key.kind == "human" else SHRINKAGE_SESSION
                masses, learned = posterior(masses, learned, self._own.get((session, path)), pseudo)
        return PauseDistribution(masses), min(1.0, learned)

    def _circumstances(self, key: PauseKey, session: str | None, ago_s: float) -> tuple[str, ...]:
        """What a pause that began ``ago_s`` seconds ago is also filed under: time of day and the session's rhythm. A tool
        with a name is not asked the time."""
        if key.tool is not None:
            return ()
        found = []
        if key.kind in ("human", "permission"):
            begun = time.localtime(self._clock() - ago_s)
            found.append(f"{key.kind}/@{'we' if begun.tm_wday >= 5 else 'wd'}{begun.tm_hour // HOURS}")
        if session is not None:
            pace = self._paces.get((session, key.kind))
            step = 0 if pace is None else round((pace - _centre(key.kind)) / PACE_STEP)
            found.append(f"{key.kind}/~{max(-PACE_STEPS, min(PACE_STEPS, step))}")
        return tuple(found)

    def _builtins(self, key: PauseKey) -> list[Knots | None]:
        levels: list[Knots | None] = [KIND.get(key.kind, KIND["unknown"])]
        if key.tool is not None:
            # Only the pauses of tools have priors by tool; a subagent or a permission prompt keeps that of its kind.
            is_tool = key.kind == "tool"
            levels.append(TOOL_CLASS[tool_class(key.tool)] if is_tool else None)
            levels.append(TOOL.get(key.tool.lower()) if is_tool else None)
            if key.program is not None:
                levels.append(PROGRAM.get(key.program) if is_tool else None)
                if key.argument is not None:
                    levels.append(None)
        return levels

    def _paths(self, key: PauseKey) -> tuple[str, ...]:
        if (known := self._known_paths.get(key)) is not None:
            return known
        if len(self._known_paths) >= _SESSION_KEYS_MAX:
            self._known_paths.clear()
        paths = self._known_paths[key] = self._new_paths(key)
        return paths

    def _new_paths(self, key: PauseKey) -> tuple[str, ...]:
        parts = [key.kind]
        if key.tool is not None:
            parts += [tool_class(key.tool), key.tool]
            if key.program is not None:
                parts.append(key.program)
                if key.argument is not None:
                    digest = hashlib.blake2b(key.argument.encode(), digest_size=8, key=bytes.fromhex(self._secret))
                    parts.append("#" + digest.hexdigest())
        clean = [part.replace("/", "_") for part in parts]
        return tuple("/".join(clean[: n + 1]) for n in range(len(clean)))

    def _dump(self) -> str:
        keys = {
            path: {str(i): round(w, 3) for i, w in sorted(sketch.bins.items())}
            for path, sketch in self._sketches.items()
        }
        return json.dumps({"version": HISTORY_VERSION, "secret": self._secret, "keys": keys, "returns": self._returns})

    def _adopt(self, stored: _Stored) -> None:
        self._secret, self._sketches, self._returns = stored
        self._known_paths.clear()
        while len(self._sketches) > self.keys_max:
            self._sketches.popitem(last=False)


def history_path() -> Path | None:
    """Where the user's pause history lives; None when ``TENUTO_HISTORY`` is ``off`` or empty."""
    setting = os.environ.get("TENUTO_HISTORY")
    if setting is not None:
        return None if setting.strip().lower() in ("", "off", "0") else Path(setting).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tenuto" / "pauses.json"


def _read(path: Path) -> _Stored | None:
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            return None
        return _parse(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _parse(data: Any) -> _Stored:
    if data["version"] != HISTORY_VERSION or len(bytes.fromhex(data["secret"])) != 16:
        raise ValueError("another version")
    sketches: OrderedDict[str, LogSketch] = OrderedDict()
    for path, bins in data["keys"].items():
        sketch = _sketch(str(path), {int(i): float(w) for i, w in bins.items()})
        if not all(0 <= i < GRID_BINS and 0.0 < w <= 2 * SKETCH_WEIGHT_MAX for i, w in sketch.bins.items()):
            raise ValueError("bins out of range")
        sketches[str(path)] = sketch
    returns = {str(kind): [float(a), float(b)] for kind, (a, b) in data["returns"].items()}
    if not all(0.0 <= x <= 2 * SKETCH_WEIGHT_MAX for counts in returns.values() for x in counts):
        raise ValueError("counts out of range")
    return data["secret"], sketches, returns


def _sketch(path: str, bins: dict[int, float] | None = None) -> LogSketch:
    _, _, rest = path.partition("/")
    return LogSketch(bins, wide=not rest or rest[0] in "@~")


@lru_cache(maxsize=16)
def _centre(kind: str) -> float:
    """Log of the prior's median."""
    return math.log(PauseDistribution(prior_masses(KIND.get(kind, KIND["unknown"]))).quantile(0.5))


def _own_path(paths: tuple[str, ...]) -> str:
    return paths[min(3, len(paths) - 1)]  # the program's level, or the finest there is above it


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
