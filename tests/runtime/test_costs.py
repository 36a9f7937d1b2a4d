"""The start-up probe on the toy model: figures of the right order, in little time."""

import time

import pytest
import torch

from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardPlan, ForwardRow
from tenuto_server.model.load import load_model
from tenuto_server.runtime.costs import measure_costs, measure_disk
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.executor import TorchExecutor


@pytest.fixture
def transformer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("toy", dtype="fp32").transformer
    torch.set_num_threads(threads)


def test_the_fit_foretells_a_chunk_it_did_not_measure(transformer, tmp_path):
    disk = DiskTier(tmp_path, "ef" * 16, block_bytes=transformer.kv_layout(16).block_bytes, slots=8)
    executor = TorchExecutor(
        transformer, device_blocks=160, host_blocks=160, disk=disk, host_bytes_per_s=20e6, disk_bytes_per_s=10e6
    )
    costs = measure_costs(executor, max_context_tokens=4096)
    assert costs.took_s < 5
    assert costs.prefill_a_s > 0
    assert costs.prefill_b_s >= 0
    assert costs.host_bytes_per_s == pytest.approx(20e6, rel=0.3)
    assert costs.disk_bytes_per_s is not None
    assert costs.disk_bytes_per_s <= 10e6
    assert not list(disk.folder.glob("probe*"))
    tokens, blocks = torch.arange(256, dtype=torch.int32).numpy(), torch.arange(32, dtype=torch.int32).numpy()
    plan = ForwardPlan(0, (ForwardRow(0, 256, tokens, blocks, False, Sampling(1)),))
    took = min(executor.run(plan).elapsed_ns for _ in range(5)) / 1e9
    foretold = 256 * (costs.prefill_a_s + costs.prefill_b_s * 384)
    assert foretold / 6 < took < foretold * 6
    executor.close()


def test_tiers_that_are_absent_have_no_cost_and_small_pools_do(transformer):
    executor = TorchExecutor(transformer, device_blocks=2)
    costs = measure_costs(executor, max_context_tokens=20)
    assert (costs.host_bytes_per_s, costs.disk_bytes_per_s, costs.disk_write_bytes_per_s) == (None, None, None)
    assert costs.prefill_a_s > 0
    executor.close()


def test_disk_bandwidth_is_measured_in_bounded_time(tmp_path):
    began = time.perf_counter()
    write, read = measure_disk(tmp_path)
    assert time.perf_counter() - began < 10
    assert write > 1e6
    assert read > 1e6
    assert not list(tmp_path.iterdir())
