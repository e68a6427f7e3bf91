"""Products that overlap with their neighbours against their references, and against the same products split over their
inputs (model/kernels/products/split_k.py): Gluon has no interpreter, so on a Hopper GPU alone. What is compiled for one
is looked at anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

from octavo.model.gpu.overlapping_layers import TILES_OF_MANY
from octavo.model.kernels.gluon import KNOWN_VERSIONS
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products import gate_up
from octavo.model.kernels.products.invariant import Splits, invariant_add_product, invariant_product, part_elements
from octavo.model.kernels.products.overlapping import (
    ADD,
    GATE,
    OverlappingCut,
    fits,
    overlapping_add_product,
    overlapping_gate_up,
    overlapping_product,
    overlapping_scale,
)
from octavo.model.kernels.products.split_k import (
    SplitKCut,
    SplitKRoom,
    add_product_reference,
    gate_up_reference,
    split_k_product,
)
from tests.support.forks import Forks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")
DTYPE, LIMIT = torch.bfloat16, 2e-2
CUTS = [
    OverlappingCut(tokens=8, blocks=1, stages=2),
    OverlappingCut(tokens=16, stages=7),
    OverlappingCut(tokens=32, blocks=4, stages=2, splits=3),
    OverlappingCut(tokens=64, splits=7),
    OverlappingCut(outputs=128, tokens=128, blocks=1, splits=2, warps=8),
    OverlappingCut(tokens=128, blocks=1, stages=8, splits=5),
    OverlappingCut(outputs=128, tokens=128, blocks=1, stages=3, splits=19, warps=8),
]
SHAPES = [(1, 96, 192), (8, 130, 448), (17, 64, 64), (33, 160, 896), (130, 160, 4864), (130, 1152, 4864)]


@pytest.fixture(scope="module")
def program() -> Iterator[Forks]:
    """Which compiles one kernel after the other."""
    with Forks("tests.support.model.assembled", {"TRITON_INTERPRET": "0"}) as forks:
        yield forks


@pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN_VERSIONS),
    reason=f"Gluon of triton {triton.__version__} is another language",
)
@pytest.mark.parametrize(
    ("then", "cut"),
    [
        (ADD, OverlappingCut(tokens=64, stages=3)),
        (ADD, OverlappingCut(tokens=128, blocks=1, splits=5)),
        (ADD, OverlappingCut(outputs=128, tokens=128, blocks=1, stages=3, splits=5, warps=8)),
        (GATE, OverlappingCut(outputs=128, tokens=8)),
        (GATE, OverlappingCut(outputs=128, tokens=256, blocks=1, warps=8)),
    ],
)
def test_compiled_products_run_beside_each_other(
    then: int, cut: OverlappingCut, program: Forks, tmp_path: Path
) -> None:
    """The assembler says so when it has to wait for each, and how many registers it kept elsewhere."""
    numbers = (then, cut.outputs, cut.tokens, cut.blocks, cut.stages, cut.splits, cut.warps)
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    told = "\n".join(program.lines("tell_product", str(tmp_path), *numbers, environment=cache))
    assert "serialized" not in told, told
    assert " 0 bytes spill stores" in told
    assert "wgmma.mma_async" in (tmp_path / "kernel.ptx").read_text()
    *_, behind = (tmp_path / "kernel.ptx").read_text().split("wgmma.wait_group")
    assert "bar.sync" in behind.split("st.shared")[0], "a warp writes where another may still be multiplying"


def room_for(cut: OverlappingCut | SplitKCut, num_tokens: int, num_outputs: int) -> SplitKRoom:
    room = SplitKRoom.allocate(
        num_elements=cut.part_elements(num_tokens, num_outputs), num_tiles=cut.num_tiles(num_tokens, num_outputs),
        device="cuda",
    )  # fmt: skip
    room.parts.fill_(float("nan"))
    return room


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


@pytest.mark.sanitize(
    only=lambda cut, T, O, overlap: overlap is Overlap.DEPENDENT and O == 160 and (T == 33 or cut.tokens == 128)
)
@ON_HOPPER
@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("T", "O", "K"), SHAPES)
def test_products_equal_their_references(cut: OverlappingCut, T: int, O: int, K: int, overlap: Overlap) -> None:
    torch.manual_seed(T)
    y, weight, x = draw(T, K), draw(O, K) * K**-0.5, draw(T, O)
    room, out, twin = room_for(cut, T, O), torch.full_like(x, float("nan")), torch.empty_like(x)
    split_k_product(y, weight, twin, room_for(SplitKCut(), T, O), SplitKCut())
    for _ in range(2):  # the second launch finds the counters as the first left them
        overlapping_product(y, weight, out, room, cut=cut, overlap=overlap)
        torch.testing.assert_close(out.float(), add_product_reference(x * 0, y, weight), atol=LIMIT, rtol=LIMIT)
        torch.testing.assert_close(out, twin, atol=LIMIT, rtol=LIMIT)
    expected = add_product_reference(x, y, weight)
    overlapping_add_product(x, y, weight, room, cut=cut, overlap=overlap)
    torch.testing.assert_close(x.float(), expected, atol=LIMIT, rtol=LIMIT)
    assert not room.arrived.any()


@pytest.mark.sanitize(only=lambda T: T == 33)
@ON_HOPPER
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("T", "D", "I"), [(1, 128, 40), (8, 192, 96), (33, 448, 130), (130, 896, 4864)])
def test_gate_and_up_equal_their_reference(cut: OverlappingCut, T: int, D: int, I: int) -> None:
    torch.manual_seed(T)
    x, weight = draw(T, D) * 3, draw(2 * I, D) * D**-0.5
    act = torch.full((T, I), float("nan"), device="cuda", dtype=DTYPE)
    overlapping_gate_up(x, weight, act, 1e-6, cut=cut, overlap=Overlap.DEPENDENT)
    torch.testing.assert_close(act.float(), gate_up_reference(x, weight, 1e-6), atol=LIMIT, rtol=LIMIT)


@ON_HOPPER
def test_a_token_has_the_same_bits_in_any_tile_and_batch() -> None:
    torch.manual_seed(5)
    y, weight = draw(200, 896), draw(320, 896)
    found = []
    for num_tokens, cut in ((200, CUTS[0]), (200, OverlappingCut(tokens=64)), (7, CUTS[1]), (33, CUTS[0])):
        out = torch.empty(num_tokens, 320, device="cuda", dtype=DTYPE)
        overlapping_product(
            y[:num_tokens], weight, out, room_for(cut, num_tokens, 320), cut=cut, overlap=Overlap.DEPENDENT
        )
        found.append(out[:7])
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.sanitize(only=lambda T: T == 17)
@ON_HOPPER
@pytest.mark.parametrize("tiles", TILES_OF_MANY, ids=lambda tiles: f"{tiles.outputs}x{tiles.tokens}")
@pytest.mark.parametrize(("T", "O", "K"), [(300, 896, 4864), (1030, 1152, 896), (17, 200, 2048)])
def test_many_tokens_have_the_bits_of_few(tiles: OverlappingCut, T: int, O: int, K: int) -> None:
    """Splits that a program goes through by turns are those that several programs would take."""
    torch.manual_seed(8)
    y, weight, x = draw(T, K), draw(O, K) * K**-0.5, draw(T, O)
    splits = Splits.of(O, K)
    expected, out = x.clone(), torch.full_like(x, float("nan"))
    part = torch.empty(part_elements(T, O, K) or 1, device="cuda")
    invariant_add_product(y, weight, expected, part)
    overlapping_add_product(x, y, weight, None, cut=replace(tiles, turns=splits.count), overlap=Overlap.DEPENDENT)
    assert torch.equal(x, expected)
    invariant_product(y, weight, expected, part)
    overlapping_product(y, weight, out, None, cut=replace(tiles, turns=splits.count), overlap=Overlap.NONE)
    assert torch.equal(out, expected)


@ON_HOPPER
@pytest.mark.parametrize("T", [257, 1024, 2500])
def test_gate_and_up_of_the_fast_mode_have_the_same_bits(T: int) -> None:
    torch.manual_seed(10)
    x, weight = draw(T, 896) * 3, draw(2 * 4864, 896) * 896**-0.5
    few, many = (torch.full((T, 4864), float("nan"), device="cuda", dtype=DTYPE) for _ in range(2))
    overlapping_gate_up(x, weight, few, 1e-6, cut=CUTS[0], overlap=Overlap.DEPENDENT)
    scale_T = torch.full((T,), float("nan"), device="cuda")
    overlapping_scale(x, scale_T, 1e-6)
    for tiles in (gate_up.TILES, *(tiles for _, tiles in gate_up.FEW_TILES)):
        gate_up.gate_up_product(x, weight, scale_T, many.fill_(float("nan")), tiles)
        assert torch.equal(many, few)


@ON_HOPPER
@pytest.mark.parametrize("T", [1, 7, 100])
def test_squares_summed_first_have_the_bits_of_those_summed_beside_the_products(T: int) -> None:
    torch.manual_seed(12)
    x, weight = draw(T, 896) * 3, draw(2 * 4864, 896) * 896**-0.5
    beside, first = (torch.full((T, 4864), float("nan"), device="cuda", dtype=DTYPE) for _ in range(2))
    overlapping_gate_up(x, weight, beside, 1e-6, cut=OverlappingCut(tokens=64), overlap=Overlap.DEPENDENT)
    for cut in (OverlappingCut(tokens=8, stages=6), OverlappingCut(outputs=128, tokens=8, stages=5), OverlappingCut()):
        overlapping_gate_up(x, weight, first.fill_(float("nan")), 1e-6, cut=cut, overlap=Overlap.DEPENDENT)
        assert torch.equal(first, beside)


@pytest.mark.sanitize(only=lambda T: T == 17)
@ON_HOPPER
@pytest.mark.parametrize("tiles", TILES_OF_MANY, ids=lambda tiles: f"{tiles.outputs}x{tiles.tokens}")
@pytest.mark.parametrize(("T", "D", "I"), [(300, 896, 4864), (17, 192, 96)])
def test_gate_and_up_have_the_same_bits_with_a_scale_from_before(tiles: OverlappingCut, T: int, D: int, I: int) -> None:
    torch.manual_seed(9)
    x, weight = draw(T, D) * 3, draw(2 * I, D) * D**-0.5
    few, many = (torch.full((T, I), float("nan"), device="cuda", dtype=DTYPE) for _ in range(2))
    overlapping_gate_up(x, weight, few, 1e-6, cut=CUTS[0], overlap=Overlap.DEPENDENT)
    scale_T = torch.full((T,), float("nan"), device="cuda")
    overlapping_gate_up(x, weight, many, 1e-6, cut=tiles, overlap=Overlap.DEPENDENT, scale_T=scale_T)
    torch.testing.assert_close(many.float(), gate_up_reference(x, weight, 1e-6), atol=LIMIT, rtol=LIMIT)
    assert torch.equal(many, few)


@ON_HOPPER
def test_a_product_behind_another_reads_what_that_one_wrote() -> None:
    torch.manual_seed(6)
    weights, cut = [draw(896, 896) * 896**-0.5 for _ in range(40)], OverlappingCut(splits=7, stages=1)
    x, room = draw(16, 896), room_for(cut, 16, 896)
    y, expected = x.clone(), x.float()
    spare = torch.empty_like(y)
    for weight in weights:
        overlapping_product(y, weight, spare, room, cut=cut, overlap=Overlap.DEPENDENT)
        y, spare = spare, y
        expected = expected.to(DTYPE).float() @ weight.float().T
    torch.testing.assert_close(y.float(), expected, atol=0.2, rtol=0.1)


@ON_HOPPER
def test_a_room_that_is_too_small_is_refused() -> None:
    cut, small = OverlappingCut(splits=2), SplitKRoom.allocate(num_elements=8, num_tiles=1, device="cuda")
    with pytest.raises(ValueError, match="room is too small"):
        overlapping_product(draw(4, 128), draw(64, 128), draw(4, 64), small, cut=cut, overlap=Overlap.NONE)


def test_one_stage_is_for_a_single_round() -> None:
    assert OverlappingCut(blocks=2, stages=1, splits=7).ends(896)
    assert not OverlappingCut(blocks=2, stages=1, splits=2).ends(512)
    assert OverlappingCut(blocks=1, stages=2, splits=2).ends(512)


def test_other_devices_and_numbers_do_not_fit() -> None:
    weight, room = torch.zeros(64, 128), SplitKRoom.allocate(num_elements=1, num_tiles=1, device="cpu")
    assert not fits(weight)
    assert not fits(weight.bfloat16())
    with pytest.raises(ValueError, match="not for these products"):
        overlapping_product(
            torch.zeros(4, 128), weight, torch.zeros(4, 64), room, cut=OverlappingCut(), overlap=Overlap.NONE
        )
