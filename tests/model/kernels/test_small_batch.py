"""The kernels for a few rows against their references, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.rows import rms_norm_reference
from octavo.model.kernels.small_batch.attention import (
    MAX_SPLITS,
    AttentionCut,
    combine,
    combine_reference,
    cut_context,
    small_batch_attention,
    small_batch_attention_reference,
    split_buffers,
)
from octavo.model.kernels.small_batch.launch import Cut
from octavo.model.kernels.small_batch.mlp import (
    small_batch_add_product,
    small_batch_gate_up,
    small_batch_gate_up_reference,
    small_batch_head,
    small_batch_product,
)
from octavo.model.kernels.small_batch.qkv import small_batch_qkv, small_batch_qkv_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
OVERLAP = Overlap.on(torch.empty(0, device=DEVICE))
S = 16


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 3e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.cpu().float(), expected.float(), atol=limit, rtol=limit, equal_nan=True)


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns) * columns**-0.5).to(dtype)


def place(positions: list[int], K: int, H: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """rows_B, position_R, table_RM and pools that are NaN but for the cached tokens."""
    B, R, M = len(positions), len(positions) + 2, max(positions) // S + 1
    rows = torch.randperm(R)[:B].int()
    position_R = torch.full((R,), 10**6, dtype=torch.int32)
    position_R[rows.long()] = torch.tensor(positions, dtype=torch.int32)
    table = torch.randperm(R * M + 3)[: R * M].view(R, M).int()
    pools = [torch.full((R * M + 3, K, S, H), float("nan"), dtype=dtype) for _ in range(2)]
    for row, position in zip(rows.tolist(), positions, strict=True):
        for token in range(position):
            for pool in pools:
                pool[table[row, token // S], :, token % S] = torch.randn(K, H).to(dtype)
    return rows, position_R, table, *pools


def test_blocks_waste_little() -> None:
    cut = Cut(rows=1, warps=1)
    assert [cut.block_of(n) for n in (896, 1536, 3584, 4864, 5120, 18944, 96, 40)] == [
        1024, 512, 1024, 1024, 1024, 1024, 128, 64,
    ]  # fmt: skip
    assert Cut(rows=1, warps=1, block=512).block_of(896) == 512


@pytest.mark.parametrize("numbers", [{"rows": 3}, {"warps": 6}, {"warps": 64}, {"block": 384}])
def test_a_cut_that_no_device_could_run_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="powers of two"):
        Cut(**{"rows": 4, "warps": 4} | numbers)  # type: ignore[arg-type]


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "K", "H", "D", "positions"),
    [(14, 2, 64, 896, [0]), (3, 1, 128, 200, [15, 16, 40]), (4, 4, 32, 96, [31, 0, 7, 18])],
)
def test_qkv_equals_its_reference(N: int, K: int, H: int, D: int, positions: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    C, B = (N + 2 * K) * H, len(positions)
    rows, position_R, table, k_pool, v_pool = place(positions, K, H, dtype)
    angle = torch.rand(64, H // 2) * 6.28
    x, qkv, bias = torch.randn(B, D).to(dtype), matrix(C, D, dtype), torch.randn(C).to(dtype)
    shared = (rows, position_R, table, angle.cos(), angle.sin())
    pools = [pool.clone().to(DEVICE) for pool in (k_pool, v_pool)]
    q = torch.full((B, N, H), float("nan"), dtype=dtype, device=DEVICE)
    small_batch_qkv(
        *(t.to(DEVICE) for t in (x, qkv, bias)), q, *pools, *(t.to(DEVICE) for t in shared), 1e-6,
        cut=Cut(rows=4, warps=4), overlap=OVERLAP,
    )  # fmt: skip
    close(q, small_batch_qkv_reference(x, qkv, bias, k_pool, v_pool, *shared, 1e-6), dtype)
    close(pools[0], k_pool, dtype)
    close(pools[1], v_pool, dtype)


@pytest.mark.sanitize(only=lambda O, dtype: O != 1152 and dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("O", "Q", "B", "cut"),
    [
        (1152, 896, 1, Cut(rows=8, warps=4)),
        (72, 40, 3, Cut(rows=8, warps=4)),
        (640, 200, 8, Cut(rows=8, warps=4)),
        (144, 896, 1, Cut(rows=16, warps=16, block=256)),
        (6, 4864, 2, Cut(rows=1, warps=1, block=512)),
        (14, 1792, 1, Cut(rows=2, warps=1, block=256)),
    ],
)
def test_a_product_alone_equals_torch(O: int, Q: int, B: int, cut: Cut, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, weight = torch.randn(B, Q).to(dtype), matrix(O, Q, dtype)
    out = torch.full((B, O), float("nan"), dtype=dtype, device=DEVICE)
    small_batch_product(y.to(DEVICE), weight.to(DEVICE), out, cut=cut, overlap=OVERLAP)
    close(out, y.float() @ weight.float().T, dtype)
    with pytest.raises(ValueError, match="matrix_OQ"):
        small_batch_product(y.to(DEVICE), weight[:, :-1].to(DEVICE), out, cut=cut, overlap=OVERLAP)


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "K", "H", "positions", "cut"),
    [
        (14, 2, 64, [0, 63, 64, 65], AttentionCut()),
        (12, 2, 128, [129, 1], AttentionCut(grain=128, tile=128, warps=8, stages=1)),
        (3, 1, 64, [64 * MAX_SPLITS + 70], AttentionCut()),
        (3, 1, 16, [32 * MAX_SPLITS + 70], AttentionCut(grain=32, tile=32, stages=1)),
        (2, 2, 64, [700, 255, 256, 257, 64 * MAX_SPLITS + 70], AttentionCut(tile=256, warps=8, stages=1)),
    ],
)
def test_attention_equals_its_reference_part_by_part_and_added_up(
    N: int, K: int, H: int, positions: list[int], cut: AttentionCut, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    B = len(positions)
    rows, position_R, table, k_pool, v_pool = place([p + 1 for p in positions], K, H, dtype)
    position_R[rows.long()] -= 1
    q = torch.randn(B, N, H).to(dtype)
    part, log = (torch.full_like(t, float("nan")) for t in split_buffers(B + 1, N, H, DEVICE))
    pools = k_pool.to(DEVICE), v_pool.to(DEVICE)
    small_batch_attention(
        q.to(DEVICE),
        *pools,
        part,
        log,
        rows.to(DEVICE),
        position_R.to(DEVICE),
        table.to(DEVICE),
        H**-0.5,
        cut=cut,
        overlap=OVERLAP,
    )
    expected_part, expected_log = small_batch_attention_reference(
        q, k_pool, v_pool, rows, position_R, table, H**-0.5, cut.grain
    )
    close(part[:B], expected_part, dtype)
    close(log[:B], expected_log, dtype)
    summed = combine_reference(expected_part, expected_log, rows, position_R, cut.grain)
    out = torch.full((B, N, H), float("nan"), dtype=dtype, device=DEVICE)
    combine(part, log, out, rows.to(DEVICE), position_R.to(DEVICE), grain=cut.grain, overlap=OVERLAP)
    close(out, summed, dtype)


def test_contexts_are_cut_into_equal_parts() -> None:
    for grain in (32, 256):
        most = grain * MAX_SPLITS
        assert [cut_context(n, grain) for n in (0, 1, grain, grain + 1, most, most + 1)] == [
            (grain, 1), (grain, 1), (grain, 1), (grain, 2), (grain, MAX_SPLITS), (2 * grain, MAX_SPLITS // 2 + 1),
        ]  # fmt: skip


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "D", "I"), [(1, 896, 48), (3, 200, 40), (2, 1536, 12), (8, 64, 7)])
def test_products_equal_their_references(B: int, D: int, I: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cut = Cut(rows=4, warps=4)
    x, gate_up, down = torch.randn(B, D).to(dtype), matrix(2 * I, D, dtype), matrix(D, I, dtype)
    act = torch.full((B, I), float("nan"), dtype=dtype, device=DEVICE)
    small_batch_gate_up(x.to(DEVICE), gate_up.to(DEVICE), act, 1e-6, cut=cut, overlap=OVERLAP)
    expected = small_batch_gate_up_reference(x, gate_up, 1e-6)
    close(act, expected, dtype)
    added = x.clone().to(DEVICE)
    small_batch_add_product(added, act, down.to(DEVICE), cut=cut, overlap=OVERLAP)
    close(added, x.float() + act.cpu().float() @ down.float().T, dtype)
    index = torch.arange(B).flip(0).int()
    norm, head = torch.randn(D).to(dtype), matrix(I * 2, D, dtype)
    logits = torch.full((B, I * 2), float("nan"), dtype=dtype, device=DEVICE)
    small_batch_head(
        x.to(DEVICE), index.to(DEVICE), norm.to(DEVICE), head.to(DEVICE), logits, 1e-6, cut=cut, overlap=OVERLAP
    )
    close(logits, rms_norm_reference(x, norm, 1e-6)[index.long()] @ head.float().T, dtype)


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, down, y = torch.randn(4, 96), matrix(96, 40, torch.float32), torch.randn(4, 40)
    together, alone = x.clone().to(DEVICE), x[2:3].clone().to(DEVICE)
    for target, source in ((together, y), (alone, y[2:3])):
        small_batch_add_product(
            target, source.contiguous().to(DEVICE), down.to(DEVICE), cut=Cut(rows=2, warps=4), overlap=OVERLAP
        )
    assert torch.equal(together[2], alone[0])


def test_a_launcher_names_the_tensor_that_does_not_fit() -> None:
    x, down = torch.randn(1, 32, device=DEVICE), torch.randn(32, 8, device=DEVICE)
    with pytest.raises(ValueError, match="matrix_OQ has shape"):
        small_batch_add_product(x, torch.randn(1, 9, device=DEVICE), down, cut=Cut(rows=2, warps=4), overlap=OVERLAP)
    with pytest.raises(ValueError, match="gate_up_ED is torch"):
        small_batch_gate_up(
            x, down.half(), torch.empty(1, 8, device=DEVICE), 1e-6, cut=Cut(rows=2, warps=4), overlap=OVERLAP
        )
