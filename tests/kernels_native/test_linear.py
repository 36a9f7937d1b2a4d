import pytest
import torch

from tenuto_kernels.linear import pack_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
def test_equals_a_float64_product(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 160, generator=generator)
    bias = torch.randn(96, generator=generator)
    x = torch.randn(rows, 160, generator=generator)
    packed = pack_linear(weight, bias, dtype=dtype)
    expected = x.double() @ weight.to(dtype).double().T + bias.double()
    torch.testing.assert_close(packed(x).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(96, 160), (576, 1536)])
def test_invariant_rows_do_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape), torch.randn(512, shape[1])
    packed = pack_linear(weight, dtype=torch.float32, invariant=True)
    full = packed(x)
    for rows in (1, 2, 3, 7, 16, 64, 65, 300):
        assert torch.equal(packed(x[:rows]), full[:rows])
        assert torch.equal(packed(x[512 - rows :]), full[512 - rows :])
