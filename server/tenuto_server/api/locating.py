"""Where in a conversation a place of its prompt lies, in the client's terms. Holds no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.wire import Divergence
from tenuto_server.api.conversation import Json
from tenuto_server.api.fitting import Placed
from tenuto_server.model.chat import ChatTemplate, ChatTemplateError


@dataclass(frozen=True, slots=True)
class Located:
    """A prompt's text (``raw``), the messages and tools as the template got them, and the tools' text where they stand in
    the system message instead."""

    raw: str
    pairs: Sequence[Placed]
    tools: Sequence[Json]
    tools_text: str
    variables: Mapping[str, Any]


def locate(chat: ChatTemplate, prompt: Located, at: int, divergence: Divergence) -> Divergence:
    """Adds to a divergence which message (the client's index), role and part the character ``at`` lies in. Renders
    O(log messages) prefixes."""
    if _in_tools(chat, prompt, at):
        return divergence.model_copy(update={"part": "tools"})
    messages = [message for message, _ in prompt.pairs]
    low, high = 0, len(messages) - 1
    while low < high:  # the last message whose start is at or before the character
        middle = (low + high + 1) // 2
        start = _start_of(chat, prompt, messages[:middle])
        if start is not None and start <= at:
            low = middle
        else:
            high = middle - 1
    role = str(messages[low]["role"])
    part = "system" if role in ("system", "developer") else "message"
    return divergence.model_copy(update={"message": prompt.pairs[low][1], "role": role, "part": part})


def _start_of(chat: ChatTemplate, prompt: Located, before: Sequence[Json]) -> int | None:
    try:
        head = chat.render(before, prompt.tools or None, False, **prompt.variables)
    except ChatTemplateError:
        return None
    return common_prefix(prompt.raw, head)


def _in_tools(chat: ChatTemplate, prompt: Located, at: int) -> bool:
    if prompt.tools_text:
        start = prompt.raw.find(prompt.tools_text)
        return 0 <= start <= at < start + len(prompt.tools_text)
    if not prompt.tools:
        return False
    try:
        bare = chat.render([message for message, _ in prompt.pairs], None, True, **prompt.variables)
    except ChatTemplateError:
        return False
    start = common_prefix(prompt.raw, bare)
    end = len(prompt.raw) - common_prefix(prompt.raw[::-1], bare[::-1])
    return start <= at < end


def common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by bisection over slices: comparisons run in C."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size
    while high - low > 1:  # a and b are equal up to low and differ before high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
