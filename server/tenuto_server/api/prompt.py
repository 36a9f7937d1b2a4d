"""Conversations to token ids, the same ids for the same conversation every time, and only what is new rendered and encoded.

Owns the memory of what was read (``readings``), rendered and generated (``memory``). A turn that appends to a known
conversation is rendered behind it (``rendering``) and encoded from the last control token before the first difference.
Answers that were generated here come back as the ids that were generated, whatever a tokenizer would make of their text. The
text of a control token inside a message stays text: a file that mentions ``<|im_end|>`` ends no message (``shield``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tenuto.wire import Divergence
from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.conversation import Conversation, Json, digest_tool
from tenuto_server.api.digests import Digest, chain, digest_of, extend
from tenuto_server.api.errors import bad_request
from tenuto_server.api.locating import Located, common_prefix, locate
from tenuto_server.api.memory import Generated, Known, PromptMemory, generated
from tenuto_server.api.readings import Readings
from tenuto_server.api.rendering import WHOLE_CHARS_MAX, Cut, Rendered, Renderer, Splice
from tenuto_server.api.shield import SPLICE, Encoded, Shield
from tenuto_server.api.tools import ToolSpec
from tenuto_server.engine.events import TokenArray
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.tokenizer import Tokenizer

MEMORY_BYTES = 256 * 2**20
_READINGS_SHARE = 4  # the memory of what was read may take this fraction of all
_TOOL_LISTS_MAX = 32
_DIGESTED = frozenset({"role", "content", "tool_calls", "tool_call_id"})  # the last is a number of ours
_NOTHING = np.empty(0, np.int64)
_EMPTY = Rendered("", (), (), "")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered prompt. ``tokens``: int32 [n]. ``talk``: what it says; None for a plain text.
    ``digests``: of the conversation's messages; ``link``: of all. ``reused``: tokens that were not encoded anew; ``kept``:
    characters that were not rendered anew; ``spliced``: answers that came back as their generated ids."""

    tokens: TokenArray
    rendered: Rendered = _EMPTY
    talk: Conversation | None = None
    last_role: str | None = None
    link: Digest | None = None
    encoded: Encoded | None = None
    reused: int = 0
    kept: int = 0
    spliced: int = 0
    removed: tuple[str, ...] = ()
    digests: tuple[Digest, ...] = ()
    tool_digests: tuple[Digest, ...] = ()
    read: Callable[[str], str] = str

    @property
    def raw(self) -> str:
        """As it was rendered."""
        return self.rendered.text

    @property
    def text(self) -> str:
        """As a reader sees it."""
        return self.read(self.raw)


@dataclass(slots=True, eq=False)
class _Part:
    """The messages of a conversation from ``start`` on, as they may be rendered. ``clean``: which held no control-token text.
    ``splices``: answers by their place in it; ``answers``: by key."""

    start: int
    hidden: list[Json]
    clean: list[bool]
    splices: dict[int, Splice]
    answers: dict[str, Generated]


