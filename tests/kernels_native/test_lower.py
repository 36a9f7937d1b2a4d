"""Blocks in eight bits: within half a step of what they were, and the same bytes from the native code and the definition."""

import time

import pytest
import torch

from tenuto_kernels import lower
from tenuto_kernels.cpu import native
from tenuto_kernels.layout import KVLayout
from tenuto_kernels.lower import LowerForm, LowerKind

KINDS: tuple[LowerKind, ...] = ("int8", "fp8")


def numbers(layout: KVLayout, count: int) -> torch.Tensor:
    """Blocks whose groups differ in size by twelve orders of magnitude, with zeros, an outlier and a group of zeros."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *layout.block_shape)
    blocks = (
        torch.randn(shape, generator=generator)
        * 10 ** (12 * torch.rand(shape[:-1], generator=generator) - 8)[..., None]
    )
    blocks[:, :, :, 0, 0] = 0.0
    blocks[0, 0, 0, 0, 1, 0], blocks[0, 0, 0, 0, 1, 1] = 1000.0, -0.0
    return blocks.to(layout.dtype)


def there_and_back(form: LowerForm, blocks: torch.Tensor) -> torch.Tensor:
    packed, back = form.allocate(len(blocks)), torch.empty_like(blocks)
    form.pack(blocks, packed)
    form.unpack(packed, back)
    return back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("use_native", [True, False])
def test_the_error_is_half_a_step(
    monkeypatch: pytest.MonkeyPatch, kind: LowerKind, dtype: torch.dtype, use_native: bool
) -> None:
    """A step is 1/127 of the group's largest for int8 (the scale, rounded up to bf16, up to 1/128 more), and for fp8 1/8 of
    the number itself above 2^-6 of 1/448; bf16 and fp16 round once more on the way back."""
    if not use_native:
        monkeypatch.setattr(lower, "library", lambda: None)
    layout = KVLayout(2, 2, 32, 4, dtype)
    blocks = numbers(layout, 3)
    if dtype == torch.float16:
        blocks = blocks.clamp(-1e4, 1e4)
    back = there_and_back(LowerForm(layout, kind), blocks).double()
    exact = blocks.double()
    largest = exact.abs().amax(-1, keepdim=True)
    if kind == "int8":
        bound = largest / 127 / 2 * (1 + 2**-7)
    else:
        bound = torch.maximum(exact.abs() / 16, largest / 448 * 2**-10) * (1 + 2**-7)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}[dtype]
    smallest = 2**-24 if dtype == torch.float16 else 0.0
    assert ((back - exact).abs() <= bound + rounding * exact.abs() * (1 + 2**-4) + smallest).all()
    assert not back[:, :, :, 0, 0].any()


@pytest.mark.skipif(not native.available(), reason="no native CPU operators here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_native_and_definition_give_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, kind: LowerKind, dtype: torch.dtype
) -> None:
    layout = KVLayout(3, 2, 64, 16, dtype)
    form, blocks = LowerForm(layout, kind), numbers(layout, 4)
    packed, back = form.allocate(4), torch.empty_like(blocks)
    form.pack(blocks, packed)
    form.unpack(packed, back)
    monkeypatch.setattr(lower, "library", lambda: None)
    defined, back_defined = form.allocate(4), torch.empty_like(blocks)
    form.pack(blocks, defined)
    form.unpack(defined, back_defined)
    assert torch.equal(packed, defined)
    assert torch.equal(back.view(torch.uint8), back_defined.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_of_one_scale_comes_back_as_itself(kind: LowerKind) -> None:
    """All 8-bit numbers, scaled so that the scale is exactly 1: nothing to round."""
    layout = KVLayout(1, 1, 256, 1, torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
    values = torch.where(values.isnan() | (values == -128), 0.0, values)
    blocks = values.expand(1, *layout.block_shape).contiguous()
    assert torch.equal(there_and_back(LowerForm(layout, kind), blocks), blocks)


def test_a_block_takes_half_of_its_bytes_and_whole_pages() -> None:
    layout = KVLayout(30, 3, 64, 16, torch.bfloat16)  # SmolLM2-135M
    form = LowerForm(layout, "int8")
    assert form.block_bytes % 4096 == 0
    assert form.block_bytes / layout.block_bytes < 0.53
    assert LowerForm(KVLayout(1, 1, 8, 4, torch.float32), "int8").block_bytes == 64 + 16
    with pytest.raises(ValueError, match="int8, fp8"):
        LowerForm(layout, "int4")  # type: ignore[arg-type]


@pytest.mark.skipif(not native.available(), reason="no native CPU operators here")
@pytest.mark.parametrize("kind", KINDS)
def test_native_is_faster_than_the_definition(monkeypatch: pytest.MonkeyPatch, kind: LowerKind) -> None:
    """By CPU time, so that a busy machine does not decide."""
    layout = KVLayout(30, 3, 64, 16, torch.bfloat16)
    form, blocks = LowerForm(layout, kind), torch.randn(8, *layout.block_shape).to(torch.bfloat16)

    def cpu_s() -> float:
        began = time.process_time()
        there_and_back(form, blocks)
        return time.process_time() - began

    fast = min(cpu_s() for _ in range(3))
    monkeypatch.setattr(lower, "library", lambda: None)
    assert fast < min(cpu_s() for _ in range(3))
