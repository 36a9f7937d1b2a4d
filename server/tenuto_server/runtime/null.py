"""An executor without arithmetic: torch-free, deterministic, and sensitive to every wrong block. Owns its toy tiers.

In place of keys and values each token slot holds one 64-bit number that depends on all tokens before it, read from the
blocks the plan names, as attention would read them: with S(p) the sum over positions 0..p (mod 2**64),

    S(p) = M * S(p - 1) + g(token at p),        value(p) = S(p) - S(p - 1)

so a stale, missing, foreign or misplaced block anywhere in a row's table changes every token sampled after it. Two runs of
one prompt give the same tokens exactly if all KV they read was right, whatever was cached, moved or recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tenuto_server.engine.events import Event, ForwardDone, SlotArray, TransferDone
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer

_MASK = (1 << 64) - 1
_M = 0x9E3779B97F4A7C15
_M_INVERSE = pow(_M, -1, 1 << 64)
_POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
HASH_BYTES = 16

Values = NDArray[np.uint64]


@dataclass(frozen=True)
class Fault:
    """What to do to one transfer.

    ``fail``: report it failed as a whole. ``corrupt``: the blocks at ``positions`` (negative: from the end) arrive damaged
    and are reported ``bad``. ``delay``: keep it until ``complete``. ``never``: report it only when cancelled or at ``close``.
    Destinations of failed and damaged blocks are filled with garbage, so that trusting them shows.
    """

    kind: Literal["fail", "corrupt", "delay", "never"]
    positions: tuple[int, ...] = ()


class NullExecutor:
    """Runs plans on toy tiers. ``tokens_low``, ``vocab``: sampled ids lie in ``[tokens_low, vocab)``.

    ``immediate`` False keeps every transfer until ``complete``. ``fault`` is asked once per transfer. ``step_s`` makes each
    forward take that long. ``draft`` guesses for rows with room, as a draft model would. Without a sink, events collect for ``take_events``. ``wrong`` lists every transfer that asked for
    a block its source slot did not hold, or stored other content under a hash than before: an engine's bug, so tests
    assert that it stays empty.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 16,
        vocab: int = 32_000,
        tokens_low: int = 0,
        immediate: bool = True,
        fault: Callable[[Transfer], Fault | None] | None = None,
        step_s: float = 0.0,
        draft: Callable[[ForwardRow], SlotArray] | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.wrong: list[str] = []
        self.transfers: list[Transfer] = []
        self.tokens_computed = 0
        self._vocab, self._low = vocab, tokens_low
        self._immediate, self._fault, self._step_s, self._draft = immediate, fault, step_s, draft
        self._device: Values = np.full((64, block_tokens), _POISON, dtype=np.uint64)
        self._tiers: dict[str, dict[int, tuple[bytes, Values]]] = {"host": {}, "disk": {}}
        self._content: dict[bytes, Values] = {}
        self._held: dict[int, tuple[Transfer, Fault | None]] = {}
        self._events: list[Event] = []
        self._sink: Callable[[Event], None] = self._events.append
        self._figures = {"forwards": 0, "transfers_done": 0, "transfers_failed": 0, "blocks_bad": 0}

    # The executor protocol.

    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Compute the rows; as in a real forward, a row sees what the others of the plan store at earlier positions."""
        if self._step_s:
            time.sleep(self._step_s)
        for source, target in plan.copies:
            self._grow(max(source, target))
            self._device[target] = self._device[source]
        rows = [self._guessed(row) for row in plan.rows]
        drafted = tuple((row.seq, row.draft) for row in rows if row.room)
        drawn = {id(row): self._row(row) for row in sorted(rows, key=lambda row: row.start)}
        sampled = tuple((row.seq, token) for row in rows for token in drawn[id(row)])
        self._figures["forwards"] += 1
        return ForwardDone(plan.step, sampled, elapsed_ns=int(self._step_s * 1e9), drafted=drafted)

    def submit(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        fault = self._fault(transfer) if self._fault else None
        if not self._immediate or (fault and fault.kind in ("delay", "never")):
            self._held[transfer.id] = (transfer, fault)
        else:
            self._finish(transfer, fault)

    def set_sink(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._tiers["disk"].pop(slot, None)

    def health(self) -> dict[str, Any]:
        stored = {f"{tier}_blocks": len(blocks) for tier, blocks in self._tiers.items()}
        return {
            "kind": "null",
            "transfers_waiting": len(self._held),
            "wrong": len(self.wrong),
            **self._figures,
            **stored,
        }

    def close(self) -> None:
        for transfer_id in list(self._held):
            self.cancel(transfer_id)

    # What tests drive.

    def take_events(self) -> list[Event]:
        """The events since the last call, when no sink was set."""
        events, self._events[:] = list(self._events), []
        return events

    def complete(self, transfer_id: int | None = None) -> int:
        """Finish one held transfer, or all but those that ``never`` end; returns how many."""
        chosen = [transfer_id] if transfer_id is not None else list(self._held)
        finished = 0
        for key in chosen:
            transfer, fault = self._held[key]
            if fault is None or fault.kind != "never":
                del self._held[key]
                self._finish(transfer, fault)
                finished += 1
        return finished

    def cancel(self, transfer_id: int) -> bool:
        """Report a held transfer failed without touching its destination; False if it is not held."""
        held = self._held.pop(transfer_id, None)
        if held is not None:
            self._report(TransferDone(transfer_id, ok=False, reason="cancelled"), 0)
        return held is not None

    def holds(self, tier: Literal["host", "disk"], slot: int) -> bytes | None:
        """The hash of the block that a slot of a lower tier holds."""
        entry = self._tiers[tier].get(slot)
        return entry[0] if entry else None

    def flip(self, tier: Literal["host", "disk"], slot: int) -> None:
        """Damage a stored block, as a failing device would; the next copy out of it reports it ``bad``."""
        tag, values = self._tiers[tier][slot]
        self._tiers[tier][slot] = (tag, values ^ np.uint64(1))

    # Arithmetic.

    def _guessed(self, row: ForwardRow) -> ForwardRow:
        if not row.room or self._draft is None:
            return row
        guess = self._draft(row)[: row.room]
        return row._replace(tokens=np.concatenate([row.tokens, guess]), draft=len(guess))

    def _row(self, row: ForwardRow) -> list[int]:
        """Stores the row; the tokens drawn: one, and one more after each guess that was right."""
        size, count = self.block_tokens, len(row.tokens)
        end = row.start + count
        if not count or len(row.blocks) * size < end:
            raise ValueError(f"row of sequence {row.seq}: {count} tokens from {row.start}, {len(row.blocks)} blocks")
        self._grow(int(row.blocks.max()))
        full, rest = divmod(row.start, size)
        before = int(self._device[row.blocks[:full]].sum(dtype=np.uint64))
        if rest:
            before = (before + int(self._device[row.blocks[full], :rest].sum(dtype=np.uint64))) & _MASK
        sums = _prefix_sums(before, row.tokens)
        positions = np.arange(row.start, end)
        self._device[row.blocks[positions // size], positions % size] = np.diff(sums)
        self.tokens_computed += count
        drawn: list[int] = []
        for ahead in range(row.draft + 1 if row.sample else 0):
            state = int(sums[count - row.draft + ahead])
            if row.sampling.temperature > 0:
                state ^= ((row.sampling.seed * 0x5851F42D4C957F2D + row.draw + ahead + 1) * _M) & _MASK
            drawn.append(self._low + _mix(state) % (self._vocab - self._low))
            if ahead < row.draft and row.tokens[count - row.draft + ahead] != drawn[-1]:
                break
        return drawn

    def _grow(self, slot: int) -> None:
        if slot >= len(self._device):
            extra = np.full((max(slot + 1 - len(self._device), len(self._device)), self.block_tokens), _POISON)
            self._device = np.concatenate([self._device, extra.astype(np.uint64)])

    # Copies.

    def _finish(self, transfer: Transfer, fault: Fault | None) -> None:
        count = len(transfer.src_slots)
        failed = fault is not None and fault.kind == "fail"
        damaged = {p % count for p in fault.positions} if fault is not None and fault.kind == "corrupt" else set()
        bad: list[int] = []
        for at in range(count):
            block_hash = transfer.hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)]
            values = None if failed or at in damaged else self._load(transfer, at, block_hash)
            if values is None:
                bad.append(at)
                values = np.full(self.block_tokens, _POISON, dtype=np.uint64)
            self._store(transfer, at, block_hash, values)
        if failed:
            self._report(TransferDone(transfer.id, ok=False, reason="injected failure"), 0)
        else:
            self._report(TransferDone(transfer.id, ok=len(bad) < count, bad=tuple(bad)), len(bad))

    def _load(self, transfer: Transfer, at: int, block_hash: bytes) -> Values | None:
        slot = int(transfer.src_slots[at])
        if transfer.src == "device":
            self._grow(slot)
            values: Values = self._device[slot].copy()
            if not np.array_equal(self._content.setdefault(block_hash, values), values):
                self.wrong.append(f"transfer {transfer.id}: device slot {slot} is not block {block_hash.hex()}")
            return values
        entry = self._tiers[transfer.src].get(slot)
        if entry is None or entry[0] != block_hash:
            held = entry[0].hex() if entry else "nothing"
            self.wrong.append(
                f"transfer {transfer.id}: {transfer.src} slot {slot} holds {held}, not {block_hash.hex()}"
            )
            return None
        intact = bool(np.array_equal(self._content[block_hash], entry[1]))
        return entry[1] if intact else None

    def _store(self, transfer: Transfer, at: int, block_hash: bytes, values: Values) -> None:
        slot = int(transfer.dst_slots[at])
        if transfer.dst == "device":
            self._grow(slot)
            self._device[slot] = values
        else:
            self._tiers[transfer.dst][slot] = (block_hash, values)

    def _report(self, done: TransferDone, bad: int) -> None:
        self._figures["transfers_done"] += done.ok
        self._figures["transfers_failed"] += not done.ok
        self._figures["blocks_bad"] += bad
        self._sink(done)


def reference_token(tokens: SlotArray, *, vocab: int = 32_000, tokens_low: int = 0) -> int:
    """The token that greedy decoding must give after ``tokens``: the definition, one position at a time, no blocks."""
    total = 0
    for token in tokens.tolist():
        total = (_M * total + _mix(token + 1)) & _MASK
    return tokens_low + _mix(total) % (vocab - tokens_low)


def _mix(x: int) -> int:
    """SplitMix64's finaliser: spreads a small difference over all 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _prefix_sums(before: int, tokens: SlotArray) -> Values:
    """[S(-1), S(0), ..., S(n-1)] for n tokens after a prefix whose sum is ``before``, without a loop over tokens.

    S(i) = M^(i+1) * (before + sum over j <= i of g(token j) * M^-(j+1)): M is odd, so it has an inverse mod 2**64.
    """
    count = len(tokens)
    g = tokens.astype(np.uint64) + np.uint64(1)
    g = (g ^ (g >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    g = (g ^ (g >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    g ^= g >> np.uint64(31)
    up = np.cumprod(np.full(count, _M, dtype=np.uint64))
    down = np.cumprod(np.full(count, _M_INVERSE, dtype=np.uint64))
    sums = np.empty(count + 1, dtype=np.uint64)
    sums[0] = before
    sums[1:] = up * (np.uint64(before) + np.cumsum(g * down, dtype=np.uint64))
    return sums
