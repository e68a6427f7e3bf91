"""Queries, keys and values of many tokens from the raw QKV product: scale, bias, norm of each query and key head, RoPE,
and the write to the cache.

The prefill counterpart of what decode attention does for its one token. The scale is the RMSNorm's, one per token; its
weight is folded into the matrix. Bias and norm of heads are only compiled in for families that have them
(model/families).

Legend: T tokens · R rows of the state · M table width · N query heads · K kv heads · H head dim · C = (N + 2K)·H, the
columns of the product · D model dim · P blocks · S block size · L positions of the RoPE table.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_pools, check_tensor, next_power_of_2
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous


def rope_write_reference(
    qkv_TC: torch.Tensor,
    x_TD: torch.Tensor,
    bias_C: torch.Tensor | None,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    row_T: torch.Tensor,
    position_T: torch.Tensor,
    table_RM: torch.Tensor,
    cos_LH: torch.Tensor,
    sin_LH: torch.Tensor,
    eps: float,
    qk_norm_2H: torch.Tensor | None = None,
) -> torch.Tensor:
    """The obvious reference in float32, token by token. Writes the pools; returns q_TNH."""
    K, S, H = k_pool_PKSH.shape[1:]
    heads = []
    for t, (row, position) in enumerate(zip(row_T.tolist(), position_T.tolist(), strict=True)):
        scale = torch.rsqrt(x_TD[t].float().square().mean() + eps)
        heads_AH = finished_heads(qkv_TC[t].float() * scale, bias_C, qk_norm_2H, K, H, eps)
        first, second = heads_AH[:-K].chunk(2, dim=-1)
        turned = heads_AH[:-K] * cos_LH[position].repeat(2) + torch.cat([-second, first], -1) * sin_LH[position].repeat(
            2
        )
        heads.append(turned[:-K])
        if row >= 0:
            block, offset = int(table_RM[row, position // S]), position % S
            k_pool_PKSH[block, :, offset] = turned[-K:].to(k_pool_PKSH.dtype)
            v_pool_PKSH[block, :, offset] = heads_AH[-K:].to(v_pool_PKSH.dtype)
    return torch.stack(heads)


def finished_heads(
    heads_C: torch.Tensor, bias_C: torch.Tensor | None, qk_norm_2H: torch.Tensor | None, K: int, H: int, eps: float
) -> torch.Tensor:
    """float32 heads [N + 2 K, H] of one token before RoPE, computed the obvious way."""
    heads_AH = (heads_C if bias_C is None else heads_C + bias_C.float()).view(-1, H)
    if qk_norm_2H is None:
        return heads_AH
    inverse_A1 = torch.rsqrt(heads_AH.square().mean(dim=1, keepdim=True) + eps)
    q_norm_H, k_norm_H = qk_norm_2H.float()
    normed_AH = heads_AH * inverse_A1
    return torch.cat([normed_AH[: -2 * K] * q_norm_H, normed_AH[-2 * K : -K] * k_norm_H, heads_AH[-K:]])


@triton.jit
def _rope_write_kernel(
    qkv_TC, x_TD, bias_C, qk_norm_2H, q_TNH, k_pool, v_pool, row_T, position_T, table_RM, cos_LH, sin_LH,
    table_width, eps,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(row_T + t)
    position = tl.load(position_T + t)
    d = tl.arange(0, WIDTH)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    half = tl.arange(0, H // 2)
    cos = tl.load(cos_LH + position * (H // 2) + half)
    sin = tl.load(sin_LH + position * (H // 2) + half)
    a = tl.arange(0, HEADS)
    is_head = a < N + 2 * K
    at = a[:, None] * H + half[None, :]
    mask = is_head[:, None] & (half >= 0)[None, :]
    base = qkv_TC + t * (N + 2 * K) * H
    first = tl.load(base + at, mask=mask, other=0.0).to(tl.float32) * scale
    if bias_C is not None:
        first += tl.load(bias_C + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + at + H // 2, mask=mask, other=0.0).to(tl.float32) * scale
    if bias_C is not None:
        second += tl.load(bias_C + at + H // 2, mask=mask, other=0.0).to(tl.float32)
    is_turned = (a < N + K)[:, None]
    if qk_norm_2H is not None:
        inverse = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / H + eps)
        norm_at = qk_norm_2H + tl.where(a < N, 0, H)[:, None] + half[None, :]
        first_norm, second_norm = tl.load(norm_at).to(tl.float32), tl.load(norm_at + H // 2).to(tl.float32)
        first = tl.where(is_turned, first * inverse[:, None] * first_norm, first)
        second = tl.where(is_turned, second * inverse[:, None] * second_norm, second)
    new_first = tl.where(is_turned, first * cos[None, :] - second * sin[None, :], first)
    new_second = tl.where(is_turned, second * cos[None, :] + first * sin[None, :], second)
    element = q_TNH.dtype.element_ty
    cached = k_pool.dtype.element_ty
    is_query = mask & (a < N)[:, None]
    tl.store(q_TNH + t * N * H + at, new_first.to(element), mask=is_query)
    tl.store(q_TNH + t * N * H + at + H // 2, new_second.to(element), mask=is_query)
    if row < 0:
        return
    block = tl.load(table_RM + row.to(tl.int64) * table_width + position // S).to(tl.int64)
    slot = ((block * K + (a - N) % K) * S + position % S) * H
    at = slot[:, None] + half[None, :]
    is_key = mask & ((a >= N) & (a < N + K))[:, None]
    is_value = mask & (a >= N + K)[:, None]
    tl.store(k_pool + at, new_first.to(cached), mask=is_key)
    tl.store(k_pool + at + H // 2, new_second.to(cached), mask=is_key)
    tl.store(v_pool + at, new_first.to(cached), mask=is_value)
    tl.store(v_pool + at + H // 2, new_second.to(cached), mask=is_value)


def rope_write(
    qkv_TC: torch.Tensor,
    x_TD: torch.Tensor,
    bias_C: torch.Tensor | None,
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    row_T: torch.Tensor,
    position_T: torch.Tensor,
    table_RM: torch.Tensor,
    cos_LH: torch.Tensor,
    sin_LH: torch.Tensor,
    eps: float,
    qk_norm_2H: torch.Tensor | None = None,
    *,
    overlap: Overlap = Overlap.NONE,
) -> None:
    """Write the rotated queries to q_TNH and the new keys and values to the pools.

    bias_C, qk_norm_2H: None if the family has none; the norm's weights are those of queries, then of keys. row_T,
    position_T, table_RM: int32; tokens with a negative row are padding and do not write to the cache. cos_LH, sin_LH:
    float32 [L, H / 2]. The others of one dtype; pools may be e4m3. Raises ValueError if a tensor does not fit.
    """
    T, N, H = q_TNH.shape
    K, S, dtype = k_pool_PKSH.shape[1], k_pool_PKSH.shape[2], q_TNH.dtype
    check_tensor("qkv_TC", qkv_TC, shape=(T, (N + 2 * K) * H), dtype=dtype)
    check_tensor("x_TD", x_TD, shape=(T, None), dtype=dtype)
    if bias_C is not None:
        check_tensor("bias_C", bias_C, shape=((N + 2 * K) * H,), dtype=dtype)
    if qk_norm_2H is not None:
        check_tensor("qk_norm_2H", qk_norm_2H, shape=(2, H), dtype=dtype)
    check_tensor("q_TNH", q_TNH, shape=(T, N, H), dtype=dtype)
    check_pools(k_pool_PKSH, v_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("row_T", row_T, shape=(T,), dtype=torch.int32)
    check_tensor("position_T", position_T, shape=(T,), dtype=torch.int32)
    D = x_TD.shape[1]
    _rope_write_kernel[(T,)](
        qkv_TC, x_TD, bias_C, qk_norm_2H, q_TNH, k_pool_PKSH, v_pool_PKSH, row_T, position_T, table_RM, cos_LH, sin_LH,
        table_RM.shape[1], eps,
        N=N, K=K, H=H, D=D, S=S, HEADS=next_power_of_2(N + 2 * K), WIDTH=next_power_of_2(D),
        PDL=overlap.value, launch_pdl=overlap.value, num_warps=4,
    )  # fmt: skip
