"""SwiGLU's gate from the raw product of gate and up: silu(scale * gate) * (scale * up).

The scale is the RMSNorm's, one per token; its weight is folded into the matrix.

Legend: T tokens · I intermediate dim · D model dim.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2

# SwiGLU's gate with one program for each token and block, whatever the number of tokens.
#
# `silu_mul` divides its work by the number of tokens; here the division depends on the matrix alone, so that a token
# has the same bits in any batch.
#
# Legend: T tokens · I intermediate dim · D model dim.


@triton.jit
def _invariant_silu_mul_kernel(
    gate_up, x_TD, out_TI, eps, I: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32) * scale
    up = tl.load(gate_up + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32) * scale
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_TI + t * I + i, out.to(out_TI.dtype.element_ty), mask=i < I)


def invariant_silu_mul(gate_up_T2I: torch.Tensor, x_TD: torch.Tensor, out_TI: torch.Tensor, eps: float) -> None:
    """As `silu_mul`, with the same reference. Raises ValueError if a tensor does not fit."""
    T, I = out_TI.shape
    check_tensor("gate_up_T2I", gate_up_T2I, shape=(T, 2 * I), dtype=out_TI.dtype)
    check_tensor("x_TD", x_TD, shape=(T, None), dtype=out_TI.dtype)
    check_tensor("out_TI", out_TI, shape=(T, I), dtype=out_TI.dtype)
    D = x_TD.shape[1]
    _invariant_silu_mul_kernel[(T, triton.cdiv(I, BLOCK))](
        gate_up_T2I, x_TD, out_TI, eps, I=I, D=D, WIDTH=next_power_of_2(D), BLOCK=BLOCK, num_warps=4
    )


BLOCK = 1024
MANY_TOKENS = 1024  # from here on a program takes MOST_BLOCKS of a token, which share the computation of its scale
MOST_BLOCKS = 8


def silu_mul_reference(gate_up_T2I: torch.Tensor, x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """The obvious reference, float32."""
    scale_T1 = torch.rsqrt(x_TD.float().square().mean(dim=-1, keepdim=True) + eps)
    gate_TI, up_TI = (gate_up_T2I.float() * scale_T1).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TI) * up_TI


@triton.jit
def _silu_mul_kernel(
    gate_up, x_TD, out_TI, eps,
    I: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    i = tl.program_id(1) * BLOCKS * BLOCK + tl.arange(0, BLOCK)
    gates, ups = (), ()
    # Everything is loaded before the sum of squares, since no load is moved across its barrier.
    for block in tl.static_range(BLOCKS):
        at = i + block * BLOCK
        gates = gates + (tl.load(gate_up + t * 2 * I + at, mask=at < I, other=0.0),)  # noqa: RUF005
        ups = ups + (tl.load(gate_up + t * 2 * I + I + at, mask=at < I, other=0.0),)  # noqa: RUF005
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    for block in tl.static_range(BLOCKS):
        at = i + block * BLOCK
        gate = gates[block].to(tl.float32) * scale
        up = ups[block].to(tl.float32) * scale
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_TI + t * I + at, out.to(out_TI.dtype.element_ty), mask=at < I)


def silu_mul(gate_up_T2I: torch.Tensor, x_TD: torch.Tensor, out_TI: torch.Tensor, eps: float) -> None:
    """out_TI = silu(scale * gate) * (scale * up); scale = 1 / rms(x_TD). All of one dtype.

    Raises ValueError if a tensor does not fit.
    """
    T, I = out_TI.shape
    check_tensor("gate_up_T2I", gate_up_T2I, shape=(T, 2 * I), dtype=out_TI.dtype)
    check_tensor("x_TD", x_TD, shape=(T, None), dtype=out_TI.dtype)
    check_tensor("out_TI", out_TI, shape=(T, I), dtype=out_TI.dtype)
    D = x_TD.shape[1]
    blocks = min(triton.cdiv(I, BLOCK), MOST_BLOCKS) if T >= MANY_TOKENS else 1
    _silu_mul_kernel[(T, triton.cdiv(I, BLOCK * blocks))](
        gate_up_T2I, x_TD, out_TI, eps,
        I=I, D=D, WIDTH=next_power_of_2(D), BLOCK=BLOCK, BLOCKS=blocks,
        num_warps=4,
    )  # fmt: skip
