import pytest
import torch

from tenuto_kernels.cpu import native
from tenuto_kernels.linear import PATHS, PackedLinear, pack_linear

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDING = {FP32: 2e-6, BF16: 2**-8}  # relative to the sum of |products|: fp32 accumulation, one bf16 rounding


def _case(rows: int, outs: int, ins: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator) for shape in ((rows, ins), (outs, ins), (outs,))]
    return draw[0], draw[1], draw[2]


def _check(packed: PackedLinear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool) -> None:
    out = packed(x)
    assert out.dtype == x.dtype
    assert out.shape == (x.shape[0], weight.shape[0])
    expected = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T + 1
    if bias is not None:
        expected = expected + bias.double()
    error = ((out.double() - expected).abs() / scale).max().item() if x.shape[0] else 0.0
    assert error <= ROUNDING[x.dtype if exact else BF16], f"{packed.kind}: {error}"


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
def test_every_path_equals_a_float64_product(
    kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "native" and not native.available():
        pytest.skip("no native CPU operators here")
    monkeypatch.setenv("TENUTO_LINEAR", kind)
    if kind == "onednn-bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with pytest.raises(ValueError, match="on this processor"):
            pack_linear(torch.eye(16), dtype=weight_dtype)
        return
    for rows, outs, ins in ((1, 96, 160), (3, 100, 77), (8, 48, 64), (9, 1, 33), (130, 577, 200), (0, 16, 16)):
        x, weight, bias = _case(rows, outs, ins)
        x, weight = x.to(x_dtype), weight.to(weight_dtype)
        exact = kind in ("native", "tiled", "onednn-fp32") or (kind == "torch" and weight_dtype == FP32)
        for added in (None, bias):
            packed = pack_linear(weight, added, dtype=weight_dtype)
            assert packed.kind == kind
            _check(packed, x, weight, added, exact)


@pytest.mark.parametrize("kind", ["native", "tiled"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (101, 77)])
def test_invariant_rows_do_not_depend_on_the_batch(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "native" and not native.available():
        pytest.skip("no native CPU operators here")
    monkeypatch.setenv("TENUTO_LINEAR", kind)
    x, weight, bias = _case(512, *shape)
    packed = pack_linear(weight, bias, dtype=dtype, invariant=True)
    full = packed(x)
    for rows in (1, 2, 3, 7, 16, 64, 65, 300):
        assert torch.equal(packed(x[:rows]), full[:rows])
        assert torch.equal(packed(x[512 - rows :]), full[512 - rows :])


def test_invariant_mode_chooses_an_invariant_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENUTO_LINEAR", raising=False)
    for dtype in (FP32, BF16):
        assert pack_linear(torch.eye(64), dtype=dtype, invariant=True).kind in ("native", "tiled")


def test_the_native_path_keeps_no_second_copy() -> None:
    if not native.available():
        pytest.skip("no native CPU operators here")
    packed = PackedLinear(torch.zeros(960, 576, dtype=BF16), None, "native")
    assert packed.nbytes == 960 * 576 * 2
    assert (packed.out_features, packed.in_features) == (960, 576)


def test_weights_are_rounded_to_the_asked_precision() -> None:
    weight = torch.full((16, 16), 1 + 2**-12)  # bf16 keeps 8 bits: this becomes 1
    assert torch.equal(pack_linear(weight, dtype=BF16)(torch.eye(16)), torch.ones(16, 16))


def test_strided_input() -> None:
    x, weight, _ = _case(20, 96, 160)
    wide = torch.zeros(20, 320)
    wide[:, 160:] = x
    _check(pack_linear(weight, dtype=FP32), wide[:, 160:], weight, None, exact=True)


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"weight must be \[O, I\]"):
        pack_linear(torch.zeros(3), dtype=FP32)
    with pytest.raises(ValueError, match="bias must be"):
        pack_linear(torch.zeros(3, 4), torch.zeros(4), dtype=FP32)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        pack_linear(torch.zeros(3, 4), dtype=torch.float16)
    monkeypatch.setenv("TENUTO_LINEAR", "fastest")
    with pytest.raises(ValueError, match="expected one of native"):
        pack_linear(torch.zeros(3, 4), dtype=FP32)
