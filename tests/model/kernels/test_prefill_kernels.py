"""The kernels of a prefill chunk against their references, on a GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.attention import prefill_hopper
from octavo.model.kernels.attention.prefill import (
    QUERY_TILE,
    list_tiles,
    prefill_attention,
    prefill_attention_reference,
)
from octavo.model.kernels.attention.rope_write import rope_write, rope_write_reference
from octavo.model.kernels.products.activation import silu_mul, silu_mul_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.cpu().float(), expected.float(), atol=limit, rtol=limit, equal_nan=True)


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "I", "D"), [(1, 48, 20), (5, 1100, 96), (3, 1024, 128)])
def test_silu_mul_equals_its_reference(T: int, I: int, D: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, x = torch.randn(T, 2 * I).to(dtype), torch.randn(T, D).to(dtype)
    out = torch.full((T, I), float("nan"), dtype=dtype, device=DEVICE)
    silu_mul(gate_up.to(DEVICE), x.to(DEVICE), out, 1e-6)
    close(out, silu_mul_reference(gate_up, x, 1e-6), dtype)


def pools_and_table(R: int, M: int, K: int, S: int, H: int, dtype: torch.dtype) -> tuple:
    """NaN everywhere: only what a test writes may be read."""
    P = R * M + 3
    pools = [torch.full((P, K, S, H), float("nan"), dtype=dtype) for _ in range(2)]
    return (*pools, torch.randperm(P)[: R * M].view(R, M).int())


@pytest.mark.sanitize(only=lambda dtype, has_bias: dtype != torch.float32 and has_bias)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (3, 3, 128), (8, 1, 32)])
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, False), (False, True), (True, True), (False, False)])
def test_rope_write_equals_its_reference(
    N: int, K: int, H: int, dtype: torch.dtype, has_bias: bool, has_norm: bool
) -> None:
    torch.manual_seed(0)
    T, D, S = 9, 40, 16
    k_pool, v_pool, table = pools_and_table(4, 3, K, S, H, dtype)
    rows = torch.tensor([0, 0, 1, 1, 1, 3, 3, -1, 2], dtype=torch.int32)
    positions = torch.tensor([0, 1, 15, 16, 17, 31, 47, 0, 33], dtype=torch.int32)
    angle = torch.rand(48, H // 2) * 6.28
    qkv, x, bias = (torch.randn(*shape).to(dtype) for shape in ((T, (N + 2 * K) * H), (T, D), ((N + 2 * K) * H,)))
    device_pools = [pool.clone().to(DEVICE) for pool in (k_pool, v_pool)]
    q = torch.full((T, N, H), float("nan"), dtype=dtype, device=DEVICE)
    shared = (rows, positions, table, angle.cos(), angle.sin())
    norm = torch.randn(2, H).to(dtype)
    optional = (bias if has_bias else None, norm if has_norm else None)
    bias_here, norm_here = (None if t is None else t.to(DEVICE) for t in optional)
    rope_write(
        qkv.to(DEVICE), x.to(DEVICE), bias_here, q, *device_pools, *(t.to(DEVICE) for t in shared), 1e-6, norm_here
    )
    expected = rope_write_reference(qkv, x, optional[0], k_pool, v_pool, *shared, 1e-6, optional[1])
    close(q, expected, dtype)
    close(device_pools[0], k_pool, dtype)
    close(device_pools[1], v_pool, dtype)


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "K", "H", "chunks"),
    [
        (4, 2, 64, [(0, 17), (0, 1), (33, 16), (64, 130), (15, 15)]),
        (3, 1, 128, [(63, 2), (100, 40)]),
        (2, 2, 32, [(0, 64), (128, 65)]),
    ],
)
def test_prefill_attention_equals_its_reference(
    N: int, K: int, H: int, chunks: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel that every device has, also where a Hopper GPU has another."""
    monkeypatch.setattr(prefill_hopper, "fits", lambda *tensors: False)
    torch.manual_seed(0)
    S, M = 16, max(start + count for start, count in chunks) // 16 + 1
    k_pool, v_pool, table = pools_and_table(len(chunks), M, K, S, H, dtype)
    for row, (start, count) in enumerate(chunks):
        for token in range(start + count):
            for pool in (k_pool, v_pool):
                pool[table[row, token // S], :, token % S] = torch.randn(K, H).to(dtype)
    firsts = np.cumsum([0, *(count for _, count in chunks)])
    tiles = list_tiles((row, int(firsts[row]), start, count) for row, (start, count) in enumerate(chunks))
    assert sorted(tiles[:, 1].tolist()) == sorted(
        int(firsts[row]) + done for row, (_, count) in enumerate(chunks) for done in range(0, count, QUERY_TILE)
    )
    q = torch.randn(int(firsts[-1]) + 2, N, H).to(dtype)
    out = torch.full_like(q, float("nan")).to(DEVICE)
    tiles_t = torch.from_numpy(tiles)
    inputs = [t.to(DEVICE) for t in (q, k_pool, v_pool)]
    prefill_attention(*inputs, out, table.to(DEVICE), tiles_t.to(DEVICE), H**-0.5)
    close(out, prefill_attention_reference(q, k_pool, v_pool, table, tiles_t, H**-0.5), dtype)
