"""The real engine on its own thread over torch, three real tiers and too little room: no token may differ from uncached."""

import random
import threading

import numpy as np
import pytest
import torch

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.engine.loop import EngineLoop
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, TokensOut, TurnDone, TurnRejected, TurnStarted
from tenuto_server.model.load import load_model
from tenuto_server.policy import make_policy
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.executor import TorchExecutor

SIZE = 16


@pytest.fixture(scope="module")
def transformer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("toy", dtype="fp32", invariant=True).transformer
    torch.set_num_threads(threads)


class Site:
    """An engine loop over a torch executor with tiers of the given sizes, and a blocking way to run a turn."""

    def __init__(self, transformer, folder, *, device: int, host: int, disk: int, policy: str) -> None:
        layout = transformer.kv_layout(SIZE)
        cache = CacheConfig(device, host, disk, SIZE)
        config = EngineConfig(
            cache, policy, max_context_tokens=1024, step_tokens_max=64, block_bytes=layout.block_bytes
        )
        tier = DiskTier(folder, "ab" * 16, block_bytes=layout.block_bytes, slots=disk) if disk else None
        self.executor = TorchExecutor(transformer, device_blocks=device, host_blocks=host, block_tokens=SIZE, disk=tier)
        identity = RootIdentity("toy", "", "fp32", 1, SIZE, b"0123456789abcdef")
        self.loop = EngineLoop(Engine(config, make_policy(policy), identity), self.executor, inbox_max=64)
        self.loop.post(self.executor.recovered())
        self.loop.start()
        self.cached: dict[str, int] = {}
        self._number = 0

    def ask(self, session: str, prompt: list[int], count: int) -> list[int]:
        self._number += 1
        outputs, ended = [], threading.Event()

        def deliver(output) -> None:
            outputs.append(output)
            if isinstance(output, TurnDone | TurnRejected):
                ended.set()

        turn = SubmitTurn(
            f"{session}-{self._number}", "t", np.array(prompt, np.int32), Sampling(count), session=session
        )
        self.loop.submit(turn, deliver)
        assert ended.wait(60)
        assert isinstance(outputs[-1], TurnDone), outputs[-1]
        assert outputs[-1].reason == "length", outputs[-1]
        for output in outputs:
            if isinstance(output, TurnStarted):
                for tier, tokens in output.report.cached.items():
                    self.cached[tier] = self.cached.get(tier, 0) + tokens
        return [token for output in outputs if isinstance(output, TokensOut) for token in output.tokens]

    def close(self) -> None:
        assert self.loop.healthy, self.loop.snapshot()["dead_reason"]
        assert self.loop.stop(30)
        self.executor.close()


def uncached(transformer, prompt: list[int], count: int) -> list[int]:
    """The answer of a fresh pool that holds nothing else."""
    executor = TorchExecutor(transformer, device_blocks=64, block_tokens=SIZE)
    tokens, blocks = list(prompt), np.arange(64, dtype=np.int32)
    first = 0
    for draw in range(count):
        row = ForwardRow(0, first, np.array(tokens[first:], np.int32), blocks, True, Sampling(count), draw)
        first = len(tokens)
        tokens.append(executor.run(ForwardPlan(draw, (row,))).sampled[0][1])
    executor.close()
    return tokens[len(prompt) :]


@pytest.mark.parametrize("policy", ["lru", "tenuto"])
def test_sessions_that_do_not_fit_get_the_uncached_tokens(transformer, tmp_path, policy):
    rng = random.Random(7)
    sites = [Site(transformer, tmp_path, device=40, host=40, disk=100, policy=policy)]
    texts = {f"s{index}": [rng.randrange(256) for _ in range(150 + 20 * index)] for index in range(6)}
    for _ in range(3):
        failures: list[BaseException] = []

        def agent(name: str, failures=failures) -> None:
            try:
                answer = sites[-1].ask(name, texts[name], 8)
                assert answer == uncached(transformer, texts[name], 8)
                texts[name] += answer + [len(name)] * 11
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=agent, args=(name,)) for name in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
    cached = sites[-1].cached
    assert cached.get("host", 0) + cached.get("disk", 0) > 0
    moved = sites[-1].executor.health()["paths"]
    sites[-1].close()
    assert moved["device_host"]["blocks"] > 0
    again = Site(transformer, tmp_path, device=40, host=40, disk=100, policy=policy)
    for name, text in texts.items():
        assert again.ask(name, text, 4) == uncached(transformer, text, 4)
    assert again.cached.get("disk", 0) > 0
    again.close()
