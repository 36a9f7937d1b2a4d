"""The torch definitions: what every other backend must agree with, and the product's path on a CPU."""

from tenuto_kernels.cpu.attention import paged_attention
from tenuto_kernels.cpu.blocks import copy_blocks, gather_blocks, scatter_blocks
from tenuto_kernels.cpu.rowwise import add_rms_norm, quant_linear, rms_norm, rope_store, silu_mul
from tenuto_kernels.cpu.sampling import sample_tokens
from tenuto_kernels.cpu.store import store_kv

__all__ = [
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
