"""Three small kernels on rows: the embedding of tokens, RMSNorm with its weight, and RMSNorm's scale alone.

Legend: B sequences of the batch · R rows of the state · T tokens · V rows of the embedding · D model dim.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

SCALED_TOKENS = 4  # a warp for each


@triton.jit
def _embed_kernel(
    ids_T, rows_T, last_token_R, embed_VD, x_TD,
    D: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, NUM_ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    token = tl.load(ids_T + t)
    if token < 0:
        token = tl.load(last_token_R + tl.load(rows_T + t))
    d = tl.arange(0, WIDTH)
    if FIRST is None:
        x = tl.load(embed_VD + token.to(tl.int64) * D + d, mask=d < D)
    else:
        row = token.to(tl.int64) - FIRST
        is_here = (row >= 0) & (row < NUM_ROWS)
        x = tl.load(embed_VD + row * D + d, mask=(d < D) & is_here, other=0.0)
    tl.store(x_TD + t.to(tl.int64) * D + d, x, mask=d < D)


def embed(
    ids_T: torch.Tensor,
    rows_T: torch.Tensor,
    last_token_R: torch.Tensor,
    embed_VD: torch.Tensor,
    x_TD: torch.Tensor,
    *,
    first: int | None = None,
) -> None:
    """x_TD[t] = embed_VD[ids_T[t]], or of the row's last token where the id is negative. ids, rows, tokens: int32.

    first: the id of embed_VD's first row if it has only some of the rows; other ids give zeros. None: it has all rows,
    and ids must be rows of it. Raises ValueError if a tensor does not fit.
    """
    T, D = x_TD.shape
    check_tensor("ids_T", ids_T, shape=(T,), dtype=torch.int32)
    check_tensor("rows_T", rows_T, shape=(T,), dtype=torch.int32)
    check_tensor("last_token_R", last_token_R, shape=(None,), dtype=torch.int32)
    check_tensor("embed_VD", embed_VD, shape=(None, D), dtype=x_TD.dtype)
    check_tensor("x_TD", x_TD, shape=(T, D), dtype=x_TD.dtype)
    num_rows = 0 if first is None else len(embed_VD)
    _embed_kernel[(T,)](
        ids_T, rows_T, last_token_R, embed_VD, x_TD, D=D, WIDTH=next_power_of_2(D), FIRST=first, NUM_ROWS=num_rows,
        num_warps=4,
    )  # fmt: skip


def rms_norm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The obvious reference of `rms_norm`, float32."""
    return x_TD.float() * torch.rsqrt(x_TD.float().square().mean(dim=-1, keepdim=True) + eps) * weight_D.float()


@triton.jit
def _rms_norm_kernel(
    x_TD, index_S, weight_D, out_SD, eps, D: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next(PDL)
    s = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    t = tl.load(index_S + s).to(tl.int64)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)) * weight
    tl.store(out_SD + s.to(tl.int64) * D + d, out.to(out_SD.dtype.element_ty), mask=d < D)


def rms_norm(
    x_TD: torch.Tensor,
    index_S: torch.Tensor,
    weight_D: torch.Tensor,
    out_SD: torch.Tensor,
    eps: float,
    *,
    overlap: Overlap = Overlap.NONE,
) -> None:
    """out_SD[s] = RMSNorm of x_TD[index_S[s]] (arXiv:1910.07467), computed in float32. index_S: int32.

    Raises ValueError if a tensor does not fit.
    """
    S, D = out_SD.shape
    check_tensor("x_TD", x_TD, shape=(None, D), dtype=out_SD.dtype)
    check_tensor("index_S", index_S, shape=(S,), dtype=torch.int32)
    check_tensor("weight_D", weight_D, shape=(D,), dtype=out_SD.dtype)
    check_tensor("out_SD", out_SD, shape=(S, D), dtype=out_SD.dtype)
    _rms_norm_kernel[(S,)](
        x_TD, index_S, weight_D, out_SD, eps, D=D, WIDTH=next_power_of_2(D), PDL=overlap.value, num_warps=4,
        launch_pdl=overlap.value,
    )  # fmt: skip


def rms_scale_reference(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """The obvious reference of `rms_scale`."""
    return torch.rsqrt(x_TD.float().square().mean(dim=-1) + eps)


@triton.jit(do_not_specialize=["T"])
def _rms_scale_kernel(
    x_TD, scale_T, eps, T, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, WIDTH)
    mask = (t < T)[:, None] & (d < D)[None, :]
    x = tl.load(x_TD + t.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(scale_T + t, 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps), mask=t < T)


def rms_scale(x_TD: torch.Tensor, scale_T: torch.Tensor, eps: float, *, overlap: Overlap = Overlap.NONE) -> None:
    """scale_T = 1 / rms(x_TD), float32: RMSNorm's scale, for matrices that have the norm's weight folded in.

    Raises ValueError if a tensor does not fit.
    """
    T, D = x_TD.shape
    check_tensor("x_TD", x_TD, shape=(T, D), dtype=x_TD.dtype)
    check_tensor("scale_T", scale_T, shape=(T,), dtype=torch.float32)
    _rms_scale_kernel[(triton.cdiv(T, SCALED_TOKENS),)](
        x_TD, scale_T, eps, T, D=D, WIDTH=next_power_of_2(D), TOKENS=SCALED_TOKENS, PDL=overlap.value, num_warps=4,
        launch_pdl=overlap.value,
    )  # fmt: skip
