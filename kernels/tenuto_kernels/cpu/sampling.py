"""Drawing one token a row from its logits, in torch, on whatever device they are. Owns no state.

A uniform is put through the inverse of the cumulative distribution over the tokens the filters keep, in the order of the
vocabulary: no sort of the whole vocabulary is needed, and ties cannot reorder anything.
"""

import torch
from torch import Tensor

_CHUNK = 256
"""Columns summed at once when searching the cumulative distribution; also the first guess at a nucleus's size."""


def sample_tokens(logits: Tensor, settings: Tensor) -> Tensor:
    """See `ops.sample_tokens`."""
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    best, tokens = logits.max(dim=-1)
    drawn = (settings[0] > 0).nonzero().flatten()
    if len(drawn):
        index = drawn.to(logits.device)
        chosen = _draw(
            logits if len(drawn) == len(logits) else logits.index_select(0, index),
            best.index_select(0, index),
            settings[:, drawn],
        )
        tokens = tokens.index_copy(0, index, chosen)
    return tokens.where(best.isfinite(), -1)


def _draw(logits: Tensor, best: Tensor, settings: Tensor) -> Tensor:
    device, vocab = logits.device, logits.shape[1]
    temperature, _, top_p, u = settings.to(device)
    # Relative to the maximum, so that exp cannot overflow and a tiny temperature degrades to greedy.
    weights = ((logits - best[:, None]) / temperature.float()[:, None]).exp_()
    top_k = [int(k) if 0 < k < vocab else vocab for k in settings[1].tolist()]
    if min(top_k) < vocab:
        largest = weights.topk(max((k for k in top_k if k < vocab), default=1), dim=-1).values
        column = torch.tensor([k - 1 if k < vocab else 0 for k in top_k], device=device)
        threshold = largest.gather(1, column[:, None])
        threshold[torch.tensor([k == vocab for k in top_k], device=device)] = 0.0
        weights = weights.where(weights >= threshold, 0.0)
    if bool((settings[2] < 1).any()):
        weights = weights.where(weights >= _nucleus(weights, top_p), 0.0)
    return _inverse_cdf(weights, u)


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


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
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
    return part[:, 0] * _CHUNK + torch.minimum(column, last)
