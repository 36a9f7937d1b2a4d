"""Linear layers over weights packed once at load time.

Owner of the state: each `PackedLinear` owns its packed weight; this module owns the one choice of path a process makes
for each (precision, mode), made at the first `pack_linear` and logged once.

Paths, by name (`PackedLinear.kind`):

- `native`: the C++ operator: the weight in its own precision, fp32 arithmetic, rows batch-invariant. The default where a
  compiler is found and the processor has no bf16 arithmetic; the only one that needs no second copy of a bf16 weight
  to be fast on such a processor, and the only one that reads quantised weights as they are (the others take their dense
  form in `dtype`).
- `onednn-bf16`: prepacked oneDNN with bf16 activations: for processors with bf16 arithmetic (AVX512-BF16, AMX), where
  a short measurement decides between it and `native`.
- `onednn-fp32`: prepacked oneDNN in fp32: fp32 weights without a compiler, or an fp32 copy of bf16 ones.
- `tiled`: `torch.nn.functional.linear` in fp32 over row tiles of one fixed size: batch-invariant without a compiler.
- `triton`: quantised weights on a CUDA device (or in Triton's interpreter), read as they are.
- `torch`: `torch.nn.functional.linear`: other CUDA tensors, and whatever else no other path takes.

`TENUTO_LINEAR=<path>` forces a path for every CPU weight and so makes the choice deterministic.
"""

import logging
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from tenuto_kernels.cpu import native
from tenuto_kernels.cpu.native_panels import Panels
from tenuto_kernels.dispatch import backend, load
from tenuto_kernels.quant import GROUP, QuantizedWeight

log = logging.getLogger(__name__)

PATHS = ("native", "onednn-bf16", "onednn-fp32", "tiled", "torch")
TILE_ROWS = 64

_chosen: dict[tuple[torch.dtype, bool, bool], str] = {}


