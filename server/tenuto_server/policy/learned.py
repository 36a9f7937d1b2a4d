"""What pauses have taught, as plain values that outlive a process, and back again. ``PauseStats`` owns what is learned.

Tenants are written under names that ``alias`` gives them (an HMAC), so that a file tells nobody who they are; what was
learned about one waits under its alias until that tenant is heard of. Figures are written by the names of their fields: a
file made when a class had others does not fit (``fields``) and is refused as a whole, as is any value out of its range.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import isfinite
from typing import Any

from tenuto_server.policy.calibration import PauseStats, _Node, _Word
from tenuto_server.policy.fates import _Fate
from tenuto_server.policy.histogram import Histogram
from tenuto_server.policy.score import Score

TENANTS_MAX, KEYS_MAX = 512, 1024
"""Of tenants and of their keys so many are written, those taught last."""
_DERIVED = frozenset({"quantiles", "stamp", "scale", "scale_stamp"})
_CLASSES: tuple[type, ...] = (_Node, _Word, _Fate, Histogram, Score)
_LIMIT = 1e15

Plain = Any  # numbers, strings, lists and string-keyed dictionaries of them


class Unfit(ValueError):
    """These values were written by another version, or are damaged."""


def fields() -> dict[str, list[str]]:
    """The classes and fields that a file is made of; part of its version."""
    return {cls.__name__: _names(cls) for cls in _CLASSES}


class Learned:
    """Writes and restores what ``stats`` has learned. ``alias(tenant)``: the name that a tenant goes by in the file. Owner of
    what has been restored and not been asked for yet."""

    def __init__(self, stats: PauseStats, alias: Callable[[str], str]) -> None:
        self._stats, self._alias = stats, alias
        self._waiting: dict[str, Plain] = {}

    def taught(self) -> float:
        """A number that changes with every pause that is learned from."""
        return sum(node.n + node.returned + node.ended for node in self._stats._kinds.values())

    def dump(self) -> dict[str, Plain]:
        """Everything learned, bounded: about half a kilobyte for each of ``KEYS_MAX`` keys, two for each tenant."""
        stats = self._stats
        return {
            "fields": fields(),
            "kinds": {kind: _write(node) for kind, node in stats._kinds.items()},
            "fates": [[kind, _write(fate)] for kind, fate in stats._fates._kinds.items()],
            "sizes": [[kind, depth, _write(fate)] for (kind, depth), fate in stats._fates._sizes.items()],
            "tenants": self._tenants(),
        }

    def _tenants(self) -> dict[str, Plain]:
        stats, found = self._stats, dict(self._waiting)

        def of(tenant: str) -> dict[str, Plain]:
            name = self._alias(tenant)
            state: dict[str, Plain] = found.pop(name, None) or {"kinds": {}, "keys": [], "words": {}, "score": None}
            found[name] = state  # taught last, kept longest
            return state

        for tenant, score in stats._scores.items():
            of(tenant)["score"] = _write(score)
        for (tenant, said), word in stats._words.items():
            of(tenant)["words"][said] = _write(word)
        for (tenant, kind), node in stats._tenants.items():
            of(tenant)["kinds"][kind] = _write(node)
        for tenant, kind, key in list(stats._keys)[-KEYS_MAX:]:
            of(tenant)["keys"].append([kind, key, _write(stats._keys[tenant, kind, key])])
        return dict(list(found.items())[-TENANTS_MAX:])

    def restore(self, saved: dict[str, Plain]) -> None:
        """Takes over what ``dump`` gave. Raises ``Unfit``; nothing is changed then."""
        fresh = PauseStats()
        try:
            if saved["fields"] != fields():
                raise Unfit("it was written by another version")
            for kind, node in fresh._kinds.items():
                _read(saved["kinds"][kind], node)
            for kind, fate in saved["fates"]:
                fresh._fates._kinds[_known(kind, fresh)] = _read(fate, _Fate())
            for kind, depth, fate in saved["sizes"]:
                fresh._fates._sizes[_known(kind, fresh), int(depth)] = _read(fate, _Fate())
            for state in saved["tenants"].values():
                _adopt(PauseStats(), "checked", state)
            waiting = dict(saved["tenants"])
        except Unfit:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise Unfit(f"{type(error).__name__}: {error}") from None
        stats = self._stats
        stats._kinds, stats._fates, self._waiting = fresh._kinds, fresh._fates, waiting

    def heard(self, tenant: str) -> None:
        """A tenant is heard of: what waits under its alias is its own from now on."""
        if self._waiting and (state := self._waiting.pop(self._alias(tenant), None)) is not None:
            _adopt(self._stats, tenant, state)


def _adopt(stats: PauseStats, tenant: str, state: dict[str, Plain]) -> None:
    score = None if state["score"] is None else _read(state["score"], Score())
    for kind, plain in state["kinds"].items():
        _, node = stats._nodes(tenant, _known(kind, stats), None)
        _read(plain, node)
    for kind, key, plain in state["keys"]:
        node_of_key, _ = stats._nodes(tenant, _known(kind, stats), str(key))
        assert node_of_key is not None
        _read(plain, node_of_key)
    for of, plain in state["words"].items():
        _read(plain, stats._word(tenant, str(of)))
    if score is not None:
        stats._scores[tenant] = score


def _known(kind: Any, stats: PauseStats) -> Any:
    if kind not in stats._kinds:
        raise Unfit(f"kind {kind!r}")
    return kind


def _names(cls: type) -> list[str]:
    slots: tuple[str, ...] = cls.__dict__["__slots__"]
    return sorted(name for name in slots if name not in _DERIVED)


def _write(thing: object) -> dict[str, Plain]:
    return {name: _plain(getattr(thing, name)) for name in _names(type(thing))}


def _plain(value: Any) -> Plain:
    if type(value) in _CLASSES:
        return _write(value)
    if isinstance(value, array):
        # Mostly zeros: [where it begins, value, value, ...] of what lies between the first and the last other one.
        some = [i for i, count in enumerate(value) if count]
        return [len(value), *([some[0], *(_short(value[i]) for i in range(some[0], some[-1] + 1))] if some else [])]
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def _short(count: float) -> float:
    return float(f"{count:.9g}")


def _read(plain: Plain, thing: Any) -> Any:
    """Sets the fields of ``thing`` to values of the types and lengths that it has."""
    for name in _names(type(thing)):
        setattr(thing, name, _like(plain[name], getattr(thing, name), name))
    return thing


def _like(plain: Plain, now: Any, name: str) -> Any:
    if name == "score":
        return None if plain is None else _read(plain, Score())
    if isinstance(now, Histogram):
        return _read(plain, now)
    if isinstance(now, array):
        if plain[0] != len(now):
            raise Unfit(name)
        values = [0.0] * len(now)
        if len(plain) > 1:
            first, rest = plain[1], [_number(value, name) for value in plain[2:]]
            if not 0 <= first <= len(now) - len(rest) or min(rest) < 0.0:
                raise Unfit(name)
            values[first : first + len(rest)] = rest
        return array(now.typecode, values)
    if isinstance(now, list):
        if len(plain) != len(now):
            raise Unfit(name)
        return [_like(part, before, name) for part, before in zip(plain, now, strict=True)]
    return type(now)(_number(plain, name))


def _number(plain: Plain, name: str) -> float:
    if isinstance(plain, bool) or not isinstance(plain, (int, float)) or not isfinite(plain) or abs(plain) > _LIMIT:
        raise Unfit(f"{name}: {plain!r}")
    return plain
