"""A row's logits as the filters see them: with its biases and penalties, and without copying the row.

    columns   |--- ids 0 .. vocab_size ---|- nothing -|--- ids with a bias ---|
              0                           num_padded              num_padded + num_biases

A biased id is in the tail, with its sum in float32; its place among the logits has -inf (`move_biased`). Penalties are
computed whenever a column is read.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor

GROUP = 64
PART = 4096
MAX_BIASES = 1024
IN_PROMPT = 0x4000
MAX_COUNT = IN_PROMPT - 1


def num_parts(vocab_size: int) -> int:
    """Number of parts of PART columns for the vocabulary; the tail takes one more."""
    return -(-vocab_size // PART)


@triton.jit
def row_of_columns(
    b, row, logits_BV, width, count_RV, vocab_size, bias_id_RA, biased_BA, num_biases_R, num_padded,
    repetition_R, presence_R, frequency_R, MAX_BIASES: tl.constexpr,
):  # fmt: skip
    """What `load_columns` needs to know of a row of the batch."""
    return (
        logits_BV + b.to(tl.int64) * width,
        count_RV + row.to(tl.int64) * vocab_size,
        bias_id_RA + row * MAX_BIASES,
        biased_BA + b * MAX_BIASES,
        tl.load(num_biases_R + row),
        vocab_size,
        num_padded,
        tl.load(repetition_R + row),
        tl.load(presence_R + row),
        tl.load(frequency_R + row),
    )


@triton.jit
def _penalised(x, counts, token, is_token, repetition, presence, frequency):
    x = tl.where(x != x, float("-inf"), x)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        packed = tl.load(counts + token, mask=is_token, other=0).to(tl.int32)
        count = (packed & 0x3FFF).to(tl.float32)
        x = tl.where(packed != 0, tl.where(x < 0.0, x * repetition, x / repetition), x)
        x = x - frequency * count - tl.where(count > 0.0, presence, 0.0)
    return x


@triton.jit
def load_columns(columns, column):
    """Token of each column, its logit (float32; NaN becomes -inf), and whether the column has one at all."""
    logits, counts, bias_id, biased, num_biases, vocab_size, num_padded, repetition, presence, frequency = columns
    place = column - num_padded
    is_tail = (place >= 0) & (place < num_biases)
    is_token = (column < vocab_size) | is_tail
    token = column
    x = tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    if num_biases > 0:
        token = tl.where(is_tail, tl.load(bias_id + place, mask=is_tail, other=0), column)
        x = tl.where(is_tail, tl.load(biased + place, mask=is_tail, other=float("-inf")), x)
    return token, _penalised(x, counts, token, is_token, repetition, presence, frequency), is_token


@triton.jit
def load_part(columns, start, PART: tl.constexpr):
    """`load_columns` for PART columns from `start` on, all of them among the logits or all in the tail."""
    logits, counts, bias_id, biased, num_biases, vocab_size, num_padded, repetition, presence, frequency = columns
    token = start + tl.arange(0, PART)
    is_token = token < vocab_size
    if start < num_padded:
        x = tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float32)
    else:
        place = token - num_padded
        is_token = place < num_biases
        token = tl.load(bias_id + place, mask=is_token, other=0)
        x = tl.load(biased + place, mask=is_token, other=float("-inf"))
    return token, _penalised(x, counts, token, is_token, repetition, presence, frequency), is_token


# Sums of logits and biases, kept outside of the logits: 16-bit logits would round them.
#
# A row has up to MAX_BIASES ids with a bias. Their logits move to the row's float32 tail and become -inf in their old
# place. Runs after the masks, so that a forbidden id stays at -inf.
#
# Legend: B sequences of the batch · R rows of the state · V columns of the logits · A MAX_BIASES.


def move_biased_reference(
    logits_BV: torch.Tensor, rows_B: torch.Tensor, biases: dict[int, dict[int, float]]
) -> list[dict[int, float]]:
    """The obvious reference: each row's sums by id. Changes the logits. biases: by row, then by id."""
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
    """biased_BA[b, i] (float32) = logit of the row's i-th biased id, plus its bias; the logit is set to -inf.

    num_biases_R, bias_id_RA, rows_B: int32; bias_RA: float32. A row's ids are distinct. Raises ValueError if a
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
