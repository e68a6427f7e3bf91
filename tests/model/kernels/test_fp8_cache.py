"""Kernels that write and read keys and values as e4m3, against the references they have with plain pools."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.attention import decode_ring
from octavo.model.kernels.attention.decode import (
    DecodeArgs,
    decode_attention,
    decode_attention_reference,
    partial_buffers,
)
from octavo.model.kernels.attention.decode_work import DecodeWork, WorkLimits, plan_work
from octavo.model.kernels.attention.prefill import list_tiles, prefill_attention, prefill_attention_reference
from octavo.model.kernels.attention.rope_write import rope_write, rope_write_reference
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.small_batch.attention import (
    AttentionCut,
    combine,
    combine_reference,
    small_batch_attention,
    small_batch_attention_reference,
    split_buffers,
)
from octavo.model.kernels.small_batch.launch import Cut
from octavo.model.kernels.small_batch.qkv import small_batch_qkv, small_batch_qkv_reference
from octavo.model.quantization.rounding import FP8, to_fp8
from tests.support.model.gluon import interpreted
from tests.support.model.interpreter import convert_to_e4m3_as_devices_do

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
OVERLAP = Overlap.on(torch.empty(0, device=DEVICE))
S, EPS = 16, 1e-6


@pytest.fixture(autouse=True)
def _round_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        convert_to_e4m3_as_devices_do(monkeypatch)


class Cache:
    """Rows at positions, with tables over pools that are NaN but for what is cached: e4m3, and the same as float32."""

    def __init__(self, positions: list[int], K: int, H: int, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        B, R, M = len(positions), len(positions) + 2, max(positions) // S + 1
        self.rows_B = torch.randperm(R)[:B].int()
        self.position_R = torch.full((R,), 10**6, dtype=torch.int32)
        self.position_R[self.rows_B.long()] = torch.tensor(positions, dtype=torch.int32)
        self.table_RM = torch.randperm(R * M + 3)[: R * M].view(R, M).int()
        self.plain = [torch.full((R * M + 3, K, S, H), float("nan")) for _ in range(2)]
        for row, position in zip(self.rows_B.tolist(), positions, strict=True):
            for token in range(position):
                for pool in self.plain:
                    pool[self.table_RM[row, token // S], :, token % S] = to_fp8(torch.randn(K, H)).float()
        self.small = [to_fp8(pool).to(DEVICE) for pool in self.plain]
        angle = torch.rand(max(positions) + 1, H // 2) * 6.28
        self.cos_LH, self.sin_LH = angle.cos(), angle.sin()

    def check_written(self) -> None:
        """The reference wrote float32: what the kernel wrote is that, rounded, but for the rare tie."""
        for small, plain in zip(self.small, self.plain, strict=True):
            found, expected = small.cpu().float(), to_fp8(plain).float()
            assert torch.equal(found.isnan(), expected.isnan())
            far = (found - expected).abs().nan_to_num() > expected.abs().nan_to_num() / 7 + 2**-9
            assert not bool(far.any())
            assert float((found.nan_to_num() != expected.nan_to_num()).float().mean()) < 0.01


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu().float(), expected.float(), atol=6e-2, rtol=4e-2, equal_nan=True)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.sanitize
@pytest.mark.parametrize(("N", "K", "H", "positions"), [(14, 2, 64, [0, 63, 200]), (4, 4, 128, [17, 130])])
def test_decode_attention(N: int, K: int, H: int, positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ring, "is_faster", lambda *_: False)
    check_decode_attention(N, K, H, positions)


@pytest.mark.sanitize(only=lambda query_scale: query_scale == 1.0)
@pytest.mark.parametrize("query_scale", [1.0, 1e5], ids=["", "queries beyond float16"])
@pytest.mark.parametrize(("N", "K", "H", "positions"), [(28, 4, 128, [130, 64, 257]), (4, 4, 128, [0, 63, 65])])
def test_the_ring(
    N: int, K: int, H: int, positions: list[int], query_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the ring is for devices of another kind")
        taken = []
        is_faster = decode_ring.is_faster
        monkeypatch.setattr(decode_ring, "is_faster", lambda *a: taken.append(is_faster(*a)) or taken[-1])
    else:
        taken = [True]
        monkeypatch.setattr(decode_ring, "is_faster", lambda *_: True)
        kernel = interpreted(decode_ring, "ring_attention_kernel")
        monkeypatch.setattr(decode_ring, "ring_attention_kernel", kernel)
    check_decode_attention(N, K, H, positions, query_scale)
    assert taken == [True]


def check_decode_attention(N: int, K: int, H: int, positions: list[int], query_scale: float = 1.0) -> None:
    """Queries as large as query_scale, whose scores are brought back to what they were by the attention's scale."""
    cache, B, D = Cache(positions, K, H), len(positions), 96
    qkv, x, bias = (torch.randn(*shape).to(DTYPE) for shape in ((B, (N + 2 * K) * H), (B, D), ((N + 2 * K) * H,)))
    dtype = DTYPE if query_scale == 1.0 or DEVICE == "cuda" else torch.float32
    qkv, x, bias = (tensor.to(dtype) for tensor in (qkv, x, bias))
    qkv[:, : N * H] *= query_scale
    bias[: N * H] *= query_scale
    limits = WorkLimits.of(K)

    def args(device: str) -> DecodeArgs:
        work = DecodeWork.allocate(B, K, device, limits)
        partial_out, partial_ml = partial_buffers(B, N, H, device, limits)
        rows, position, table, cos, sin = (
            t.to(device) for t in (cache.rows_B, cache.position_R, cache.table_RM, cache.cos_LH, cache.sin_LH)
        )
        return DecodeArgs(
            rows_B=rows, position_R=position, table_RM=table, cos_LH=cos, sin_LH=sin, work=work,
            partial_out=partial_out, partial_ml=partial_ml, num_heads=N, num_kv_heads=K, head_dim=H,
            scale=H**-0.5 / query_scale, eps=EPS,
        )  # fmt: skip

    here, reference = args(DEVICE), args("cpu")
    rounded = [pool.cpu().clone() for pool in cache.small]
    plan_work(here.rows_B, here.position_R, here.work)
    out = torch.full((B, N, H), float("nan"), dtype=dtype, device=DEVICE)
    decode_attention(*on_device(qkv, x, bias), *cache.small, out, here)
    decode_attention_reference(qkv, x, bias, *cache.plain, reference)
    cache.check_written()
    expected = decode_attention_reference(qkv, x, bias, *rounded, reference)
    close(out, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (4, 4, 128)])
