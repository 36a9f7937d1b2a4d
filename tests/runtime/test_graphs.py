"""Decode steps on static buffers: the Triton kernels in the interpreter against the CPU's operators, and the fallback."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardPlan, ForwardRow
from tenuto_server.model.load import load_model
from tenuto_server.runtime.batch import BatchBuilder
from tenuto_server.runtime.executor import TorchExecutor
from tenuto_server.runtime.graphs import DecodeGraphs, decode_graphs, run_eagerly

ROOT = Path(__file__).resolve().parents[2]

# Over KV that is there already: decode steps of three and one rows (buckets of 4 and 1), then a chunk beside a decode row.
STEPS = """
import sys, warnings
warnings.simplefilter("error")
import numpy as np, torch
from tenuto_kernels.dispatch import backend
from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardPlan, ForwardRow
from tenuto_server.model.load import load_model
from tenuto_server.runtime.batch import BatchBuilder
from tenuto_server.runtime.graphs import DecodeGraphs, run_eagerly
from tenuto_server.runtime.sampler import sample

torch.set_num_threads(1)
model = load_model("toy", dtype="fp32", weights="int4").transformer
pool = model.kv_layout(16).allocate(16, "cpu").normal_(generator=torch.Generator().manual_seed(1))
graphs = DecodeGraphs(model, pool, run_eagerly, max_context_tokens=64, buckets=(1, 4))
tables = [np.array(blocks, np.int32) for blocks in ([9], [3, 12], [1, 14, 6])]
logits = []
for rows in (((0, 4, 1), (1, 17, 1), (2, 34, 1)), ((1, 18, 1),), ((2, 35, 3), (0, 5, 1))):
    plan = tuple(
        ForwardRow(row, start, np.arange(7 * row, 7 * row + count, dtype=np.int32), tables[row], True, Sampling(4))
        for row, start, count in rows
    )
    batch = BatchBuilder(16, 16, torch.device("cpu")).build(ForwardPlan(0, plan))
    captured = graphs.takes(batch) and backend() == "interpret"
    logits.append((graphs.forward(batch) if captured else model.forward(batch, pool)).clone())
samplings = [Sampling(4), *(Sampling(4, 0.8, top_p, top_k, seed) for seed, (top_p, top_k) in enumerate(
    ((1.0, 0), (0.9, 0), (1.0, 5), (0.6, 40)) * 2
))]
drawn = sample(torch.randn(9, 400, generator=torch.Generator().manual_seed(2)) * 2, samplings, range(9))
torch.save((model.linear_kind, graphs.health()["replays"], logits, pool, drawn), sys.argv[1])
"""


def run_steps(backend: str, out: Path) -> tuple[str, int, list[torch.Tensor], torch.Tensor, list[int]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TENUTO_"))}
    path = os.pathsep.join(str(ROOT / part) for part in ("harness", "server", "kernels"))
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TENUTO_KERNELS": backend}
    command = [sys.executable, "-c", STEPS, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


def test_decode_steps_on_static_buffers_equal_those_of_the_cpu(tmp_path: Path) -> None:
    """Also: padding rows write nothing, quantised weights are read as they are by the Triton product, and the same seeds draw
    the same tokens."""
    pytest.importorskip("triton", reason="triton is not installed")
    _, _, expected, expected_pool, expected_tokens = run_steps("cpu", tmp_path / "cpu")
    kind, replays, got, pool, tokens = run_steps("interpret", tmp_path / "interpret")
    assert (kind, replays) == ("triton", 2)
    for values, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(values, wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(pool, expected_pool, atol=2e-5, rtol=1e-4)
    assert tokens == expected_tokens
    free = [0, 2, 4, 5, 7, 8, 10, 11, 13, 15]
    assert torch.equal(pool[free], expected_pool[free])


@pytest.fixture(scope="module")
def transformer():
    return load_model("toy", dtype="fp32").transformer


def batch_of(lengths, blocks, *, tokens=1):
    rows = [
        ForwardRow(at, length - tokens, np.zeros(tokens, np.int32), np.array(table, np.int32), True, Sampling(1))
        for at, (length, table) in enumerate(zip(lengths, blocks, strict=True))
    ]
    return BatchBuilder(16, 8, torch.device("cpu")).build(ForwardPlan(0, tuple(rows)))


def test_only_batches_that_fit_a_bucket_are_taken(transformer):
    pool = transformer.kv_layout(16).allocate(8, "cpu")
    graphs = DecodeGraphs(transformer, pool, run_eagerly, max_context_tokens=32, buckets=(1, 2))
    assert graphs.takes(batch_of([5, 20], [[0], [1, 2]]))
    assert not graphs.takes(batch_of([5, 20, 3], [[0], [1, 2], [3]]))
    assert not graphs.takes(batch_of([5, 40], [[0], [1, 2, 3]]))
    assert not graphs.takes(batch_of([5, 20], [[0], [1, 2]], tokens=2))


def test_a_failed_capture_is_told_once_and_everything_goes_on_without(transformer, caplog):
    asked = []

    def refuse(step):
        asked.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    pool = transformer.kv_layout(16).allocate(8, "cpu")
    graphs = DecodeGraphs(transformer, pool, refuse, max_context_tokens=64)
    batch = batch_of([5, 20], [[0], [1, 2]])
    with caplog.at_level("WARNING"):
        got = graphs.forward(batch)
    assert torch.equal(got, transformer.forward(batch, transformer.kv_layout(16).allocate(8, "cpu")))
    assert not graphs.takes(batch)
    graphs.prepare()
    assert len(asked) == 1
    assert graphs.health() == {
        "buckets": [],
        "replays": 0,
        "failed": "operation not permitted when stream is capturing",
    }
    assert "launched one kernel at a time" in caplog.text


def test_without_cuda_there_are_none(transformer):
    executor = TorchExecutor(transformer, device_blocks=4)
    assert decode_graphs(transformer, executor.store.device_pool) is None
    assert "decode_graphs" not in executor.health()
    executor.close()
