"""KV in eight bits below the device: what comes back is near what left, damage is still caught, and nothing else may match it.

The exception to the equality test: here blocks that were on a lower tier are not the bits that were computed. What is held
instead: each number is within half a step of its group's scale, logits move by little, and what never left the device is
untouched.
"""

from __future__ import annotations

import queue

import numpy as np
import pytest
import torch

from tenuto_kernels.lower import LowerForm
from tenuto_server.commands import build_service
from tenuto_server.config import ServerConfig
from tenuto_server.engine.events import Sampling, TransferDone
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer
from tenuto_server.errors import ConfigError
from tenuto_server.model.load import load_model
from tenuto_server.options import config_from, serve_parser
from tenuto_server.runtime.executor import TorchExecutor

SLOTS, OTHER = list(range(12)), [63 - at for at in range(12)]
STEP = {"int8": 1 / 127, "fp8": 1 / 8}  # of the largest of a group, of each number


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("way", [["host"], ["disk"], ["host", "disk"], ["disk", "host"]])
def test_every_way_there_and_back_is_within_half_a_step(open_rig, tmp_path, kind, way):
    rig = open_rig(tmp_path, dtype=torch.float32, lower=kind)
    pool = rig.store.device_pool
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    original = pool.clone()
    tiers, slots = ["device", *way, "device"], [SLOTS, OTHER, SLOTS, OTHER]
    for at in range(len(way)):
        assert rig.move(tiers[at], tiers[at + 1], slots[at], slots[at + 1]).ok
    pool[OTHER] = 0.0
    done = rig.move(tiers[-2], "device", slots[len(way)], OTHER)
    assert (done.ok, done.bad, done.failed) == (True, (), ())
    wanted, error = original[SLOTS], (pool[OTHER] - original[SLOTS]).abs()
    largest = wanted.abs().amax(-1, keepdim=True)
    bound = STEP[kind] / 2 * (largest if kind == "int8" else torch.maximum(wanted.abs(), largest * 2**-15)) * 1.01
    assert (error <= bound).all()
    assert error.max() > 0
    rest = sorted(set(range(64)) - set(OTHER))
    assert torch.equal(pool[rest], original[rest])


def test_damage_is_caught_as_ever(open_rig, tmp_path):
    rig = open_rig(tmp_path, lower="int8")
    rig.device[:] = 0
    assert rig.move("device", "host", SLOTS, SLOTS).ok
    rig.store.host_bytes[5, 100] ^= 1
    done = rig.move("host", "device", SLOTS, OTHER)
    assert (done.ok, done.bad) == (True, (5,))
    assert rig.store.host_bytes.shape[1] == rig.store.lower_bytes < rig.store.layout.block_bytes * 0.6


def test_logits_after_a_restore_move_by_little():
    """The toy model reads a context that went to host memory and came back: the logits' change is a small part of their
    spread. The same context left alone gives the same logits to the bit."""
    model = load_model("toy", dtype="fp32", invariant=True).transformer
    executor = TorchExecutor(model, device_blocks=64, host_blocks=32, lower=LowerForm(model.kv_layout(16), "int8"))
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    executor.set_sink(events.put)
    tokens, seen = np.arange(260, 260 + 8 * 16 + 1, dtype=np.int32), []
    forward = model.forward
    model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    blocks = np.arange(9, dtype=np.int32)

    def last_token() -> torch.Tensor:
        executor.run(ForwardPlan(0, (ForwardRow(1, 128, tokens[128:], blocks, True, Sampling(1)),)))
        return seen[-1].clone()

    executor.run(ForwardPlan(0, (ForwardRow(1, 0, tokens[:128], blocks, False, Sampling(1)),)))
    exact = last_token()
    assert torch.equal(last_token(), exact)
    hashes = bytes(16 * 8)
    executor.submit(Transfer(1, "device", "host", blocks[:8], blocks[:8], hashes))
    assert isinstance(done := events.get(timeout=10), TransferDone)
    assert done.ok
    executor.store.device_pool[:8] = 0.0
    executor.submit(Transfer(2, "host", "device", blocks[:8], blocks[:8], hashes))
    assert isinstance(done := events.get(timeout=10), TransferDone)
    assert done.ok
    restored = last_token()
    assert not torch.equal(restored, exact)
    assert (restored - exact).square().mean().sqrt() < 0.05 * exact.std()
    executor.close()


def test_no_block_of_one_form_is_ever_taken_for_one_of_another(tmp_path):
    """Another root of all hashes, another directory; the tiers hold more."""
    roots, hosts = set(), {}
    for kind in ("native", "int8", "fp8"):
        config = ServerConfig(
            model="toy", lower_kv=kind, device_bytes=2**22, host_bytes=2**22, disk_dir=tmp_path, disk_bytes=2**22
        )
        service = build_service(config)
        engine = service.loop._engine
        roots.add(engine._root("t", ""))  # type: ignore[attr-defined]
        hosts[kind] = engine.core.config.cache.host_blocks  # type: ignore[attr-defined]
        assert service.loop.snapshot()["executor"]["lower_kv"] == kind
        service.close()
    assert len(roots) == len(list(tmp_path.glob("?" * 32))) == 3
    assert hosts["int8"] == hosts["fp8"] > 1.7 * hosts["native"]


def test_the_option() -> None:
    assert config_from(serve_parser().parse_args(["--model", "toy"])).lower_kv == "native"
    assert config_from(serve_parser().parse_args(["--lower-kv", "fp8"])).lower_kv == "fp8"
    with pytest.raises(SystemExit):
        serve_parser().parse_args(["--lower-kv", "int4"])
    with pytest.raises(ConfigError, match="--draft-model guesses nothing"):
        config_from(serve_parser().parse_args(["--draft-model", "toy", "--speculate", "0"]))
