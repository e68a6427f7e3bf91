"""Products whose rows do not depend on the batch: right, and the same bits however many rows there are."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.products.activation import invariant_silu_mul, silu_mul_reference
from octavo.model.kernels.products.invariant import (
    BY_TOKENS,
    MANY_TOKENS,
    MOST,
    ProductTiles,
    Splits,
    invariant_add_product,
    invariant_product,
    part_elements,
    product_reference,
)

pytestmark = pytest.mark.usefixtures("one_order")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
LARGEST = 1000 if DEVICE == "cuda" else MANY_TOKENS + 5


def product(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None, tiles: ProductTiles | None = None
) -> torch.Tensor:
    """On the device, into a buffer of NaN or onto the residual; back on the CPU."""
    (T, K), O = x.shape, len(weight)
    part = torch.full((max(part_elements(T, O, K), 1),), float("nan"), device=DEVICE)
    out = torch.full((T, O), float("nan"), dtype=x.dtype) if residual is None else residual.clone()
    out = out.to(DEVICE)
    run = invariant_product if residual is None else invariant_add_product
    run(x.to(DEVICE), weight.to(DEVICE), out, part, tiles=tiles)
    return out.cpu()


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "O", "K"), [(1, 96, 64), (15, 130, 96), (17, 70, 2600), (70, 64, 200)])
def test_a_product_equals_its_reference(T: int, O: int, K: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, residual = torch.randn(T, K).to(dtype), torch.randn(O, K).to(dtype), torch.randn(T, O).to(dtype)
    limit = {"atol": 1e-3, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.5, "rtol": 1e-2}
    torch.testing.assert_close(product(x, weight).float(), product_reference(x, weight), **limit)
    added = product(x, weight, residual=residual).float()
    torch.testing.assert_close(added, product_reference(x, weight, residual), **limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("O", "K"), [(96, 128), (130, 2600)])
def test_a_row_has_the_same_bits_in_any_batch(O: int, K: int, dtype: torch.dtype) -> None:
    """Splits in programs of their own, added by a second kernel, or one after the other: the same sums."""
    torch.manual_seed(1)
    x, weight, residual = torch.randn(LARGEST, K).to(dtype), torch.randn(O, K).to(dtype), torch.randn(LARGEST, O)
    residual = residual.to(dtype)
    whole, added = product(x, weight), product(x, weight, residual=residual)
    for first, count in ((0, 1), (0, 2), (3, 15), (60, 17), (1, 64), (7, 100)):
        rows = slice(first, first + count)
        assert torch.equal(product(x[rows], weight), whole[rows]), (first, count)
        assert torch.equal(product(x[rows], weight, residual=residual[rows]), added[rows]), (first, count)


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_tile(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(70, 192).to(dtype) * torch.rand(70, 1).to(dtype) * 8, torch.randn(200, 192).to(dtype)
    every = [tiles for _, tiles in BY_TOKENS] + [MOST]
    if dtype == torch.float32:
        every = [tiles for tiles in every if tiles.outputs == 64]  # the others are too large for shared memory
    wanted = product(x, weight, tiles=every[0])
    for tiles in every[1:]:
        assert torch.equal(product(x, weight, tiles=tiles), wanted), tiles


def test_splits_depend_on_the_matrix_alone() -> None:
    assert Splits.of(1152, 896) == Splits(count=1, inputs=896)
    assert Splits.of(896, 4864) == Splits(count=5, inputs=1024)
    assert Splits.of(3584, 18944) == Splits(count=4, inputs=4736)
    assert Splits.of(151936, 3584).count == 1
    assert part_elements(10, 896, 4864) == 5 * 10 * 896
    assert part_elements(10_000, 896, 4864) == 5 * MANY_TOKENS * 896


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, weight, part = torch.zeros(4, 2600), torch.zeros(64, 2600), torch.zeros(1)
    with pytest.raises(ValueError, match="part"):
        invariant_product(x, weight, torch.zeros(4, 64), part)
    with pytest.raises(ValueError, match="weight_OK"):
        invariant_product(x, weight.half(), torch.zeros(4, 64), part)
    with pytest.raises(ValueError, match="out_TO"):
        invariant_product(x, weight, torch.zeros(4, 63), part)


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_its_reference_and_is_the_same_for_a_token_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, x = torch.randn(9, 2 * 1100).to(dtype).to(DEVICE), torch.randn(9, 96).to(dtype).to(DEVICE)
    out = torch.full((9, 1100), float("nan"), dtype=dtype, device=DEVICE)
    invariant_silu_mul(gate_up, x, out, 1e-6)
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    wanted = silu_mul_reference(gate_up.cpu(), x.cpu(), 1e-6)
    torch.testing.assert_close(out.cpu().float(), wanted, atol=limit, rtol=limit)
    alone = torch.empty(1, 1100, dtype=dtype, device=DEVICE)
    invariant_silu_mul(gate_up[4:5], x[4:5], alone, 1e-6)
    assert torch.equal(alone, out[4:5])
