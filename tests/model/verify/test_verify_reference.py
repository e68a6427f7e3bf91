"""The weights that `octavo verify` gives transformers where the service rounds its own."""

import pytest
import torch

from octavo.model.quantization.rounding import FP8_MAX
from octavo.model.verify.reference import rounded_rows


@pytest.mark.parametrize(("name", "most", "half_step"), [("int8", 127, 0.5 / 127), ("fp8", FP8_MAX, 1 / 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_units_of_their_largest_magnitude(
    name: str, most: float, half_step: float, dtype: torch.dtype
) -> None:
    """half_step: of the row's largest magnitude for integers, of the number itself for e4m3's three bits."""
    torch.manual_seed(0)
    weight_OI = torch.cat([torch.randn(5, 64) * 10.0 ** torch.arange(-2, 3)[:, None], torch.zeros(1, 64)]).to(dtype)
    rounded_OI = rounded_rows(weight_OI, name)
    assert rounded_OI.dtype == torch.float32
    largest_O1 = weight_OI.float().abs().amax(1, keepdim=True)
    allowed_OI = largest_O1.expand(-1, 64) if name == "int8" else weight_OI.float().abs() + largest_O1 / most
    assert ((rounded_OI - weight_OI.float()).abs() <= allowed_OI * half_step * 1.001).all()
    assert torch.equal(rounded_OI[5], torch.zeros(64))
    peaks = weight_OI.float().abs().argmax(1, keepdim=True)
    torch.testing.assert_close(rounded_OI.gather(1, peaks), weight_OI.float().gather(1, peaks))
