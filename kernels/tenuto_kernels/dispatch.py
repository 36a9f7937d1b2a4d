"""Which implementation runs. Owns the one choice of backend of this process.

`cpu` are the torch definitions (they run wherever torch runs), `gpu` the Triton kernels, `interpret` the Triton kernels
in Triton's interpreter, on CPU tensors, for tests. `TENUTO_KERNELS` forces one of the three.
"""

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Literal, Protocol, cast, get_args

import torch

from tenuto_kernels.quant import QuantizedWeight
from tenuto_kernels.rows import AttentionRows

Backend = Literal["cpu", "interpret", "gpu"]

log = logging.getLogger("tenuto.kernels")


class Kernels(Protocol):
    """What a backend provides. Arguments are checked in `ops`; a backend may rely on that."""

    def store_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None: ...

    def paged_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        rows: AttentionRows,
        scale: float,
        *,
        window: int | None,
        invariant: bool,
    ) -> torch.Tensor: ...

    def copy_blocks(self, pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None: ...

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None: ...

    def scatter_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, src: torch.Tensor) -> None: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor: ...

    def sample_tokens(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor: ...

    def quant_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, *, invariant: bool = False
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """`x @ weight.T + bias` as a function of x [T, I], with the weight packed once, in the way this backend reads it."""
        ...


@functools.cache
def backend() -> Backend:
    """The backend of this process, chosen and logged at the first call.

    Raises ValueError for an unknown `TENUTO_KERNELS` and RuntimeError for one that cannot run here.
    """
    forced = os.environ.get("TENUTO_KERNELS", "")
    if forced and forced not in get_args(Backend):
        raise ValueError(f"TENUTO_KERNELS must be one of {', '.join(get_args(Backend))}, got {forced!r}")
    has_triton = importlib.util.find_spec("triton") is not None
    has_gpu = torch.cuda.is_available()
    if forced in ("gpu", "interpret") and not has_triton:
        raise RuntimeError(f"TENUTO_KERNELS={forced} needs triton: pip install 'tenuto[server,gpu]'")
    if forced == "gpu" and not has_gpu:
        raise RuntimeError("TENUTO_KERNELS=gpu, but torch sees no CUDA device")
    chosen: Backend = cast(Backend, forced) if forced else ("gpu" if has_gpu and has_triton else "cpu")
    why = "forced by TENUTO_KERNELS" if forced else f"CUDA device: {has_gpu}, triton: {has_triton}"
    log.info("kernel backend: %s (%s)", chosen, why)
    return chosen


@functools.cache
def load(name: Backend) -> Kernels:
    """The implementation called `name`, imported on first use.

    Raises RuntimeError where the interpreter is asked for after Triton's kernels were bound to the compiler (or the
    reverse): the decorator decides once, at import.
    """
    if name == "cpu":
        return cast(Kernels, importlib.import_module("tenuto_kernels.cpu"))
    interpreted = name == "interpret"
    if interpreted and "tenuto_kernels.gpu" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    module = importlib.import_module("tenuto_kernels.gpu")
    bound_to_interpreter: bool = module.INTERPRETED
    if bound_to_interpreter != interpreted:
        state = "the interpreter" if bound_to_interpreter else "the compiler"
        raise RuntimeError(f"backend {name!r} asked for, but this process bound the Triton kernels to {state}")
    return cast(Kernels, module)


@functools.cache
def native_bf16() -> bool:
    """Whether this processor multiplies bf16 itself (AVX512-BF16 or AMX) rather than by conversion."""
    # Private names, so a torch without them counts as "no": fp32 is right everywhere.
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def kernels_for(tensor: torch.Tensor) -> Kernels:
    """The implementation for a tensor's device: host tensors of a GPU process are left to the torch definitions."""
    name = backend()
    if name == "gpu" and tensor.device.type != "cuda":
        name = "cpu"
    return load(name)
