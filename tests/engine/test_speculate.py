"""Prompt lookup: what is guessed, how long guesses grow, and that no guess ever changes a token or a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.integrity import check
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.engine.plan import ForwardRow
from tenuto_server.engine.speculate import Guesser, lookup
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor
from tenuto_server.sim.world import World

IDENTITY = RootIdentity("weights", "", "fp32", 1, 4, b"0123456789abcdef")
VOCAB = 3  # so few words that every context repeats itself, and one guess in three is right


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ((), ()),
        ((1, 2), ()),
        ((1, 2, 3, 4), ()),  # nothing repeats
        ((1, 2, 9, 5, 2), ()),  # one token alone is no match
        ((1, 2, 7, 8, 9, 1, 2), (7, 8, 9)),
        ((1, 2, 7, 1, 2, 8, 1, 2), (8, 1, 2)),  # the later of two places as long
        ((5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2), (7, 6, 1)),  # the longer match, though it is earlier
        ((4, 4, 4), (4,)),  # up to the end of what is known
    ],
)
def test_lookup(context: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(lookup(ids(*context), 3).tolist()) == expected


def test_a_guesser_grows_with_success_and_rests_after_failure() -> None:
    guesser, context = Guesser(), np.tile(ids(1, 2, 3, 4, 5, 6, 7, 8, 9), 5)
    assert len(guesser.guess(context, 8)) == 4
    guesser.judge(4, 4, 8)
    assert len(guesser.guess(context, 8)) == 8
    assert len(guesser.guess(context, 3)) == 3
    for expected in (4, 2, 1):
        guesser.judge(guesser.length, 0, 8)
        assert guesser.length == expected
    guesser.judge(1, 0, 8)
    assert [len(guesser.guess(context, 8)) for _ in range(5)] == [0, 0, 0, 0, 1]
    assert (guesser.drafted, guesser.confirmed) == (4 + 8 + 4 + 2 + 1, 4)


def chance(row: ForwardRow) -> np.ndarray:
    """A draft model that guesses without knowing anything: one token in three is right, and some guesses are short."""
    assert row.context is not None
    assert row.context[-1] == row.tokens[-1]
    assert row.start + len(row.tokens) == len(row.context)
    rng = np.random.default_rng([row.seq, len(row.context)])
    return rng.integers(0, VOCAB, rng.integers(0, row.room + 1)).astype(np.int32)


def world(guesses: int, device: int, model: int = 0) -> World:
    config = EngineConfig(
        cache=CacheConfig(device, 64, 0, 4, 400, 64, 8, 6, transfer_patience_s=0.5),
        max_context_tokens=4096,
        step_tokens_max=24,
        speculate_tokens_max=guesses,
        draft_tokens_max=model,
        speculate_batch_max=16,
        running_max=4,
        reserve_tokens_max=16,
        block_bytes=64,
    )
    engine = Engine(config, make_policy("tenuto"), IDENTITY)
    return World(
        engine,
        NullExecutor(block_tokens=4, vocab=VOCAB, draft=chance),
        forward_s=lambda plan: 1e-3,
        transfer_s=lambda transfer: 1e-3,
        after_step=lambda: check(engine.core.cache, deep=True),
    )


turns = st.lists(
    st.tuples(
        st.integers(0, 2),  # session
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        st.integers(1, 40),  # answer
        st.sampled_from([0.0, 1.0]),
        st.booleans(),  # token 0 ends the answer
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(turns=turns, device=st.sampled_from([26, 40, 200]))
def test_guesses_change_no_token(turns: list[tuple[int, list[int], int, float, bool]], device: int) -> None:
    """Many sessions at once, tight and ample devices, stop tokens in the middle of a guess, seeded sampling."""
    said: list[list[list[int]]] = []
    for guesses, model in ((0, 0), (8, 0), (8, 8)):
        at = world(guesses, device, model)
        contexts: dict[int, list[int]] = {}
        answers = []
        for number, (session, words, count, temperature, stops) in enumerate(turns):
            prompt = [*contexts.get(session, []), *words]
            sampling = Sampling(count, temperature, seed=number, stop_ids=frozenset({0} if stops else ()))
            record = at.submit(SubmitTurn(f"r{number}", "t", ids(*prompt), sampling, session=str(session)))
            if number % 2:
                at.run()  # every other turn runs beside the next one
                contexts[session] = [*prompt, *record.tokens]
            answers.append(record)
        at.run()
        said.append([[*record.tokens, -1 if record.done.reason == "stop" else -2] for record in answers])
        assert not at.machine.wrong
        if not guesses:
            assert "drafted_tokens" not in at.engine.core.counters
    assert said[0] == said[1] == said[2]


def test_a_draft_model_guesses_where_the_context_knows_nothing() -> None:
    """The first answer tokens of a prompt without repetition: no lookup can help, the model's guesses are judged and counted."""
    at = world(8, 400, model=8)
    record = at.submit(SubmitTurn("r", "t", ids(0, 1, 2), Sampling(60, temperature=1.0, seed=5), session="s"))
    at.run()
    plain = world(0, 400)
    same = plain.submit(SubmitTurn("r", "t", ids(0, 1, 2), Sampling(60, temperature=1.0, seed=5), session="s"))
    plain.run()
    assert record.tokens == same.tokens
    session = next(iter(at.engine.core.sessions.by_handle.values()))
    assert session.drafted >= session.confirmed > 0
    assert at.machine.health()["forwards"] < plain.machine.health()["forwards"]


def test_a_repeating_answer_takes_fewer_forwards() -> None:
    """Tokens come out as before, and the guesses that were right are counted, per session too."""
    forwards, tokens = [], []
    for guesses in (0, 8):
        at = world(guesses, 400)
        record = at.submit(SubmitTurn("r", "t", ids(*[0, 1, 2] * 5), Sampling(120), session="s"))
        at.run()
        forwards.append(at.machine.health()["forwards"])
        tokens.append(record.tokens)
    assert tokens[0] == tokens[1]
    counters = at.engine.core.counters
    assert forwards[0] - forwards[1] == counters["confirmed_tokens"] > 0
    assert counters["drafted_tokens"] >= counters["confirmed_tokens"]


def test_a_client_that_leaves_during_a_guess_leaves_nothing_behind() -> None:
    for after_s in (0.004, 0.0075, 0.012, 0.03):
        at = world(8, 200)
        at.submit(SubmitTurn("r", "t", ids(*[0, 1, 2] * 6), Sampling(100), session="s"))
        at.cancel("r", in_s=after_s)
        at.run()
        assert not at.engine.metrics().get("running")
        again = at.submit(SubmitTurn("r2", "t", ids(*[0, 1, 2] * 6), Sampling(30), session="s"))
        at.run()
        other = world(0, 200)
        fresh = other.submit(SubmitTurn("r", "t", ids(*[0, 1, 2] * 6), Sampling(30), session="s"))
        other.run()
        assert again.tokens == fresh.tokens
