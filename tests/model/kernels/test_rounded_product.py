"""Products of e4m3 weights with e4m3 tokens, and what rounds the tokens, against their references."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.products.activation import silu_mul
from octavo.model.kernels.products.rounded import (
    MOST_TOKENS,
    RoundedTokens,
    cut_of,
    room_of,
    rounded_add_product,
    rounded_product,
    rounded_product_reference,
    silu_round,
)
from octavo.model.kernels.products.unpack import round_rows
from octavo.model.quantization.rounding import Fp8Weight, quantize_rows
from tests.support.model.interpreter import convert_to_e4m3_as_devices_do

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def tokens_of(x_TI: torch.Tensor) -> RoundedTokens:
    return RoundedTokens(*(part.to(DEVICE) for part in quantize_rows(x_TI)))


def weight_of(O: int, I: int) -> Fp8Weight:
    weight = Fp8Weight.quantize(torch.randn(O, I) * I**-0.5)
    return Fp8Weight(code_OI=weight.code_OI.to(DEVICE), scale_O=weight.scale_O.to(DEVICE))


@pytest.mark.sanitize(only=lambda T: T in (37, 50))
@pytest.mark.parametrize(
    ("T", "O", "I"), [(1, 200, 128), (37, 72, 2048), (64, 130, 1040), (50, 256, 896), (33, 3584, 128)]
)
def test_products_equal_their_reference(T: int, O: int, I: int) -> None:
    torch.manual_seed(0)
    weight, tokens = weight_of(O, I), tokens_of(torch.randn(T, I))
    here = RoundedTokens(tokens.code_TI.cpu(), tokens.scale_T.cpu())
    expected = rounded_product_reference(here, Fp8Weight(code_OI=weight.code_OI.cpu(), scale_O=weight.scale_O.cpu()))
    room = room_of([(O, I)], DEVICE)
    room.parts.fill_(float("nan"))
    out = torch.full((T, O), float("nan"), dtype=DTYPE, device=DEVICE)
    start = torch.randn(T, O).to(DTYPE)
    added = start.clone().to(DEVICE)
    for _ in range(2):  # the counters are zero again
        rounded_product(tokens, weight, out, room)
        torch.testing.assert_close(out.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    rounded_add_product(tokens, weight, added, room)
    torch.testing.assert_close(added.cpu().float(), start.float() + expected, atol=3e-2, rtol=2e-2)


def test_every_matrix_has_a_cut_that_the_room_is_for() -> None:
    shapes = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (16, 16)]
    room = room_of(shapes, "meta")
    for O, I in shapes:
        cut = cut_of(O, I)
        assert cut.num_tiles(MOST_TOKENS, 1) == 1
        assert cut.part_elements(MOST_TOKENS, O) <= room.parts.numel()
        assert cut.num_tiles(MOST_TOKENS, O) <= len(room.arrived)
        assert -(-I // cut.inputs) >= cut.splits, "a split without inputs"
    assert cut_of(3584, 18944).splits == 4


def test_more_tokens_than_the_kernel_has_cuts_for_are_refused() -> None:
    weight, tokens = weight_of(16, 16), tokens_of(torch.randn(MOST_TOKENS + 1, 16))
    out = torch.empty(len(tokens), 16, device=DEVICE)
    with pytest.raises(ValueError, match=f"code_TI has {MOST_TOKENS + 1} tokens, more than {MOST_TOKENS}"):
        rounded_product(tokens, weight, out, room_of([(16, 16)], DEVICE))


@pytest.mark.sanitize(only=lambda I: I in (700, 9000))
@pytest.mark.parametrize(("T", "I", "D"), [(3, 48, 32), (5, 700, 96), (2, 4864, 896), (2, 9000, 100)])
def test_the_activation_is_rounded_as_by_two_kernels(T: int, I: int, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        convert_to_e4m3_as_devices_do(monkeypatch)
    torch.manual_seed(0)
    gate_up, x = (torch.randn(T, 2 * I) * 3).to(DTYPE).to(DEVICE), torch.randn(T, D).to(DTYPE).to(DEVICE)
    gate_up[0] = 0  # a token of zeros has a scale, too
    one, two = RoundedTokens.empty(T, I, DEVICE), RoundedTokens.empty(T, I, DEVICE)
    silu_round(gate_up, x, one, 1e-6)
    act = torch.empty(T, I, dtype=DTYPE, device=DEVICE)
    silu_mul(gate_up, x, act, 1e-6)
    round_rows(act, two.code_TI, two.scale_T)
    torch.testing.assert_close(one.scale_T, two.scale_T, rtol=1e-6, atol=0)
    assert torch.equal(one.code_TI.float(), two.code_TI.float())
