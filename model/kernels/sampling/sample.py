"""From logits to tokens in one pass: the largest logit, or a draw from softmax(logits / temperature).

The draw is Gumbel-max with the counter-based noise of model/sampling/noise.py: a function of (seed, output index, token
id) and of nothing else, so a row's token does not depend on the batch. A first kernel bounds each part of a row from
above, with noise that costs a third of the exact noise (which took longer than reading the logits). A second kernel
computes parts exactly, highest bound first, until no bound is above the best score: most often one part of 75. It also
advances the row: its last token, its position, and whether the logits were finite.

If the vocabulary is divided among ranks, each has some columns of the logits and needs no others: the second kernel
leaves a candidate, the best of its columns with their noise, and a third kernel, after an exchange of all ranks'
candidates, takes the best of them and advances the row. That is the token that a single rank would have chosen.

    candidate   | score, in the order of integers | token, lowest id is largest  | whether all are finite |
    bits          63                             32                             1                        0

Legend: B sequences of the batch · R rows of the state · V columns of the logits · W parts of a row · G ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.kernels.sampling.noise import draw_key, log2_exponential, log2_exponential_bound
from octavo.model.kernels.sampling.ordering import ordered
from octavo.model.sampling.noise import log_exponential, row_keys

PART = 2048
WARPS = 2


def num_parts(num_columns: int) -> int:
    """Number of parts of a row."""
    return -(-num_columns // PART)


def sample_reference(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, seed_B: torch.Tensor, index_B: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The obvious reference on the CPU: tokens_B (int64) and is_finite_B. seed_B: int64 with the bits of the uint64
    seed."""
    x_BV = logits_BV[:, :vocab_size].float()
    is_finite_B = torch.isfinite(x_BV.max(dim=-1).values) & ~x_BV.isnan().any(dim=-1)
    keys = torch.from_numpy(row_keys(seed_B.numpy().view("uint64"), index_B.numpy()))
    noise_BV = log_exponential(keys, torch.arange(vocab_size, dtype=torch.int32))
    drawn_BV = x_BV / temperature_B.clamp(min=1e-30)[:, None] - noise_BV
    return torch.where((temperature_B > 0)[:, None], drawn_BV, x_BV).argmax(dim=-1), is_finite_B


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bound_parts_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, bound_BW, width, first_token, vocab_size,
    PART: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_B + b)
    temperature = tl.load(temperature_R + row)
    column = part * PART + tl.arange(0, PART)
    token = first_token + column
    # The width is a round number, the vocabulary size is not: a mask by the latter would load element by element.
    x = tl.load(logits_BV + b.to(tl.int64) * width + column, mask=column < width, other=float("-inf"))
    x = x.to(tl.float32)
    if first_token + (part + 1) * PART > vocab_size:
        x = tl.where(token < vocab_size, x, float("-inf"))
    if temperature > 0.0:
        index = tl.load(position_R + row) + 1 - tl.load(num_prompt_R + row)
        key_low, key_high = draw_key(tl.load(seed_R + row), index)
        x = x * (1.4426950408889634 / temperature) - log2_exponential_bound(token, key_low, key_high, FAST)
        most = tl.reduce(x, 0, _larger) + 32.0
    else:
        most = tl.reduce(x, 0, _larger)
    tl.store(bound_BW + b * PARTS + part, most)


@triton.jit
def _move_on(
    b, row, chosen, is_fine, last_token_R, position_R, token_B, is_finite_B, scratch_row,
):  # fmt: skip
    tl.store(token_B + b, chosen)
    tl.store(is_finite_B + b, is_fine.to(tl.int8))
    if row != scratch_row:
        tl.store(last_token_R + row, chosen)
        tl.store(position_R + row, tl.load(position_R + row) + 1)


