"""Tells the conversations of clients without session ids apart, by their growing prompts. ``Chains`` owns the digests.

A digest is Python's own hash of a message's JSON: it lives in one process only and costs a fraction of what
parsing the body did. Text content counts the same as a string or as blocks; cache markers and item ids do not count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.proxy.json_text import dump

CHAINS_MAX = 512
_SYSTEM = ("system", "developer")
_IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint", "output_config"})
_ITEM_IDS = ("msg_", "fc_", "fco_", "amsg_", "rs_")
# How the first message after a compaction begins.
_CONTINUED = ("This session is being continued", "Another language model started")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as digests. ``head``: system text and tool names; ``messages``: what follows; the lengths of both."""

    head: int
    messages: tuple[int, ...]
    chars: tuple[int, ...]
    head_chars: int

    @property
    def size(self) -> int:
        """Characters of JSON: a rough measure, not tokens."""
        return self.head_chars + sum(self.chars)


@dataclass(frozen=True, slots=True)
class Items:
    """A conversation, message by message. ``lead``: contents of the system messages that it begins with; ``digests`` and
    ``chars``: of all others; ``opened``: the index of the first message that opens with the summary of an earlier
    conversation; ``last``: the last message as it was sent, None where that is not known any more."""

    lead: tuple[Any, ...] = ()
    digests: tuple[int, ...] = ()
    chars: tuple[int, ...] = ()
    opened: int | None = None
    last: Mapping[str, Any] | None = None

    @property
    def count(self) -> int:
        """Messages in all."""
        return len(self.lead) + len(self.digests)

    def cut(self, count: int) -> Items:
        """The first ``count`` messages."""
        if count == self.count:
            return self
        rest = max(0, count - len(self.lead))
        opened = self.opened if self.opened is not None and self.opened < count else None
        return Items(self.lead[:count], self.digests[:rest], self.chars[:rest], opened)

    def plus(self, messages: Sequence[Mapping[str, Any]]) -> Items:
        """The conversation with more messages behind it."""
        if not messages:
            return self
        lead, first = self.lead, 0
        if not self.digests:
            first = next((i for i, m in enumerate(messages) if m.get("role") not in _SYSTEM), len(messages))
            lead = (*lead, *(m.get("content") for m in messages[:first]))
        texts = [_canonical(message) for message in messages[first:]]
        opened = self.opened
        if opened is None:
            starts = (i for i, m in enumerate(messages, self.count) if m.get("role") == "user" and _continued(m))
            opened = next(starts, None)
        digests, chars = tuple(map(hash, texts)), tuple(map(len, texts))
        return Items(lead, self.digests + digests, self.chars + chars, opened, messages[-1])


def prompt_of(items: Items, tools: Sequence[str], system: Any, size: int = 0) -> Prompt:
    """The digests of a prompt in any dialect. ``size``: bytes of the whole body; what is no message counts as head, as
    the descriptions of tools do, which are not looked at."""
    head = dump([system, items.lead, tools])
    return Prompt(hash(head), items.digests, items.chars, max(len(head), size - sum(items.chars)))


def first_text(message: Mapping[str, Any]) -> str:
    """The first text of a message, in any dialect."""
    content = message.get("content", message.get("parts"))
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else ():
        text = block.get("text") if isinstance(block, Mapping) else None
        if isinstance(text, str):
            return text
    return ""


def shared(old: Prompt, new: Prompt) -> int:
    """Leading messages that both prompts have in common; 0 where system or tools differ."""
    if old.head != new.head:
        return 0
    if new.messages[: len(old.messages)] == old.messages:
        return len(old.messages)
    pairs = zip(old.messages, new.messages, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old.messages), len(new.messages)))


class Chains:
    """The latest prompt of every conversation without an id, by name; bounded, the least recently used go first."""

    def __init__(self, limit: int = CHAINS_MAX) -> None:
        self._limit = limit
        self._latest: OrderedDict[str, tuple[str, Prompt]] = OrderedDict()

    def find(self, scope: str, prompt: Prompt) -> str | None:
        """The conversation in ``scope`` that this prompt continues.

        It extends the latest prompt, or all of it but the last message: some clients append a reminder to the user
        message of the moment and leave it out of the history. Of several, the longest and then the latest.
        """
        best: tuple[int, str] | None = None
        for name, (where, known) in reversed(self._latest.items()):
            if where != scope or known.head != prompt.head:
                continue
            length, same = len(known.messages), shared(known, prompt)
            grew = same > 0 and same == length - 1 and len(prompt.messages) > length
            if (same == length or grew) and (best is None or same > best[0]):
                best = (same, name)
        return best[1] if best is not None else None

    def idle_like(self, scope: str, prompt: Prompt, names: Sequence[str]) -> str | None:
        """The latest of ``names`` with the same system text and tools: what a rewritten history may belong to."""
        for name, (where, known) in reversed(self._latest.items()):
            if where == scope and name in names and known.head == prompt.head:
                return name
        return None

    def put(self, scope: str, name: str, prompt: Prompt) -> None:
        """Remembers a conversation's latest prompt."""
        self._latest[name] = (scope, prompt)
        self._latest.move_to_end(name)
        while len(self._latest) > self._limit:
            self._latest.popitem(last=False)

    def drop(self, name: str) -> None:
        """Forgets a conversation."""
        self._latest.pop(name, None)


def _canonical(message: Mapping[str, Any]) -> bytes:
    found = {key: value for key, value in message.items() if key not in _IGNORED and value is not None}
    name = found.get("id")
    if isinstance(name, str) and name.startswith(_ITEM_IDS):
        del found["id"]
    content = found.get("content")
    if isinstance(content, str):
        found["content"] = [{"type": "text", "text": content}] if content else []
    elif isinstance(content, list):
        found["content"] = [_block(block) for block in content]
    return dump(found)


def _block(block: Any) -> Any:
    if isinstance(block, Mapping) and not _IGNORED.isdisjoint(block):
        return {key: value for key, value in block.items() if key not in _IGNORED}
    return block


def _continued(message: Mapping[str, Any]) -> bool:
    return first_text(message).lstrip().startswith(_CONTINUED)
