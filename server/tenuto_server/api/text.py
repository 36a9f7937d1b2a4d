"""From generated ids to the text of an answer: decoding and stop strings.

``AnswerText`` owns one answer's undecided tail. Everything is linear in the text: a long answer costs no more per token
than a short one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from tenuto_server.model.tokenizer import Tokenizer


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and never lets a part of it out.

    One Knuth-Morris-Pratt automaton per stop string; what could still become a stop string is held back. The match that
    *ends* first wins, and of several that end together the longest; ``found`` is that one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops if stop]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may go out, whether a stop string was completed). After True nothing more may be pushed."""
        if not self._stops:
            return text, False
        whole = self._held + text
        for index, char in enumerate(text):
            matched = 0
            for number, (stop, table) in enumerate(self._stops):
                state = self._states[number]
                while state and stop[state] != char:
                    state = table[state - 1]
                state += stop[state] == char
                if state == len(stop):
                    if state > matched:
                        matched, self.found = state, stop
                    state = 0
                self._states[number] = state
            if matched:
                return whole[: len(self._held) + index + 1 - matched], True
        cut = len(whole) - max(self._states)
        self._held = whole[cut:]
        return whole[:cut], False

    def finish(self) -> str:
        """The text that was held back for nothing."""
        held, self._held = self._held, ""
        return held


def _failure_table(pattern: str) -> list[int]:
    """table[i]: length of the longest proper prefix of ``pattern`` that ends at i (Knuth, Morris and Pratt, 1977)."""
    table = [0] * len(pattern)
    state = 0
    for index in range(1, len(pattern)):
        while state and pattern[state] != pattern[index]:
            state = table[state - 1]
        state += pattern[state] == pattern[index]
        table[index] = state
    return table


class AnswerText:
    """The text of one answer as its tokens arrive.

    ``stopped``: a stop string was completed (``stop_string``); ``keep_tokens`` then says how many tokens lie wholly before it. ``shown``:
    control tokens that belong to the text, since they mark tool calls or reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], shown: frozenset[int] = frozenset()) -> None:
        self._decoder = tokenizer.incremental(shown=shown)
        self._matcher = StopMatcher(stops)
        self._track = bool(stops)
        self._ends: list[int] = []  # characters decoded after each token
        self._decoded = 0
        self._released = 0
        self.stopped = False
        self.keep_tokens = 0

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens made final. Tokens after a stop string are ignored."""
        if not self._track:
            return self._decoder.push(*ids)
        pieces: list[str] = []
        for token in ids:
            if self.stopped:
                break
            piece = self._decoder.push(token)
            self._decoded += len(piece)
            if self._track:
                self._ends.append(self._decoded)
            pieces.append(self._release(piece))
        return "".join(pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was completed."""
        return self._matcher.found

    def finish(self) -> str:
        """The rest, when the answer ended for another reason than a stop string."""
        if self.stopped:
            return ""
        tail = self._decoder.finish()
        return self._release(tail) + ("" if self.stopped else self._matcher.finish())

    def _release(self, piece: str) -> str:
        out, self.stopped = self._matcher.push(piece)
        self._released += len(out)
        if self.stopped:
            index = bisect_left(self._ends, self._released)
            exact = index < len(self._ends) and self._ends[index] == self._released
            self.keep_tokens = index + 1 if exact and self._released else index
        return out
