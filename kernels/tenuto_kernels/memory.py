"""Large CPU buffers on huge pages, page-locked beside a GPU. Owns no state: a buffer lives as long as the tensors over it.

A matrix product or an attention pass walks megabytes at strides of kilobytes: with pages of 4 KiB the processor spends a
tenth to a fifth of the time on address translation (measured in the products of `tenuto bench kernels` on two virtual cores).
"""

import contextlib
import math
import mmap
import sys

import torch

#: Below this a buffer is left to the ordinary allocator.
LARGE_BYTES = 8 << 20
_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet among the mmap module's constants


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor, resident, on huge pages where the system grants them and the size is worth it.

    Raises RuntimeError or OSError if memory lacks.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_BYTES or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: the memory is as good, only slower
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    tensor = whole[skip : skip + size].view(dtype).view(shape)
    try:
        region.madvise(_MADV_POPULATE_WRITE)  # the pages come zeroed: writing the zeros again would double the time
    except OSError:
        tensor.zero_()
    return tensor


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`zeros` that a CUDA device copies from and to by itself, locked for as long as the process runs.

    Torch's own page-locked memory is rounded up to a power of two: for a pool of 40 GiB it would take 64. Raises
    RuntimeError if the system does not lock so much.
    """
    if math.prod(shape) * dtype.itemsize < LARGE_BYTES:  # pages that other tensors share cannot be locked twice
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    tensor = zeros(shape, dtype)
    failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))  # type: ignore[no-untyped-call]
    if failed:
        raise RuntimeError(f"cannot lock {tensor.nbytes} bytes of host memory (CUDA error {failed})")
    return tensor
