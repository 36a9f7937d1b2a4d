"""The Triton kernels. Importing this package binds them to the compiler or, under TRITON_INTERPRET=1, the interpreter."""

from tenuto_kernels.gpu.attention import paged_attention
from tenuto_kernels.gpu.blocks import copy_blocks, gather_blocks, scatter_blocks
from tenuto_kernels.gpu.matmul import quant_linear
from tenuto_kernels.gpu.rowwise import add_rms_norm, rms_norm, rope_store, silu_mul
from tenuto_kernels.gpu.sampling import sample_tokens
from tenuto_kernels.gpu.shared import INTERPRETED
from tenuto_kernels.gpu.store import store_kv

__all__ = [
    "INTERPRETED",
    "add_rms_norm",
    "copy_blocks",
    "gather_blocks",
    "paged_attention",
    "quant_linear",
    "rms_norm",
    "rope_store",
    "sample_tokens",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
]