class PromptBuilder:
    """Renders and encodes. Safe to share between threads. ``whole_chars_max``: see ``Renderer``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        memory_bytes: int = MEMORY_BYTES,
        whole_chars_max: int = WHOLE_CHARS_MAX,
    ) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self.renderer = Renderer(chat, whole_chars_max)
        self._shield = Shield(tokenizer)
        self.readings = Readings(memory_bytes // _READINGS_SHARE)
        self.memory = PromptMemory(memory_bytes - memory_bytes // _READINGS_SHARE)
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
        return self.conversation(from_chat(messages, tools, variables=variables, readings=self.readings))

    def conversation(self, talk: Conversation, scope: str = "") -> Prompt:
        """The prompt of a conversation of ``scope`` (a tenant). Raises 400 in the template's words."""
        digests, links = talk.digests, talk.links
        if len(links) != len(talk.messages) or talk.scope != scope:
            digests = tuple(map(digest_of, talk.messages))
            links = tuple(chain(scope, digests))
        tool_digests = tuple(map(digest_tool, talk.tools))
        tools = self._hidden_tools(talk.tools, tool_digests)
        known, shared = self.memory.find(links)
        clean = known.clean[:shared] if known is not None else ()
        made = self._behind(known, shared, talk, links, tools) if known is not None else None
        if made is None or self._due(made[0]):
            part = self._part(talk, links, 0, clean)
            whole = self.renderer.whole(talk, part.hidden, tools, part.splices)
            if made is not None and made[0].text != whole.text:
                self.renderer.distrust()
            made = whole, part
        rendered, part = made
        ended = replace(rendered, rest=rendered.rest + self._shield.hide(talk.prefill)) if talk.prefill else rendered
        encoded, reused = self._encode(ended, known, part)
        if self._shield.on and links:
            now = (*clean[: part.start], *part.clean)
            self.memory.remember(Known(ended, encoded, links, now), known)
        return Prompt(
            encoded.tokens,
            ended,
            talk,
            talk.last_role,
            links[-1] if links else None,
            encoded,
            reused,
            rendered.kept,
            rendered.spliced,
            talk.removed,
            digests,
            tool_digests,
            self._read,
        )

    def opening(self, prompt: Prompt, scope: str = "") -> Prompt:
        """Of a prompt that ends with system text, what stays whatever a user says next: neither the beginning of an answer
        nor what a template writes behind the last message alone. Any other prompt stays as it is."""
        talk = prompt.talk
        if talk is None or talk.last_role not in ("system", "developer"):
            return prompt
        said = [*talk.messages, {"role": "user", "content": "."}]
        longer = replace(talk, messages=tuple(said), places=(*talk.places, None), digests=(), links=(), prefill="")
        other = self.conversation(longer, scope).tokens[: len(prompt.tokens)]
        same = int(np.argmin(np.append(prompt.tokens[: len(other)] == other, False)))
        return replace(prompt, tokens=prompt.tokens[:same]) if same else prompt

    def text(self, text: str) -> Prompt:
        """The prompt of a plain completion: control tokens are recognised, as that interface is for."""
        tokens = self._tokenizer.encode(text)
        if self._tokenizer.add_bos and self._tokenizer.bos_id is not None and tokens[:1] != [self._tokenizer.bos_id]:
            tokens = [self._tokenizer.bos_id, *tokens]
        return Prompt(_ids(tokens), replace(_EMPTY, rest=text))

    def ids(self, ids: Sequence[int], field: str = "prompt") -> Prompt:
        """A prompt given as token ids. Raises 400 for an id outside the vocabulary, naming ``field``."""
        size = self._tokenizer.vocab_size
        for index, token in enumerate(ids):
            if not 0 <= token < size:
                raise bad_request(f"{field}[{index}]: token id outside 0..{size - 1}", f"{field}[{index}]")
        return Prompt(_ids(ids))

    def remember_answer(self, prompt: Prompt, message: Json, ids: Sequence[int]) -> None:
        """Keeps what was generated after ``prompt``: when ``message`` comes back behind it, it is these ids."""
        if prompt.link is None or prompt.encoded is None or not self._shield.on:
            return
        chars = prompt.encoded.chars
        at = int(chars[-1]) if len(chars) else 0
        lead = prompt.rendered.behind(at)
        control = self._tokenizer.decode([int(prompt.tokens[int(prompt.encoded.ends[-1]) - 1])]) if len(chars) else ""
        reasoning = message.get("reasoning_content", "")
        answer = generated(ids, lead, control + lead, reasoning)
        self.memory.remember_answer(extend(prompt.link, digest_of(message)), answer)

    def locate(self, prompt: Prompt, divergence: Divergence) -> Divergence:
        """Adds to a divergence which message (the client's index), role and part its token lies in, where that can be
        told."""
        if prompt.talk is None or not prompt.talk.messages:
            return divergence
        keys = set(self._shield.splices(prompt.raw))
        links = prompt.talk.links or tuple(chain(prompt.talk.scope, prompt.digests))
        part = self._part(prompt.talk, links, 0, ())
        given = [
            {"role": "assistant", "content": f"{SPLICE}{link.hex()}{SPLICE}"} if link.hex() in keys else message
            for link, message in zip(links, part.hidden, strict=True)
        ]
        tools = self._hidden_tools(prompt.talk.tools, prompt.tool_digests)
        pairs, schemas, text = self.renderer.fitting.fit(replace(prompt.talk, messages=tuple(given), tools=tools))
        return locate(
            self._chat,
            Located(prompt.raw, pairs, schemas, text, prompt.talk.variables),
            prompt_char(prompt, divergence.token, self._tokenizer),
            divergence,
        )

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _part(self, talk: Conversation, links: Sequence[Digest], start: int, clean: Sequence[bool]) -> _Part:
        """The conversation from a message on. ``clean``: of the messages that are known from before, which held no
        control-token text; of these only what their digests leave out is looked through."""
        part = _Part(start, [], [], {}, {})
        for index in range(start, len(talk.messages)):
            message = talk.messages[index]
            if index < len(clean) and clean[index]:
                rest = {key: message[key] for key in message if key not in _DIGESTED}
                hidden = self._shield.hide(rest) if rest else rest
                part.hidden.append(message if hidden is rest else message | hidden)
                part.clean.append(True)
            else:
                part.hidden.append(self._shield.hide(message))
                part.clean.append(part.hidden[-1] is message)
            answer = self._answer(message, links[index])
            if answer is not None:
                key = links[index].hex()
                part.answers[key] = answer
                part.splices[index - start] = Splice(key, answer.opening, bool(answer.reasoning))
        return part

    def _answer(self, message: Json, link: Digest) -> Generated | None:
        """What was generated, where this message is such an answer with its reasoning as it was."""
        if not self._shield.on or message["role"] != "assistant" or (found := self.memory.answer(link)) is None:
            return None
        return found if message.get("reasoning_content", "").strip() == found.reasoning.strip() else None

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

    # ---- behind a known prompt -------------------------------------------------------------------------------------

    def _behind(
        self, known: Known, shared: int, talk: Conversation, links: Sequence[Digest], tools: tuple[ToolSpec, ...]
    ) -> tuple[Rendered, _Part] | None:
        """The conversation rendered behind a known prompt; None where it must be rendered whole."""
        cut = self.renderer.cut(known.rendered, talk, tools, shared)
        if cut is None:
            return None
        part = self._part(talk, links, cut.messages, known.clean[:shared])
        rendered = self.renderer.tail(known.rendered, cut, talk, part.hidden, part.splices)
        if rendered is None or not self._complete(rendered, known, cut, part):
            return None
        return rendered, part

    def _complete(self, rendered: Rendered, known: Known, cut: Cut, part: _Part) -> bool:
        """Adds the answers before the cut that lie behind the last control token before it; False if one is forgotten."""
        at = int(np.searchsorted(known.encoded.chars, cut.chars, side="right"))
        start = int(known.encoded.chars[at - 1]) if at else 0
        for key in self._shield.splices(rendered.behind(start)[: cut.chars - start]):
            answer = self.memory.answer(bytes.fromhex(key))
            if answer is None:
                return False
            part.answers[key] = answer
        return True

    @staticmethod
    def _due(rendered: Rendered) -> bool:
        """Whether the conversation has doubled since it was rendered whole: then that is done again, and compared."""
        return len(rendered.messages) >= 2 * rendered.whole_at

    # ---- encoding ------------------------------------------------------------------------------------------------

    def _read(self, raw: str) -> str:
        text = self._shield.reveal(raw)
        for key in self._shield.splices(raw):
            if (answer := self.memory.answer(bytes.fromhex(key))) is not None:
                text = text.replace(f"{SPLICE}{key}{SPLICE}", self._tokenizer.decode(answer.ids.tolist()))
        return text

    def _encode(self, rendered: Rendered, known: Known | None, part: _Part) -> tuple[Encoded, int]:
        """Ids of the rendered text and how many of them were known."""
        if not self._shield.on:
            return Encoded(_ids(self._tokenizer.encode(rendered.text)), _NOTHING, _NOTHING), 0
        ids = {key: (answer.lead, answer.ids.tolist()) for key, answer in part.answers.items()}
        if known is None or not (keep := _kept(rendered, known)):
            return self._shield.encode(rendered.text, ids), 0
        old = known.encoded
        char, token = int(old.chars[keep - 1]), int(old.ends[keep - 1])
        new = self._shield.encode(rendered.behind(char), ids)
        encoded = Encoded(
            np.concatenate((old.tokens[:token], new.tokens)),
            np.concatenate((old.chars[:keep], new.chars + char)),
            np.concatenate((old.ends[:keep], new.ends + token)),
        )
        return encoded, token


def prompt_char(prompt: Prompt, token: int, tokenizer: Tokenizer) -> int:
    """The character of ``raw`` at which a token begins: exact up to the control token before it."""
    chars, ends = (prompt.encoded.chars, prompt.encoded.ends) if prompt.encoded else (_NOTHING, _NOTHING)
    index = int(np.searchsorted(ends, token, side="right"))
    char, first = (int(chars[index - 1]), int(ends[index - 1])) if index else (0, 0)
    at = char + len(tokenizer.decode(prompt.tokens[first:token].tolist()))
    return min(at, int(chars[index]) - 1) if index < len(chars) else at


def _ids(ids: Sequence[int]) -> TokenArray:
    return np.asarray(ids, dtype=np.int32)


def _kept(rendered: Rendered, known: Known) -> int:
    """How many of the known prompt's control tokens lie in what it has in common with a text. What was taken over from it is
    the same; only the rest is compared."""
    same = rendered.kept
    same += common_prefix(rendered.behind(same), known.rendered.behind(same))
    return int(np.searchsorted(known.encoded.chars, same, side="right"))
