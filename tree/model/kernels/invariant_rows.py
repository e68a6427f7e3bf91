"""SwiGLU's gate with one program for each token and block, whatever the number of tokens.

model/kernels/activation.py cuts its work by the number of tokens; here it is cut by the matrix alone, so that a token
has the same bits in any batch.

Legend: T tokens · I intermediate dim · D model dim.
"""

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor, next_power_of_2

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
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
    """As model.kernels.activation.silu_mul, whose reference is this one's. Raises ValueError where a tensor does not
    fit."""
    T, I = out_TI.shape
    check_tensor("gate_up_T2I", gate_up_T2I, shape=(T, 2 * I), dtype=out_TI.dtype)
    check_tensor("x_TD", x_TD, shape=(T, None), dtype=out_TI.dtype)
    check_tensor("out_TI", out_TI, shape=(T, I), dtype=out_TI.dtype)
    D = x_TD.shape[1]
    _silu_mul_kernel[(T, triton.cdiv(I, BLOCK))](
        gate_up_T2I, x_TD, out_TI, eps, I=I, D=D, WIDTH=next_power_of_2(D), BLOCK=BLOCK, num_warps=4
    )
