"""What was rendered and generated before, so that a turn which appends to a known conversation touches only what is new.

``PromptMemory`` owns both tables; they are bounded in bytes and forget what was unused for longest. Conversations are found
by their links (``digests``). Nothing in it decides what a prompt says: of a remembered prompt only that part is used which
was made from the very same messages, or whose text is equal, character by character, to the new one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tenuto_server.api.digests import Digest
from tenuto_server.api.rendering import Rendered
from tenuto_server.api.shield import Encoded
from tenuto_server.engine.events import TokenArray

_ENTRY_BYTES = 200  # what a table entry costs beside its text and ids, about


@dataclass(slots=True, eq=False)
class Known:
    """A prompt as it was rendered, with its ids. ``links``: the digests that lead to it. ``clean``: for each of them whether
    its message held no control-token text. ``number``: its place in the memory."""

    rendered: Rendered
    encoded: Encoded
    links: tuple[Digest, ...]
    clean: tuple[bool, ...]
    number: int = 0

    @property
    def size(self) -> int:
        texts = (*self.rendered.pieces, self.rendered.rest)
        return (
            sum(len(text) * (1 if text.isascii() else 4) for text in texts)
            + self.encoded.tokens.nbytes
            + 16 * len(self.encoded.chars)
            + _ENTRY_BYTES
        )


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """Ids that were generated, and the ``lead``: the prompt's text between its last control token and them. ``opening``: that
    control token's own text and the lead. ``reasoning``: what of the answer was reasoning."""

    ids: TokenArray
    lead: str
    opening: str = ""
    reasoning: str = ""

    @property
    def size(self) -> int:
        return self.ids.nbytes + 4 * (len(self.lead) + len(self.opening) + len(self.reasoning)) + _ENTRY_BYTES


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

    def remember(self, known: Known, before: Known | None = None) -> None:
        """Keeps a prompt. It takes the place of ``before``, found for it, if it continues that one."""
        with self._lock:
            continued = 0
            if before is not None and self._known.get(before.number) is before:
                ends = len(before.links)
                continued = ends if ends <= len(known.links) and known.links[ends - 1] == before.links[-1] else 0
            if before is not None and continued:
                known.number = before.number
                self.bytes -= before.size
            else:
                self._next += 1
                known.number = self._next
            for link in known.links[continued:]:
                self._by_link[link] = known.number
            self._known[known.number] = known
            self._known.move_to_end(known.number)
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

    def remember_answer(self, link: Digest, generated: Generated) -> None:
        """Keeps generated ids under the chain that the answer will have when it comes back."""
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


def generated(ids: Sequence[int], lead: str, opening: str = "", reasoning: str = "") -> Generated:
    """Generated ids as they are remembered."""
    return Generated(np.asarray(ids, np.int32), lead, opening, reasoning)
