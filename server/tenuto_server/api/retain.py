"""How long clients ask, in the fields of other APIs, that a prefix be kept. Holds no state.

Every one of them is read as a floor for the lease, budgeted and never a ceiling: it becomes a ``kv.retain`` for the pause
after the answer. Cache marks without a ``ttl`` ask for nothing that the server would not do by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MARKS_MAX = 100_000
_DEFAULT_S = 300.0


def seconds_of(value: Any) -> float | None:
    """A duration such as ``"5m"``, ``"24h"`` or a number of seconds; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if 0 < value < 1e9 else None
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", value.strip()) if isinstance(value, str) else None
    return float(match[1]) * _UNITS_S[match[2] or "s"] if match and int(match[1]) else None


def _marks(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every ``cache_control`` and ``prompt_cache_breakpoint`` at the top, on tools, system and message blocks."""
    stack: list[Any] = [raw]
    seen = 0
    while stack and seen < _MARKS_MAX:
        node = stack.pop()
        seen += 1
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            for key in ("cache_control", "prompt_cache_breakpoint"):
                if isinstance(mark := node.get(key), dict):
                    yield mark
            stack.extend(node.get(key) for key in ("tools", "system", "messages", "input", "content"))


def marked_ttl_s(raw: Mapping[str, Any]) -> float | None:
    """The longest life that cache marks ask for (300 s where one names none); None without marks."""
    lives = [seconds_of(mark.get("ttl")) or _DEFAULT_S for mark in _marks(raw)]
    return max(lives) if lives else None


def retain_s(raw: Mapping[str, Any]) -> float | None:
    """The longest life that a request asks for in so many words; None if it does not."""
    lives = [seconds_of(mark.get("ttl")) for mark in _marks(raw)]
    options = raw.get("prompt_cache_options")
    if isinstance(options, dict):
        lives.append(seconds_of(options.get("ttl")))
    for field in ("prompt_cache_retention", "keep_alive", "ttl"):
        lives.append(seconds_of(raw.get(field)))
    asked = [life for life in lives if life is not None]
    return max(asked) if asked else None


def wants_prewarm(raw: Mapping[str, Any]) -> bool:
    """Whether only the cache is to be filled: ``generate: false`` or ``prompt_cache_options.prewarm``."""
    options = raw.get("prompt_cache_options")
    return raw.get("generate") is False or (isinstance(options, dict) and options.get("prewarm") is True)
