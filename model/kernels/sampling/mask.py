"""-inf in place of the logits that must not be chosen, by masks of one bit per id.

    word w of a mask, int32    ids 32 w .. 32 w + 31, the lowest bit first; a bit that is set allows its id

There are two kinds: a row's own masks, which apply as long as the request has the row (allowed ids, bad words of one
token; stop tokens while the output is too short), and masks for one step, which come from the host with it (grammars).

Legend: B sequences of the batch · R rows of the state · V columns of the logits · W words of a mask · N masked rows.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor

PART = 4096
ALWAYS, WHILE_SHORT = 1, 2
"""Bits of mask_R: which masks of its own a row has."""


def num_words(vocab_size: int) -> int:
    """Number of words of a mask."""
    return -(-vocab_size // 32)


def packed_mask(is_allowed_V: np.ndarray) -> np.ndarray:
    """int32 words of a bool mask."""
    bits = np.zeros(num_words(len(is_allowed_V)) * 32, np.bool_)
    bits[: len(is_allowed_V)] = is_allowed_V
    return np.packbits(bits, bitorder="little").view(np.int32)


def forbid_reference(logits_NV: torch.Tensor, mask_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The obvious reference for one mask per row."""
    bits = (mask_NW[:, :, None] >> torch.arange(32, device=mask_NW.device)) & 1
    is_allowed_NV = bits.flatten(1)[:, :vocab_size].bool()
    masked_NV = logits_NV.clone()
    masked_NV[:, :vocab_size] = masked_NV[:, :vocab_size].masked_fill(~is_allowed_NV, -torch.inf)
    return masked_NV


@triton.jit
def _forbid_part(logits, bits, vocab_size, PART: tl.constexpr):
    # Most parts of a row's own masks forbid nothing.
    if tl.max((bits != -1).to(tl.int32), 0) > 0:
        bit = tl.arange(0, 32)
        is_forbidden = tl.reshape(((bits[:, None] >> bit[None, :]) & 1) == 0, [PART])
        token = tl.program_id(1) * PART + tl.arange(0, PART)
        is_token = token < vocab_size
        # Read and written as a whole: for scattered stores the memory would have to read the rest of each sector.
        x = tl.load(logits + token, mask=is_token, other=0.0).to(tl.float32)
        tl.store(logits + token, tl.where(is_forbidden, float("-inf"), x), mask=is_token)


@triton.jit
def _forbid_kernel(
    logits_BV, rows_B, mask_R, position_R, num_prompt_R, min_tokens_R, always_RW, short_RW, width, words, vocab_size,
    PART: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    kinds = tl.load(mask_R + row)
    # The row has already advanced: its position is the index of the token in question.
    is_short = tl.load(position_R + row) - tl.load(num_prompt_R + row) < tl.load(min_tokens_R + row)
    has_always = (kinds & 1) != 0
    has_short = ((kinds & 2) != 0) & is_short
    if has_always | has_short:
        at = row.to(tl.int64) * words
        word = tl.program_id(1) * (PART // 32) + tl.arange(0, PART // 32)
        bits = tl.load(always_RW + at + word, mask=has_always & (word < words), other=-1)
        bits &= tl.load(short_RW + at + word, mask=has_short & (word < words), other=-1)
        _forbid_part(logits_BV + b.to(tl.int64) * width, bits, vocab_size, PART)


@triton.jit
def _forbid_step_kernel(logits_BV, column_N, mask_NW, width, words, vocab_size, PART: tl.constexpr):
    n = tl.program_id(0)
    word = tl.program_id(1) * (PART // 32) + tl.arange(0, PART // 32)
    bits = tl.load(mask_NW + n.to(tl.int64) * words + word, mask=word < words, other=-1)
    _forbid_part(logits_BV + tl.load(column_N + n).to(tl.int64) * width, bits, vocab_size, PART)


def forbid(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    mask_R: torch.Tensor,
    position_R: torch.Tensor,
    num_prompt_R: torch.Tensor,
    min_tokens_R: torch.Tensor,
    always_RW: torch.Tensor,
    short_RW: torch.Tensor,
    vocab_size: int,
) -> None:
    """Apply the rows' own masks: always_RW if mask_R has ALWAYS; short_RW if it has WHILE_SHORT and the output has
    fewer than min_tokens_R tokens.

    All int32 except the logits. Runs after `sample_and_advance`: position_R is that of the token in question. Raises
    ValueError if a tensor does not fit.
    """
    (B,), (R,) = rows_B.shape, mask_R.shape
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    for name, tensor, size in (
        ("rows_B", rows_B, B),
        ("mask_R", mask_R, R),
        ("position_R", position_R, R),
        ("num_prompt_R", num_prompt_R, R),
        ("min_tokens_R", min_tokens_R, R),
    ):
        check_tensor(name, tensor, shape=(size,), dtype=torch.int32)
    words = num_words(vocab_size)
    check_tensor("always_RW", always_RW, shape=(R, words), dtype=torch.int32)
    check_tensor("short_RW", short_RW, shape=(R, words), dtype=torch.int32)
    if logits_BV.shape[1] < vocab_size:
        raise ValueError(f"logits_BV has {logits_BV.shape[1]} columns, fewer than the {vocab_size} ids")
    _forbid_kernel[(B, -(-vocab_size // PART))](
        logits_BV, rows_B, mask_R, position_R, num_prompt_R, min_tokens_R, always_RW, short_RW,
        logits_BV.shape[1], words, vocab_size, PART=PART, num_warps=4,
    )  # fmt: skip


def forbid_step(logits_BV: torch.Tensor, column_N: torch.Tensor, mask_NW: torch.Tensor, vocab_size: int) -> None:
    """Apply one step's masks: mask_NW[n] to logits_BV[column_N[n]]. column_N, mask_NW: int32. Raises ValueError if a
    tensor does not fit."""
    (N,) = column_N.shape
    check_tensor("logits_BV", logits_BV, shape=(None, None), dtype=logits_BV.dtype)
    check_tensor("column_N", column_N, shape=(N,), dtype=torch.int32)
    check_tensor("mask_NW", mask_NW, shape=(N, num_words(vocab_size)), dtype=torch.int32)
    if logits_BV.shape[1] < vocab_size:
        raise ValueError(f"logits_BV has {logits_BV.shape[1]} columns, fewer than the {vocab_size} ids")
    if N:
        _forbid_step_kernel[(N, -(-vocab_size // PART))](
            logits_BV, column_N, mask_NW, logits_BV.shape[1], mask_NW.shape[1], vocab_size, PART=PART, num_warps=4
        )
