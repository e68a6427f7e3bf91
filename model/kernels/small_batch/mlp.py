"""Products of a few rows with a matrix that is read once: gate and up with SiLU, a product added to the residual
stream, a product alone, and the head.

Legend: B sequences · D model dim · I intermediate dim · Q inner dim of a product · O its outputs · V rows of the head ·
E = 2 I · T tokens, of which B are sampled.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous
from octavo.model.kernels.small_batch.launch import (
    Cut,
    check_size,
    inverse_rms,
    load_rows,
    load_vector,
    product,
)


def small_batch_gate_up_reference(x_BD: torch.Tensor, gate_up_ED: torch.Tensor, eps: float) -> torch.Tensor:
    """The obvious reference of `small_batch_gate_up`, float32."""
    x = x_BD.float() * torch.rsqrt(x_BD.float().square().mean(dim=-1, keepdim=True) + eps)
    gate_BI, up_BI = (x @ gate_up_ED.float().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_BI) * up_BI


@triton.jit
def _small_batch_gate_up_kernel(
    x_BD, gate_up_ED, act_BI, eps,
    B: tl.constexpr, D: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    COUNT: tl.constexpr = (D + BLOCK - 1) // BLOCK
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_tiles = load_rows(gate_up_ED, r, D, BLOCK)
    up_tiles = load_rows(gate_up_ED, r + I, D, BLOCK)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        x = load_vector(x_BD + b * D, D, BLOCK)
        scale = inverse_rms(x, eps, D, BLOCK, COUNT)
        gate = product(gate_tiles, x, ROWS, BLOCK, COUNT) * scale
        up = product(up_tiles, x, ROWS, BLOCK, COUNT) * scale
        tl.store(act_BI + b * I + r, (gate / (1.0 + tl.exp(-gate)) * up).to(act_BI.dtype.element_ty))


def small_batch_gate_up(
    x_BD: torch.Tensor, gate_up_ED: torch.Tensor, act_BI: torch.Tensor, eps: float, *, cut: Cut, overlap: Overlap
) -> None:
    """act_BI = silu(gate) * up of RMSNorm(x_BD), with the norm's weight folded into gate_up_ED [2I, D]. All of one
    dtype.

    Raises ValueError if a tensor does not fit.
    """
    (B, D), I, dtype = x_BD.shape, act_BI.shape[1], x_BD.dtype
    check_tensor("x_BD", x_BD, shape=(B, D), dtype=dtype)
    check_tensor("gate_up_ED", gate_up_ED, shape=(2 * I, D), dtype=dtype)
    check_tensor("act_BI", act_BI, shape=(B, I), dtype=dtype)
    check_size("gate_up_ED", gate_up_ED)
    rows = cut.rows_of(I)
    _small_batch_gate_up_kernel[(I // rows,)](
        x_BD, gate_up_ED, act_BI, eps, B=B, D=D, I=I, ROWS=rows, BLOCK=cut.block_of(D), PDL=overlap.value,
        num_warps=cut.warps, launch_pdl=overlap.value,
    )  # fmt: skip


@triton.jit
def _small_batch_product_kernel(
    y_BQ, matrix_OQ, out_BO,
    B: tl.constexpr, O: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    COUNT: tl.constexpr = (Q + BLOCK - 1) // BLOCK
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = load_rows(matrix_OQ, r, Q, BLOCK)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        at = out_BO + b * O + r
        if ADD:
            before = tl.load(at).to(tl.float32)
        out = product(tiles, load_vector(y_BQ + b * Q, Q, BLOCK), ROWS, BLOCK, COUNT)
        if ADD:
            out = before + out
        tl.store(at, out.to(out_BO.dtype.element_ty))


def small_batch_product(
    y_BQ: torch.Tensor, matrix_OQ: torch.Tensor, out_BO: torch.Tensor, *, cut: Cut, overlap: Overlap
) -> None:
    """out_BO = y_BQ @ matrix_OQ^T, in float32, rounded once. All of one dtype.

    Raises ValueError if a tensor does not fit.
    """
    _launch(y_BQ, matrix_OQ, out_BO, cut, overlap, adds=0)


def small_batch_add_product(
    x_BO: torch.Tensor, y_BQ: torch.Tensor, matrix_OQ: torch.Tensor, *, cut: Cut, overlap: Overlap
) -> None:
    """x_BO += y_BQ @ matrix_OQ^T; otherwise as `small_batch_product`."""
    _launch(y_BQ, matrix_OQ, x_BO, cut, overlap, adds=1)


def _launch(
    y_BQ: torch.Tensor, matrix_OQ: torch.Tensor, out_BO: torch.Tensor, cut: Cut, overlap: Overlap, *, adds: int
) -> None:
    (B, Q), O, dtype = y_BQ.shape, out_BO.shape[1], y_BQ.dtype
    check_tensor("y_BQ", y_BQ, shape=(B, Q), dtype=dtype)
    check_tensor("matrix_OQ", matrix_OQ, shape=(O, Q), dtype=dtype)
    check_tensor("out_BO", out_BO, shape=(B, O), dtype=dtype)
    check_size("matrix_OQ", matrix_OQ)
    rows = cut.rows_of(O)
    _small_batch_product_kernel[(O // rows,)](
        y_BQ, matrix_OQ, out_BO, B=B, O=O, Q=Q, ROWS=rows, BLOCK=cut.block_of(Q), ADD=adds, PDL=overlap.value,
        num_warps=cut.warps, launch_pdl=overlap.value,
    )  # fmt: skip


@triton.jit
def _small_batch_head_kernel(
    x_TD, index_B, norm_D, head_VD, logits_BV, eps,
    B: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    COUNT: tl.constexpr = (D + BLOCK - 1) // BLOCK
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = load_rows(head_VD, r, D, BLOCK)
    norm = load_vector(norm_D, D, BLOCK)
    wait_for_previous(PDL)
    for b in tl.static_range(B):
        t = tl.load(index_B + b)
        x = load_vector(x_TD + t * D, D, BLOCK)
        scale = inverse_rms(x, eps, D, BLOCK, COUNT)
        normed = ()
        for i in tl.static_range(COUNT):
            normed = normed + (x[i] * norm[i],)  # noqa: RUF005
        out = product(tiles, normed, ROWS, BLOCK, COUNT) * scale
        tl.store(logits_BV + b * V + r, out.to(logits_BV.dtype.element_ty))


def small_batch_head(
    x_TD: torch.Tensor,
    index_B: torch.Tensor,
    norm_D: torch.Tensor,
    head_VD: torch.Tensor,
    logits_BV: torch.Tensor,
    eps: float,
    *,
    cut: Cut,
    overlap: Overlap,
) -> None:
    """logits_BV = RMSNorm(x_TD[index_B]) @ head_VD^T. index_B: int32; the others of one dtype.

    Raises ValueError if a tensor does not fit.
    """
    (B, V), D, dtype = logits_BV.shape, x_TD.shape[1], x_TD.dtype
    check_tensor("x_TD", x_TD, shape=(None, D), dtype=dtype)
    check_tensor("index_B", index_B, shape=(B,), dtype=torch.int32)
    check_tensor("norm_D", norm_D, shape=(D,), dtype=dtype)
    check_tensor("head_VD", head_VD, shape=(V, D), dtype=dtype)
    check_tensor("logits_BV", logits_BV, shape=(B, V), dtype=dtype)
    check_size("head_VD", head_VD)
    rows = cut.rows_of(V)
    _small_batch_head_kernel[(V // rows,)](
        x_TD, index_B, norm_D, head_VD, logits_BV, eps, B=B, D=D, V=V, ROWS=rows, BLOCK=cut.block_of(D),
        PDL=overlap.value, num_warps=cut.warps, launch_pdl=overlap.value,
    )  # fmt: skip
