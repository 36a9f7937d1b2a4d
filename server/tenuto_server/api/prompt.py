"""Conversations to token ids, the same ids for the same conversation every time, and only new text encoded.

Owns the memory of what was rendered and generated (``memory``). Per turn, the whole conversation is rendered and compared
with what was rendered before; encoding starts at the last control token before the first difference. Answers that were
generated here come back as the ids that were generated, whatever a tokenizer would make of their text. The text of a
control token inside a message stays text: a file that mentions ``<|im_end|>`` ends no message (``shield``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tenuto.wire import Divergence
from tenuto_server.api.conversation import Conversation, Json, from_chat
from tenuto_server.api.errors import bad_request
from tenuto_server.api.fitting import Fitting
from tenuto_server.api.memory import Digest, Generated, Known, PromptMemory, chain, digest_of, extend
from tenuto_server.api.outline import digest_tool
from tenuto_server.api.shield import SPLICE, Encoded, Shield
from tenuto_server.api.tools import ToolSpec
from tenuto_server.engine.events import TokenArray
from tenuto_server.model.chat import ChatTemplate, ChatTemplateError
from tenuto_server.model.tokenizer import Tokenizer

MEMORY_BYTES = 256 * 2**20
_TOOL_LISTS_MAX = 32
_DIGESTED = frozenset({"role", "content", "tool_calls", "tool_call_id"})  # the last is a number of ours
_NOTHING = np.empty(0, np.int64)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered prompt. ``tokens``: int32 [n]. ``text``: as a reader sees it. ``raw``: as it was rendered, with ``messages``
    and ``places`` (their index in the client's list) and ``tools`` as the template got them; ``tools_text``: the tools where
    they stand in the system message. ``digests``: of the conversation's messages; ``link``: of all. ``reused``: tokens that
    were not encoded anew; ``spliced``: answers that came back as their generated ids."""

    tokens: TokenArray
    text: str = ""
    raw: str = ""
    messages: tuple[Json, ...] = ()
    places: tuple[int | None, ...] = ()
    tools: tuple[Json, ...] = ()
    tools_text: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    last_role: str | None = None
    link: Digest | None = None
    encoded: Encoded | None = None
    reused: int = 0
    spliced: int = 0
    removed: tuple[str, ...] = ()
    digests: tuple[Digest, ...] = ()
    tool_digests: tuple[Digest, ...] = ()


