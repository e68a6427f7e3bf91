"""Sums of logits and biases, beside the logits: 16-bit logits would round them.

A row has up to MAX_BIASES ids with a bias. Their logits move to a float32 tail of the row (model/kernels/columns.py)
and become -inf where they were. Runs behind the masks, so that a forbidden id stays at -inf.

Legend: B sequences of the batch · R rows of the state · V columns of the logits · A MAX_BIASES.
"""

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor
from model.kernels.columns import MAX_BIASES


def move_biased_reference(
    logits_BV: torch.Tensor, rows_B: torch.Tensor, biases: dict[int, dict[int, float]]
) -> list[dict[int, float]]:
    """The obvious twin: each row's sums by id. Changes the logits. biases: by row, then by id."""
    sums = []
    for b, row in enumerate(rows_B.tolist()):
        wanted = biases.get(row, {})
        sums.append({token: float(logits_BV[b, token]) + bias for token, bias in wanted.items()})
        logits_BV[b, list(wanted)] = -torch.inf
    return sums


@triton.jit
def _move_biased_kernel(logits_BV, rows_B, num_biases_R, bias_id_RA, bias_RA, biased_BA, width, A: tl.constexpr):
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    num_biases = tl.load(num_biases_R + row)
    if num_biases == 0:
        return
    i = tl.arange(0, A)
    has = i < num_biases
    logits = logits_BV + b.to(tl.int64) * width + tl.load(bias_id_RA + row * A + i, mask=has, other=0)
    x = tl.load(logits, mask=has, other=0.0).to(tl.float32)
    tl.store(biased_BA + b * A + i, x + tl.load(bias_RA + row * A + i, mask=has, other=0.0), mask=has)
    tl.store(logits, float("-inf"), mask=has)


def move_biased(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    num_biases_R: torch.Tensor,
    bias_id_RA: torch.Tensor,
    bias_RA: torch.Tensor,
    biased_BA: torch.Tensor,
) -> None:
    """biased_BA[b, i] (float32) = logit of the row's i-th biased id, plus its bias; the logit becomes -inf.

    num_biases_R, bias_id_RA, rows_B: int32; bias_RA: float32. A row's ids are distinct. Raises ValueError where a
    tensor does not fit.
    """
    (B,), (R,) = rows_B.shape, num_biases_R.shape
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("num_biases_R", num_biases_R, shape=(R,), dtype=torch.int32)
    check_tensor("bias_id_RA", bias_id_RA, shape=(R, MAX_BIASES), dtype=torch.int32)
    check_tensor("bias_RA", bias_RA, shape=(R, MAX_BIASES), dtype=torch.float32)
    check_tensor("biased_BA", biased_BA, shape=(None, MAX_BIASES), dtype=torch.float32)
    if len(biased_BA) < B:
        raise ValueError(f"biased_BA has {len(biased_BA)} rows, fewer than the batch of {B}")
    _move_biased_kernel[(B,)](
        logits_BV, rows_B, num_biases_R, bias_id_RA, bias_RA, biased_BA, logits_BV.shape[1], A=MAX_BIASES, num_warps=4
    )
