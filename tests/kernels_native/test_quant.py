"""Quantised weights: the codes against their definition, the native products against the dense form."""

import pytest
import torch

from tenuto_kernels.cpu import native
from tenuto_kernels.cpu.native_panels import Panels
from tenuto_kernels.linear import pack_linear
from tenuto_kernels.quant import GROUP, QuantizedWeight, quantize, stack

needs_native = pytest.mark.skipif(not native.available(), reason="no native CPU operators here")


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_every_weight_is_within_half_a_step(bits: int, steps: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 3 * GROUP) * torch.logspace(-3, 2, 20)[:, None]
    quantized = quantize(weight, bits)
    assert quantized is not None
    groups = weight.view(20, 3, GROUP)
    spread = groups.amax(-1) - groups.amin(-1) if bits == 4 else 2 * groups.abs().amax(-1)
    # Half a step, and what rounding scale and minimum to fp16 (11 bits) adds over all the steps.
    bound = spread / steps / 2 + 2**-10 * groups.abs().amax(-1) * (2 if bits == 4 else 1)
    error = (quantized.dense(torch.float32) - weight).view(20, 3, GROUP).abs().amax(-1)
    assert (error <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_a_constant_group_is_exact(bits: int, value: float) -> None:
    quantized = quantize(torch.full((2, GROUP), value), bits)
    assert quantized is not None
    assert torch.allclose(quantized.dense(torch.float32), torch.full((2, GROUP), value), rtol=2**-10, atol=0)


def test_what_has_no_form_is_left_alone() -> None:
    assert quantize(torch.ones(4, GROUP + 1), 8) is None
    assert quantize(torch.full((1, GROUP), 1e9), 8) is None
    with pytest.raises(ValueError, match="4 or 8"):
        quantize(torch.ones(1, GROUP), 3)
    with pytest.raises(ValueError, match="fp16"):
        QuantizedWeight(torch.zeros(2, GROUP, dtype=torch.int8), torch.ones(2, 1), None)


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 32), (101, 96), (96, 576), (48, 1536)])
def test_products_equal_those_of_the_dense_form(bits: int, shape: tuple[int, int]) -> None:
    """Bit by bit: one rounding per weight, then the same chain of multiply-adds; and whatever the number of rows."""
    torch.manual_seed(1)
    quantized = quantize(torch.randn(shape), bits)
    assert quantized is not None
    bias = torch.randn(shape[0])
    linear, dense = Panels(quantized, bias), Panels(quantized.dense(torch.float32), bias)
    x = torch.randn(150, shape[1])
    whole = linear(x)
    assert torch.equal(whole, dense(x))
    for rows in (1, 2, 3, 4, 5, 8, 9, 31):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@needs_native
def test_rows_stack_and_are_reordered() -> None:
    torch.manual_seed(2)
    first, second = quantize(torch.randn(5, GROUP), 4), quantize(torch.randn(7, GROUP), 4)
    assert first is not None
    assert second is not None
    order = torch.randperm(12)
    both = stack([first, second]).rows(order)
    expected = torch.cat([first.dense(torch.float32), second.dense(torch.float32)])[order]
    assert torch.equal(both.dense(torch.float32), expected)
    other = quantize(torch.randn(5, GROUP), 8)
    assert other is not None
    with pytest.raises(ValueError, match="stacked"):
        stack([first, other])


@needs_native
@pytest.mark.parametrize("path", ["native", "tiled"])
def test_other_paths_take_the_dense_form(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_LINEAR", path)
    quantized = quantize(torch.randn(40, 2 * GROUP), 4)
    assert quantized is not None
    packed = pack_linear(quantized, dtype=torch.float32)
    assert (packed.kind, packed.bits) == ((path, 4) if path == "native" else (path, 32))
    x = torch.randn(3, 2 * GROUP)
    torch.testing.assert_close(packed(x), x @ quantized.dense(torch.float32).T, atol=1e-5, rtol=1e-5)
