"""Products cut so that tiles fill whole rounds of a device: their cuts, what the compiler makes of the kernel, and, on
a Hopper GPU alone, their sums against torch's."""

import re
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model.gpu.overlapping_layers import CLUSTERED_SIZES, overlapping_cuts_of
from octavo.model.kernels import cuda_source
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products import clustered
from octavo.model.kernels.products.clustered import (
    CLUSTERS,
    ClusteredCut,
    Then,
    clustered_add_product,
    clustered_gate_up,
    clustered_product,
    fits_clustered,
    gate_up_cut,
    source_of,
    split_cut,
)
from octavo.model.kernels.products.split_k import add_product_reference, gate_up_reference
from octavo.model.kernels.rows import rms_scale
from octavo.model.parallel import config_of_rank

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")
MOST_SHARED_BYTES = 232_448
MOST_SPILLED_BYTES = 32  # of a thread, around its products, and never within them
LIMIT = 2e-2
GATES = [
    *(gate_up_cut(9728, tokens) for tokens in CLUSTERED_SIZES),
    gate_up_cut(37888, 128),
    gate_up_cut(27648, 192),
    gate_up_cut(22016, 256),
]
SPLIT = [
    *(ClusteredCut(tokens=128, outputs=48, stages=3, splits=splits) for splits in CLUSTERS),
    ClusteredCut(tokens=192, outputs=64, stages=5, splits=8),
    ClusteredCut(tokens=256, outputs=88, stages=5, splits=2),
    ClusteredCut(tokens=128, outputs=64, stages=6, splits=4),
    ClusteredCut(tokens=128, outputs=104, stages=5, splits=7),
    ClusteredCut(tokens=256, outputs=64, stages=3, splits=5),
]
SHAPES = [(1, 136, 512), (65, 136, 4864), (120, 896, 512), (256, 1000, 896), (300, 200, 640)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("shape", PUBLISHED)
def test_every_shape_has_cuts_that_a_device_holds_at_once(shape: str, num_ranks: int) -> None:
    config = config_of_rank(PUBLISHED[shape].config, num_ranks)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    for size in CLUSTERED_SIZES:
        cuts = overlapping_cuts_of(config, size, has_clusters=True)
        gate_up = cuts.gate_up
        assert isinstance(gate_up, ClusteredCut)
        assert gate_up.tokens == size
        assert gate_up.splits == 1
        assert gate_up.outputs % 16 == 0
        tiles = gate_up.num_tiles(size, 2 * config.intermediate_size)
        assert tiles / (-(-tiles // 132) * 132) > 0.75, "a round is left empty"
        split = [
            (cut, outputs)
            for cut, outputs in (
                (cuts.qkv, heads * config.head_dim),
                (cuts.output, config.hidden_size),
                (cuts.down, config.hidden_size),
            )
            if isinstance(cut, ClusteredCut)
        ]
        for cut in [gate_up, *(cut for cut, _ in split)]:
            assert cut.stages >= 3
            assert cut.shared_bytes + 256 <= MOST_SHARED_BYTES
        for cut, outputs in split:
            assert cut.num_tiles(size, outputs) <= CLUSTERS[cut.splits]
            assert cut.holds_sums


@pytest.mark.parametrize(
    ("shape", "size", "gate_up", "others"),
    [
        ("0.5B", 128, 80, {"down": (128, 64, 8)}),
        ("0.5B", 192, 80, {"down": (192, 64, 8)}),
        ("0.5B", 256, 80, {"down": (128, 64, 4)}),
        ("1.5B", 128, 144, {"qkv": (128, 32, 2), "output": (128, 24, 2), "down": (128, 104, 8)}),
        ("1.5B", 256, 144, {"qkv": (128, 64, 2), "down": (128, 104, 4)}),
        ("7B", 128, 288, {"qkv": (128, 72, 2), "output": (128, 56, 2), "down": (128, 120, 4)}),
        ("7B", 256, 144, {}),
        ("14B", 192, 224, {}),
        ("32B", 128, 224, {"qkv": (128, 112, 2), "output": (128, 80, 2), "down": (128, 80, 2)}),
    ],
)
def test_products_are_cut_as_was_measured(
    shape: str, size: int, gate_up: int, others: dict[str, tuple[int, int, int]]
) -> None:
    """bench/RESULTS.md, "Tiles that fill a device"."""
    cuts = overlapping_cuts_of(PUBLISHED[shape].config, size, has_clusters=True)
    assert isinstance(cuts.gate_up, ClusteredCut)
    assert cuts.gate_up.outputs == gate_up
    found = {name: getattr(cuts, name) for name in ("qkv", "output", "down")}
    clustered_cuts = {name: cut for name, cut in found.items() if isinstance(cut, ClusteredCut)}
    assert {name: (cut.tokens, cut.outputs, cut.splits) for name, cut in clustered_cuts.items()} == others


def test_a_cut_whose_sums_have_no_room_is_refused() -> None:
    assert not ClusteredCut(tokens=256, outputs=88, stages=4, splits=2).holds_sums
    assert ClusteredCut(tokens=256, outputs=88, stages=5, splits=2).holds_sums


@pytest.mark.parametrize("num_tokens", CLUSTERED_SIZES)
def test_each_split_of_a_small_matrix_has_inputs(num_tokens: int) -> None:
    for num_inputs, num_outputs in product(range(64, 1024, 64), range(64, 1024, 64)):
        cut = split_cut(num_outputs, num_inputs, num_tokens)
        assert cut is not None
        assert cut.splits <= num_inputs // 64


def test_a_product_that_no_cluster_takes_in_a_round_has_no_cut() -> None:
    assert split_cut(1 << 20, 4864, 256) is None


def test_without_such_a_device_nothing_is_cut_this_way() -> None:
    weight = torch.empty(64, 896, dtype=torch.bfloat16)
    assert not fits_clustered(weight)
    config = PUBLISHED["0.5B"].config
    assert not isinstance(overlapping_cuts_of(config, 256).gate_up, ClusteredCut)
    with pytest.raises(ValueError, match="weight_OK has shape"):
        clustered_product(
            weight[:8], weight, torch.empty(8, 64, dtype=torch.bfloat16), cut=SPLIT[0], overlap=Overlap.NONE
        )


@pytest.mark.parametrize("is_fp16", [False, True])
@pytest.mark.parametrize(("cut", "then"), [*((cut, Then.GATE) for cut in GATES), *((cut, Then.ADD) for cut in SPLIT)])
def test_compiled_products_run_beside_each_other(cut: ClusteredCut, then: Then, is_fp16: bool) -> None:
    """The assembler says so when it has to wait for each, and how many registers it kept elsewhere."""
    pytest.importorskip("cuda.bindings", reason="there is no compiler of CUDA C++")
    image, told = cuda_source.run_compiler(source_of(cut, then, is_fp16=is_fp16), "sm_90a", "--ptxas-options=-v")
    assert image.startswith(b"\x7fELF")
    assert "serialized" not in told, told
    assert "warning" not in told, told
    assert all(int(spilled) <= MOST_SPILLED_BYTES for spilled in re.findall(r"(\d+) bytes spill stores", told)), told


def test_what_the_compiler_refuses_is_told() -> None:
    pytest.importorskip("cuda.bindings", reason="there is no compiler of CUDA C++")
    with pytest.raises(cuda_source.CudaError, match="nothing_such"):
        cuda_source.compile_source("nothing_such;", "sm_90a")


def test_a_kernel_is_compiled_once(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="there is no compiler of CUDA C++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" __global__ void nothing() {}'
    image = cuda_source.compile_source(source, "sm_90a")
    assert [bytes([number])[0] for number in range(256)] == [*range(256)], "the compiler wrote where all read"
    monkeypatch.setattr(cuda_source, "run_compiler", lambda *arguments: pytest.fail("it is on disk"))
    assert cuda_source.compile_source(source, "sm_90a") == image


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def kept(T: int, O: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for T rows, and rows behind them that nobody may write."""
    whole = torch.full((T + 8, O), 3.0, device="cuda", dtype=dtype)
    return whole[:T], whole[T:]


@pytest.mark.sanitize(only=lambda cut, T, O, overlap, dtype: overlap is Overlap.DEPENDENT and T in (65, 300))
@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("cut", SPLIT)
@pytest.mark.parametrize(("T", "O", "K"), SHAPES)
def test_products_equal_their_references(
    cut: ClusteredCut, T: int, O: int, K: int, overlap: Overlap, dtype: torch.dtype
) -> None:
    torch.manual_seed(T)
    y, weight, x = draw(T, K, dtype=dtype), draw(O, K, dtype=dtype) * K**-0.5, draw(T, O, dtype=dtype)
    (out, behind), (added, behind_added) = kept(T, O, dtype), kept(T, O, dtype)
    for _ in range(2):
        clustered_product(y, weight, out, cut=cut, overlap=overlap)
        torch.testing.assert_close(out.float(), add_product_reference(x * 0, y, weight), atol=LIMIT, rtol=LIMIT)
    results = []
    for _ in range(2):
        added.copy_(x)
        clustered_add_product(added, y, weight, cut=cut, overlap=overlap)
        torch.testing.assert_close(added.float(), add_product_reference(x, y, weight), atol=LIMIT, rtol=LIMIT)
        results.append(added.clone())
    assert torch.equal(*results)
    assert bool((behind == 3).all() & (behind_added == 3).all())


@pytest.mark.sanitize(only=lambda cut, T, I, overlap, dtype: overlap is Overlap.DEPENDENT and T in (65, 300))
@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("cut", GATES)
@pytest.mark.parametrize(("T", "I", "D"), SHAPES)
def test_gate_and_up_equal_their_reference(
    cut: ClusteredCut, T: int, I: int, D: int, overlap: Overlap, dtype: torch.dtype
) -> None:
    torch.manual_seed(T)
    x, gate_up, scale = draw(T, D, dtype=dtype), draw(2 * I, D, dtype=dtype) * D**-0.5, draw(T).float()
    act, behind = kept(T, I, dtype)
    results = []
    for _ in range(2):
        rms_scale(x, scale, 1e-6, overlap=overlap)
        clustered_gate_up(x, gate_up, scale, act, cut=cut, overlap=overlap)
        torch.testing.assert_close(act.float(), gate_up_reference(x, gate_up, 1e-6), atol=LIMIT, rtol=LIMIT)
        results.append(act.clone())
    assert torch.equal(*results)
    assert bool((behind == 3).all())


@ON_HOPPER
def test_a_device_that_has_them_passes_the_trial() -> None:
    assert fits_clustered(draw(64, 128))
    assert not fits_clustered(draw(64, 96))
    assert not fits_clustered(draw(64, 128).float())
    assert clustered._TRIAL.passes(torch.device("cuda", torch.cuda.current_device()))
