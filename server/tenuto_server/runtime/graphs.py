"""Decode steps as captured CUDA graphs. ``DecodeGraphs`` owns the graphs and the static buffers that they read.

Launching a decode step's hundreds of small kernels from Python takes longer than the device needs to run them; a graph is
launched once. It repeats exactly what was captured, on the same memory: so a batch is copied into static buffers, filled up
to the next bucket with padding rows (a slot of -1 stores nothing, a context of 0 attends to nothing), and how long the rows
are is read on the device. What no bucket takes runs as it always did, and so does everything once a capture has failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenuto_kernels.dispatch import backend
from tenuto_kernels.rows import AttentionRows
from tenuto_server.model.transformer import ForwardBatch, Transformer

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)

Step = Callable[[], Tensor]
"""Computes logits from the static buffers; returns the same memory every time once it is recorded."""


class DecodeGraphs:
    """``record`` makes a replayable step of one: ``CudaRecorder``, or ``run_eagerly`` where nothing can be captured.

    ``max_context_tokens``: no row gets longer; wider block tables are not taken.
    """

    def __init__(
        self,
        transformer: Transformer,
        pool: Tensor,
        record: Callable[[Step], Step],
        *,
        max_context_tokens: int,
        buckets: tuple[int, ...] = BUCKETS,
    ) -> None:
        self._transformer, self._pool, self._record = transformer, pool, record
        self._buckets = tuple(sorted(buckets))
        most, size = self._buckets[-1], pool.shape[4]
        width = min(-(-max_context_tokens // size), len(pool))
        self._longest = width * size
        device = transformer.device
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._context = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._steps: dict[int, Step] = {}
        self._failed = ""
        self._replays = 0

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether every row computes one token and wants its logits, and a bucket has room for all of them."""
        rows = batch.rows
        return (
            not self._failed
            and rows.num_tokens == rows.num_rows == len(batch.logits_index)
            and rows.num_rows <= self._buckets[-1]
            and rows.block_tables.shape[1] <= self._tables.shape[1]
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """``Transformer.forward`` of a batch that ``takes`` allows: logits fp32 [R, vocab], valid until the next call."""
        count = batch.rows.num_rows
        bucket = next(bucket for bucket in self._buckets if bucket >= count)
        step = self._step(bucket)
        if step is None:
            return self._transformer.forward(batch, self._pool)
        self._fill(batch, bucket)
        self._replays += 1
        return step()[:count]

    def prepare(self) -> None:
        """Capture every bucket now rather than under the first request; largest first, so that the others fit its memory."""
        began = time.perf_counter()
        ready = [bucket for bucket in reversed(self._buckets) if self._step(bucket) is not None]
        logger.info("captured decode steps of %s rows in %.1f s", ready[::-1], time.perf_counter() - began)

    def health(self) -> dict[str, Any]:
        """Captured buckets, replays, and why capturing stopped, if it did."""
        return {"buckets": sorted(self._steps), "replays": self._replays, "failed": self._failed}

    def _fill(self, batch: ForwardBatch, bucket: int) -> None:
        count, width = batch.rows.block_tables.shape
        self._tokens[:count].copy_(batch.tokens)
        self._positions[:count].copy_(batch.positions)
        self._slots[:count].copy_(batch.slots)
        self._slots[count:bucket].fill_(-1)
        lengths = torch.tensor([*batch.rows.context_len, *[0] * (bucket - count)], dtype=torch.int32)
        if self._context.device.type == "cuda":
            lengths = lengths.pin_memory()
        self._context[:bucket].copy_(lengths, non_blocking=True)
        # What a longer batch left behind these columns lies past the rows' contexts and is not read.
        self._tables[:count, :width].copy_(batch.rows.block_tables)

    def _step(self, bucket: int) -> Step | None:
        if bucket not in self._steps and not self._failed:
            self._slots.fill_(-1)
            self._context.zero_()
            try:
                self._steps[bucket] = self._record(lambda: self._compute(bucket))
            except RuntimeError as error:
                self._failed = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                self._steps.clear()
                logger.warning("decode steps are launched one kernel at a time: capturing failed (%s)", self._failed)
        return self._steps.get(bucket)

    def _compute(self, bucket: int) -> Tensor:
        rows = AttentionRows.decoding(self._tables[:bucket], self._context[:bucket], self._longest)
        every = torch.arange(bucket, device=self._tokens.device)
        batch = ForwardBatch(self._tokens[:bucket], self._positions[:bucket], self._slots[:bucket], rows, every)
        return self._transformer.forward(batch, self._pool)


class CudaRecorder:
    """Captures steps as CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Raises ``RuntimeError`` if the step cannot be captured or memory lacks."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()  # compiles kernels and allocates what is allocated once: neither may happen while capturing
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Copies between the tiers go on in their threads meanwhile, and are none of this capture's business.
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def run_eagerly(step: Step) -> Step:
    """The recorder of a place without CUDA: the step itself."""
    return step


def forward(transformer: Transformer, graphs: DecodeGraphs | None, batch: ForwardBatch, pool: Tensor) -> Tensor:
    """``Transformer.forward``, as a captured graph where there is one that takes the batch."""
    if graphs is not None and graphs.takes(batch):
        return graphs.forward(batch)
    return transformer.forward(batch, pool)


def decode_graphs(transformer: Transformer, pool: Tensor) -> DecodeGraphs | None:
    """Captured graphs where they are possible: Triton kernels on a CUDA device, and a model whose forward reads nothing on
    the host. Set ``TENUTO_KERNELS=cpu`` to do without."""
    if pool.device.type != "cuda" or backend() != "gpu" or transformer.kind != "layers" or transformer.invariant:
        return None
    graphs = DecodeGraphs(
        transformer, pool, CudaRecorder(pool.device), max_context_tokens=transformer.config.max_position
    )
    graphs.prepare()
    return graphs
