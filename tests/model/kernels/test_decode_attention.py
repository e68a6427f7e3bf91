"""Decode attention against its reference, on a GPU or in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

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
from octavo.model.kernels.attention.decode_work import DecodeWork, WorkLimits, plan_work, plan_work_reference
from tests.support.model.gluon import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sanitize(only=lambda lengths: len(lengths) == 8)
@pytest.mark.parametrize("lengths", [[70], [0], [70, 300, 10], [1, 2, 3, 5000, 0, 64, 128, 129], [700] * 33])
def test_the_work_list_covers_every_chunk_once(lengths: list[int]) -> None:
    order = torch.randperm(len(lengths)).int()
    positions = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    positions[order.long()] = torch.tensor(lengths, dtype=torch.int32)
    limits = WorkLimits.of(2)
    work = DecodeWork.allocate(len(lengths), 2, DEVICE)
    plan_work(order.to(DEVICE), positions.to(DEVICE), work)
    items = plan_work_reference(order.tolist(), lengths, limits)
    assert work.count_1.tolist() == [len(items)]
    assert len(items) <= limits.capacity(len(lengths))
    assert work.item_W8[: len(items)].tolist() == [list(item) for item in items]


def make_case(N: int, K: int, H: int, positions: list[int], dtype: torch.dtype, D: int = 96, S: int = 16) -> tuple:
    """Random inputs; every block outside the tables is NaN, as is every slot behind a sequence's end."""
    B, R, M = len(positions), len(positions) + 3, max(positions) // S + 2
    rows = torch.randperm(R)[:B].int()
    position_R = torch.full((R,), 10**6, dtype=torch.int32)
    position_R[rows.long()] = torch.tensor(positions, dtype=torch.int32)
    P = B * M + 5
    table_RM = torch.full((R, M), P - 1, dtype=torch.int32)
    pools = [torch.full((P, K, S, H), float("nan"), dtype=dtype) for _ in range(2)]
    ids = torch.randperm(P - 1)[: B * M].view(B, M).int()
    for b, (row, position) in enumerate(zip(rows.tolist(), positions, strict=True)):
        table_RM[row] = ids[b]
        for pool in pools:
            for token in range(position):
                pool[ids[b, token // S], :, token % S] = torch.randn(K, H).to(dtype)
    angle = torch.rand(max(positions) + 1, H // 2) * 6.28
    C = (N + 2 * K) * H
    inputs = [torch.randn(B, C).to(dtype), torch.randn(B, D).to(dtype), torch.randn(C).to(dtype)]
    args = DecodeArgs(
        rows_B=rows.to(DEVICE),
        position_R=position_R.to(DEVICE),
        table_RM=table_RM.to(DEVICE),
        cos_LH=angle.cos().to(DEVICE),
        sin_LH=angle.sin().to(DEVICE),
        work=DecodeWork.allocate(B, K, DEVICE),
        partial_out=partial_buffers(B, N, H, DEVICE, WorkLimits.of(K))[0],
        partial_ml=partial_buffers(B, N, H, DEVICE, WorkLimits.of(K))[1],
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        scale=H**-0.5,
        eps=1e-6,
    )
    return [t.to(DEVICE) for t in inputs], [pool.to(DEVICE) for pool in pools], args


@pytest.mark.sanitize(only=lambda dtype, positions, has_bias: dtype != torch.float32 or (300 in positions and has_bias))
@pytest.mark.parametrize(
    ("N", "K", "H", "positions", "dtype"),
    [
        (14, 2, 64, [0, 15, 16, 17, 63, 64, 65, 300], torch.float32),
        (14, 2, 64, [200, 1], torch.bfloat16),
        (12, 2, 128, [129, 40], torch.float32),
        (28, 4, 128, [33], torch.float16),
        (16, 16, 64, [31, 150], torch.float32),
        (8, 1, 64, [257, 3], torch.float32),
        (20, 1, 32, [90], torch.float32),
    ],
)
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, False), (False, True)], ids=["bias", "norm of heads"])
def test_decode_attention_equals_its_reference(
    N: int,
    K: int,
    H: int,
    positions: list[int],
    dtype: torch.dtype,
    has_bias: bool,
    has_norm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the kernel that every device has, also where the ring is the faster one."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 as integers")
    monkeypatch.setattr(decode_ring, "is_faster", lambda *_: False)
    check_against_the_reference(N, K, H, positions, dtype, has_bias=has_bias, has_norm=has_norm)