class PackedLinear:
    """`y = x @ weight.T + bias` with the weight in the layout its path wants.

    Called with x [T, I] in fp32 or bf16, it returns [T, O] in x's dtype. `nbytes` counts everything it keeps. `panels`
    is the weight as the native code reads it, where `kind` is `native`; `bits`: of one weight. `invariant` matters to
    `triton` alone: the other paths are invariant or not by themselves.
    """

    def __init__(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, kind: str, invariant: bool = False
    ) -> None:
        self.out_features, self.in_features = int(weight.shape[0]), int(weight.shape[1])
        self.kind = kind
        self._run: Callable[[Tensor], Tensor]
        self.panels: Panels | None = None
        if kind == "native":
            self.panels = Panels(weight, bias)
            self._run = self.panels
            kept: list[Tensor | None] = [self.panels.data, self.panels.bias]
        elif kind == "triton":
            assert isinstance(weight, QuantizedWeight)
            self._run = load(backend()).quant_linear(weight, bias, invariant=invariant)
            kept = [weight.codes, weight.scale, weight.minimum, bias]
        else:
            assert isinstance(weight, Tensor)
            own = {"torch": weight.dtype, "onednn-bf16": torch.bfloat16}
            self._compute = own.get(kind, torch.float32)
            self._weight = weight.to(self._compute).contiguous()
            self._bias = None if bias is None else bias.detach().to(self._compute).contiguous()
            kept = [self._weight, self._bias]
            if kind.startswith("onednn"):
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)
            self._run = {"torch": self._plain, "tiled": self._tiled}.get(kind, self._onednn)
        self.bits = weight.bits if isinstance(weight, QuantizedWeight) else 8 * weight.element_size()
        self.nbytes = sum(t.numel() * t.element_size() for t in kept if t is not None)
        if kind == "triton" and self.bits == 4:
            self.nbytes -= self.out_features * self.in_features // 2  # two codes share a byte

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)

    def _plain(self, x: Tensor) -> Tensor:
        return torch_linear(x.to(self._compute), self._weight, self._bias).to(x.dtype)

    def _onednn(self, x: Tensor) -> Tensor:
        wide = x.to(self._compute).contiguous()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(wide, self._weight, self._bias, "none", [], "")
        return out.to(x.dtype)

    def _tiled(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = x.new_zeros(-(-rows // TILE_ROWS) * TILE_ROWS, x.shape[1], dtype=torch.float32)
        padded[:rows] = x
        tiles = [torch_linear(tile, self._weight, self._bias) for tile in torch.split(padded, TILE_ROWS)]
        return torch.cat(tiles)[:rows].to(x.dtype) if tiles else x.new_empty(0, self.out_features)


def pack_linear(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    invariant: bool = False,
    keep_fp32: bool = True,
) -> PackedLinear:
    """Pack weight [O, I] (and bias [O]) for repeated products.

    A quantised weight stays what it is on the paths `native` and `triton`. `dtype` is the precision of the weight's values
    (bf16 or fp32): the weight is rounded to it first. `invariant` asks for rows whose bits do not depend on how many other
    rows share the call. `keep_fp32=False` forbids holding a bf16 weight in fp32, for models whose fp32 copy would not fit
    (batch invariance without a compiler needs one all the same). Raises ValueError on shapes or a dtype it does not take.
    """
    if len(weight.shape) != 2:
        raise ValueError(f"weight must be [O, I], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype}")
    if isinstance(weight, QuantizedWeight):
        if takes_on_device(weight):
            return PackedLinear(weight, bias, "triton", invariant)
        if weight.codes.device.type == "cpu" and takes_quantized():
            return PackedLinear(weight, bias, "native")
        weight = weight.dense(dtype)
    weight = weight.detach().to(dtype)
    if weight.device.type != "cpu":
        return PackedLinear(weight, bias, "torch")
    return PackedLinear(weight, bias, _path(dtype, invariant, keep_fp32))


def takes_on_device(weight: QuantizedWeight) -> bool:
    """Whether the Triton product reads this weight as it is, where it lies."""
    device = {"gpu": "cuda", "interpret": "cpu"}.get(backend())
    return weight.codes.device.type == device and (weight.bits == 8 or weight.shape[1] % (2 * GROUP) == 0)


def takes_quantized() -> bool:
    """Whether quantised weights are read as they are on this machine's CPU (rather than in their dense form)."""
    return os.environ.get("TENUTO_LINEAR", "native") == "native" and native.available()


def fast_bf16() -> bool:
    """Whether the processor multiplies bf16: dense bf16 weights are then faster at large batches than quantised ones."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _path(dtype: torch.dtype, invariant: bool, keep_fp32: bool) -> str:
    forced = os.environ.get("TENUTO_LINEAR", "")
    if forced:
        if forced not in PATHS:
            raise ValueError(f"TENUTO_LINEAR={forced!r}: expected one of {', '.join(PATHS)}")
        computes = {"onednn-bf16": torch.bfloat16, "onednn-fp32": torch.float32}.get(forced)
        if computes is not None and not _onednn_works(computes):
            raise ValueError(f"TENUTO_LINEAR={forced!r}: oneDNN has no {computes} products on this processor")
        return forced
    key = (dtype, invariant, keep_fp32)
    if key not in _chosen:
        _chosen[key] = _choose(dtype, invariant, keep_fp32)
        log.info("linear layers, %s%s: %s", dtype, ", batch-invariant" if invariant else "", _chosen[key])
    return _chosen[key]


def _choose(dtype: torch.dtype, invariant: bool, keep_fp32: bool) -> str:
    """By capability; by measurement only where capability leaves two fast paths."""
    compiled = native.available()
    if invariant:
        return "native" if compiled else "tiled"
    if dtype == torch.bfloat16 and fast_bf16() and _onednn_works(dtype):
        return _faster("native", "onednn-bf16") if compiled else "onednn-bf16"
    if compiled:
        return "native"
    if not _onednn_works(torch.float32):
        return "torch"
    return "onednn-fp32" if dtype == torch.float32 or keep_fp32 else "torch"


def _faster(first: str, second: str) -> str:
    """The path with the smaller product of its times for one row (decode) and for 128 rows (prefill)."""
    weight = torch.randn(1536, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    score = {first: 1.0, second: 1.0}
    for kind in score:
        packed = PackedLinear(weight, None, kind)
        for rows in (1, 128):
            x = torch.ones(rows, 1024, dtype=torch.bfloat16)
            score[kind] *= min(_seconds(packed, x) for _ in range(8))
    return min(score, key=score.__getitem__)


def _seconds(packed: PackedLinear, x: Tensor) -> float:
    started = time.perf_counter()
    packed(x)
    return time.perf_counter() - started


def _onednn_works(dtype: torch.dtype) -> bool:
    """The prepack operators are private to torch, and in bf16 not every processor has them: try them rather than trust a
    version."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.eye(16, dtype=dtype), None)
        out = torch.ops.mkldnn._linear_pointwise(torch.ones(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(torch.equal(out, torch.ones(1, 16, dtype=dtype)))
