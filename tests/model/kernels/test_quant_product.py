"""Products with weights of fewer bits against their references, on a GPU or in Triton's interpreter."""

from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.products.quantized import (
    QuantizedWeight,
    QuantScratch,
    QuantTiles,
    quant_add_product,
    quant_product,
    quant_product_reference,
    splits_of,
)
from octavo.model.kernels.products.unpack import round_rows, unpack_weight
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import FP8, Fp8Weight, quantize_rows, round_to_groups
from tests.support.model.interpreter import convert_to_e4m3_as_devices_do

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 3e-5 if dtype == torch.float32 else 2.5e-2
    torch.testing.assert_close(actual.cpu().float(), expected.float(), atol=limit, rtol=limit)


def on_device(weight: QuantizedWeight) -> QuantizedWeight:
    moved = {f.name: getattr(weight, f.name) for f in fields(weight)}
    return type(weight)(**{name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in moved.items()})


def random_weight(kind: str, O: int, I: int, size: int | None = None) -> QuantizedWeight:
    """Quantised from N(0, 1 / I); grouped ones with zero points, and in another order where the kind says so."""
    weight = torch.randn(O, I) * I**-0.5
    if kind == "fp8":
        return Fp8Weight.quantize(weight)
    bits = 4 if "4" in kind else 8
    grouped = round_to_groups(weight, bits=bits, group_size=size)
    zero = torch.randint(0, 2**bits, grouped.zero_GO.shape, dtype=torch.uint8) if "zeros" in kind else grouped.zero_GO
    order = torch.randperm(I).int() if "order" in kind else None
    factor = torch.rand(I) + 0.5 if "factor" in kind else None
    return replace(grouped, zero_GO=zero, order_I=order, input_scale_I=factor, scale_GO=grouped.scale_GO.half())


def scratch(O: int, T: int) -> QuantScratch:
    made = QuantScratch.allocate(max_outputs=O, max_tokens=T, device=DEVICE)
    made.part.fill_(float("nan"))
    return made


KINDS = ["fp8", "int4", "int8", "int4 zeros order factor", "int8 zeros factor"]


@pytest.mark.sanitize(only=lambda T, dtype: T in (1, 3, 17) and dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("T", "O", "I", "size"),
    [(1, 70, 128, 32), (3, 24, 896, 128), (5, 70, 128, 32), (17, 64, 384, 128), (65, 24, 256, None)],
)
def test_products_equal_their_references(
    T: int, O: int, I: int, size: int | None, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, x = random_weight(kind, O, I, size), torch.randn(T, I).to(dtype)
    expected, start = quant_product_reference(x, weight), torch.randn(T, O).to(dtype)
    moved, room = on_device(weight), scratch(O, T)
    out = torch.full((T, O), float("nan"), dtype=dtype, device=DEVICE)
    for _ in range(2):  # the counters are zero again
        quant_product(x.to(DEVICE), moved, out, room)
        close(out, expected, dtype)
    added = start.clone().to(DEVICE)
    quant_add_product(x.to(DEVICE), moved, added, room)
    close(added, start.float() + expected, dtype)


@pytest.mark.sanitize(only=lambda programs: programs == 4)
@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_splits_change_nothing_but_rounding(programs: int) -> None:
    torch.manual_seed(0)
    weight, x = random_weight("int4", 64, 768, 128), torch.randn(3, 768)
    tiles = QuantTiles(outputs=32, tokens=16, programs=programs)
    assert splits_of(weight, 2, tiles) == {1: 1, 4: 2, 1000: 6}[programs]
    out = torch.empty(3, 64, device=DEVICE)
    quant_product(x.to(DEVICE), on_device(weight), out, scratch(64, 3), tiles=tiles)
    close(out, quant_product_reference(x, weight), torch.float32)


def test_the_reference_is_the_dequantized_weight() -> None:
    torch.manual_seed(0)
    weight, x = random_weight("int4 zeros order factor", 8, 64, 32), torch.randn(3, 64)
    assert isinstance(weight, GroupedWeight)
    torch.testing.assert_close(quant_product_reference(x, weight), x @ weight.dequantized().T, atol=1e-5, rtol=1e-5)


@pytest.mark.sanitize(only=lambda O: O == 17)
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize(("O", "I", "size"), [(17, 128, 32), (33, 96, 48), (8, 256, None)])
def test_unpacking_equals_its_reference(O: int, I: int, size: int | None, kind: str) -> None:
    torch.manual_seed(0)
    weight = random_weight(kind, O, I, size)
    assert isinstance(weight, GroupedWeight)
    moved = on_device(weight)
    assert isinstance(moved, GroupedWeight)
    out = torch.full((O, I), float("nan"), device=DEVICE)
    unpack_weight(moved, out)
    torch.testing.assert_close(out.cpu(), weight.dequantized(), atol=1e-6, rtol=1e-6)


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_rounded_as_their_reference_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        convert_to_e4m3_as_devices_do(monkeypatch)
    torch.manual_seed(0)
    x = (torch.randn(5, 200) * 300).to(dtype)
    x[3] = 0
    code, scale = torch.empty(5, 200, dtype=FP8, device=DEVICE), torch.empty(5, device=DEVICE)
    round_rows(x.to(DEVICE), code, scale)
    expected_code, expected_scale = quantize_rows(x)
    torch.testing.assert_close(scale.cpu(), expected_scale)
    found, expected = code.cpu().float(), expected_code.float()
    assert bool(((found - expected).abs() <= (expected.abs() / 8).clamp(min=2**-9)).all())  # ties, and subnormals
    assert float((found != expected).float().mean()) < 0.01


def test_a_launcher_names_what_does_not_fit() -> None:
    weight, room = on_device(random_weight("int4", 8, 64, 32)), scratch(8, 1)
    with pytest.raises(ValueError, match="x_TI has shape"):
        quant_product(torch.randn(1, 32, device=DEVICE), weight, torch.empty(1, 8, device=DEVICE), room)
    narrow = on_device(random_weight("int4", 8, 64, 16))
    with pytest.raises(ValueError, match="blocks of 16 inputs"):
        quant_product(torch.randn(1, 64, device=DEVICE), narrow, torch.empty(1, 8, device=DEVICE), room)
    many, wide = torch.randn(40, 256, device=DEVICE), on_device(random_weight("int4", 8, 256, 32))
    with pytest.raises(ValueError, match="scratch is too small"):
        quant_product(many, wide, torch.empty(40, 8, device=DEVICE), room)
