"""Keeps the text of control tokens inside messages from becoming control tokens, and encodes prompts piece by piece.

Holds only what it read off the tokenizer. Before rendering, each such text is swapped for a noncharacter and its number;
after rendering, the control tokens in the text are the template's own, and the pieces between them are encoded as ordinary
text with the swap undone. The ids equal those of ``Tokenizer.encode`` wherever no such text occurs (checked once, else the
shield is off).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto_server.api.errors import bad_request
from tenuto_server.engine.events import TokenArray
from tenuto_server.model.tokenizer import Tokenizer

SPLICE = "\ufdd1"
"""Stands on both sides of the key of an answer whose generated ids take its place."""
THOUGHT = "\ufdd2"
"""Stands for the reasoning of such an answer."""

_MARK, _FIRST = "\ufdd0", 0xF0000
_SPLICED = re.compile(f"{SPLICE}([0-9a-f]+){SPLICE}")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Token ids (int32 [n]) of a text, and where each of its control tokens ends: in characters and in tokens (int64)."""

    tokens: TokenArray
    chars: NDArray[np.int64]
    ends: NDArray[np.int64]


class Shield:
    """See the module. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = {tokenizer.token_bytes(i).decode("utf-8", "replace"): i for i in sorted(tokenizer.special_ids)}
        texts.pop("", None)
        self._ids, self._tokenizer = texts, tokenizer
        marks = (_MARK, SPLICE, THOUGHT)
        self._hidden = [*texts, *marks]
        by_length = sorted(texts, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, [*by_length, *marks]))) if texts else None
        # Substring search runs at memory speed, a regular expression does not; most texts hold not even a beginning.
        self._hints = tuple({text[:2] for text in texts} | set(marks))
        self._split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if texts else None
        self._number = {text: chr(_FIRST + n) for n, text in enumerate(self._hidden)}
        sample = f"{by_length[0]}user\nHello  wor\u00e9ld 12{by_length[-1]}\n" if by_length else ""
        self.on = bool(texts) and self.encode(sample).tokens.tolist() == tokenizer.encode(sample)

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value with control-token text swapped out; the value itself if there is none in it."""
        if not self.on:
            return value
        try:
            return self._walk(value)
        except RecursionError:
            raise bad_request("messages: nested too deeply", "messages") from None

    def _walk(self, node: Any) -> Any:
        if isinstance(node, str):
            assert self._find is not None
            if not any(hint in node for hint in self._hints) or self._find.search(node) is None:
                return node
            return self._find.sub(lambda match: _MARK + self._number[match[0]], node)
        if isinstance(node, Mapping):
            pairs = [(self._walk(key), self._walk(item)) for key, item in node.items()]
            same = all(key is old and item is node[old] for (key, item), old in zip(pairs, node, strict=True))
            return node if same else dict(pairs)
        if isinstance(node, (list, tuple)):
            items = [self._walk(item) for item in node]
            return node if all(a is b for a, b in zip(items, node, strict=True)) else items
        return node

    def reveal(self, text: str) -> str:
        """Undoes the swap."""
        return re.sub(f"{_MARK}(.)", self._original, text) if _MARK in text else text

    def _original(self, match: re.Match[str]) -> str:
        number = ord(match[1]) - _FIRST
        return self._hidden[number] if 0 <= number < len(self._hidden) else match[0]

    def encode(self, text: str, answers: Mapping[str, tuple[str, Sequence[int]]] | None = None) -> Encoded:
        """Ids of a rendered text in which only the template's control tokens are control tokens. ``answers``: for each
        spliced key the text that stood between the last control token and the answer, and the answer's ids."""
        assert self._split is not None
        ids: list[int] = []
        chars, ends, at = [], [], 0
        for index, piece in enumerate(self._split.split(text)):
            at += len(piece)
            if index % 2:
                ids.append(self._ids[piece])
                chars.append(at)
                ends.append(len(ids))
            elif SPLICE in piece and answers:
                ids += self._spliced(piece, answers)
            else:
                ids += self._ordinary(piece)
        return Encoded(np.asarray(ids, np.int32), np.asarray(chars, np.int64), np.asarray(ends, np.int64))

    def _spliced(self, piece: str, answers: Mapping[str, tuple[str, Sequence[int]]]) -> list[int]:
        parts = _SPLICED.split(piece)
        # Some templates put a space before an answer that a prompt for one does not end with: the answer's own place counts.
        lead = answers[parts[1]][0]
        if parts[0] != lead and parts[0].strip() == lead.strip():
            parts[0] = lead
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += answers[part][1] if number % 2 else self._ordinary(part)
        return ids

    def _ordinary(self, text: str) -> list[int]:
        return self._tokenizer.encode_ordinary(self.reveal(text)) if text else []

    def splices(self, text: str) -> list[str]:
        """The spliced keys in a rendered text, in order."""
        return _SPLICED.findall(text) if SPLICE in text else []
