"""Conversations to text through the model's own template, and only their ends where that gives the same text.

A template renders a whole conversation. Behind a long known one that is nearly all work done before, so a turn that appends
is rendered as its beginning (system, tools, first exchange) and its last messages alone, and what these last ones became is
put behind the known text. That is right for templates in which a message's text depends on nothing but its neighbourhood.
Whether a template is one is found by rendering small conversations both ways (``locality``); it is checked again with the
conversation at hand whenever that has doubled, and a template that fails once is rendered whole from then on.

``Renderer`` owns what was found out about one template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenuto_server.api.conversation import Conversation, Json
from tenuto_server.api.errors import bad_request
from tenuto_server.api.fitting import Fitting
from tenuto_server.api.shield import SPLICE, THOUGHT
from tenuto_server.api.tools import ToolSpec
from tenuto_server.model.chat import ChatTemplate, ChatTemplateError

WHOLE_CHARS_MAX = 16_384  # below this a prompt is rendered whole: nothing would be saved
_ASKING = frozenset({"user", "system", "developer"})
_THOUGHTS = re.compile(f"{THOUGHT}[^{THOUGHT}{SPLICE}]*{SPLICE}([0-9a-f]+){SPLICE}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Splice:
    """An answer that stands in a prompt by its key. ``opening``: the text in front of it, from the last control token on;
    ``reasoning``: it has some."""

    key: str
    opening: str
    reasoning: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """A place at which a prompt can be taken up again: the messages, characters and spliced answers before it."""

    messages: int
    chars: int
    spliced: int


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A conversation's beginning, up to its first answer, as the template got it, and its text."""

    messages: tuple[Json, ...]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A prompt's text: ``pieces``, each up to one of the ``cuts``, and the ``rest`` behind the last; those of long prompts are
    shared with the prompt that goes on from it. ``messages``: what it says, in the client's own objects. ``tools``,
    ``variables``: as given. ``whole_at``: how many messages it had when it was rendered whole. ``kept``: characters taken
    over from the prompt before it."""

    rest: str
    messages: tuple[Json, ...]
    tools: tuple[ToolSpec, ...]
    variables: str
    pieces: tuple[str, ...] = ()
    spliced: int = 0
    reasoning: bool = False
    head: Head | None = None
    cuts: tuple[Cut, ...] = ()
    whole_at: int = 0
    kept: int = 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join((*self.pieces, self.rest))

    def behind(self, char: int) -> str:
        """The text from a character on, without copying what lies before."""
        start = self.cuts[-1].chars if self.cuts else 0
        if char >= start:
            return self.rest[char - start :] if char > start else self.rest
        parts, index = [self.rest], len(self.cuts)
        while char < start:
            index -= 1
            start = self.cuts[index - 1].chars if index else 0
            parts.append(self.pieces[index])
        return "".join(reversed(parts))[char - start :]


def boundary(messages: Sequence[Json], index: int) -> bool:
    """Whether a conversation may be taken up at this message: it follows an answer and is none."""
    return index > 0 and messages[index - 1]["role"] == "assistant" and messages[index]["role"] != "assistant"


def asks(messages: Sequence[Json]) -> bool:
    """Whether somebody says something in these, rather than tools alone."""
    return any(message["role"] in _ASKING for message in messages)


class Renderer:
    """See the module. Safe to share between threads. ``whole_chars_max``: prompts up to this size are rendered whole."""

    def __init__(self, chat: ChatTemplate, whole_chars_max: int = WHOLE_CHARS_MAX) -> None:
        self._chat, self.fitting = chat, Fitting(chat)
        self.whole_chars_max = whole_chars_max
        self.local: dict[tuple[bool, bool], bool] = {}
        self.tails = 0

    def text(
        self,
        messages: Sequence[Json],
        tools: tuple[ToolSpec, ...],
        variables: Mapping[str, Any],
        ask: bool = True,
        plain: bool = False,
    ) -> str:
        """The text of these messages. ``ask``: the prompt for an answer behind them. Raises ``ChatTemplateError``."""
        pairs, given, _ = self.fitting.fit(Conversation(tuple(messages), tools, places=(None,) * len(messages)), plain)
        try:
            return self._chat.render([message for message, _ in pairs], given or None, ask, **variables)
        except TypeError as error:  # a variable that takes a name of render itself
            raise ChatTemplateError(str(error)) from error

    # ---- whole -----------------------------------------------------------------------------------------------------

    def whole(
        self, talk: Conversation, hidden: Sequence[Json], tools: tuple[ToolSpec, ...], splices: dict[int, Splice]
    ) -> Rendered:
        """The prompt of a conversation. ``hidden``: its messages as they may be rendered. ``splices``: answers by their
        message; those that the template does not render in that form are taken out. Raises 400 in the template's words."""
        refusal: ChatTemplateError | None = None
        for splice, plain in ((True, False), (False, False), (False, True)):
            if splice and not splices:
                continue
            if not splice:
                splices.clear()
            try:
                text = self._spliced_text(hidden, tools, talk.variables, splices, plain)
            except ChatTemplateError as error:
                refusal = refusal or error
                continue
            except RecursionError:
                raise bad_request(f"{talk.source}: nested too deeply", talk.source) from None
            reasoning = any("reasoning_content" in message for message in talk.messages)
            count = len(talk.messages)
            done = Rendered(
                text, talk.messages, tools, repr(talk.variables), (), len(splices), reasoning, whole_at=count
            )
            return done if plain else self._with_cut(done, hidden, talk.variables, splices, 0)
        raise bad_request(f"{talk.source}: {refusal}", talk.source, "chat_template_error") from None

    def _spliced_text(
        self,
        hidden: Sequence[Json],
        tools: tuple[ToolSpec, ...],
        variables: Mapping[str, Any],
        splices: dict[int, Splice],
        plain: bool = False,
    ) -> str:
        """With the answers' keys in their places. Answers whose reasoning the template leaves out, or shows in another place
        than the answer had it, are left to the template."""
        text = self.text(_with_keys(hidden, splices), tools, variables, plain=plain)
        if any(splice.reasoning for splice in splices.values()):
            text, shown = _without_thoughts(text, {splice.key: splice for splice in splices.values()})
            lost = [index for index, splice in splices.items() if splice.reasoning and splice.key not in shown]
            for index in lost:
                del splices[index]
            if lost:
                text = self.text(_with_keys(hidden, splices), tools, variables, plain=plain)
                text, shown = _without_thoughts(text, {splice.key: splice for splice in splices.values()})
                if any(splice.reasoning and splice.key not in shown for splice in splices.values()):
                    raise ChatTemplateError("answers with reasoning change their places")
        return text

    # ---- ends ------------------------------------------------------------------------------------------------------

    def cut(self, before: Rendered, talk: Conversation, tools: tuple[ToolSpec, ...], shared: int) -> Cut | None:
        """Where ``talk`` can be taken up behind a known prompt with which it shares this many messages; None: nowhere."""
        if before.head is None or before.tools is not tools or before.variables != repr(talk.variables):
            return None
        ends = (cut for cut in reversed(before.cuts) if cut.messages <= shared)
        cut = next(ends, None)
        if cut is None or cut.messages >= len(talk.messages):
            return None
        if not all(a is b for a, b in zip(before.messages[: cut.messages], talk.messages, strict=False)):
            return None
        tail = talk.messages[cut.messages :]
        reasoning = before.reasoning or any("reasoning_content" in message for message in tail)
        return cut if self._is_local(reasoning, asks(tail)) else None

    def tail(
        self, before: Rendered, cut: Cut, talk: Conversation, hidden: Sequence[Json], splices: dict[int, Splice]
    ) -> Rendered | None:
        """The prompt of ``talk`` behind a known one; None where it must be rendered whole. ``hidden``: the messages behind the
        cut, as they may be rendered; ``splices``: as in ``whole``, counted from the cut."""
        text = self._tail_text(before, hidden, talk.variables, splices)
        if text is None:
            return None
        self.tails += 1
        kept = before.cuts.index(cut) + 1
        done = Rendered(
            text,
            talk.messages,
            before.tools,
            before.variables,
            before.pieces[:kept],
            cut.spliced + len(splices),
            before.reasoning or any("reasoning_content" in message for message in talk.messages[cut.messages :]),
            before.head,
            before.cuts[:kept],
            before.whole_at,
            cut.chars,
        )
        if len(text) <= max(len(before.head.text) if before.head else 0, self.whole_chars_max):
            return done
        return self._with_cut(done, hidden, talk.variables, splices, cut.messages)

    def _tail_text(
        self, before: Rendered, hidden: Sequence[Json], variables: Mapping[str, Any], splices: dict[int, Splice]
    ) -> str | None:
        head = before.head
        assert head is not None
        moved = {index + len(head.messages): splice for index, splice in splices.items()}
        try:
            text = self._spliced_text((*head.messages, *hidden), before.tools, variables, moved)
        except (ChatTemplateError, RecursionError):
            return None
        for index in [index for index in splices if index + len(head.messages) not in moved]:
            del splices[index]
        return text[len(head.text) :] if text.startswith(head.text) else None

    def _with_cut(
        self,
        done: Rendered,
        hidden: Sequence[Json],
        variables: Mapping[str, Any],
        splices: Mapping[int, Splice],
        start: int,
    ) -> Rendered:
        """With the last place at which it can be taken up, if there is one; ``hidden`` and ``splices`` begin at ``start``."""
        if not done.cuts and len(done.rest) <= self.whole_chars_max:
            return done
        last = next((i for i in range(len(hidden) - 1, 0, -1) if boundary(hidden, i)), None)
        head = done.head or self._head(done, hidden, variables)
        if last is None or head is None or start + last <= len(head.messages):
            return done
        ends = {index - last: splice for index, splice in splices.items() if index >= last}
        count = len(ends)
        text = self._tail_text(replace(done, head=head), hidden[last:], variables, ends)
        if text is None or len(ends) != count or not done.rest.endswith(text):
            return done
        piece = done.rest[: len(done.rest) - len(text)]
        before = done.cuts[-1].chars if done.cuts else 0
        cut = Cut(start + last, before + len(piece), done.spliced - count)
        return replace(done, head=head, cuts=(*done.cuts, cut), pieces=(*done.pieces, piece), rest=text)

    def _head(self, done: Rendered, hidden: Sequence[Json], variables: Mapping[str, Any]) -> Head | None:
        first = next((i for i in range(1, len(hidden)) if boundary(hidden, i)), None)
        if first is None:
            return None
        messages = tuple(hidden[:first])
        try:
            return Head(messages, self.text(messages, done.tools, variables, ask=False))
        except ChatTemplateError:
            return None

    # ---- what is known of the template -----------------------------------------------------------------------------

    def _is_local(self, reasoning: bool, asking: bool) -> bool:
        if (reasoning, asking) not in self.local:
            from tenuto_server.api.locality import find  # it renders with this class

            self.local |= {(reasoning, said): holds for said, holds in find(self, reasoning).items()}
        return self.local[reasoning, asking]

    def distrust(self) -> None:
        """The template turned out to render a message by more than its neighbourhood."""
        self.local = {(reasoning, asking): False for reasoning in (False, True) for asking in (False, True)}
        logger.warning("the chat template renders by more than neighbouring messages: prompts are rendered whole")


def _with_keys(messages: Sequence[Json], splices: Mapping[int, Splice]) -> Sequence[Json]:
    """The messages with the keys of answers in their places."""
    if not splices:
        return messages
    return [_keyed(splices[index]) if index in splices else message for index, message in enumerate(messages)]


def _keyed(splice: Splice) -> Json:
    message: Json = {"role": "assistant", "content": f"{SPLICE}{splice.key}{SPLICE}"}
    return {**message, "reasoning_content": THOUGHT} if splice.reasoning else message


def _without_thoughts(text: str, splices: Mapping[str, Splice]) -> tuple[str, set[str]]:
    """The text with the template's rendering of spliced reasoning cut out, since the answers' ids begin with theirs; and the
    keys for which that was possible."""
    parts: list[str] = []
    shown: set[str] = set()
    last = 0
    for match in _THOUGHTS.finditer(text):
        splice = splices.get(match[1])
        begin = text.rfind(splice.opening, last, match.start()) if splice is not None and splice.opening else -1
        if splice is None or begin < 0:
            continue
        parts.append(text[last : begin + len(splice.opening)])
        last = match.end() - len(match[1]) - 2 * len(SPLICE)
        shown.add(splice.key)
    return "".join((*parts, text[last:])), shown
