"""A draft model beside the served one: exact whoever guesses, following what was refused, and never out of its own memory."""

from __future__ import annotations

import queue
from dataclasses import replace

import numpy as np
import pytest
import torch

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.engine.loop import EngineLoop
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, TokensOut, TurnDone
from tenuto_server.errors import ConfigError
from tenuto_server.model.load import LoadedModel, load_model
from tenuto_server.model.toy import toy_weights
from tenuto_server.model.transformer import Transformer
from tenuto_server.policy import make_policy
from tenuto_server.runtime.draft import CATCH_UP_TOKENS, DraftModel
from tenuto_server.runtime.executor import TorchExecutor

PROMPTS = [list(range(260, 290)), [300, 301, 302] * 7, list(range(400, 445))]


@pytest.fixture(scope="module")
def toy():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("toy", dtype="fp32", invariant=True)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stranger(toy: LoadedModel) -> LoadedModel:
    """The same shape and vocabulary with its weights shuffled a little: it agrees now and then."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in toy_weights().items()
    }
    other = Transformer(toy.config, weights, dtype=torch.float32, invariant=True)
    return replace(toy, name="stranger", transformer=other)


def answers(served: LoadedModel, draft: LoadedModel | None, temperature: float, pool_bytes: int = 2**24):
    """Every prompt's answer, all turns at once; and the engine and executor that gave them."""
    executor = TorchExecutor(served.transformer, device_blocks=64, block_tokens=16)
    if draft is not None:
        executor.drafter = DraftModel(draft, served, pool_bytes=pool_bytes)
    config = EngineConfig(
        CacheConfig(64),
        max_context_tokens=512,
        speculate_tokens_max=6,
        draft_tokens_max=6 if draft else 0,
        block_bytes=1,
    )
    if draft is None:
        config = replace(config, speculate_tokens_max=0)
    engine = Engine(config, make_policy("lru"), RootIdentity("w", "", "fp32", 1, 16, b"0123456789abcdef"))
    loop, said, outputs = EngineLoop(engine, executor, inbox_max=8), {}, queue.SimpleQueue()
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(40, temperature=temperature, seed=number, ignore_eos=True)
        turn = SubmitTurn(f"r{number}", "t", np.array(prompt, np.int32), sampling, session=f"s{number}")
        loop.submit(turn, outputs.put)
    loop.start()
    left = len(PROMPTS)
    while left:
        output = outputs.get(timeout=60)
        if isinstance(output, TokensOut):
            said.setdefault(output.request_id, []).extend(output.tokens)
        elif isinstance(output, TurnDone):
            assert output.reason == "length"
            left -= 1
    loop.stop(5)
    executor.close()
    return said, engine, executor


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_changes_a_token(toy: LoadedModel, stranger: LoadedModel, temperature: float) -> None:
    """A model as its own draft is always right; another one is wrong most of the time."""
    plain, _, without = answers(toy, None, temperature)
    itself, engine, executor = answers(toy, toy, temperature)
    other, _, _ = answers(toy, stranger, temperature)
    assert plain == itself == other
    assert engine.core.counters["confirmed_tokens"] == engine.core.counters["drafted_tokens"] > 0
    assert executor.health()["forwards"] < without.health()["forwards"] / 2


def test_a_pool_too_small_for_all_guesses_less_and_stays_exact(toy: LoadedModel) -> None:
    block = toy.transformer.kv_layout(16).block_bytes
    plain, _, _ = answers(toy, None, 0.0)
    tight, engine, _ = answers(toy, toy, 0.0, pool_bytes=6 * block)
    assert plain == tight
    assert engine.core.counters["drafted_tokens"] > 0


def row(seq: int, context: list[int], room: int = 3) -> ForwardRow:
    tokens = np.array(context, np.int32)
    return ForwardRow(seq, len(context) - 1, tokens[-1:], np.zeros(1, np.int32), True, Sampling(9), 0, 0, room, tokens)


def greedy(model: LoadedModel, context: list[int], count: int) -> list[int]:
    """By fresh forwards over the whole context."""
    said = list(context)
    for _ in range(count):
        executor = TorchExecutor(model.transformer, device_blocks=32)
        tokens = np.array(said, np.int32)
        blocks = np.arange(-(-len(said) // 16), dtype=np.int32)
        done = executor.run(ForwardPlan(0, (ForwardRow(0, 0, tokens, blocks, True, Sampling(9)),)))
        executor.close()
        said.append(done.sampled[0][1])
    return said[len(context) :]


def test_guesses_are_the_models_own_after_any_change_of_mind(toy: LoadedModel) -> None:
    drafter = DraftModel(toy, toy, pool_bytes=2**22)
    context = list(range(260, 300))
    (guess,) = drafter.propose([row(1, context)])
    assert guess.tolist() == greedy(toy, context, 3)
    refused = [*context, guess[0], 301]  # the served model said something else after the first guess
    (again,) = drafter.propose([row(1, refused)])
    assert again.tolist() == greedy(toy, refused, 3)
    first, second = drafter.propose([row(1, [*refused, int(again[0])], 1), row(2, context, 2)])
    assert first.tolist() == [again[1]]
    assert second.tolist() == guess[:2].tolist()


def test_a_long_context_is_caught_up_with_bit_by_bit(toy: LoadedModel) -> None:
    drafter = DraftModel(toy, toy, pool_bytes=2**24)
    context = [260 + at % 90 for at in range(CATCH_UP_TOKENS + 40)]
    assert len(drafter.propose([row(1, context)])[0]) == 0
    (guess,) = drafter.propose([row(1, context)])
    assert guess.tolist() == greedy(toy, context, 3)
    assert drafter.health()["tokens_caught_up"] == CATCH_UP_TOKENS


def test_another_vocabulary_is_refused(toy: LoadedModel) -> None:
    other = replace(toy, name="odd", config=replace(toy.config, vocab_size=toy.config.vocab_size - 1))
    with pytest.raises(ConfigError, match="vocabulary is not that of toy"):
        DraftModel(other, toy, pool_bytes=2**22)
    with pytest.raises(ConfigError, match="--draft-bytes"):
        DraftModel(toy, toy, pool_bytes=10)
