"""Drawing tokens from logits. Holds no state: token number ``draw`` of a turn depends on its logits and ``Sampling`` only.

The randomness is counter-based: one Philox4x32-10 block (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) keyed by the seed, with ``draw`` as its counter, so that preemption, batching and caching cannot change a token.
What is done with that uniform is ``tenuto_kernels.ops.sample_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenuto_kernels.ops import sample_tokens
from tenuto_server.engine.events import Sampling


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
    settings = np.zeros((4, len(samplings)))
    if any(sampling.temperature > 0 for sampling in samplings):
        settings[:3] = np.array([(each.temperature, each.top_k, each.top_p) for each in samplings]).T
        settings[3] = uniforms([sampling.seed for sampling in samplings], draws)
    result: list[int] = sample_tokens(logits, torch.from_numpy(settings)).tolist()
    if -1 in result:
        rows = [row for row, token in enumerate(result) if token == -1]
        raise FloatingPointError(f"logits of rows {rows} are not finite")
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
