"""The parts of attention that model/kernels/narrow_attention.py left, added up: one program for a head of a row.

A kernel of its own: adding up in every program of the output product cost more at any context (bench/RESULTS.md).

Legend: B sequences · R rows of the state · W parts at most · N query heads · H head dim.
"""

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor
from model.kernels.narrow import Overlap, begin, wait
from model.kernels.narrow_attention import MAX_SPLITS, TILE_TOKENS, cut_context, num_parts


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
def _combine_kernel(
    part_BWNH, log_BWN, out_BNH, rows_B, position_R,
    N: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n = tl.program_id(0)
    b = tl.program_id(1)
    w = tl.arange(0, SPLITS)
    h = tl.arange(0, H)
    _, count = num_parts(tl.load(position_R + tl.load(rows_B + b)), SPLITS, TILE)
    at = (b * SPLITS + w) * N + n
    wait(PDL)
    log = tl.load(log_BWN + at, mask=w < count, other=float("-inf"))
    part = tl.load(part_BWNH + at[:, None] * H + h[None, :], mask=(w < count)[:, None], other=0.0)
    weight = tl.exp2(log - tl.max(log, 0))
    out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0)
    tl.store(out_BNH + (b * N + n) * H + h, out.to(out_BNH.dtype.element_ty))


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
    check_tensor("part_BWNH", part_BWNH, shape=(None, MAX_SPLITS, N, H), dtype=torch.float32)
    check_tensor("log_BWN", log_BWN, shape=(len(part_BWNH), MAX_SPLITS, N), dtype=torch.float32)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("position_R", position_R, shape=(None,), dtype=torch.int32)
    if len(part_BWNH) < B:
        raise ValueError(f"part_BWNH is for {len(part_BWNH)} rows, not {B}")
    check_tensor("out_BNH", out_BNH, shape=(B, N, H), dtype=out_BNH.dtype)
    _combine_kernel[(N, B)](
        part_BWNH, log_BWN, out_BNH, rows_B, position_R,
        N=N, H=H, SPLITS=MAX_SPLITS, TILE=TILE_TOKENS, PDL=overlap.value,
        num_warps=4, launch_pdl=overlap.value,
    )  # fmt: skip
