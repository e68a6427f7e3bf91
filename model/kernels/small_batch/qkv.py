"""Queries, keys and values of a few rows straight from the residual stream, with the write to the cache.

One kernel: the product with the QKV matrix (the norm's weight folded in), scale of the RMSNorm, bias, RoPE, and the
write of the new key and value. A program has pairs of output columns that RoPE rotates together: d and d + H/2 of a
head.

Legend: B sequences · R rows of the state · M table width · N query heads · K kv heads · H head dim · D model dim ·
C = (N + 2K)·H · P blocks · S block size · L positions of the RoPE table.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_pools, check_tensor
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous
from octavo.model.kernels.small_batch.launch import (
    Cut,
    check_size,
    inverse_rms,
    load_rows,
    load_vector,
    product,
)


def small_batch_qkv_reference(
    x_BD: torch.Tensor,
    qkv_CD: torch.Tensor,
    bias_C: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    table_RM: torch.Tensor,
    cos_LH: torch.Tensor,
    sin_LH: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The obvious reference in float32, row by row. Writes the pools; returns q_BNH."""
    K, S, H = k_pool_PKSH.shape[1:]
    queries = []
    for b, row in enumerate(rows_B.tolist()):
        position = int(position_R[row])
        x_D = x_BD[b].float()
        x_D = x_D * torch.rsqrt(x_D.square().mean() + eps)
        heads_AH = (qkv_CD.float() @ x_D + bias_C.float()).view(-1, H)
        first, second = heads_AH[:-K].chunk(2, dim=-1)
        cos_H, sin_H = cos_LH[position].repeat(2), sin_LH[position].repeat(2)
        turned = heads_AH[:-K] * cos_H + torch.cat([-second, first], -1) * sin_H
        block, offset = int(table_RM[row, position // S]), position % S
        k_pool_PKSH[block, :, offset] = turned[-K:].to(k_pool_PKSH.dtype)
        v_pool_PKSH[block, :, offset] = heads_AH[-K:].to(v_pool_PKSH.dtype)
        queries.append(turned[:-K])
    return torch.stack(queries)


@triton.jit
def _small_batch_qkv_kernel(
    x_BD, qkv_CD, bias_C, q_BNH, k_pool, v_pool, rows_B, position_R, table_RM, cos_LH, sin_LH, table_width, eps,
    B: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    COUNT: tl.constexpr = (D + BLOCK - 1) // BLOCK
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    head = pair // (H // 2)
    half = pair % (H // 2)
    c = head * H + half
    first_tiles = load_rows(qkv_CD, c, D, BLOCK)
    second_tiles = load_rows(qkv_CD, c + H // 2, D, BLOCK)
    first_bias = tl.load(bias_C + c).to(tl.float32)
    second_bias = tl.load(bias_C + c + H // 2).to(tl.float32)
    is_turned = head < N + K
    element = q_BNH.dtype.element_ty
    cached = k_pool.dtype.element_ty
    cosines, sines, slots = (), (), ()
    for b in tl.static_range(B):
        row = tl.load(rows_B + b)
        position = tl.load(position_R + row)
        cosines = cosines + (tl.load(cos_LH + position * (H // 2) + half),)  # noqa: RUF005
        sines = sines + (tl.load(sin_LH + position * (H // 2) + half),)  # noqa: RUF005
        block = tl.load(table_RM + row.to(tl.int64) * table_width + position // S).to(tl.int64)
        slots = slots + ((block * K + (head - N) % K) * S + position % S,)  # noqa: RUF005
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        cos, sin = cosines[b], sines[b]
        x = load_vector(x_BD + b * D, D, BLOCK)
        scale = inverse_rms(x, eps, D, BLOCK, COUNT)
        first = product(first_tiles, x, PAIRS, BLOCK, COUNT) * scale + first_bias
        second = product(second_tiles, x, PAIRS, BLOCK, COUNT) * scale + second_bias
        new_first = tl.where(is_turned, first * cos - second * sin, first)
        new_second = tl.where(is_turned, second * cos + first * sin, second)
        q_at = q_BNH + b * N * H + c
        tl.store(q_at, new_first.to(element), mask=head < N)
        tl.store(q_at + H // 2, new_second.to(element), mask=head < N)
        at = slots[b] * H + half
        is_key = (head >= N) & is_turned
        tl.store(k_pool + at, new_first.to(cached), mask=is_key)
        tl.store(k_pool + at + H // 2, new_second.to(cached), mask=is_key)
        tl.store(v_pool + at, new_first.to(cached), mask=head >= N + K)
        tl.store(v_pool + at + H // 2, new_second.to(cached), mask=head >= N + K)


def small_batch_qkv(
    x_BD: torch.Tensor,
    qkv_CD: torch.Tensor,
    bias_C: torch.Tensor,
    q_BNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    table_RM: torch.Tensor,
    cos_LH: torch.Tensor,
    sin_LH: torch.Tensor,
    eps: float,
    *,
    cut: Cut,
    overlap: Overlap,
) -> None:
    """Write the rotated queries to q_BNH and the new keys and values of rows_B to the pools.

    rows_B, position_R, table_RM: int32. cos_LH, sin_LH: float32 [L, H / 2]. The others of one dtype; pools may be e4m3.
    cut.rows: pairs of columns. Raises ValueError if a tensor does not fit.
    """
    B, N, H = q_BNH.shape
    K, S, dtype = k_pool_PKSH.shape[1], k_pool_PKSH.shape[2], q_BNH.dtype
    C, D = (N + 2 * K) * H, x_BD.shape[1]
    check_tensor("x_BD", x_BD, shape=(B, D), dtype=dtype)
    check_tensor("qkv_CD", qkv_CD, shape=(C, D), dtype=dtype)
    check_tensor("bias_C", bias_C, shape=(C,), dtype=dtype)
    check_tensor("q_BNH", q_BNH, shape=(B, N, H), dtype=dtype)
    check_pools(k_pool_PKSH, v_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("table_RM", table_RM, shape=(len(position_R), None), dtype=torch.int32)
    check_size("qkv_CD", qkv_CD)
    pairs = cut.rows_of(H // 2)
    _small_batch_qkv_kernel[(C // 2 // pairs,)](
        x_BD, qkv_CD, bias_C, q_BNH, k_pool_PKSH, v_pool_PKSH, rows_B, position_R, table_RM, cos_LH, sin_LH,
        table_RM.shape[1], eps,
        B=B, N=N, K=K, H=H, D=D, S=S, PAIRS=pairs, BLOCK=cut.block_of(D), PDL=overlap.value,
        num_warps=cut.warps, launch_pdl=overlap.value,
    )  # fmt: skip
