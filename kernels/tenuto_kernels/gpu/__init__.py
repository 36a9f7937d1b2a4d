"""The Triton kernels. Importing this package binds them to the compiler or, under TRITON_INTERPRET=1, the interpreter."""

from tenuto_kernels.gpu.attention import paged_attention
from tenuto_kernels.gpu.blocks import copy_blocks, gather_blocks, scatter_blocks
from tenuto_kernels.gpu.shared import INTERPRETED
from tenuto_kernels.gpu.store import store_kv

__all__ = ["INTERPRETED", "copy_blocks", "gather_blocks", "paged_attention", "scatter_blocks", "store_kv"]
