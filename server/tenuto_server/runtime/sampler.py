"""Drawing tokens from logits. Holds no state: token number ``draw`` of a turn depends on its logits and ``Sampling`` only.

The randomness is counter-based: one Philox4x32-10 block (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) keyed by the seed, with ``draw`` as its counter, so that preemption, batching and caching cannot change a token.
That uniform is put through the inverse of the cumulative distribution over the tokens the filters keep, in the order of
the vocabulary: no sort of the whole vocabulary is needed, and ties cannot reorder anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenuto_server.engine.events import Sampling

_CHUNK = 256
"""Columns summed at once when searching the cumulative distribution; also the first guess at a nucleus's size."""


def sample(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[int]) -> list[int]:
    """One token per row. ``logits``: fp32 [R, V], not changed.

    Filters in order: ``temperature``, ``top_k`` (tokens equal to the k-th stay too), ``top_p`` over what is left (the
    smallest set of most likely tokens whose mass reaches it, with ties of the last). Raises ``FloatingPointError`` if a
    row has a NaN or no finite maximum: such a row has no distribution to draw from.
    """
    if logits.shape[0] != len(samplings) or len(samplings) != len(draws):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(samplings)} samplings and {len(draws)} draws")
    if not samplings:
        return []
    best, tokens = logits.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        rows = (~torch.isfinite(best)).nonzero().flatten().tolist()
        raise FloatingPointError(f"logits of rows {rows} are not finite")
    result: list[int] = tokens.tolist()
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = _draw(
            logits if len(drawn) == len(samplings) else logits.index_select(0, index),
            best.index_select(0, index),
            [samplings[row] for row in drawn],
            uniforms([samplings[row].seed for row in drawn], [draws[row] for row in drawn]),
        )
        for row, token in zip(drawn, chosen, strict=True):
            result[row] = token
    return result


def mask_logits(logits: Tensor, rows: Sequence[int], masks: Tensor) -> None:
    """Sets what is not allowed to minus infinity, in place. ``logits``: fp32 [R, V]; ``masks``: int32 [n, W] in host memory,
    W * 32 >= V, one row for each of ``rows``; bit v % 32 of word v // 32 allows token v."""
    bits = np.unpackbits(masks.numpy().astype("<i4", copy=False).view(np.uint8), axis=1, bitorder="little")
    refused = torch.from_numpy(bits[:, : logits.shape[1]] == 0).to(logits.device)
    for at, row in enumerate(rows):
        logits[row].masked_fill_(refused[at], -torch.inf)


def uniforms(seeds: Sequence[int], draws: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1), 53 random bits, for each (seed, draw); both are taken mod 2**64."""
    seed = np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in seeds], dtype=np.uint64)
    draw = np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in draws], dtype=np.uint64)
    low, shift = np.uint64(0xFFFF_FFFF), np.uint64(32)
    counter = np.stack([draw & low, draw >> shift, np.zeros_like(draw), np.zeros_like(draw)])
    words = philox4x32(counter, np.stack([seed & low, seed >> shift]))
    bits: NDArray[np.uint64] = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return np.ldexp(bits.astype(np.float64), -53)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 over columns: ``counter`` [4, n] and ``key`` [2, n] hold 32-bit words; returns [4, n] words."""
    low, shift = np.uint64(0xFFFF_FFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (product1 >> shift) ^ c1 ^ k0, product1 & low, (product0 >> shift) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3])


def _draw(logits: Tensor, best: Tensor, samplings: Sequence[Sampling], u: NDArray[np.float64]) -> list[int]:
    device, vocab = logits.device, logits.shape[1]
    temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device)
    # Relative to the maximum, so that exp cannot overflow and a tiny temperature degrades to greedy.
    weights = ((logits - best[:, None]) / temperature[:, None]).exp_()
    top_k = [s.top_k if 0 < s.top_k < vocab else vocab for s in samplings]
    if min(top_k) < vocab:
        largest = weights.topk(max((k for k in top_k if k < vocab), default=1), dim=-1).values
        column = torch.tensor([k - 1 if k < vocab else 0 for k in top_k], device=device)
        threshold = largest.gather(1, column[:, None])
        threshold[torch.tensor([k == vocab for k in top_k], device=device)] = 0.0
        weights = weights.where(weights >= threshold, 0.0)
    if min(s.top_p for s in samplings) < 1:
        top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
        weights = weights.where(weights >= _nucleus(weights, top_p), 0.0)
    return _inverse_cdf(weights, torch.from_numpy(u).to(device))


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """[R, 1]: the smallest weight in each row's nucleus, looking at no more of the largest weights than needed."""
    vocab = weights.shape[1]
    wanted = top_p * weights.sum(dim=-1, dtype=torch.float64)
    wanted = wanted.where(top_p < 1, torch.inf)
    size = _CHUNK
    while True:
        largest = weights.topk(min(size, vocab), dim=-1).values
        mass = largest.cumsum(dim=-1, dtype=torch.float64)
        if size >= vocab or bool(((mass[:, -1] >= wanted) | (top_p >= 1)).all()):
            break
        size *= 8
    # A token is in the nucleus while the mass before it is short of what is wanted; the first one always is.
    count = ((mass - largest) < wanted[:, None]).sum(dim=-1).clamp_(min=1)
    threshold = largest.gather(1, (count - 1)[:, None])
    return threshold.where(top_p[:, None] < 1, torch.zeros_like(threshold))


def _inverse_cdf(weights: Tensor, u: Tensor) -> list[int]:
    """The first column at which each row's cumulative weight exceeds u times its total; two levels of sums."""
    rows, vocab = weights.shape
    if vocab % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, _CHUNK - vocab % _CHUNK))
    parts = weights.view(rows, -1, _CHUNK)
    sums = parts.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    wanted = (u * sums[:, -1])[:, None]
    part = (sums <= wanted).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    before = sums.gather(1, (part - 1).clamp_(min=0)).where(part > 0, 0.0)
    inner = parts[torch.arange(rows, device=weights.device), part[:, 0]]
    cumulative = before + inner.cumsum(dim=-1, dtype=torch.float64)
    column = (cumulative <= wanted).sum(dim=-1)
    # Sums in another order may differ in their last bit: never step past the last token that has any weight.
    last = _CHUNK - 1 - (inner.flip(-1) > 0).int().argmax(dim=-1)
    result: list[int] = (part[:, 0] * _CHUNK + torch.minimum(column, last)).tolist()
    return result