@triton.jit
def _choose_kernel(
    logits_BV, rows_B, temperature_R, seed_R, num_prompt_R, bound_BW, last_token_R, position_R, token_B, is_finite_B,
    candidate_B, width, first_token, vocab_size, scratch_row,
    PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    temperature = tl.load(temperature_R + row)
    position = tl.load(position_R + row)
    key_low, key_high = draw_key(tl.load(seed_R + row), position + 1 - tl.load(num_prompt_R + row))
    w = tl.arange(0, WIDTH)
    bound = tl.load(bound_BW + b * PARTS + w, mask=w < PARTS, other=float("-inf"))
    # False for NaN too. What is not finite is reported and never chosen; its part is computed in any case.
    is_fine = bound < float("inf")
    bound = tl.where(is_fine, bound, float("inf"))
    best = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], 0x7FFFFFFF, tl.int32)
    largest = tl.max(bound, 0)
    while (largest > float("-inf")) & (largest + 0.001 >= best - 1e-6 * tl.abs(best)):
        part = tl.min(tl.where(bound == largest, w, WIDTH), 0)
        column = part * PART + tl.arange(0, PART)
        token = first_token + column
        x = tl.load(logits_BV + b.to(tl.int64) * width + column, mask=column < width, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where((token < vocab_size) & (x < float("inf")), x, float("-inf"))
        if temperature > 0.0:
            # Base 2 throughout: argmax of x / T * log2(e) - log2(E) is that of x / T - ln(E).
            x = x * (1.4426950408889634 / temperature) - log2_exponential(token, key_low, key_high, FAST)
        most = tl.max(x, 0)
        first = tl.min(tl.where(x == most, token, 0x7FFFFFFF), 0)
        chosen = tl.where((most > best) | ((most == best) & (first < chosen)), first, chosen)
        best = tl.maximum(most, best)
        bound = tl.where(w == part, float("-inf"), bound)
        largest = tl.max(bound, 0)
    is_any = best > float("-inf")
    is_all_fine = tl.min(is_fine.to(tl.int32), 0)
    if IS_ALONE:
        _move_on(
            b, row, tl.where(is_any, chosen, 0), (is_all_fine == 1) & is_any, last_token_R, position_R,
            token_B, is_finite_B, scratch_row,
        )  # fmt: skip
    else:
        score = ordered(tl.where(best == 0.0, 0.0, best)).to(tl.int64)  # the two zeros are equal
        after = tl.where(is_any, 0x7FFFFFFF - chosen, 0).to(tl.int64)
        tl.store(candidate_B + b, (score << 32) | (after << 1) | is_all_fine.to(tl.int64))


@triton.jit
def _choose_among_ranks_kernel(
    candidate_BG, rows_B, last_token_R, position_R, token_B, is_finite_B, scratch_row,
    RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    g = tl.arange(0, WIDTH)
    # Places beyond the ranks repeat the first candidate.
    candidate = tl.load(candidate_BG + b * RANKS + tl.where(g < RANKS, g, 0))
    after = (tl.max(candidate, 0) >> 1) & 0x7FFFFFFF
    is_any = after > 0
    chosen = tl.where(is_any, 0x7FFFFFFF - after, 0).to(tl.int32)
    _move_on(
        b, tl.load(rows_B + b), chosen, (tl.min(candidate & 1, 0) == 1) & is_any, last_token_R,
        position_R, token_B, is_finite_B, scratch_row,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """A rank's part of the vocabulary. first: id of its first column. gather: collects all ranks' candidates; called
    with candidate_B1 (int64) and candidate_BG, which it fills in order of the ranks."""

    first: int
    num_ranks: int
    gather: Callable[[torch.Tensor, torch.Tensor], object]


class SampleParts:
    """The bounds that the first kernel leaves for the second, for up to max_batch rows; with several ranks also their
    candidates. num_columns: of the logits; None: the vocabulary's. of_ranks: None with one rank. candidate_B: memory
    for this rank's candidates; None: allocate it."""

    def __init__(
        self,
        max_batch: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        num_columns: int | None = None,
        of_ranks: VocabularyPart | None = None,
        candidate_B: torch.Tensor | None = None,
    ) -> None:
        self.vocab_size, self.of_ranks = vocab_size, of_ranks
        self.num_columns = vocab_size if num_columns is None else min(num_columns, vocab_size)
        shape = (max_batch, num_parts(self.num_columns))
        self.bound_BW = torch.empty(shape, dtype=torch.float32, device=device)
        self.candidate_B, self.candidate_BG = candidate_B, torch.empty(0, dtype=torch.int64, device=device)
        if of_ranks is not None:
            self.candidate_BG = self.candidate_BG.new_empty(max_batch, of_ranks.num_ranks)
            self.candidate_B = self.candidate_BG.new_empty(max_batch) if candidate_B is None else candidate_B


def sample_and_advance(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    temperature_R: torch.Tensor,
    seed_R: torch.Tensor,
    num_prompt_R: torch.Tensor,
    last_token_R: torch.Tensor,
    position_R: torch.Tensor,
    token_B: torch.Tensor,
    is_finite_B: torch.Tensor,
    parts: SampleParts,
) -> None:
    """Choose a token per row and make it the row's last one, at the next position.

    logits_BV: any float dtype; with several ranks, this one's columns. Ids from parts.vocab_size on are never chosen.
    rows_B, last_token_R, position_R, num_prompt_R, token_B: int32. seed_R: int64 (the bits of a uint64). temperature_R:
    float32, 0 is greedy. is_finite_B: int8. The output index of the token is position + 1 - num_prompt. The last row of
    the state is scratch and stays as it is. Raises ValueError if a tensor does not fit.
    """
    (B,), (R,) = rows_B.shape, position_R.shape
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    for name, tensor, dtype in (
        ("temperature_R", temperature_R, torch.float32),
        ("seed_R", seed_R, torch.int64),
        ("num_prompt_R", num_prompt_R, torch.int32),
        ("last_token_R", last_token_R, torch.int32),
        ("position_R", position_R, torch.int32),
    ):
        check_tensor(name, tensor, shape=(R,), dtype=dtype)
    check_tensor("token_B", token_B, shape=(B,), dtype=torch.int32)
    check_tensor("is_finite_B", is_finite_B, shape=(B,), dtype=torch.int8)
    if logits_BV.shape[1] < parts.num_columns:
        raise ValueError(f"logits_BV has {logits_BV.shape[1]} columns, fewer than the {parts.num_columns} ids")
    count, width, ranks = num_parts(parts.num_columns), logits_BV.shape[1], parts.of_ranks
    first = 0 if ranks is None else ranks.first
    _bound_parts_kernel[(B, count)](
        logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, parts.bound_BW, width, first,
        parts.vocab_size, PART=PART, PARTS=count, FAST=logits_BV.is_cuda, num_warps=WARPS,
    )  # fmt: skip
    _choose_kernel[(B,)](
        logits_BV, rows_B, temperature_R, seed_R, num_prompt_R, parts.bound_BW, last_token_R, position_R, token_B,
        is_finite_B, parts.candidate_B, width, first, parts.vocab_size, R - 1,
        PART=PART, PARTS=count, WIDTH=next_power_of_2(count), FAST=logits_BV.is_cuda, IS_ALONE=ranks is None,
        num_warps=WARPS,
    )  # fmt: skip
    if ranks is None:
        return
    assert parts.candidate_B is not None
    candidate_BG = parts.candidate_BG[:B]
    ranks.gather(parts.candidate_B[:B, None], candidate_BG)
    _choose_among_ranks_kernel[(B,)](
        candidate_BG, rows_B, last_token_R, position_R, token_B, is_finite_B, R - 1,
        RANKS=ranks.num_ranks, WIDTH=next_power_of_2(ranks.num_ranks), num_warps=1,
    )  # fmt: skip
