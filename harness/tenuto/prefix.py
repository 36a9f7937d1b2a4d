"""Where two prompts stop being the same: fingerprints of a prompt's parts and a report of their first difference.

Pure functions and values, no state, no prompt text kept: an item is represented by the blake2b hash of its canonical
JSON. Canonical means: text content is one form whether sent as a string or as text blocks; cache markers, item ids and
a client's per-request attribution line are left out. Only the comparison is canonicalised, never what is sent.

The order of keys inside a tool schema is kept, because chat templates print schemas in the order given: the same tools
or keys in another order render to other tokens, and are reported as ``order-only``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tenuto.errors import PrefixDivergedError

Message = Mapping[str, Any]
Part = Literal["system", "tools", "messages"]
Kind = Literal["changed", "moved", "order-only", "truncated"]

_MARKERS = frozenset({"cache_control", "prompt_cache_breakpoint", "output_config"})
_ITEM_ID = re.compile(r"(msg|fc|fco|amsg|rs)_")
_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_SYSTEM_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Item:
    """One tool, system block or message: its role, hash, order-insensitive hash, and length in characters of JSON."""

    role: str
    digest: str
    unordered: str
    chars: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A prompt without its text: system blocks, tools and messages in order.

    ``system`` holds the leading system or developer messages; ``order`` is the order in which the server renders.
    """

    system: tuple[Item, ...]
    tools: tuple[Item, ...]
    messages: tuple[Item, ...]
    order: tuple[Part, ...] = ("system", "tools", "messages")

    @property
    def digest(self) -> str:
        """One hash (32 hex digits) of the whole prompt."""
        return self.head_digest(len(self.messages))

    def head_digest(self, messages: int) -> str:
        """The hash of system, tools and the first ``messages`` messages."""
        state = hashlib.blake2b(digest_size=16)
        for part in self.order:
            items = self.part(part)[:messages] if part == "messages" else self.part(part)
            state.update(part.encode() + b"\0" + "".join(item.digest for item in items).encode() + b"\0")
        return state.hexdigest()

    def part(self, name: Part) -> tuple[Item, ...]:
        """The items of one part."""
        if name == "system":
            return self.system
        return self.tools if name == "tools" else self.messages

    @property
    def chars(self) -> int:
        """Characters of canonical JSON: a rough measure of size, not tokens."""
        return sum(item.chars for part in self.order for item in self.part(part))


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    """The first difference between a prompt and the one that should be its prefix.

    ``part``, ``index``, ``role``: which item of which part (``index`` counts inside the part). ``kind``: ``changed``
    (other content), ``moved`` (that content stood elsewhere before, at ``moved_from``), ``order-only`` (the same items
    or keys in another order), ``truncated`` (the new prompt ends, or the part is shorter). ``shared_messages``: messages
    before the difference. ``shared_chars`` and ``lost_chars``: characters of the old prompt before and after it.
    """

    part: Part
    index: int
    role: str
    kind: Kind
    shared_messages: int
    shared_chars: int
    lost_chars: int
    moved_from: int | None = None

    def __str__(self) -> str:
        origin = f", was {self.part}[{self.moved_from}]" if self.moved_from is not None else ""
        total = self.shared_chars + self.lost_chars
        share = 100.0 * self.shared_chars / total if total else 100.0
        return f"{self.part}[{self.index}] ({self.role}): {self.kind}{origin}; {share:.1f} % of the old prompt is kept"


def fingerprint(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    system: str | Sequence[Mapping[str, Any]] | None = None,
    *,
    order: tuple[Part, ...] = ("system", "tools", "messages"),
) -> Fingerprint:
    """The fingerprint of a prompt in Chat Completions or Messages form.

    ``system``: the separate system prompt of the Messages dialect; leading system messages are added to it. ``order``:
    most open chat templates render system, tools, messages; hosted services tools, system, messages.
    """
    count = next((i for i, m in enumerate(messages) if m.get("role") not in _SYSTEM_ROLES), len(messages))
    contents: list[Any] = [system] if system is not None else []
    contents += [message.get("content") for message in messages[:count]]
    blocks = [block for content in contents for block in _blocks(content)]
    return Fingerprint(
        system=tuple(_item("system", block) for block in blocks),
        tools=tuple(_item("tool", {k: v for k, v in tool.items() if k not in _MARKERS}, False) for tool in tools or ()),
        messages=tuple(_item(str(m.get("role", "")), _without_id(_canonical(m))) for m in messages[count:]),
        order=order,
    )


