"""Linear layers over weights packed once at load time.

Owner of the state: each `PackedLinear` owns its packed weight; this module owns the one choice of path a process makes
for each (precision, mode), made at the first `pack_linear` and logged once.

Paths, by name (`PackedLinear.kind`):

- `onednn-bf16`: prepacked oneDNN, activations in bf16: for processors with bf16 arithmetic;
- `onednn-fp32`: prepacked oneDNN in fp32;
- `torch`: `torch.nn.functional.linear`: CUDA tensors, and whatever oneDNN does not take;
- `tiled-fp32`: `onednn-fp32` in row tiles of one fixed size, so that a row's bits do not depend on its neighbours.

`TENUTO_LINEAR=<path>` forces a path for every CPU weight and so makes the choice deterministic.
"""

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

log = logging.getLogger(__name__)

PATHS = ("onednn-bf16", "onednn-fp32", "tiled-fp32", "torch")
TILE_ROWS = 64

_chosen: dict[tuple[torch.dtype, bool], str] = {}


class PackedLinear:
    """`y = x @ weight.T + bias` with the weight in the layout its path wants.

    Called with x [T, I] in fp32 or bf16, it returns [T, O] in x's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: str) -> None:
        self.out_features, self.in_features = int(weight.shape[0]), int(weight.shape[1])
        self.kind = kind
        compute = torch.bfloat16 if kind == "onednn-bf16" else torch.float32
        if kind == "torch":
            compute = weight.dtype
        weight = weight.detach().to(compute).contiguous()
        self._compute = compute
        self._bias = None if bias is None else bias.detach().to(compute).contiguous()
        self._weight = weight if kind == "torch" else torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._run: Callable[[Tensor], Tensor] = {
            "torch": self._plain,
            "tiled-fp32": self._tiled,
        }.get(kind, self._onednn)
        self.nbytes = weight.numel() * weight.element_size() + (
            0 if self._bias is None else self._bias.numel() * self._bias.element_size()
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x.to(self._compute)).to(x.dtype)

    def _plain(self, x: Tensor) -> Tensor:
        return torch_linear(x, self._weight, self._bias)

    def _onednn(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._weight, self._bias, "none", [], "")
        return out

    def _tiled(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        tiles = -(-rows // TILE_ROWS)
        padded = x.new_zeros(tiles * TILE_ROWS, x.shape[1])
        padded[:rows] = x
        return torch.cat([self._onednn(tile) for tile in torch.split(padded, TILE_ROWS)])[:rows]


def pack_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    invariant: bool = False,
    keep_fp32: bool = True,
) -> PackedLinear:
    """Pack weight [O, I] (and bias [O]) for repeated products.

    `dtype` is the precision of the weight's values (bf16 or fp32): the weight is rounded to it first. `invariant` asks
    for rows whose bits do not depend on how many other rows share the call. `keep_fp32=False` forbids an fp32 copy of
    a bf16 weight, for models whose fp32 copy would not fit.
    Raises ValueError on shapes or a dtype it does not take.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must be [O, I], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype}")
    weight = weight.detach().to(dtype)
    if weight.device.type != "cpu":
        return PackedLinear(weight, bias, "torch")
    return PackedLinear(weight, bias, _path(dtype, invariant, keep_fp32))


def _path(dtype: torch.dtype, invariant: bool, keep_fp32: bool) -> str:
    forced = os.environ.get("TENUTO_LINEAR", "")
    if forced:
        if forced not in PATHS:
            raise ValueError(f"TENUTO_LINEAR={forced!r}: expected one of {', '.join(PATHS)}")
        return forced
    key = (dtype, invariant)
    if key not in _chosen:
        _chosen[key] = _choose(dtype, invariant)
        log.info("linear layers, %s%s: %s", dtype, " batch-invariant" if invariant else "", _chosen[key])
    return _chosen[key]


def _choose(dtype: torch.dtype, invariant: bool) -> str:
    if not _onednn_works():
        return "torch"
    if invariant:
        return "tiled-fp32"
    native_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "onednn-bf16" if dtype == torch.bfloat16 and native_bf16 else "onednn-fp32"


def _onednn_works() -> bool:
    """The prepack operators are private to torch: try them rather than trust a version."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.eye(16), None)
        out = torch.ops.mkldnn._linear_pointwise(torch.ones(1, 16), weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(torch.equal(out, torch.ones(1, 16)))
