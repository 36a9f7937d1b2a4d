"""The torch executor: carries out plans on real memory. Owns the model's use, the KV pools and the transfer workers.

``run`` belongs to the engine thread; copies run on the workers of ``Transfers`` meanwhile and report to the sink.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tenuto_kernels.lower import LowerForm
from tenuto_kernels.ops import copy_blocks
from tenuto_server.engine.events import DiskRecovered, Event, ForwardDone, TokenArray
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer
from tenuto_server.model.transformer import Transformer
from tenuto_server.runtime.batch import BatchBuilder
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.draft import DraftModel
from tenuto_server.runtime.grammar import GrammarBook
from tenuto_server.runtime.graphs import decode_graphs, forward
from tenuto_server.runtime.kv_store import KVStore
from tenuto_server.runtime.sampler import sample
from tenuto_server.runtime.transfer import Transfers


class TorchExecutor:
    """``disk``: an open tier whose ``block_bytes`` are those of the model's layout, or of its ``lower`` form (of blocks below
    the device; None: as they are), or None; closed with the executor.

    ``host_bytes_per_s``, ``disk_bytes_per_s`` limit the tiers' bandwidth (None: no limit). ``host_checksums`` guards blocks in
    host memory; those on disk always are. ``grammars``, set after construction,
    holds answers to a grammar, ``drafter`` guesses where a row has room. Raises ``ValueError`` for sizes that do not fit.
    """

    def __init__(
        self,
        transformer: Transformer,
        *,
        device_blocks: int,
        host_blocks: int = 0,
        block_tokens: int = 16,
        disk: DiskTier | None = None,
        host_bytes_per_s: float | None = None,
        disk_bytes_per_s: float | None = None,
        host_checksums: bool = True,
        stuck_s: float = 30.0,
        lower: LowerForm | None = None,
    ) -> None:
        layout = transformer.kv_layout(block_tokens)
        size = layout.block_bytes if lower is None else lower.block_bytes
        if disk is not None and disk.block_bytes != size:
            raise ValueError(f"disk tier has blocks of {disk.block_bytes} bytes, the model's are {size}")
        self.transformer = transformer
        self.store = KVStore(
            layout,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            device=transformer.device,
            checksums=host_checksums,
            lower=lower,
        )
        self.disk = disk
        self.grammars: GrammarBook | None = None
        self.drafter: DraftModel | None = None
        self.transfers = Transfers(
            self.store,
            disk,
            host_bytes_per_s=host_bytes_per_s,
            disk_bytes_per_s=disk_bytes_per_s,
            stuck_s=stuck_s,
        )
        self._graphs = decode_graphs(transformer, self.store.device_pool)
        self._batches = BatchBuilder(block_tokens, device_blocks, transformer.device)
        self._counts = {"forwards": 0, "rows": 0, "tokens": 0, "blocks_copied": 0, "model_ns": 0, "forward_ns": 0}

    @torch.inference_mode()
    def run(self, plan: ForwardPlan) -> ForwardDone:
        """Copies first, then the rows, then one token per row that asks for it; complete when it returns."""
        began = time.perf_counter_ns()
        pool = self.store.device_pool
        if pool.device.type == "cuda":
            torch.cuda.set_device(
                pool.device
            )  # kernels are launched on the thread's current device, not on their tensors'
        if plan.copies:
            pairs = torch.tensor(plan.copies, dtype=torch.int64, device=pool.device)
            copy_blocks(pool, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
        sampled: tuple[tuple[int, int], ...] = ()
        drafted: tuple[tuple[int, int], ...] = ()
        if self.drafter is not None and any(row.room for row in plan.rows):
            plan, drafted = with_guesses(plan, self.drafter.propose)
        if plan.rows:
            batch = self._batches.build(plan)
            computing = time.perf_counter_ns()
            logits = forward(self.transformer, self._graphs, batch, pool)
            self._counts["model_ns"] += time.perf_counter_ns() - computing
            rows = [each for row in plan.rows if row.sample for each in _draws(row)]
            if self.grammars is not None:
                self.grammars.constrain(logits, rows)
            tokens = sample(logits, [row.sampling for row in rows], [row.draw for row in rows])
            if self.grammars is not None:
                self.grammars.advance(rows, tokens)
            sampled = tuple(confirmed(plan.rows, tokens))
            self._counts["tokens"] += batch.rows.num_tokens
        if pool.device.type == "cuda":
            # Without a token to read nothing has waited for the kernels yet, and a failure would surface elsewhere.
            torch.cuda.current_stream(pool.device).synchronize()
        elapsed = time.perf_counter_ns() - began
        self._counts["forwards"] += 1
        self._counts["rows"] += len(plan.rows)
        self._counts["blocks_copied"] += len(plan.copies)
        self._counts["forward_ns"] += elapsed
        return ForwardDone(plan.step, sampled, elapsed, drafted=drafted)

    def submit(self, transfer: Transfer) -> None:
        """Queue a copy; its ``TransferDone`` reaches the sink. Raises ``InvariantBroken`` if no tier could make it."""
        self.transfers.submit(transfer)

    def cancel(self, transfer_id: int) -> bool:
        """Give a transfer up early; it is still reported, as failed. False if it was reported already."""
        return self.transfers.cancel(transfer_id)

    def set_sink(self, sink: Callable[[Event], None]) -> None:
        """Where ``TransferDone`` and ``TierFailed`` go, from worker threads."""
        self.transfers.set_sink(sink)

    def forget_disk(self, slots: tuple[int, ...]) -> None:
        """These disk slots hold nothing any more; does not wait for the disk."""
        self.transfers.forget_disk(slots)

    def recovered(self) -> DiskRecovered:
        """What the disk directory held at start, for the engine's first step."""
        return DiskRecovered(*self.disk.recovered()) if self.disk is not None else DiskRecovered()

    def health(self) -> dict[str, Any]:
        """Counters of forwards and transfers, sizes of the pools, the disk's state. Thread-safe."""
        layout = self.store.layout
        return {
            "kind": "torch",
            "device": str(self.store.device),
            "forward": self.transformer.kind,
            "linears": self.transformer.linear_kind,
            "weights": self.transformer.weights_form,
            "block_bytes": layout.block_bytes,
            "lower_kv": self.store.lower.kind if self.store.lower is not None else "native",
            "lower_block_bytes": self.store.lower_bytes,
            "device_blocks": len(self.store.device_pool),
            "host_blocks": len(self.store.host_sums),
            "host_checksums": self.store.checksums,
            **({"decode_graphs": self._graphs.health()} if self._graphs is not None else {}),
            **self._counts,
            **({"draft": self.drafter.health()} if self.drafter is not None else {}),
            **self.transfers.health(),
        }

    def close(self) -> None:
        """Stop the workers, close the disk tier."""
        self.transfers.close()


