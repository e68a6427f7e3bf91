"""-inf for the last token of every bad word whose other tokens are the end of the output so far.

A row has up to MAX_WORDS words of two to MAX_LENGTH + 1 tokens (words of one token are a mask,
model/kernels/sampling/mask.py). A word's beginning is stored backwards, the token before its last one first, and
compared with a ring of the row's newest tokens, which `filter_and_choose` writes.

    said_RH    token of position p at p modulo RING

Legend: B sequences of the batch · R rows of the state · V columns of the logits · L tokens of a beginning · N words.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor

MAX_WORDS = 128
MAX_LENGTH = 32
RING = 32


def banned_reference(output_ids: list[int], words: list[tuple[int, ...]]) -> set[int]:
    """The obvious reference: ids that may not come next."""
    return {word[-1] for word in words if len(word) == 1 or tuple(output_ids[-len(word) + 1 :]) == word[:-1]}


@triton.jit
def _ban_kernel(
    logits_BV, rows_B, position_R, num_prompt_R, num_words_R, last_RN, length_RN, begin_RLN, said_RH, width, vocab_size,
    N: tl.constexpr, L: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    num_words = tl.load(num_words_R + row)
    if num_words == 0:
        return
    n = tl.arange(0, N)
    is_word = n < num_words
    length = tl.load(length_RN + row * N + n, mask=is_word, other=0)
    # The row has already advanced: its position is the index of the token in question.
    position = tl.load(position_R + row)
    num_said = position - tl.load(num_prompt_R + row)
    is_hit = is_word & (length <= num_said)
    begins = begin_RLN + row * (L * N) + n
    for back in range(tl.minimum(tl.max(length, 0), num_said)):
        said = tl.load(said_RH + row * RING + (position - 1 - back) % RING)
        is_compared = is_hit & (back < length)
        is_hit &= (tl.load(begins + back * N, mask=is_compared, other=0) == said) | (back >= length)
    last = tl.load(last_RN + row * N + n, mask=is_hit, other=0)
    tl.store(logits_BV + b.to(tl.int64) * width + last, float("-inf"), mask=is_hit & (last < vocab_size))


def ban(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    num_prompt_R: torch.Tensor,
    num_words_R: torch.Tensor,
    last_RN: torch.Tensor,
    length_RN: torch.Tensor,
    begin_RLN: torch.Tensor,
    said_RH: torch.Tensor,
    vocab_size: int,
) -> None:
    """Forbid tokens that would complete one of a row's num_words_R words.

    last_RN: each word's last token; length_RN: number of tokens before it; begin_RLN: those tokens, the nearest first.
    Only tokens of the output count. All int32 except the logits. Runs after `sample_and_advance`: position_R is that of
    the token in question. Raises ValueError if a tensor does not fit.
    """
    (B,), (R,) = rows_B.shape, position_R.shape
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    for name, tensor in (("position_R", position_R), ("num_prompt_R", num_prompt_R), ("num_words_R", num_words_R)):
        check_tensor(name, tensor, shape=(R,), dtype=torch.int32)
    check_tensor("last_RN", last_RN, shape=(R, MAX_WORDS), dtype=torch.int32)
    check_tensor("length_RN", length_RN, shape=(R, MAX_WORDS), dtype=torch.int32)
    check_tensor("begin_RLN", begin_RLN, shape=(R, MAX_LENGTH, MAX_WORDS), dtype=torch.int32)
    check_tensor("said_RH", said_RH, shape=(R, RING), dtype=torch.int32)
    if logits_BV.shape[1] < vocab_size:
        raise ValueError(f"logits_BV has {logits_BV.shape[1]} columns, fewer than the {vocab_size} ids")
    _ban_kernel[(B,)](
        logits_BV, rows_B, position_R, num_prompt_R, num_words_R, last_RN, length_RN, begin_RLN, said_RH,
        logits_BV.shape[1], vocab_size, N=MAX_WORDS, L=MAX_LENGTH, RING=RING, num_warps=1,
    )  # fmt: skip
