"""The torch definitions: what every other backend must agree with, and the product's path on a CPU."""

from tenuto_kernels.cpu.attention import paged_attention
from tenuto_kernels.cpu.blocks import copy_blocks, gather_blocks, scatter_blocks
from tenuto_kernels.cpu.store import store_kv

__all__ = ["copy_blocks", "gather_blocks", "paged_attention", "scatter_blocks", "store_kv"]
