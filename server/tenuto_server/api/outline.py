"""The shape of a request in digests, and what changed from one to the next. Holds no state.

Everything is told in the client's own terms: which part, which message of its list, whose. What a change cost in tokens
only the cache knows; see ``Divergence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tenuto_server.api.conversation import Conversation
from tenuto_server.api.digests import Digest

Part = Literal["model", "system", "tools", "messages"]


@dataclass(frozen=True, slots=True)
class Outline:
    """``tools``: a digest for each, in order. ``system``: digests of the messages before the first of another role.
    ``messages``: (digest, role, index in the client's list) of all others. ``tokens``: of the whole prompt."""

    model: str
    tools: tuple[Digest, ...]
    names: tuple[str, ...]
    system: tuple[Digest, ...]
    messages: tuple[tuple[Digest, str, int | None], ...]
    tokens: int

    @classmethod
    def of(
        cls, model: str, talk: Conversation, digests: Sequence[Digest], tools: Sequence[Digest], tokens: int
    ) -> Outline:
        """The outline of a conversation whose messages and tools have these digests."""
        lead = next((i for i, m in enumerate(talk.messages) if m["role"] not in ("system", "developer")), len(digests))
        rest = zip(digests[lead:], talk.messages[lead:], talk.places[lead:], strict=True)
        return cls(
            model,
            tuple(tools),
            tuple(tool.name for tool in talk.tools),
            tuple(digests[:lead]),
            tuple((digest, message["role"], place) for digest, message, place in rest),
            tokens,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """The first difference. ``message``, ``role``: where it lies, for messages. ``moved_from``: the same message stood at
    this index before. ``reordered``: the tools are the same ones in another order. ``tool``: the first tool that differs.
    ``shorter``: the conversation was cut, and nothing else changed."""

    part: Part
    message: int | None = None
    role: str | None = None
    moved_from: int | None = None
    reordered: bool = False
    tool: str | None = None
    shorter: bool = False

    def notes(self) -> dict[str, Any]:
        """As the ``tenuto`` object says it."""
        told: dict[str, Any] = {"part": self.part}
        for name in ("message", "role", "moved_from", "tool"):
            if (value := getattr(self, name)) is not None:
                told[name] = value
        return told | {name: True for name in ("reordered", "shorter") if getattr(self, name)}


def compare(old: Outline, new: Outline) -> Change | None:
    """What changed first, in the order model, tools, system, messages; None: the new one only goes on."""
    if old.model != new.model:
        return Change("model")
    if old.tools != new.tools:
        at = next((i for i, (a, b) in enumerate(zip(old.tools, new.tools, strict=False)) if a != b), None)
        at = min(len(old.tools), len(new.tools)) if at is None else at
        names = old.names if at < len(old.names) else new.names
        return Change("tools", reordered=sorted(old.tools) == sorted(new.tools), tool=names[at])
    if old.system != new.system:
        return Change("system")
    if new.messages[: len(old.messages)] == old.messages:
        return None  # the usual case, told without a loop
    for index, (before, after) in enumerate(zip(old.messages, new.messages, strict=False)):
        if before[0] != after[0]:
            _, role, place = after
            moved = next((p for d, _, p in old.messages[index:] if d == after[0]), None)
            return Change("messages", place, role, moved)
    if len(new.messages) < len(old.messages):
        return Change("messages", old.messages[len(new.messages)][2], shorter=True)
    return None


def shared_messages(old: Outline, new: Outline) -> int:
    """How many messages both begin with."""
    if new.messages[: len(old.messages)] == old.messages:
        return len(old.messages)
    pairs = zip(old.messages, new.messages, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), min(len(old.messages), len(new.messages)))
