"""Group-wise quantised weights: what they mean, how they are made, and their dense form. Owns no state.

Along its inputs a row is cut into groups of 32. 4 bits: w = scale * code + minimum, codes 0..15; 8 bits: w = scale * code,
codes -128..127. Scales and minima are fp16, as GGUF's Q4_0, Q4_1 and Q8_0 blocks store them, so that such a file's weights
are used as they are: a code times an fp16 scale is exact in fp32, and so one rounding (of the sum) remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [O, I]: `codes` uint8 (4 bits) or int8 (8 bits) [O, I]; `scale` and `minimum` (4 bits only) fp16
    [O, I / 32]. Raises ValueError where these do not fit one another."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        groups = (outputs, inputs // GROUP)
        halves = [part for part in (self.scale, self.minimum) if part is not None]
        if inputs % GROUP or any(part.shape != groups or part.dtype != torch.float16 for part in halves):
            raise ValueError(f"codes {tuple(self.codes.shape)} need fp16 scales and minima {list(groups)}")
        if self.codes.dtype != (torch.int8 if self.minimum is None else torch.uint8):
            raise ValueError(f"codes must be uint8 with a minimum, int8 without, got {self.codes.dtype}")

    @property
    def bits(self) -> int:
        return 8 if self.minimum is None else 4

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[O, I] in `dtype`, computed in fp32."""
        wide = self.codes.float().view(len(self.codes), -1, GROUP).mul_(self.scale.float()[:, :, None])
        if self.minimum is not None:
            wide.add_(self.minimum.float()[:, :, None])
        return wide.view(self.codes.shape).to(dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same on another device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return QuantizedWeight(self.codes.to(device), self.scale.to(device), minimum)

    def rows(self, index: Tensor) -> QuantizedWeight:
        """The rows `index`, in that order."""
        return QuantizedWeight(
            self.codes[index], self.scale[index], None if self.minimum is None else self.minimum[index]
        )


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Several weights of the same inputs and bits, one below the other."""
    minima = [part.minimum for part in parts if part.minimum is not None]
    if len(minima) not in (0, len(parts)):
        raise ValueError("weights of 4 and of 8 bits cannot be stacked")
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minima) if minima else None,
    )


def quantize(weight: Tensor, bits: int) -> QuantizedWeight | None:
    """The nearest codes for weight [O, I]: 8 bits symmetric about zero by the group's largest magnitude, 4 bits between
    its least and greatest value, both taken as the fp16 that will be stored. None where I is not a multiple of 32 or a
    scale leaves the range of fp16.

    Raises ValueError for other numbers of bits.
    """
    if bits not in (4, 8):
        raise ValueError(f"weights are quantised to 4 or 8 bits, not {bits}")
    if weight.shape[1] % GROUP:
        return None
    groups = weight.detach().float().view(len(weight), -1, GROUP)
    if bits == 8:
        scale = (groups.abs().amax(-1) / 127).half()
        codes = _codes(groups, scale, torch.zeros_like(scale)).clamp_(-127, 127).to(torch.int8)
        minimum = None
    else:
        minimum = groups.amin(-1).half()
        scale = ((groups.amax(-1) - minimum.float()) / 15).half()
        codes = _codes(groups, scale, minimum).clamp_(0, 15).to(torch.uint8)
    if not bool(torch.isfinite(scale).all()) or (minimum is not None and not bool(torch.isfinite(minimum).all())):
        return None
    return QuantizedWeight(codes.view(weight.shape), scale, minimum)


def _codes(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    step = scale.float()[:, :, None]
    return ((groups - minimum.float()[:, :, None]) / step.where(step > 0, 1.0)).round_()
