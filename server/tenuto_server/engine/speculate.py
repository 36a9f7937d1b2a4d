"""Guessing a turn's next tokens: from where its context said the same before (prompt lookup), or by a draft model.

A coding agent copies much of what it reads: file contents, names, earlier commands. A guess costs nothing but a few more rows
in a forward that is bound by memory, and since every token is drawn from a counter-based generator, a confirmed guess is
exactly the token that would have been drawn without it (Leviathan et al. 2023 need rejection sampling because their
draws are not reproducible; here the draw itself is compared). Where the context knows nothing, a draft model's guesses are
judged in the same way; the executor makes them, since only it has models.

Owner of the state: a ``Guesser`` belongs to one sequence and remembers how well its guesses went.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tenuto_server.engine.events import TokenArray

MATCH_MIN, MATCH_MAX = 2, 16
"""Tokens before the end of the context that must (and, for choosing, at most can) repeat an earlier place."""
WINDOW = 32_768
"""How far back to look: the cost of a guess is bounded."""
_PATIENCE = 64
"""Tokens to wait at most after guesses that all failed."""
_NONE: TokenArray = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Guesser:
    """``length``: how many tokens to guess next, doubled when all were right, halved when none was; after a failure at length
    1 it pauses, twice as long each time."""

    length: int = 4
    pause: int = 0
    resting: int = 0
    drafted: int = 0
    confirmed: int = 0

    def guess(self, tokens: TokenArray, limit: int) -> TokenArray:
        """At most ``limit`` tokens that may follow ``tokens``; empty where the context knows no continuation."""
        count = self.count(limit)
        return lookup(tokens[-WINDOW:], count) if count else _NONE

    def count(self, limit: int) -> int:
        """How many tokens to guess now, at most ``limit``; none while it rests."""
        if limit > 0 and self.resting > 0:
            self.resting -= 1
            return 0
        return max(0, min(self.length, limit))

    def judge(self, drafted: int, confirmed: int, limit: int) -> None:
        """What became of a guess of ``drafted`` tokens."""
        if not drafted:
            return
        self.drafted += drafted
        self.confirmed += confirmed
        if confirmed == drafted:
            self.length, self.pause = min(limit, 2 * self.length), 0
        elif confirmed:
            self.pause = 0
        elif self.length > 1:
            self.length //= 2
        else:
            self.pause = min(_PATIENCE, 2 * self.pause + 4)
            self.resting = self.pause


def lookup(tokens: TokenArray, count: int) -> TokenArray:
    """Up to ``count`` tokens that followed the latest of the places where the longest suffix of ``tokens`` stood before."""
    end = len(tokens)
    if end <= MATCH_MIN:
        return _NONE
    places = np.flatnonzero(tokens[: end - 1] == tokens[-1])
    for length in range(2, min(MATCH_MAX, end - 1) + 1):
        longer = places[places >= length - 1]
        longer = longer[tokens[longer - (length - 1)] == tokens[end - length]]
        if not len(longer):
            if length <= MATCH_MIN:
                return _NONE
            break
        places = longer
    if not len(places):
        return _NONE
    after = int(places[-1]) + 1
    return tokens[after : after + count].copy()