@pytest.mark.sanitize(only=lambda positions: max(positions) not in (150, 300))
@pytest.mark.parametrize(
    ("N", "K", "H", "positions"),
    [
        (14, 2, 64, [0, 15, 16, 17, 63, 64, 65, 300]),
        (28, 4, 128, [129, 40, 31, 33]),
        (16, 16, 64, [31, 150]),
        (16, 1, 128, [257, 3]),
        (14, 2, 64, [2200, 1]),
    ],
)
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, False), (False, True)], ids=["bias", "norm of heads"])
def test_the_ring_equals_the_same_reference(
    N: int, K: int, H: int, positions: list[int], has_bias: bool, has_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the ring is for devices of another kind")
        dtype, launched = torch.bfloat16, []
        monkeypatch.setattr(decode_ring, "settings_of", note_calls(decode_ring.settings_of, launched))
    else:
        dtype, launched = torch.float32, [()]
        monkeypatch.setattr(decode_ring, "is_faster", lambda *_: True)
        kernel = interpreted(decode_ring, "ring_attention_kernel")
        monkeypatch.setattr(decode_ring, "ring_attention_kernel", kernel)
    check_against_the_reference(N, K, H, positions, dtype, has_bias=has_bias, has_norm=has_norm)
    assert launched


def note_calls(function: Callable[..., Any], calls: list[tuple]) -> Callable[..., Any]:
    """The function, whose arguments are noted."""

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call


def check_against_the_reference(
    N: int, K: int, H: int, positions: list[int], dtype: torch.dtype, *, has_bias: bool, has_norm: bool
) -> None:
    """Twice, as the counters are left by the first launch."""
    torch.manual_seed(0)
    (qkv, x, bias), (k_pool, v_pool), args = make_case(N, K, H, positions, dtype)
    bias = bias if has_bias else None
    norm = torch.randn(2, H, device=DEVICE).to(dtype) if has_norm else None
    pools = k_pool.cpu().clone(), v_pool.cpu().clone()
    out = torch.full((len(positions), N, H), float("nan"), dtype=dtype, device=DEVICE)
    for _ in range(2):  # the second launch finds the counters as the first left them
        plan_work(args.rows_B, args.position_R, args.work)
        decode_attention(qkv, x, bias, k_pool, v_pool, out, args, norm)
    reference_args = DecodeArgs(
        **{
            name: value.cpu() if isinstance(value := getattr(args, name), torch.Tensor) else value
            for name in DecodeArgs.__dataclass_fields__
        }
    )
    bias, norm = (None if tensor is None else tensor.cpu() for tensor in (bias, norm))
    expected = decode_attention_reference(qkv.cpu(), x.cpu(), bias, *pools, reference_args, norm)
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().float(), expected, atol=limit, rtol=limit)
    for pool, reference in zip((k_pool, v_pool), pools, strict=True):
        torch.testing.assert_close(pool.cpu().float(), reference.float(), atol=limit, rtol=limit, equal_nan=True)
    assert int(args.work.arrived_BK.abs().sum()) == 0


def test_a_launcher_names_the_tensor_that_does_not_fit() -> None:
    (qkv, x, bias), (k_pool, v_pool), args = make_case(4, 2, 16, [3], torch.float32)
    out = torch.empty(1, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="bias_C is torch"):
        decode_attention(qkv, x, bias.half(), k_pool, v_pool, out, args)
    with pytest.raises(ValueError, match="out_BNH has shape"):
        decode_attention(qkv, x, bias, k_pool, v_pool, out[:, :2], args)
