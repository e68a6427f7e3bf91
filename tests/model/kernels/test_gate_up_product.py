"""Gate, up and their activation in one product against the reference, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model.kernels.products import gate_up
from octavo.model.kernels.products.gate_up import (
    LEAST_TOKENS,
    TILES,
    GateUpTiles,
    gate_up_product,
    gate_up_product_reference,
    is_faster,
    tiles_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if torch.cuda.is_available() else [torch.float32, torch.float16]
LIMIT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SMALL = GateUpTiles(tokens=64, outputs=32, inputs=32, group=2, warps=4)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="tiles of an H100"
)


def check(T: int, D: int, I: int, dtype: torch.dtype, tiles: GateUpTiles) -> None:
    torch.manual_seed(T)
    x = (torch.randn(T, D, device=DEVICE) * 3).to(dtype)
    weight = (torch.randn(2 * I, D, device=DEVICE) * D**-0.5).to(dtype)
    scale = torch.rand(T, device=DEVICE) + 0.1
    room = torch.full((T + 200, I), float("nan"), device=DEVICE, dtype=dtype)
    gate_up_product(x, weight, scale, room[:T], tiles)
    limit = LIMIT[dtype]
    wanted = gate_up_product_reference(x, weight, scale)
    torch.testing.assert_close(room[:T].float(), wanted, atol=limit, rtol=limit)
    assert room[T:].isnan().all()


@pytest.mark.sanitize(only=lambda T, dtype: T in (65, 300) and dtype != torch.float16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "D", "I"),
    [
        (1, 32, 32),  # one tile, most of it behind the last token
        (64, 64, 32),  # tokens of exactly one tile
        (65, 96, 64),
        (300, 64, 96),  # five tiles of tokens: groups of two and a last one of one
    ],
)
def test_gate_up_product_equals_its_reference(T: int, D: int, I: int, dtype: torch.dtype) -> None:
    check(T, D, I, dtype, SMALL)


@pytest.mark.sanitize(only=lambda T, dtype: T == 300 and dtype != torch.float16)
@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "D", "I"),
    [(1024, 896, 4864), (2500, 896, 4864), (1100, 1536, 8960), (130, 3584, 18944), (8200, 64, 128), (300, 896, 256)],
)
def test_the_tiles_that_serve_equal_the_reference(T: int, D: int, I: int, dtype: torch.dtype) -> None:
    check(T, D, I, dtype, TILES)


@pytest.mark.parametrize(
    ("shape", "T", "tokens", "outputs"),
    [("0.5B", 512, 64, 64), ("0.5B", 1024, 128, 64), ("0.5B", 2048, 128, 128), ("7B", 512, 128, 128)],
)
def test_few_turns_are_divided_into_smaller_tiles(
    shape: str, T: int, tokens: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_up, "_num_multiprocessors", lambda device: 132)
    config = PUBLISHED[shape].config
    tiles = tiles_of(T, torch.empty(2 * config.intermediate_size, config.hidden_size, device="meta"))
    assert (tiles.tokens, tiles.outputs) == (tokens, outputs)


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    dtype = DTYPES[0]
    x = torch.randn(70, 64, device=DEVICE).to(dtype)
    weight = torch.randn(128, 64, device=DEVICE).to(dtype)
    x[3], x[68] = float("nan"), float("inf")
    scale, act = torch.ones(70, device=DEVICE), torch.zeros(70, 64, device=DEVICE, dtype=dtype)
    gate_up_product(x, weight, scale, act, SMALL)
    is_spoiled = ~act.isfinite().all(dim=1)
    assert is_spoiled.nonzero().flatten().tolist() == [3, 68]


def test_gates_far_from_zero_are_shut_or_open() -> None:
    dtype = DTYPES[0]
    x, weight = torch.ones(1, 32, device=DEVICE, dtype=dtype), torch.zeros(64, 32, device=DEVICE, dtype=dtype)
    weight[0], weight[1], weight[32:] = -8, 8, 1
    act = torch.full((1, 32), float("nan"), device=DEVICE, dtype=dtype)
    gate_up_product(x, weight, torch.ones(1, device=DEVICE), act, SMALL)
    assert act[0, :3].tolist() == [0, 8192, 0]


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(4, 64, device=DEVICE), torch.zeros(128, 64, device=DEVICE)
    scale, act = torch.ones(4, device=DEVICE), torch.zeros(4, 64, device=DEVICE)
    with pytest.raises(ValueError, match="do not divide"):
        gate_up_product(x, weight, scale, act, GateUpTiles(outputs=48, inputs=64))
    with pytest.raises(ValueError, match="do not divide"):
        gate_up_product(x, weight, scale, act, GateUpTiles(outputs=64, inputs=128))
    with pytest.raises(ValueError, match=r"scale_T is torch\.float16"):
        gate_up_product(x, weight, scale.half(), act, SMALL)
    with pytest.raises(ValueError, match="gate_up_ED has shape"):
        gate_up_product(x, weight[:64], scale, act, SMALL)


def test_numbers_of_32_bits_and_matrices_that_tiles_do_not_divide_go_the_other_way() -> None:
    def chosen(tokens: int, outputs: int, dtype: torch.dtype) -> bool:
        return is_faster(tokens, torch.empty(2 * outputs, 128, dtype=dtype, device=DEVICE))

    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert chosen(LEAST_TOKENS, 256, torch.bfloat16) == is_hopper
    assert not chosen(LEAST_TOKENS, 256, torch.float32)
    assert not chosen(LEAST_TOKENS, 200, torch.bfloat16)
    assert not chosen(LEAST_TOKENS - 1, 256, torch.bfloat16)
