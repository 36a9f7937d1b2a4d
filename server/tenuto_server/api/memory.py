"""What was rendered and generated before, so that a turn which appends to a known conversation encodes only what is new.

``PromptMemory`` owns both tables; they are bounded in bytes and forget what was unused for longest. Nothing in it decides
what a prompt says: a remembered prompt is used as far as its text is equal, character by character, to the new one.

Conversations are found by a chain of digests over their messages, begun with the tenant's name: nobody can learn from the
time an answer takes whether another tenant sent the same text.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tenuto_server.api.conversation import Json
from tenuto_server.api.shield import Encoded
from tenuto_server.engine.events import TokenArray

Digest = bytes
_ENTRY_BYTES = 200  # what a table entry costs beside its text and ids, about


@dataclass(slots=True, eq=False)
class Known:
    """A prompt as it was rendered, with its ids. ``links``: the digests that lead to it. ``clean``: for each of them whether
    its message held no control-token text."""

    text: str
    encoded: Encoded
    links: tuple[Digest, ...]
    clean: tuple[bool, ...]

    @property
    def size(self) -> int:
        return 4 * len(self.text) + self.encoded.tokens.nbytes + 16 * len(self.encoded.chars) + _ENTRY_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """Ids that were generated, and the ``lead``: the prompt's text between its last control token and them."""

    ids: TokenArray
    lead: str

    @property
    def size(self) -> int:
        return self.ids.nbytes + 4 * len(self.lead) + _ENTRY_BYTES


class PromptMemory:
    """``bytes_max`` bounds both tables together. Safe to share between threads."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._by_link: dict[Digest, int] = {}
        self._answers: OrderedDict[Digest, Generated] = OrderedDict()
        self._next = 0
        self.bytes = 0
        self.hits = 0

    # ---- prompts -------------------------------------------------------------------------------------------------

    def find(self, links: Sequence[Digest]) -> tuple[Known | None, int]:
        """The remembered prompt that shares the most messages with this chain, and how many it shares."""
        with self._lock:
            for count in range(len(links), 0, -1):
                if (number := self._by_link.get(links[count - 1])) is not None:
                    self._known.move_to_end(number)
                    self.hits += 1
                    return self._known[number], count
        return None, 0

    def remember(self, text: str, encoded: Encoded, links: Sequence[Digest], clean: Sequence[bool]) -> None:
        """Keeps a prompt. It takes the place of every remembered prompt that it continues."""
        known = Known(text, encoded, tuple(links), tuple(clean))
        with self._lock:
            self._next += 1
            for link in links:
                before = self._by_link.get(link)
                self._by_link[link] = self._next
                if before is not None and before in self._known and self._known[before].links[-1] == link:
                    self._forget(before)
            self._known[self._next] = known
            self.bytes += known.size
            self._trim()

    def _forget(self, number: int) -> None:
        known = self._known.pop(number)
        self.bytes -= known.size
        for link in known.links:
            if self._by_link.get(link) == number:
                del self._by_link[link]

    # ---- answers -------------------------------------------------------------------------------------------------

    def answer(self, link: Digest) -> Generated | None:
        """What was generated as the answer whose chain ends with ``link``."""
        with self._lock:
            if (found := self._answers.get(link)) is not None:
                self._answers.move_to_end(link)
            return found

    def remember_answer(self, link: Digest, ids: Sequence[int], lead: str) -> None:
        """Keeps generated ids under the chain that the answer will have when it comes back."""
        generated = Generated(np.asarray(ids, np.int32), lead)
        with self._lock:
            old = self._answers.pop(link, None)
            self._answers[link] = generated
            self.bytes += generated.size - (old.size if old is not None else 0)
            self._trim()

    def _trim(self) -> None:
        while self.bytes > self._bytes_max and (self._known or self._answers):
            # Answers are small, and without one a whole prefix is lost: prompts go first.
            if len(self._known) > 1 or not self._answers:
                self._forget(next(iter(self._known)))
            else:
                _, generated = self._answers.popitem(last=False)
                self.bytes -= generated.size


def chain(scope: str, digests: Sequence[Digest]) -> list[Digest]:
    """One digest after each message, over all up to it. ``scope``: whose conversation it is."""
    link = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    links = []
    for digest in digests:
        link = extend(link, digest)
        links.append(link)
    return links


def extend(link: Digest, digest: Digest) -> Digest:
    """The chain behind one more message."""
    return hashlib.blake2b(link + digest, digest_size=16).digest()


def digest_of(message: Json) -> Digest:
    """What a message says, in 16 bytes. An answer's reasoning does not count: clients may or may not send it back."""
    state = hashlib.blake2b(digest_size=16)
    content = message["content"]
    if message["role"] == "assistant":
        content = content.strip()
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        state.update(json.dumps(calls, sort_keys=True).encode("utf-8", "surrogatepass"))
    state.update(f"{message['role']}\0{len(content)}\0".encode())
    state.update(content.encode("utf-8", "surrogatepass"))
    return state.digest()
