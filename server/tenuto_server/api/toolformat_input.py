"""Text that arrives in pieces, read like text that is all there. ``Input`` owns the part that is not consumed yet.

Its methods are generators that yield while they need more; ``final`` says that no more will come, ``cut`` that there would
have been more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

_SPACE = " \t\r\n"


class Input:
    """``text[at:]`` is unread. While a mark is set, everything since is kept, so that reading can go back to it."""

    def __init__(self) -> None:
        self.text, self.at, self.final, self.cut = "", 0, False, False
        self.skipped_space = ""
        self._mark: int | None = None

    def push(self, piece: str) -> None:
        """Appends a piece."""
        if self._mark is None:
            self.text, self.at = self.text[self.at :], 0
        self.text += piece

    def mark(self) -> None:
        """Remembers this place."""
        self._mark = self.at

    def unmark(self) -> None:
        """Forgets it: what was read since is consumed."""
        self._mark = None

    def back(self) -> None:
        """Returns to the mark and forgets it."""
        assert self._mark is not None
        self.at, self._mark = self._mark, None

    def more(self) -> Generator[None, None, bool]:
        """Whether a character is left."""
        while self.at >= len(self.text):
            if self.final:
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """The next character, not consumed; "" at the end."""
        return self.text[self.at] if (yield from self.more()) else ""

    def skip_space(self) -> Generator[None, None, str]:
        """Skips JSON's white space; the next character, "" at the end."""
        while (char := (yield from self.peek())) and char in _SPACE:
            self.at += 1
        return char

    def literal(self, word: str) -> Generator[None, None, bool]:
        """Consumes ``word`` if it is next, or what came of it before the text was cut."""
        while True:
            have = self.text[self.at : self.at + len(word)]
            if have == word:
                self.at += len(word)
                return True
            if self.final or not word.startswith(have):
                if self.cut and word.startswith(have):
                    self.at += len(have)
                return False
            yield

    def until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """What certainly stands before any of the markers, and the marker if one is complete (then it is consumed).

        Space before a marker is left out (``skipped_space``), so space at the end of what has arrived stays unread. Never
        waits.
        """
        places = [(place, marker) for marker in markers if (place := self.text.find(marker, self.at)) >= 0]
        if places:
            place, marker = min(places, key=lambda found: found[0])
            whole = self.text[self.at : place]
            text = whole.rstrip(_SPACE)
            self.skipped_space = whole[len(text) :]
            self.at = place + len(marker)
            return text, marker
        end = len(self.text)
        if markers:
            end -= max(_overlap(self.text, self.at, marker) for marker in markers)
            while end > self.at and self.text[end - 1] in _SPACE:
                end -= 1
        text, self.at = self.text[self.at : end], end
        return text, None

    def take_until(self, word: str) -> Generator[None, None, str | None]:
        """What stands before ``word``, both consumed; None if it does not come."""
        searched = self.at
        kept = self._mark is not None
        if not kept:
            self.mark()
            searched = self.at
        while (place := self.text.find(word, searched)) < 0:
            if self.final:
                if not kept:
                    self.back()
                return None
            searched = max(self.at, len(self.text) - len(word) + 1)
            yield
        taken, self.at = self.text[self.at : place], place + len(word)
        if not kept:
            self.unmark()
        return taken

    def rest(self) -> str:
        """Everything left."""
        text, self.at = self.text[self.at :], len(self.text)
        return text


def _overlap(text: str, start: int, marker: str) -> int:
    """Length of the longest proper beginning of ``marker`` that ``text[start:]`` ends with."""
    for size in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
