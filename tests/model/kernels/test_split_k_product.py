"""Products split over their inputs against their references, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.products.split_k import (
    SplitKCut,
    SplitKRoom,
    add_product_reference,
    dot_gate_up,
    gate_up_reference,
    split_k_add_product,
    split_k_product,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LIMIT = 2e-2 if torch.cuda.is_available() else 1e-4
CUTS = [
    SplitKCut(outputs=32, tokens=16, inputs=64),
    SplitKCut(outputs=64, tokens=16, inputs=64, splits=3),
    SplitKCut(outputs=64, tokens=32, inputs=128, splits=7, stages=3),
]


def room_for(cut: SplitKCut, num_tokens: int, num_outputs: int) -> SplitKRoom:
    room = SplitKRoom.allocate(
        num_elements=cut.part_elements(num_tokens, num_outputs), num_tiles=cut.num_tiles(num_tokens, num_outputs),
        device=DEVICE,
    )  # fmt: skip
    room.parts.fill_(float("nan"))
    return room


@pytest.mark.sanitize(only=lambda T: T == 33)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("T", "O", "K"), [(1, 96, 200), (8, 130, 448), (17, 64, 64), (33, 160, 896)])
def test_products_equal_their_references(cut: SplitKCut, T: int, O: int, K: int) -> None:
    torch.manual_seed(T)
    y = torch.randn(T, K, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(O, K, device=DEVICE, dtype=DTYPE) * K**-0.5
    x = torch.randn(T, O, device=DEVICE, dtype=DTYPE)
    room, out = room_for(cut, T, O), torch.full_like(x, float("nan"))
    for _ in range(2):  # the second launch finds the counters as the first left them
        split_k_product(y, weight, out, room, cut)
        torch.testing.assert_close(out.float(), add_product_reference(x * 0, y, weight), atol=LIMIT, rtol=LIMIT)
    expected = add_product_reference(x, y, weight)
    split_k_add_product(x, y, weight, room, cut)
    torch.testing.assert_close(x.float(), expected, atol=LIMIT, rtol=LIMIT)
    assert not room.arrived.any()


@pytest.mark.sanitize(only=lambda T: T == 33)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("T", "D", "I"), [(1, 96, 40), (8, 200, 96), (33, 448, 130)])
def test_gate_and_up_equal_their_reference(cut: SplitKCut, T: int, D: int, I: int) -> None:
    torch.manual_seed(T)
    x = torch.randn(T, D, device=DEVICE, dtype=DTYPE) * 3
    weight = torch.randn(2 * I, D, device=DEVICE, dtype=DTYPE) * D**-0.5
    act = torch.full((T, I), float("nan"), device=DEVICE, dtype=DTYPE)
    dot_gate_up(x, weight, act, 1e-6, cut)
    torch.testing.assert_close(act.float(), gate_up_reference(x, weight, 1e-6), atol=LIMIT, rtol=LIMIT)


def test_a_room_that_is_too_small_is_refused() -> None:
    cut = SplitKCut(splits=2)
    y, weight, out = (torch.zeros(shape, device=DEVICE) for shape in ((4, 128), (64, 128), (4, 64)))
    small = SplitKRoom.allocate(num_elements=8, num_tiles=1, device=DEVICE)
    with pytest.raises(ValueError, match="too few"):
        split_k_product(y, weight, out, small, cut)
    with pytest.raises(ValueError, match="weight_OK has shape"):
        split_k_product(y, weight[:, :64], out, small, cut)
