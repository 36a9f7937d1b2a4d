"""Weights as the native products read them: in panels of as many outputs as the processor's registers take.

Owner of the state: a `Panels` owns its packed weight, in memory of its own or in a buffer it was moved to.
"""

import torch
from torch import Tensor

from tenuto_kernels.cpu.native_build import library
from tenuto_kernels.quant import GROUP, QuantizedWeight

_KINDS = {torch.float32: 0, torch.bfloat16: 1}


class Panels:
    """A weight [O, I] in panels of `width` outputs, zero-padded.

    bf16 or fp32: [ceil(O / width), I, width]. Quantised: [ceil(O / width), I / 32, bytes], each group its scales, minima
    and codes, as `Quant` in native_ops.h reads them. `kind` says which. Raises RuntimeError where the native library is
    not available.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        loaded = library()
        if loaded is None:
            raise RuntimeError("native CPU operators are not available")
        self.out_features, self.in_features = int(weight.shape[0]), int(weight.shape[1])
        width = loaded.tn_panel_width()
        if isinstance(weight, QuantizedWeight):
            self.kind = weight.bits
            self.data = _quantized(weight, width)
        else:
            self.kind = _KINDS[weight.dtype]
            self.data = _panels(weight, width)
        assert self.data[0].numel() * self.data.element_size() == loaded.tn_panel_bytes(self.kind, self.in_features)
        self.bias = None if bias is None else bias.float().contiguous()
        self._call = loaded.tn_linear

    def move(self, buffer: Tensor) -> None:
        """Keep the weight in `buffer` (uint8, large enough, aligned) from now on."""
        size = self.data.numel() * self.data.element_size()
        self.data = buffer[:size].view(self.data.dtype).view(self.data.shape).copy_(self.data)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I], fp32 or bf16 -> [T, O] in x's dtype, accumulated in fp32."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x must be [T, {self.in_features}], got {tuple(x.shape)}")
        if x.dtype not in _KINDS:
            raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        self._call(
            x.data_ptr(),
            int(x.dtype == torch.bfloat16),
            self.data.data_ptr(),
            self.kind,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )
        return out


def _panels(rows: Tensor, width: int) -> Tensor:
    """rows [O, N] -> [ceil(O / width), N, width], zero-padded."""
    outputs, columns = rows.shape
    whole = outputs // width
    data = rows.new_zeros(-(-outputs // width), columns, width)
    data[:whole] = rows[: whole * width].view(whole, width, columns).transpose(1, 2)
    if whole < len(data):
        data[whole, :, : outputs - whole * width] = rows[whole * width :].T
    return data


def _quantized(weight: QuantizedWeight, width: int) -> Tensor:
    codes = _panels(weight.codes.view(torch.uint8), width)
    count, inputs, _ = codes.shape
    # Words of 32 bits, little-endian: the first input in the lowest bits.
    if weight.minimum is not None:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    codes = codes.view(count, -1, 4, width).transpose(2, 3).reshape(count, inputs // GROUP, -1)
    halves = [part for part in (weight.scale, weight.minimum) if part is not None]
    parts = [_panels(half, width).view(torch.uint8).view(count, inputs // GROUP, -1) for half in halves]
    return torch.cat([*parts, codes], dim=2)
