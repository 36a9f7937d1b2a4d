"""KV-cache kernels: torch definitions, a fast CPU path and Triton kernels behind one set of entry points.

Everything public is imported on first use, so that looking at this package costs nothing and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto_kernels.dispatch import backend
    from tenuto_kernels.layout import LAYOUT_VERSION, KVLayout
    from tenuto_kernels.linear import PackedLinear, pack_linear
    from tenuto_kernels.ops import copy_blocks, gather_blocks, paged_attention, scatter_blocks, store_kv
    from tenuto_kernels.rows import AttentionRows

__all__ = [
    "LAYOUT_VERSION",
    "AttentionRows",
    "KVLayout",
    "PackedLinear",
    "backend",
    "copy_blocks",
    "gather_blocks",
    "pack_linear",
    "paged_attention",
    "scatter_blocks",
    "store_kv",
]

_HOMES = {
    "LAYOUT_VERSION": "layout",
    "AttentionRows": "rows",
    "KVLayout": "layout",
    "PackedLinear": "linear",
    "backend": "dispatch",
    "copy_blocks": "ops",
    "gather_blocks": "ops",
    "pack_linear": "linear",
    "paged_attention": "ops",
    "scatter_blocks": "ops",
    "store_kv": "ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
