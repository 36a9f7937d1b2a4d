"""How long clients ask, in the fields of other APIs, that a prefix be kept. Holds no state.

Every one of them is read as a floor for the lease, budgeted and never a ceiling: it becomes a ``kv.retain`` for the pause
after the answer. Cache marks without a ``ttl`` ask for nothing that the server would not do by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto_server.api.conversation import Conversation

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MARKS_MAX = 100_000
_DEFAULT_S = 300.0
_FOR_EVER_S = 31 * 86400.0  # what a hint can say


def seconds_of(value: Any) -> float | None:
    """A duration such as ``"5m"``, ``"24h"`` or a number of seconds; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if 0 < value < 1e9 else None
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", value.strip()) if isinstance(value, str) else None
    return float(match[1]) * _UNITS_S[match[2] or "s"] if match and int(match[1]) else None


def _marks(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every ``cache_control`` and ``prompt_cache_breakpoint`` on a message, tool or system text and its blocks."""
    stack: list[Any] = [node]
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
            if isinstance(content := node.get("content"), list):
                stack.extend(content)


def longest(*lives: float | None) -> float | None:
    """The longest of several lives; None: there is none."""
    return max((life for life in lives if life is not None), default=None)


def marks_of(node: Any) -> tuple[float | None, float | None]:
    """The longest lives that cache marks in a message (or tools, or system text) ask for: by a ``ttl``, and at all, where a
    mark that names none asks for 300 s. None: there are none."""
    lives = [seconds_of(mark.get("ttl")) for mark in _marks(node)]
    return longest(*lives), longest(*(life or _DEFAULT_S for life in lives))


def _beside_messages(raw: Mapping[str, Any]) -> list[Any]:
    top = {key: raw[key] for key in ("cache_control", "prompt_cache_breakpoint") if key in raw}
    return [top, raw.get("tools"), raw.get("system")]


def marked_ttl_s(raw: Mapping[str, Any], talk: Conversation) -> float | None:
    """The longest life that cache marks ask for (300 s where one names none); None without marks."""
    return longest(talk.marked_s, *(marks_of(node)[1] for node in _beside_messages(raw)))


def retain_s(raw: Mapping[str, Any], talk: Conversation) -> float | None:
    """The longest life that a request asks for in so many words; None if it does not."""
    lives = [talk.asked_s, *(marks_of(node)[0] for node in _beside_messages(raw))]
    options = raw.get("prompt_cache_options")
    if isinstance(options, dict):
        lives.append(seconds_of(options.get("ttl")))
    for field in ("prompt_cache_retention", "keep_alive", "ttl"):
        lives.append(seconds_of(raw.get(field)))
    lives.append(seconds_of(inner(raw, "nvext", "cache_control").get("ttl")))
    session = inner(raw, "nvext", "session_control")
    if session.get("action") == "open":
        lives.append(seconds_of(session.get("timeout", _DEFAULT_S)))
    if _span(raw.get("keep_alive")) < 0:
        lives.append(_FOR_EVER_S)  # as long as the server grants
    asked = longest(*lives)
    return None if asked is None else min(asked, _FOR_EVER_S)


def releases(raw: Mapping[str, Any]) -> bool:
    """Whether nothing need be kept after the answer: ``keep_alive`` 0."""
    return _span(raw.get("keep_alive")) == 0


def closes(raw: Mapping[str, Any]) -> bool:
    """Whether the session is over with this answer: ``nvext.session_control`` with the action ``close``."""
    return inner(raw, "nvext", "session_control").get("action") == "close"


def inner(raw: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The object at a path of fields; an empty one where there is none."""
    node: Any = raw
    for field in path:
        node = node.get(field) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _span(value: Any) -> float:
    """The sign of a ``keep_alive``: 0 for none at all, negative for ever, positive for anything else."""
    if isinstance(value, str) and (match := re.fullmatch(r"(-?)(\d{1,9})(?:ms|s|m|h)?", value.strip())):
        return -1.0 if match[1] else float(match[2])
    if type(value) not in (int, float):
        return 1.0
    return 0.0 if value == 0 else -1.0 if value < 0 else 1.0


def wants_prewarm(raw: Mapping[str, Any]) -> bool:
    """Whether only the cache is to be filled: ``generate: false`` or ``prompt_cache_options.prewarm``."""
    options = raw.get("prompt_cache_options")
    return raw.get("generate") is False or (isinstance(options, dict) and options.get("prewarm") is True)
