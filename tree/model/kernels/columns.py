"""A row's logits as the filters see them: with its biases and penalties, and without copying the row.

    columns   |--- ids 0 .. vocab_size ---|- nothing -|--- ids with a bias ---|
              0                           num_padded              num_padded + num_biases

A biased id stands in the tail with its sum in float32; in its place among the logits is -inf (model/kernels/bias.py).
Penalties are computed whenever a column is read.
"""

import triton
import triton.language as tl

GROUP = 64
PART = 4096
MAX_BIASES = 1024
IN_PROMPT = 0x4000
MAX_COUNT = IN_PROMPT - 1


def num_parts(vocab_size: int) -> int:
    """Parts of PART columns that the vocabulary takes; the tail takes one more."""
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
    """Token of each column, its logit (float32; NaN becomes -inf), and whether the column holds one at all."""
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
    """The same for PART columns from `start` on, all among the logits or all in the tail."""
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
