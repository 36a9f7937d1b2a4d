"""Which tokens an answer's grammar allows next. ``GrammarBook`` owns compiled grammars and the matchers of open turns.

A grammar is compiled off the engine thread and opened for one turn; the turn's ``Sampling.grammar`` carries the number under
which its matcher is found. The engine thread asks for masks before it samples and tells the matcher what was drawn. A
matcher knows how many tokens it has taken, and a row says which draw it wants: where a forward failed after drawing, the
matcher goes back, so that the same draw always sees the same mask. Preemption costs nothing: matchers outlive it.

The work is xgrammar's (an optional extra); it is imported at first use, since it takes seconds.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenuto_server.engine.plan import ForwardRow
from tenuto_server.errors import TenutoServerError
from tenuto_server.model.tokenizer import Tokenizer
from tenuto_server.runtime.sampler import mask_logits

logger = logging.getLogger(__name__)

INSTALL = "pip install 'tenuto[constrain]'"
COMPILED_MAX = 32


class GrammarError(TenutoServerError):
    """The grammar cannot be compiled; the message says why."""


class GrammarsMissing(TenutoServerError):
    """The library is not installed; the message says how to get it."""

    missing = True


@dataclass(slots=True, eq=False)
class _Open:
    matcher: Any
    taken: int = 0


class GrammarBook:
    """``vocab_size``: width of the logits. ``shown``: control tokens that are markup of answers and so part of their text;
    every other control token is never allowed. ``eos_ids``: what ends an answer."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], shown: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids, self._shown = tokenizer, vocab_size, tuple(eos_ids), shown
        self._compiling = threading.Lock()
        self._compiler: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)

    # API threads.

    def compile(self, source: str) -> Any:
        """A compiled grammar from the JSON text of a structural tag; may take seconds, and no lock of the engine's.
        Raises ``GrammarError``, ``GrammarsMissing``."""
        with self._compiling:
            if (known := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return known
            xgrammar = _xgrammar()
            if self._compiler is None:
                hidden = self._tokenizer.special_ids - self._shown
                # A token without bytes is never allowed: no text of an answer can be a control token.
                vocabulary = [
                    b"" if index in hidden else self._tokenizer.token_bytes(index) for index in range(self._vocab_size)
                ]
                info = xgrammar.TokenizerInfo(
                    vocabulary,
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocab_size,
                    stop_token_ids=list(self._eos_ids),
                )
                # All masks at once, here, rather than one by one on the engine thread, where everybody would wait.
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            try:
                compiled = self._compiler.compile_structural_tag(source)
            except (RuntimeError, ValueError) as error:
                raise GrammarError(_reason(error)) from None
            self._compiled[source] = compiled
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
            return compiled

    def open(self, compiled: Any) -> int:
        """A matcher at the beginning of an answer; its number, never 0. Close it when the turn is over."""
        number = next(self._numbers)  # no lock: the caller must not wait for somebody else's compilation
        self._open[number] = _Open(_xgrammar().GrammarMatcher(compiled))
        return number

    def close(self, number: int) -> None:
        """Forgets a matcher. A row of its turn that is still under way is drawn without a mask: nobody reads it."""
        self._open.pop(number, None)

    # The engine thread.

    def constrain(self, logits: Tensor, rows: Sequence[ForwardRow]) -> None:
        """Takes from ``logits`` (fp32 [R, V], changed) what the grammars of these rows do not allow."""
        bound = [(index, row, found) for index, row in enumerate(rows) if (found := self._find(row)) is not None]
        if not bound:
            return
        masks = self._empty(len(bound))
        for at, (_, row, found) in enumerate(bound):
            if found.taken > row.draw:
                found.matcher.rollback(found.taken - row.draw)
                found.taken = row.draw
            if found.taken < row.draw:
                raise RuntimeError(f"draw {row.draw} of sequence {row.seq}, but its grammar has seen {found.taken}")
            if found.matcher.is_terminated():
                self._only_eos(masks[at])
            else:
                found.matcher.fill_next_token_bitmask(masks, at)
            if not bool(masks[at].any()):
                logger.warning("the grammar of sequence %d allows nothing more; its answer ends here", row.seq)
                self._only_eos(masks[at])
        mask_logits(logits, [index for index, _, _ in bound], masks)

    def advance(self, rows: Sequence[ForwardRow], tokens: Sequence[int]) -> None:
        """Tells the matchers what was drawn."""
        for row, token in zip(rows, tokens, strict=True):
            found = self._find(row)
            if found is not None and not found.matcher.is_terminated():
                if not found.matcher.accept_token(token):
                    raise RuntimeError(f"token {token} of sequence {row.seq} is not in its grammar")
                found.taken += 1

    def _find(self, row: ForwardRow) -> _Open | None:
        return self._open.get(row.sampling.grammar) if row.sampling.grammar else None

    def _empty(self, rows: int) -> Tensor:
        return torch.zeros((rows, -(-self._vocab_size // 32)), dtype=torch.int32)

    def _only_eos(self, mask: Tensor) -> None:
        mask.zero_()
        for token in self._eos_ids:
            bit = 1 << (token % 32)
            mask[token // 32] |= bit - (1 << 32) if bit >= 1 << 31 else bit


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise GrammarsMissing(f"constrained decoding is not installed: {INSTALL}") from None
    return xgrammar


def _reason(error: Exception) -> str:
    """The library's message without what is its own: time stamp, source line, the condition that it checked."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    line = line.rsplit(".cc:", 1)[-1].partition(": ")[2] or line if ".cc:" in line else line
    if "type mismatch!" in line:
        return "a keyword has a value of the wrong type"
    return line.partition(" is false: ")[2] or line if line.startswith("Check failed: ") else line
