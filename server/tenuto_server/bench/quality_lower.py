"""What KV in eight bits below the device costs in answers: the second part of ``tenuto bench quality``.

The first half of every window is computed, packed and unpacked as a stay on a lower tier does, and the second half is read and
scored on top of it; greedy continuations begin there. The reference does the same without the packing, so everything else
is equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tenuto_kernels.lower import LowerForm, LowerKind
from tenuto_server.bench.quality import BLOCK, Reading, compare, forward
from tenuto_server.model.transformer import Transformer


def measure(
    transformer: Transformer,
    windows: Sequence[list[int]],
    continuations: int,
    new_tokens: int,
    kinds: Sequence[LowerKind],
) -> list[dict[str, Any]]:
    """A row for each kind, in terms of the reading without packing."""
    layout = transformer.kv_layout(BLOCK)
    reference = _read(transformer, windows, continuations, new_tokens, None)
    rows = []
    for kind in kinds:
        form = LowerForm(layout, kind)
        found = _read(transformer, windows, continuations, new_tokens, form)
        share = form.block_bytes / layout.block_bytes
        rows.append({"name": kind, "bytes": share, **compare(found, reference), "native": reference.perplexity})
    return rows


def _read(
    transformer: Transformer, windows: Sequence[list[int]], continuations: int, new_tokens: int, form: LowerForm | None
) -> Reading:
    size = len(windows[0])
    half = max(BLOCK, size // 2 // BLOCK * BLOCK)
    blocks = -(-max(size, half + new_tokens) // BLOCK) + 1
    pool = transformer.kv_layout(BLOCK).allocate(blocks, transformer.device)
    loss, best, greedy = 0.0, [], []
    for number, window in enumerate(windows):
        first = int(forward(transformer, pool, 0, window[:half], every=False)[-1].argmax())
        if form is not None:
            _stay_below(pool, form)
        logits = forward(transformer, pool, half, window[half:], every=True)[:-1]
        targets = torch.tensor(window[half + 1 :], device=logits.device)
        loss += torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum").item()
        best.append(logits.argmax(-1).cpu())
        if number < continuations:
            greedy.append(_continue(transformer, pool, half, first, new_tokens))
    scored = len(windows) * (size - half - 1)
    return Reading(math.exp(loss / scored), torch.stack(best), greedy)


def _continue(transformer: Transformer, pool: Tensor, at: int, token: int, count: int) -> list[int]:
    """Greedy tokens behind the half that is in the pool. The first was drawn when that was computed."""
    found = [token]
    while len(found) < count:
        found.append(int(forward(transformer, pool, at, found[-1:], every=False)[-1].argmax()))
        at += 1
    return found


def _stay_below(pool: Tensor, form: LowerForm) -> None:
    packed = form.allocate(len(pool), pool.device)
    form.pack(pool, packed)
    form.unpack(packed, pool)
