"""Prompts for measurements: tokens of this project's own sources, no two prompts with a common start."""

from __future__ import annotations

import random
from pathlib import Path

import tenuto_server
from tenuto_server.bench.endpoint import Endpoint

_CHARS_MAX = 600_000


class Prompts:
    """``take(n)`` gives n token ids, each time others. Owns its random state: the same seed gives the same prompts."""

    def __init__(self, endpoint: Endpoint, seed: int = 0) -> None:
        files = sorted(Path(tenuto_server.__file__).parent.rglob("*.py"))
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)[:_CHARS_MAX]
        self._tokens = endpoint.tokenize(text)
        self._rng = random.Random(seed)

    def take(self, count: int) -> list[int]:
        """A stretch may come again; ids of its own in front keep it from being found in a cache."""
        rng, tokens = self._rng, self._tokens
        start = rng.randrange(len(tokens) - count)
        return [rng.choice(tokens), rng.choice(tokens), rng.choice(tokens), *tokens[start : start + count - 3]][:count]