class PromptBuilder:
    """Renders and encodes. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate, memory_bytes: int = MEMORY_BYTES) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._fitting = Fitting(chat)
        self._shield = Shield(tokenizer)
        self.memory = PromptMemory(memory_bytes)
        self._tool_lists: OrderedDict[tuple[Digest, ...], tuple[ToolSpec, ...]] = OrderedDict()
        self._lock = threading.Lock()
        if tokenizer.special_ids and not self._shield.on:
            logger.warning(
                "this tokenizer cannot be encoded in pieces: control-token text in messages is not neutralised"
            )

    def chat(
        self, messages: Sequence[Any], tools: Sequence[Any] = (), variables: Mapping[str, Any] | None = None
    ) -> Prompt:
        """The prompt of messages and tools in the Chat Completions form. Raises 400 naming the message."""
        return self.conversation(from_chat(messages, tools, variables=variables))

    def conversation(self, talk: Conversation, scope: str = "") -> Prompt:
        """The prompt of a conversation of ``scope`` (a tenant). Raises 400 in the template's words."""
        digests = tuple(map(digest_of, talk.messages))
        links = chain(scope, digests)
        answers = self._answers(talk, links)
        known, shared = self.memory.find(links)
        tool_digests = tuple(map(digest_tool, talk.tools))
        hidden, clean = self._hidden(talk, tool_digests, known.clean[:shared] if known is not None else ())
        prompt = self._render(talk, hidden, links, answers)
        encoded, reused = self._encode(prompt, known, answers)
        if self._shield.on and links:
            self.memory.remember(prompt.raw, encoded, links, clean)
        text = self._shield.reveal(prompt.raw)
        for key, answer in answers.items():
            text = text.replace(f"{SPLICE}{key}{SPLICE}", self._tokenizer.decode(answer.ids.tolist()))
        return Prompt(
            encoded.tokens,
            text,
            prompt.raw,
            prompt.messages,
            prompt.places,
            prompt.tools,
            prompt.tools_text,
            talk.variables,
            talk.last_role,
            links[-1] if links else None,
            encoded,
            reused,
            len(answers),
            talk.removed,
            digests,
            tool_digests,
        )

    def text(self, text: str) -> Prompt:
        """The prompt of a plain completion: control tokens are recognised, as that interface is for."""
        tokens = self._tokenizer.encode(text)
        if self._tokenizer.add_bos and self._tokenizer.bos_id is not None and tokens[:1] != [self._tokenizer.bos_id]:
            tokens = [self._tokenizer.bos_id, *tokens]
        return Prompt(_ids(tokens), text)

    def ids(self, ids: Sequence[int], field: str = "prompt") -> Prompt:
        """A prompt given as token ids. Raises 400 for an id outside the vocabulary, naming ``field``."""
        size = self._tokenizer.vocab_size
        for index, token in enumerate(ids):
            if not 0 <= token < size:
                raise bad_request(f"{field}[{index}]: token id outside 0..{size - 1}", f"{field}[{index}]")
        return Prompt(_ids(ids))

    def remember_answer(self, prompt: Prompt, message: Json, ids: Sequence[int]) -> None:
        """Keeps what was generated after ``prompt``: when ``message`` comes back behind it, it is these ids. An answer with
        reasoning is left to the template, which may strip it."""
        if prompt.link is None or prompt.encoded is None or not self._shield.on or message.get("reasoning_content"):
            return
        chars = prompt.encoded.chars
        lead = prompt.raw[int(chars[-1]) :] if len(chars) else prompt.raw
        self.memory.remember_answer(extend(prompt.link, digest_of(message)), ids, lead)

    # ---- rendering -----------------------------------------------------------------------------------------------

    def _answers(self, talk: Conversation, links: list[Digest]) -> dict[str, Generated]:
        """The answers of the conversation that were generated here, by key."""
        found: dict[str, Generated] = {}
        for link, message in zip(links, talk.messages, strict=True):
            if not self._shield.on or message["role"] != "assistant" or message.get("reasoning_content"):
                continue
            if (answer := self.memory.answer(link)) is not None:
                found[link.hex()] = answer
        return found

    def _render(
        self, talk: Conversation, hidden: Conversation, links: list[Digest], answers: dict[str, Generated]
    ) -> Prompt:
        """With the answers' keys in their places; without, should the template refuse that (``answers`` is then emptied);
        as plain text at last."""
        refusal: ChatTemplateError | TypeError | None = None
        for splice, plain in ((True, False), (False, False), (False, True)):
            if splice and not answers:
                continue
            if not splice:
                answers.clear()
            pairs, tools, tools_text = self._fitting.fit(_spliced(hidden, links, answers), plain)
            messages = [message for message, _ in pairs]
            try:
                raw = self._chat.render(messages, tools or None, True, **talk.variables)
            except (ChatTemplateError, TypeError) as error:  # TypeError: a variable that takes a name of render itself
                refusal = refusal or error
                continue
            except RecursionError:
                raise bad_request(f"{talk.source}: nested too deeply", talk.source) from None
            raw += self._shield.hide(talk.prefill)
            places = tuple(place for _, place in pairs)
            return Prompt(_ids(()), "", raw, tuple(messages), places, tuple(tools), tools_text)
        raise bad_request(f"{talk.source}: {refusal}", talk.source, "chat_template_error") from None

    def _hidden_tools(self, tools: tuple[ToolSpec, ...], digests: tuple[Digest, ...]) -> tuple[ToolSpec, ...]:
        """The tools with control-token text swapped out. Agents send the same long list every turn, so the last lists are
        kept."""
        with self._lock:
            if (found := self._tool_lists.get(digests)) is not None:
                self._tool_lists.move_to_end(digests)
                return found
        plain = [[tool.name, tool.description, tool.parameters] for tool in tools]
        hidden = tuple(
            replace(tool, name=name, description=description, parameters=parameters)
            for tool, (name, description, parameters) in zip(tools, self._shield.hide(plain), strict=True)
        )
        with self._lock:
            self._tool_lists[digests] = hidden
            if len(self._tool_lists) > _TOOL_LISTS_MAX:
                self._tool_lists.popitem(last=False)
        return hidden

    def _hidden(
        self, talk: Conversation, tool_digests: tuple[Digest, ...], clean: Sequence[bool]
    ) -> tuple[Conversation, list[bool]]:
        """The conversation with control-token text swapped out, and which messages had none. ``clean``: the same for the
        messages that are known from before; of these only what their digests leave out is looked through."""
        messages: list[Json] = []
        now: list[bool] = []
        for index, message in enumerate(talk.messages):
            if index < len(clean) and clean[index]:
                rest = {key: message[key] for key in message if key not in _DIGESTED}
                hidden = self._shield.hide(rest) if rest else rest
                messages.append(message if hidden is rest else message | hidden)
                now.append(True)
            else:
                messages.append(self._shield.hide(message))
                now.append(messages[-1] is message)
        tools = self._hidden_tools(talk.tools, tool_digests)
        return Conversation(tuple(messages), tools, places=talk.places, variables=talk.variables), now

    # ---- encoding ------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, known: Known | None, answers: dict[str, Generated]) -> tuple[Encoded, int]:
        """Ids of the rendered text and how many of them were known."""
        if not self._shield.on:
            return Encoded(_ids(self._tokenizer.encode(prompt.raw)), _NOTHING, _NOTHING), 0
        ids = {key: (answer.lead, answer.ids.tolist()) for key, answer in answers.items()}
        char = token = keep = 0
        if known is not None:
            keep = _kept(prompt.raw, known)
            if keep:
                char, token = int(known.encoded.chars[keep - 1]), int(known.encoded.ends[keep - 1])
        new = self._shield.encode(prompt.raw[char:] if char else prompt.raw, ids)
        encoded = new
        if known is not None and keep:
            old = known.encoded
            encoded = Encoded(
                np.concatenate((old.tokens[:token], new.tokens)),
                np.concatenate((old.chars[:keep], new.chars + char)),
                np.concatenate((old.ends[:keep], new.ends + token)),
            )
        return encoded, token

    # ---- where a prompt diverged -----------------------------------------------------------------------------------

    def locate(self, prompt: Prompt, divergence: Divergence) -> Divergence:
        """Adds to a divergence which message (the client's index), role and part its token lies in, where that can be
        told. Renders O(log messages) prefixes."""
        if not prompt.messages:
            return divergence
        at = self._char_of(prompt, divergence.token)
        if self._in_tools(prompt, at):
            return divergence.model_copy(update={"part": "tools"})
        low, high = 0, len(prompt.messages) - 1
        while low < high:  # the last message whose start is at or before the character
            middle = (low + high + 1) // 2
            start = self._start_of(prompt, middle)
            if start is not None and start <= at:
                low = middle
            else:
                high = middle - 1
        role = str(prompt.messages[low]["role"])
        part = "system" if role in ("system", "developer") else "message"
        return divergence.model_copy(update={"message": prompt.places[low], "role": role, "part": part})

    def _char_of(self, prompt: Prompt, token: int) -> int:
        """The character of ``raw`` at which a token begins: exact up to the control token before it."""
        chars, ends = (prompt.encoded.chars, prompt.encoded.ends) if prompt.encoded else (_NOTHING, _NOTHING)
        index = int(np.searchsorted(ends, token, side="right"))
        char, first = (int(chars[index - 1]), int(ends[index - 1])) if index else (0, 0)
        at = char + len(self._tokenizer.decode(prompt.tokens[first:token].tolist()))
        return min(at, int(chars[index]) - 1) if index < len(chars) else at

    def _start_of(self, prompt: Prompt, index: int) -> int | None:
        try:
            head = self._chat.render(prompt.messages[:index], prompt.tools or None, False, **prompt.variables)
        except ChatTemplateError:
            return None
        return common_prefix(prompt.raw, head)

    def _in_tools(self, prompt: Prompt, at: int) -> bool:
        if prompt.tools_text:
            start = prompt.raw.find(prompt.tools_text)
            return 0 <= start <= at < start + len(prompt.tools_text)
        if not prompt.tools:
            return False
        try:
            bare = self._chat.render(prompt.messages, None, True, **prompt.variables)
        except ChatTemplateError:
            return False
        start = common_prefix(prompt.raw, bare)
        end = len(prompt.raw) - common_prefix(prompt.raw[::-1], bare[::-1])
        return start <= at < end


def _spliced(talk: Conversation, links: list[Digest], answers: dict[str, Generated]) -> Conversation:
    """The conversation with the keys of answers in their places."""
    if not answers:
        return talk
    messages = tuple(
        {"role": "assistant", "content": f"{SPLICE}{key}{SPLICE}"} if (key := link.hex()) in answers else message
        for link, message in zip(links, talk.messages, strict=True)
    )
    return replace(talk, messages=messages)


def _ids(ids: Sequence[int]) -> TokenArray:
    return np.asarray(ids, dtype=np.int32)


def _kept(text: str, known: Known) -> int:
    """How many of the known prompt's control tokens lie in what it has in common with ``text``."""
    chars = known.encoded.chars
    if text.startswith(known.text):
        return len(chars)  # it only goes on: one comparison, no copy
    return int(np.searchsorted(chars, common_prefix(text, known.text), side="right"))


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
