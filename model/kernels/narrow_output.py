"""From the parts of attention back into the residual stream: add them up, multiply by the output matrix, add to x.

Two ways for two sizes: every program of the product adds the parts up for itself (few heads), or a small kernel does it
first and the plain product of model/kernels/narrow_mlp.py follows (many heads).

Legend: B sequences · R rows of the state · W parts at most · N query heads · H head dim · A = N·H · D model dim.
"""

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor, next_power_of_2
from model.kernels.narrow import Cut, Overlap, begin, check_size, wait
from model.kernels.narrow_attention import MAX_SPLITS, TILE_TOKENS, cut_context, num_parts

STEP = 4  # parts that are loaded at once


def combine_reference(
    part_BWNH: torch.Tensor, log_BWN: torch.Tensor, rows_B: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """The obvious twin of `combine`: float32 [B, N, H]."""
    rows = []
    for b, row in enumerate(rows_B.tolist()):
        count = cut_context(int(position_R[row]))[1]
        weight_WN = torch.softmax(log_BWN[b, :count] / 1.4426950408889634, dim=0)
        rows.append((weight_WN[:, :, None] * part_BWNH[b, :count]).sum(dim=0))
    return torch.stack(rows)


@triton.jit
def _sum_parts(part, log, count, n, N: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr):
    # Heads n of one row, [HEADS, H], in order of the parts; zeros for heads that are not there.
    is_head = n < N
    h = tl.arange(0, H)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, H], tl.float32)
    for first in range(0, count, STEP):
        w = first + tl.arange(0, STEP)
        mask = (w < count)[:, None] & is_head[None, :]
        head = w[:, None] * N + n[None, :]
        value = tl.load(part + head[:, :, None] * H + h[None, None, :], mask=mask[:, :, None], other=0.0)
        weight = tl.load(log + head, mask=mask, other=float("-inf"))
        new_most = tl.maximum(most, tl.max(weight, 0))
        base = tl.where(is_head, new_most, 0.0)
        weight = tl.exp2(weight - base[None, :])
        shrink = tl.exp2(most - base)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * value, 0)
        total = total * shrink + tl.sum(weight, 0)
        most = new_most
    return acc / tl.where(is_head, total, 1.0)[:, None]


@triton.jit
def _combine_kernel(
    part_BWNH, log_BWN, out_BNH, rows_B, position_R,
    N: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(1)
    n = tl.program_id(0) + tl.arange(0, 1)
    _, count = num_parts(tl.load(position_R + tl.load(rows_B + b)), SPLITS, TILE)
    wait(PDL)
    part = part_BWNH + b * SPLITS * N * H
    out = _sum_parts(part, log_BWN + b * SPLITS * N, count, n, N, H, 1, STEP)
    at = (b * N + n[:, None]) * H + tl.arange(0, H)[None, :]
    tl.store(out_BNH + at, out.to(out_BNH.dtype.element_ty))


def combine(
    part_BWNH: torch.Tensor,
    log_BWN: torch.Tensor,
    out_BNH: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    *,
    overlap: Overlap,
) -> None:
    """out_BNH = the parts of each row's attention, added up. Raises ValueError where a tensor does not fit."""
    B, N, H = out_BNH.shape
    _check(part_BWNH, log_BWN, rows_B, position_R, B, N, H)
    check_tensor("out_BNH", out_BNH, shape=(B, N, H), dtype=out_BNH.dtype)
    _combine_kernel[(N, B)](
        part_BWNH, log_BWN, out_BNH, rows_B, position_R,
        N=N, H=H, SPLITS=MAX_SPLITS, TILE=TILE_TOKENS, STEP=32, PDL=overlap.value,
        num_warps=4, launch_pdl=overlap.value,
    )  # fmt: skip


@triton.jit
def _combined_output_kernel(
    x_BD, o_DA, part_BWNH, log_BWN, rows_B, position_R,
    B: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    A: tl.constexpr = N * H
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, HEADS)
    a = tl.arange(0, HEADS * H)
    weights = tl.load(o_DA + r[:, None] * A + a[None, :], mask=(a < A)[None, :], other=0.0)
    wait(PDL)
    for b in tl.static_range(B):
        _, count = num_parts(tl.load(position_R + tl.load(rows_B + b)), SPLITS, TILE)
        at = x_BD + b * D + r
        x = tl.load(at).to(tl.float32)
        part = part_BWNH + b * SPLITS * A
        out = tl.reshape(_sum_parts(part, log_BWN + b * SPLITS * N, count, n, N, H, HEADS, STEP), [HEADS * H])
        x += tl.sum(weights.to(tl.float32) * out[None, :], 1)
        tl.store(at, x.to(x_BD.dtype.element_ty))


def combined_output(
    x_BD: torch.Tensor,
    o_DA: torch.Tensor,
    part_BWNH: torch.Tensor,
    log_BWN: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    *,
    cut: Cut,
    overlap: Overlap,
) -> None:
    """x_BD += (the parts added up) @ o_DA^T. x and o of one dtype. Raises ValueError where a tensor does not fit."""
    B, D = x_BD.shape
    _, _, N, H = part_BWNH.shape
    _check(part_BWNH, log_BWN, rows_B, position_R, B, N, H)
    check_tensor("x_BD", x_BD, shape=(B, D), dtype=x_BD.dtype)
    check_tensor("o_DA", o_DA, shape=(D, N * H), dtype=x_BD.dtype)
    check_size("o_DA", o_DA)
    rows = cut.rows_of(D)
    _combined_output_kernel[(D // rows,)](
        x_BD, o_DA, part_BWNH, log_BWN, rows_B, position_R,
        B=B, N=N, H=H, D=D, ROWS=rows, HEADS=next_power_of_2(N), SPLITS=MAX_SPLITS, TILE=TILE_TOKENS, STEP=STEP,
        PDL=overlap.value, num_warps=cut.warps, launch_pdl=overlap.value,
    )  # fmt: skip


def _check(
    part_BWNH: torch.Tensor,
    log_BWN: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    B: int,
    N: int,
    H: int,
) -> None:
    check_tensor("part_BWNH", part_BWNH, shape=(None, MAX_SPLITS, N, H), dtype=torch.float32)
    check_tensor("log_BWN", log_BWN, shape=(len(part_BWNH), MAX_SPLITS, N), dtype=torch.float32)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("position_R", position_R, shape=(None,), dtype=torch.int32)
    if len(part_BWNH) < B:
        raise ValueError(f"part_BWNH is for {len(part_BWNH)} rows, not {B}")