def with_guesses(
    plan: ForwardPlan, propose: Callable[[list[ForwardRow]], list[TokenArray]]
) -> tuple[ForwardPlan, tuple[tuple[int, int], ...]]:
    """The plan with ``propose``'s guesses in the rows that have room for them, and how many each of those got."""
    asking = [row for row in plan.rows if row.room]
    guessed = {row.seq: guess[: row.room] for row, guess in zip(asking, propose(asking), strict=True)}
    rows = [
        row._replace(tokens=np.concatenate([row.tokens, guessed[row.seq]]), draft=len(guessed[row.seq]))
        if row.room
        else row
        for row in plan.rows
    ]
    return replace(plan, rows=tuple(rows)), tuple((row.seq, len(guessed[row.seq])) for row in asking)


def _draws(row: ForwardRow) -> list[ForwardRow]:
    """The row once for every token that may be drawn from it, with the number of that draw."""
    if not row.draft:
        return [row]
    return [row._replace(draw=row.draw + ahead) for ahead in range(row.draft + 1)]


def confirmed(rows: Sequence[ForwardRow], tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """What was really drawn of the rows that sample: (sequence, token) up to the first that was not guessed.

    ``tokens``: for each such row one token for each of its draft + 1 draws.
    """
    at = 0
    for row in rows:
        if not row.sample:
            continue
        drawn = tokens[at : at + row.draft + 1]
        at += row.draft + 1
        guesses = row.tokens[len(row.tokens) - row.draft :].tolist()
        for ahead, token in enumerate(drawn):
            yield row.seq, token
            if ahead < row.draft and guesses[ahead] != token:
                break
