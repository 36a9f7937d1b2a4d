"""What `gpu.py` times: one function a section, each yielding rows of name, ms, rate, unit, bound and torch's ms.

`Bench` owns the device's measured bandwidths and the buffer that flushes its cache. On the CPU (the interpreter) everything
is called once and shapes are small: that shows that the script works, nothing else.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from tenuto_kernels import cpu, ops
from tenuto_kernels.dispatch import backend, load
from tenuto_kernels.layout import KVLayout
from tenuto_kernels.quant import quantize
from tenuto_kernels.rows import AttentionRows
from tenuto_server.model.config import ModelConfig
from tenuto_server.model.toy import toy_config, toy_weights
from tenuto_server.model.transformer import ForwardBatch, Transformer
from tenuto_server.runtime.graphs import CudaRecorder, DecodeGraphs, run_eagerly

Row = dict[str, Any]

#: Llama 3.1 8B: query heads, KV heads, head dimension, hidden size, inner width, vocabulary.
HQ, HKV, D, HIDDEN, INNER, VOCAB = 32, 8, 128, 4096, 14336, 128256
BLOCK = 16


class Bench:
    """`memory`, `to_device`, `to_host`: GB/s of large copies (the first counts reading and writing)."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick, self.real = torch.device(device), quick, device == "cuda"
        self.dtype = torch.bfloat16 if self.real else torch.float32
        size = 1 << 30 if self.real else 1 << 16
        self._flush = torch.empty(size // 4 if self.real else 1, dtype=torch.uint8, device=self.device)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.memory = 2 * size / self.ms(lambda: target.copy_(source)) / 1e6
        host = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=self.real)
        self.to_device = len(host) / self.ms(lambda: target[: len(host)].copy_(host, non_blocking=True)) / 1e6
        self.to_host = len(host) / self.ms(lambda: host.copy_(source[: len(host)], non_blocking=True)) / 1e6

    def ms(self, call: Callable[[], object], repeat: int = 20) -> float:
        """The median time of a call, its operands not in the cache."""
        if not self.real:
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e3
        for _ in range(3):
            call()
        times = []
        for _ in range(4 if self.quick else repeat):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return float(statistics.median(times))

    def torch_ms(self, call: Callable[[], object]) -> float | None:
        """The same for torch's way; None where it refuses the shapes."""
        try:
            return self.ms(call)
        except RuntimeError:
            return None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def pool(self, blocks: int, layers: int = 1) -> Tensor:
        """KV of `layers` layers, filled with noise."""
        pool = KVLayout(layers, HKV, D, BLOCK, self.dtype).allocate(blocks, self.device)
        return pool.normal_()

    def tables(self, rows: int, context: int, pool: Tensor) -> Tensor:
        """Blocks in no order, different for every row where the pool is large enough."""
        count = -(-context // BLOCK)
        order = torch.randperm(len(pool))
        index = torch.arange(rows * count) % len(pool)
        return order[index].view(rows, count).int().to(self.device)


def decode(bench: Bench) -> Iterator[Row]:
    """Single queries against paged KV; SDPA has the same keys without pages."""
    shapes = ((1, 2048), (1, 32768), (16, 8192), (64, 2048)) if bench.real else ((2, 20),)
    for rows, context in shapes:
        pool = bench.pool(min(rows * -(-context // BLOCK), 65536))
        q, tables = bench.normal(rows, HQ, D), bench.tables(rows, context, pool)
        batch = AttentionRows(tuple(range(rows + 1)), (context,) * rows, tables)
        ms = bench.ms(functools.partial(ops.paged_attention, q, pool, 0, batch, D**-0.5))
        k, v = bench.normal(rows, HKV, context, D), bench.normal(rows, HKV, context, D)
        asked = q.view(rows, HQ, 1, D)
        torch_ms = bench.torch_ms(functools.partial(scaled_dot_product_attention, asked, k, v, enable_gqa=True))
        rate = 2 * rows * context * HKV * D * bench.dtype.itemsize / ms / 1e6
        yield {"name": f"decode attention, {rows} rows at {context}", "ms": ms, "torch_ms": torch_ms,
               "rate": rate, "unit": "GB/s", "bound": bench.memory}  # fmt: skip


def prefill(bench: Bench) -> Iterator[Row]:
    """A chunk at the end of its context. No bound: the device's peak depends on its clock."""
    for chunk, context in ((2048, 2048), (512, 8192), (2048, 8192), (2048, 32768)) if bench.real else ((5, 20),):
        pool = bench.pool(-(-context // BLOCK))
        q, tables = bench.normal(chunk, HQ, D), bench.tables(1, context, pool)
        batch = AttentionRows((0, chunk), (context,), tables)
        ms = bench.ms(functools.partial(ops.paged_attention, q, pool, 0, batch, D**-0.5))
        k, v = (
            bench.normal(1, HQ, context, D),
            bench.normal(1, HQ, context, D),
        )  # its bias and groups of heads do not mix
        asked, bias = q.transpose(0, 1)[None].contiguous(), causal_lower_right(chunk, context)
        torch_ms = bench.torch_ms(functools.partial(scaled_dot_product_attention, asked, k, v, attn_mask=bias))
        flops = 4 * D * HQ * (chunk * (context - chunk) + chunk * (chunk + 1) / 2)
        yield {"name": f"prefill attention, {chunk} tokens at {context}", "ms": ms, "torch_ms": torch_ms,
               "rate": flops / ms / 1e9, "unit": "TFLOPS"}  # fmt: skip


def rowwise(bench: Bench) -> Iterator[Row]:
    """Bytes that must be read and written, over the time; beside the torch definitions."""
    hidden, inner = (HIDDEN, INNER) if bench.real else (64, 96)
    weight = torch.ones(hidden, device=bench.device)
    for rows in (16, 4096) if bench.real else (2,):
        x, gate_up, fused = (
            bench.normal(rows, hidden),
            bench.normal(rows, 2 * inner),
            bench.normal(rows, HQ + 2 * HKV, D),
        )
        angle, slots = torch.rand(rows, D // 2, device=bench.device), torch.arange(rows, device=bench.device)
        rope = (*torch.split(fused, [HQ, HKV, HKV], dim=1), angle, angle, bench.pool(-(-rows // BLOCK)), 0, slots)
        for name, elements, arguments in (
            ("add_rms_norm", 4 * x.numel(), (x, x.clone(), weight, 1e-5)),
            ("silu_mul", 3 * gate_up.numel() // 2, (gate_up,)),
            ("rope_store", 2 * fused.numel(), rope),
        ):
            ms = bench.ms(functools.partial(getattr(ops, name), *arguments))
            torch_ms = bench.torch_ms(functools.partial(getattr(cpu, name), *arguments))
            rate = elements * bench.dtype.itemsize / ms / 1e6
            row = {"name": f"{name}, {rows} tokens", "ms": ms, "torch_ms": torch_ms}
            yield row | {"rate": rate, "unit": "GB/s", "bound": bench.memory}


def products(bench: Bench) -> Iterator[Row]:
    """Beside torch's product with the weight in bf16. Few rows are bound by reading the weight."""
    outputs, inputs = (INNER, HIDDEN) if bench.real else (96, 128)
    dense = bench.normal(outputs, inputs)
    for bits in (8, 4):
        weight = quantize(dense, bits)
        assert weight is not None
        product = load(backend()).quant_linear(weight, None)
        for rows in (1, 16, 64, 2048) if bench.real else (1, 17):
            x = bench.normal(rows, inputs)
            ms = bench.ms(functools.partial(product, x))
            row = {"name": f"W{bits}A16 {outputs} x {inputs}, {rows} rows", "ms": ms,
                   "torch_ms": bench.ms(functools.partial(linear, x, dense))}  # fmt: skip
            if rows <= 64:
                size = outputs * inputs * (bits / 8 + (2 if bits == 8 else 4) / 32)
                yield row | {"rate": size / ms / 1e6, "unit": "GB/s", "bound": bench.memory}
            else:
                yield row | {"rate": 2 * rows * outputs * inputs / ms / 1e9, "unit": "TFLOPS"}


def sample(bench: Bench) -> Iterator[Row]:
    """Greedy, plain and filtered draws; torch's definition reads results on the host, which is part of its price."""
    vocab = VOCAB if bench.real else 500
    for rows in (1, 32) if bench.real else (2,):
        logits = torch.randn(rows, vocab, device=bench.device) * 3
        for name, settings in (
            ("greedy", (0, 0, 1)),
            ("temperature", (0.8, 0, 1)),
            ("top-k 50, top-p 0.9", (0.8, 50, 0.9)),
        ):
            asked = torch.tensor([*settings, 0.5], dtype=torch.float64)[:, None].repeat(1, rows)
            ms = bench.ms(functools.partial(ops.sample_tokens, logits, asked))
            torch_ms = bench.torch_ms(functools.partial(cpu.sample_tokens, logits, asked))
            yield {"name": f"sample {name}, {rows} rows of {vocab}", "ms": ms, "torch_ms": torch_ms}


def blocks(bench: Bench) -> Iterator[Row]:
    """Moving scattered blocks: within the device by a kernel, to and from pinned memory by copies."""
    count, layers = (512, 32) if bench.real else (2, 1)
    pool = bench.pool(2 * count, layers)
    chosen = torch.randperm(len(pool))[:count]
    size = count * pool[0].numel() * pool.itemsize
    staging = torch.empty((count, *pool.shape[1:]), dtype=pool.dtype, device=bench.device)
    host = torch.empty(staging.shape, dtype=pool.dtype, pin_memory=bench.real)
    on_device = chosen.to(bench.device)
    for name, call, moved, bound in (
        ("gather on the device", lambda: ops.gather_blocks(pool, on_device, staging), 2 * size, bench.memory),
        ("scatter on the device", lambda: ops.scatter_blocks(pool, on_device, staging), 2 * size, bench.memory),
        ("offload to pinned memory", lambda: ops.gather_blocks(pool, chosen, host), size, bench.to_host),
        ("restore from pinned memory", lambda: ops.scatter_blocks(pool, chosen, host), size, bench.to_device),
    ):
        ms = bench.ms(call, repeat=8)
        yield {"name": f"{name}, {count} blocks of {size // count >> 10} KiB", "ms": ms, "rate": moved / ms / 1e6,
               "unit": "GB/s", "bound": bound}  # fmt: skip


def offload(bench: Bench) -> Iterator[Row]:
    """What a forward's products lose while blocks go out on a side stream, and what the copies lose to them."""
    if not bench.real:
        return
    pool = bench.pool(1024, 32)
    chosen = torch.randperm(len(pool))[:512]
    host = torch.empty((len(chosen), *pool.shape[1:]), dtype=pool.dtype, pin_memory=True)
    x, weight = bench.normal(2048, HIDDEN), bench.normal(INNER, HIDDEN)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def compute() -> None:
        for _ in range(60):
            linear(x, weight)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ops.gather_blocks(pool, chosen, host)
        compute()
        torch.cuda.current_stream().wait_stream(side)

    alone, copy = bench.ms(compute, 8), bench.ms(lambda: ops.gather_blocks(pool, chosen, host), 8)
    together = bench.ms(both, 8)
    name = f"products ({alone:.1f} ms) beside an offload ({copy:.1f} ms); both in turn as torch ms"
    yield {"name": name, "ms": together, "torch_ms": alone + copy}


def step(bench: Bench) -> Iterator[Row]:
    """A whole decode step of an 8B model's layers: launched kernel by kernel (as `torch ms`), and as a captured graph."""
    config = _config() if bench.real else toy_config()
    weights = _weights(config, bench) if bench.real else toy_weights()
    for form in ("dense", "int8", "int4") if bench.real else ("int4",):
        model = Transformer(config, weights, dtype=bench.dtype, device=bench.device, weights_form=form)
        for rows in (1, 16) if bench.real else (2,):
            context = 4096 if bench.real else 20
            width = -(-context // BLOCK)
            pool = model.kv_layout(BLOCK).allocate(rows * width, bench.device).normal_()
            record = CudaRecorder(bench.device) if bench.real else run_eagerly
            graphs = DecodeGraphs(model, pool, record, max_context_tokens=context, buckets=(rows,))
            tables = torch.arange(rows * width, dtype=torch.int32, device=bench.device).view(rows, width)
            where = torch.full((rows,), context - 1, device=bench.device)
            slots = tables[:, -1].long() * BLOCK + (context - 1) % BLOCK
            every = torch.arange(rows, device=bench.device)
            batch = ForwardBatch(
                every, where, slots, AttentionRows(tuple(range(rows + 1)), (context,) * rows, tables), every
            )
            assert graphs.takes(batch)
            with torch.inference_mode():
                eager = bench.ms(functools.partial(model.forward, batch, pool))
                ms = bench.ms(functools.partial(graphs.forward, batch))
                same = torch.allclose(graphs.forward(batch), model.forward(batch, pool), atol=0.1, rtol=0.05)
            if graphs.health()["failed"] or not same:
                raise RuntimeError(f"the graph of {rows} rows: {graphs.health()['failed'] or 'other logits'}")
            yield {"name": f"decode step, {config.num_layers} layers, {form}, {rows} rows at {context}", "ms": ms,
                   "torch_ms": eager, "rate": rows / ms * 1e3, "unit": "tokens/s"}  # fmt: skip


def _config() -> ModelConfig:
    """Eight layers of Llama 3.1 8B over a smaller vocabulary."""
    return ModelConfig(
        architecture="llama",
        num_layers=8,
        hidden_size=HIDDEN,
        num_heads=HQ,
        num_kv_heads=HKV,
        head_dim=D,
        intermediate_size=INNER,
        vocab_size=32768,
        max_position=32768,
        rope_theta=5e5,
        rms_eps=1e-5,
    )


def _weights(config: ModelConfig, bench: Bench) -> dict[str, Tensor]:
    """Noise of a size that keeps activations finite."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    found = {"embed": bench.normal(config.vocab_size, hidden), "norm": torch.ones(hidden)}
    found["head"] = bench.normal(config.vocab_size, hidden) / hidden**0.5
    for index in range(config.num_layers):
        for name, shape in shapes.items():
            found[f"layers.{index}.{name}.weight"] = bench.normal(*shape) / shape[1] ** 0.5
        for name in ("attn_norm", "mlp_norm"):
            found[f"layers.{index}.{name}"] = torch.ones(hidden)
    return found
