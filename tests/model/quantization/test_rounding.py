"""Weights rounded to e4m3 and to integers: how far from the floats, and the same as arithmetic element by element."""

import pytest
import torch

from octavo.model.quantization.rounding import FP8_MAX, Fp8Weight, quantize_rows, round_to_groups, to_fp8


def test_e4m3_is_within_a_sixteenth_of_each_element() -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 64)
    weight[3] = 0
    quantized = Fp8Weight.quantize(weight)
    error = (quantized.dequantized() - weight).abs()
    assert bool((error <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) * 2**-18).all())
    assert quantized.num_bytes == 70 * 64 + 4 * 70
    assert quantized.dequantized().abs().amax(1)[0] == pytest.approx(float(weight.abs().amax(1)[0]))


def test_what_lies_beyond_becomes_the_largest_and_nan_stays() -> None:
    x = to_fp8(torch.tensor([1e4, -1e4, FP8_MAX, float("nan"), 0.0])).float()
    assert x[[0, 1, 2, 4]].tolist() == [FP8_MAX, -FP8_MAX, FP8_MAX, 0.0]
    assert x.isnan().tolist() == [False, False, False, True, False]


def test_products_by_way_of_floats() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(8, 64), torch.randn(8), torch.randn(5, 64)
    quantized = Fp8Weight.quantize(weight, bias)
    exact = x @ weight.T + bias
    near, rounded = quantized.multiply(x), quantized.multiply_rounded(x)
    codes, scales = quantize_rows(x)
    assert torch.allclose(rounded, (codes.float() * scales[:, None]) @ quantized.dequantized().T + bias)
    spread = exact.std()
    assert (near - exact).std() < 0.04 * spread
    assert (near - exact).std() < (rounded - exact).std() < 0.06 * spread


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (8, None), (4, None)])
def test_rounding_to_groups_errs_by_half_a_step(bits: int, size: int | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 64)
    weight[2, :32] = 0
    quantized = round_to_groups(weight, bits=bits, group_size=size)
    step = weight.unflatten(1, (-1, size or 64)).abs().amax(2) / (2 ** (bits - 1) - 1)
    limit = step.repeat_interleave(size or 64, dim=1) / 2
    assert bool(((quantized.dequantized() - weight).abs() <= limit * 1.001).all())


def test_groups_must_come_out_even() -> None:
    with pytest.raises(ValueError, match="64 inputs are no multiple of group_size 48"):
        round_to_groups(torch.randn(2, 64), bits=4, group_size=48)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_none_when_it_is_rounded(bits: int, value: float) -> None:
    """Integers have no NaN: its scale says it, or answers would be made of noise instead of ending as NUMERICAL."""
    weight = torch.randn(4, 64)
    weight[1, 5] = value
    is_finite = round_to_groups(weight, bits=bits).multiply(torch.randn(2, 64)).isfinite().all(0)
    assert is_finite.tolist() == [True, False, True, True]
