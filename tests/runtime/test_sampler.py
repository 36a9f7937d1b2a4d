"""The sampler against published test vectors, exact probabilities and a plain definition of the filters."""

import numpy as np
import pytest
import torch

from tenuto_server.engine.events import Sampling
from tenuto_server.runtime.sampler import philox4x32, sample, uniforms

SEEDS = 20_000


def drawn(logits: torch.Tensor, count: int = SEEDS, **settings) -> np.ndarray:
    """How often each token is drawn over ``count`` seeds."""
    samplings = [Sampling(1, seed=seed, **settings) for seed in range(count)]
    tokens = sample(logits.expand(count, -1), samplings, [0] * count)
    return np.bincount(tokens, minlength=logits.shape[-1])


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """In standard deviations: (X^2 - df) / sqrt(2 df). Above 5 is one chance in a million or less."""
    kept = probabilities > 0
    assert not observed[~kept].any()
    expected = probabilities[kept] * observed.sum()
    assert expected.min() > 5
    freedom = kept.sum() - 1
    return (((observed[kept] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The definition, token by token."""
    probabilities = softmax(logits / temperature)
    order = np.argsort(-probabilities, kind="stable")
    kept = order[: top_k or len(order)]
    total, nucleus = probabilities[kept].sum(), []
    mass = 0.0
    for token in kept:
        if mass >= top_p * total and nucleus:
            break
        nucleus.append(token)
        mass += probabilities[token]
    result = np.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    return result


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers published with the generator (Random123, philox4x32, 10 rounds).
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


def test_uniforms_are_uniform_along_seeds_and_along_draws():
    for seeds, draws in ((range(20000), [7] * 20000), ([7] * 20000, range(20000)), ([-1, 2**70], [0, 0])):
        values = uniforms(list(seeds), list(draws))
        assert ((values >= 0) & (values < 1)).all()
        if len(values) > 2:
            counts = np.histogram(values, bins=50, range=(0, 1))[0]
            assert chi_square(counts, np.full(50, 1 / 50)) < 5
            assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_greedy_is_the_largest():
    logits = torch.randn(5, 3000)
    assert sample(logits, [Sampling(1)] * 5, range(5)) == logits.argmax(-1).tolist()
    assert sample(logits[:0], [], []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_temperature_follows_the_softmax(temperature):
    logits = torch.linspace(0, 3, 300)[torch.randperm(300, generator=torch.Generator().manual_seed(0))] * temperature
    counts = drawn(logits, temperature=temperature)
    assert chi_square(counts, softmax(logits.double().numpy() / temperature)) < 5


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (0, 0.6), (40, 0.7), (1, 1.0), (0, 1e-9), (0, 0.999)])
def test_filters_follow_their_definition(top_k, top_p):
    logits = torch.linspace(0, 6, 100)[torch.randperm(100, generator=torch.Generator().manual_seed(1))]
    expected = filtered(logits.double().numpy(), 0.9, top_k, top_p)
    counts = drawn(logits, temperature=0.9, top_k=top_k, top_p=top_p)
    assert not counts[expected == 0].any()
    seen = expected * SEEDS > 5
    assert (seen & (counts > 0)).sum() == seen.sum()
    if seen.sum() > 1:
        rest = np.append(expected[seen], expected[~seen].sum())
        observed = np.append(counts[seen], counts[~seen].sum())
        if rest[-1] * SEEDS <= 5:
            rest, observed = rest[:-1] / rest[:-1].sum(), observed[:-1]
        assert chi_square(observed, rest) < 5


def test_a_flat_nucleus_wider_than_the_first_guess_is_found():
    logits = torch.zeros(5000)
    logits[:100] = -0.5
    counts = drawn(logits, 500, temperature=1.0, top_p=0.5)
    # Equal weights: ties with the last of the nucleus stay, so all 4900 equal tokens do, and no smaller one.
    assert counts[:100].sum() == 0
    slope = torch.linspace(0, 0.5, 5000)
    expected = filtered(slope.double().numpy(), 1.0, 0, 0.5)
    counts = drawn(slope, 500, temperature=1.0, top_p=0.5)
    assert counts[expected == 0].sum() == 0
    assert counts.sum() == 500


def test_a_token_depends_on_its_own_row_seed_and_draw_only():
    logits = torch.randn(8, 1000)
    samplings = [
        Sampling(1, temperature=0.8, seed=1),
        Sampling(1),
        Sampling(1, temperature=1.2, top_k=50, seed=2),
        Sampling(1, temperature=0.7, top_p=0.9, seed=3),
        Sampling(1, temperature=1.0, top_k=10, top_p=0.5, seed=4),
        Sampling(1, temperature=1.0, seed=1),
        Sampling(1, temperature=1.0, top_k=1, seed=6),
        Sampling(1, temperature=1e-6, seed=7),
    ]
    draws = [0, 5, 1, 2, 3, 0, 9, 9]
    together = sample(logits, samplings, draws)
    alone = [sample(logits[i : i + 1], [samplings[i]], [draws[i]])[0] for i in range(8)]
    assert together == alone
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    assert sample(logits[order], [samplings[i] for i in order], [draws[i] for i in order]) == [alone[i] for i in order]
    assert together[6:] == logits[6:].argmax(-1).tolist()
    steps = {sample(logits[:1], samplings[:1], [draw])[0] for draw in range(50)}
    assert len(steps) > 20


def test_probability_zero_is_never_drawn_and_vocabularies_need_not_be_round():
    logits = torch.full((259,), -torch.inf)
    logits[[3, 258]] = torch.tensor([0.0, 1.0])
    counts = drawn(logits, temperature=1.0)
    assert counts.nonzero()[0].tolist() == [3, 258]
    assert chi_square(counts[[3, 258]], softmax(np.array([0.0, 1.0]))) < 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error(bad):
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(FloatingPointError, match=r"\[1\]"):
        sample(logits, [Sampling(1)] * 3, [0] * 3)
    with pytest.raises(ValueError, match="rows"):
        sample(logits, [Sampling(1)], [0])