def divergence(prev: Fingerprint, new: Fingerprint) -> DivergenceReport | None:
    """Where ``new`` stops extending ``prev``; None when ``prev`` is a prefix of it."""
    shared = 0
    for part in new.order:
        old, now = prev.part(part), new.part(part)
        same = next((i for i, (a, b) in enumerate(zip(old, now, strict=False)) if a != b), min(len(old), len(now)))
        shared += sum(item.chars for item in old[:same])
        if same == len(old) and (part == "messages" or len(now) == len(old)):
            continue  # messages may grow; a longer list of tools moves everything behind it
        kind, moved_from = _explain(old, now, same)
        item = now[same] if same < len(now) else old[same]
        return DivergenceReport(
            part=part,
            index=same,
            role=item.role,
            kind=kind,
            shared_messages=same if part == "messages" else 0,
            shared_chars=shared,
            lost_chars=prev.chars - shared,
            moved_from=moved_from,
        )
    return None


def shared_messages(prev: Fingerprint, new: Fingerprint) -> int:
    """How many leading messages both prompts have in common; 0 unless system and tools agree as well."""
    report = divergence(prev, new)
    return len(prev.messages) if report is None else report.shared_messages


def assert_prefix_stable(
    prev: Sequence[Message] | Fingerprint,
    new: Sequence[Message] | Fingerprint,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    new_tools: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """For tests of an agent: raises ``PrefixDivergedError`` unless the prompt ``new`` extends the prompt ``prev``.

    ``tools`` are those of ``prev``; ``new_tools`` those of ``new`` where they differ.
    """
    before = prev if isinstance(prev, Fingerprint) else fingerprint(prev, tools)
    after = new if isinstance(new, Fingerprint) else fingerprint(new, tools if new_tools is None else new_tools)
    report = divergence(before, after)
    if report is not None:
        raise PrefixDivergedError(f"the prompt does not extend the previous one: {report}")


def _explain(old: tuple[Item, ...], now: tuple[Item, ...], at: int) -> tuple[Kind, int | None]:
    if Counter(i.unordered for i in old) == Counter(i.unordered for i in now):
        return "order-only", None
    if at >= len(now):
        return "truncated", None
    if at < len(old):
        moved = next((i for i, item in enumerate(old) if i != at and item == now[at]), None)
        if moved is not None:
            return "moved", moved
    return "changed", None


def _item(role: str, value: Any, sort: bool = True) -> Item:
    ordered = json.dumps(value, sort_keys=sort, ensure_ascii=False, separators=(",", ":"), default=str)
    unordered = ordered if sort else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return Item(role, _hash(ordered), _hash(unordered), len(ordered))


def _without_id(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("id"), str) and _ITEM_ID.match(value["id"]):
        return {name: inner for name, inner in value.items() if name != "id"}
    return value


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): _canonical_content(inner) if name == "content" else _canonical(inner)
            for name, inner in value.items()
            if name not in _MARKERS and inner is not None
        }
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if isinstance(value, str):
        return _ATTRIBUTION.sub("", value)
    return value


def _canonical_content(content: Any) -> Any:
    return _blocks(content) if isinstance(content, (str, list, tuple)) else _canonical(content)


def _blocks(content: Any) -> list[Any]:
    """Content as a list of canonical blocks; empty text is no block."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [_without_id(_canonical(block)) for block in content or ()]
    return [b for b in blocks if b != {"type": "text", "text": ""}]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