def test_kernels_for_a_small_batch(N: int, K: int, H: int) -> None:
    positions, D = [0, 100, 64], 96
    cache, B, C = Cache(positions, K, H), len(positions), (N + 2 * K) * H
    x, qkv, bias = torch.randn(B, D).to(DTYPE), (torch.randn(C, D) * D**-0.5).to(DTYPE), torch.randn(C).to(DTYPE)
    shared = (cache.rows_B, cache.position_R, cache.table_RM)
    q = torch.full((B, N, H), float("nan"), dtype=DTYPE, device=DEVICE)
    small_batch_qkv(
        *on_device(x, qkv, bias), q, *cache.small, *on_device(*shared, cache.cos_LH, cache.sin_LH), EPS,
        cut=Cut(rows=4, warps=4), overlap=OVERLAP,
    )  # fmt: skip
    expected_q = small_batch_qkv_reference(x, qkv, bias, *cache.plain, *shared, cache.cos_LH, cache.sin_LH, EPS)
    close(q, expected_q)
    cache.check_written()
    part, log = (torch.full_like(t, float("nan")) for t in split_buffers(B, N, H, DEVICE))
    cut = AttentionCut(grain=32, tile=32)
    small_batch_attention(q, *cache.small, part, log, *on_device(*shared), H**-0.5, cut=cut, overlap=OVERLAP)
    out = torch.full((B, N, H), float("nan"), dtype=DTYPE, device=DEVICE)
    combine(part, log, out, *on_device(cache.rows_B, cache.position_R), grain=cut.grain, overlap=OVERLAP)
    plain = [pool.cpu().float() for pool in cache.small]
    parts = small_batch_attention_reference(q.cpu(), *plain, *shared, H**-0.5, cut.grain)
    close(out, combine_reference(*parts, cache.rows_B, cache.position_R, cut.grain))


@pytest.mark.sanitize
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (4, 4, 128)])
def test_prefill_kernels(N: int, K: int, H: int) -> None:
    """A chunk of 40 tokens behind 33 cached ones, and a first chunk of 20."""
    cache, D, C = Cache([33, 0], K, H), 96, (N + 2 * K) * H
    row_a, row_b = cache.rows_B.tolist()
    width = 5
    table = torch.full((len(cache.table_RM), width), -1, dtype=torch.int32)
    table[:, : cache.table_RM.shape[1]] = cache.table_RM
    free = sorted(set(range(len(cache.plain[0]))) - set(cache.table_RM.flatten().tolist()))
    extra = [torch.full((12, K, S, H), float("nan")) for _ in range(2)]
    free += list(range(len(cache.plain[0]), len(cache.plain[0]) + 12))
    cache.plain = [torch.cat([pool, more]) for pool, more in zip(cache.plain, extra, strict=True)]
    cache.small = [to_fp8(pool).to(DEVICE) for pool in cache.plain]
    for row in (row_a, row_b):
        for column in range(cache.table_RM.shape[1], width):
            table[row, column] = free.pop()
    T, position = 60, torch.cat([torch.arange(33, 73), torch.arange(20)]).int()
    rows = torch.tensor([row_a] * 40 + [row_b] * 20, dtype=torch.int32)
    angle = torch.rand(80, H // 2) * 6.28
    qkv, x, bias = torch.randn(T, C).to(DTYPE), torch.randn(T, D).to(DTYPE), torch.randn(C).to(DTYPE)
    shared = (rows, position, table, angle.cos(), angle.sin())
    q = torch.full((T, N, H), float("nan"), dtype=DTYPE, device=DEVICE)
    rope_write(*on_device(qkv, x, bias), q, *cache.small, *on_device(*shared), EPS)
    close(q, rope_write_reference(qkv, x, bias, *cache.plain, *shared, EPS))
    cache.check_written()
    tiles = torch.from_numpy(list_tiles([(row_a, 0, 33, 40), (row_b, 40, 0, 20)]))
    out = torch.full((T, N, H), float("nan"), dtype=DTYPE, device=DEVICE)
    prefill_attention(q, *cache.small, out, *on_device(table, tiles), H**-0.5)
    plain = [pool.cpu().float() for pool in cache.small]
    close(out, prefill_attention_reference(q.cpu(), *plain, table, tiles, H**-0.5))


def test_pools_of_different_dtypes_are_refused() -> None:
    cache = Cache([3], 2, 64)
    q, tiles = torch.randn(1, 4, 64, device=DEVICE, dtype=DTYPE), torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    pools = cache.small[0], cache.small[1].to(DTYPE)
    with pytest.raises(ValueError, match="v_pool_PKSH is torch"):
        prefill_attention(q, *pools, torch.empty_like(q), cache.table_RM.to(DEVICE), tiles, 1.0)
    assert pools[0].dtype == FP8
