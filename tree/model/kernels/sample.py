"""From logits to tokens in one pass: the largest logit, or a draw from softmax(logits / temperature).

The draw is Gumbel-max with the counter-based noise of model/sampling_noise.py: a function of (seed, output index, token
id) and of nothing else, so a row's token does not depend on the batch. A first kernel reduces parts of each row, a
second one the parts; it also moves the row on: its last token, its position, and whether the logits were finite.

Legend: B sequences of the batch · R rows of the state · V columns of the logits · W parts of a row.
"""

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor, next_power_of_2
from model.kernels.noise import draw_key, log2_exponential
from model.sampling_noise import log_exponential, row_keys

PART = 2048
WARPS = 4


def num_parts(vocab_size: int) -> int:
    """Parts that a row is cut into."""
    return -(-vocab_size // PART)


def sample_reference(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, seed_B: torch.Tensor, index_B: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The obvious twin on the CPU: tokens_B (int64) and is_finite_B. seed_B: int64 with the bits of the uint64 seed."""
    x_BV = logits_BV[:, :vocab_size].float()
    is_finite_B = torch.isfinite(x_BV.max(dim=-1).values) & ~x_BV.isnan().any(dim=-1)
    keys = torch.from_numpy(row_keys(seed_B.numpy().view("uint64"), index_B.numpy()))
    noise_BV = log_exponential(keys, torch.arange(vocab_size, dtype=torch.int32))
    drawn_BV = x_BV / temperature_B.clamp(min=1e-30)[:, None] - noise_BV
    return torch.where((temperature_B > 0)[:, None], drawn_BV, x_BV).argmax(dim=-1), is_finite_B


@triton.jit
def _reduce_parts_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, best_BW, token_BW, bad_BW, width, vocab_size,
    PART: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_B + b)
    temperature = tl.load(temperature_R + row)
    is_drawn = temperature > 0.0
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits_BV + b.to(tl.int64) * width + token, mask=token < vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    # False for NaN too. What is not finite is told and never chosen; behind the last id all is -inf.
    is_fine = x < float("inf")
    x = tl.where(is_fine, x, float("-inf"))
    if is_drawn:
        # Base 2 throughout: argmax of x / T * log2(e) - log2(E) is that of x / T - ln(E).
        index = tl.load(position_R + row) + 1 - tl.load(num_prompt_R + row)
        key_low, key_high = draw_key(tl.load(seed_R + row), index)
        x = x * (1.4426950408889634 / temperature) - log2_exponential(token, key_low, key_high, FAST)
    most = tl.max(x, 0)
    at = b * PARTS + part
    tl.store(best_BW + at, most)
    tl.store(token_BW + at, tl.min(tl.where(x == most, token, 0x7FFFFFFF), 0))
    tl.store(bad_BW + at, tl.max(tl.where(is_fine, 0, 1), 0))


@triton.jit
def _advance_kernel(
    best_BW, token_BW, bad_BW, rows_B, last_token_R, position_R, token_B, is_finite_B, scratch_row,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    w = tl.arange(0, WIDTH)
    best = tl.load(best_BW + b * PARTS + w, mask=w < PARTS, other=float("-inf"))
    token = tl.load(token_BW + b * PARTS + w, mask=w < PARTS, other=0x7FFFFFFF)
    bad = tl.max(tl.load(bad_BW + b * PARTS + w, mask=w < PARTS, other=0), 0)
    most = tl.max(best, 0)
    chosen = tl.min(tl.where(best == most, token, 0x7FFFFFFF), 0)
    tl.store(token_B + b, chosen)
    tl.store(is_finite_B + b, ((bad == 0) & (most > float("-inf"))).to(tl.int8))
    row = tl.load(rows_B + b)
    if row != scratch_row:
        tl.store(last_token_R + row, chosen)
        tl.store(position_R + row, tl.load(position_R + row) + 1)


class SampleParts:
    """Where the first kernel leaves what the second one reads, for up to max_batch rows of V logits."""

    def __init__(self, max_batch: int, vocab_size: int, device: torch.device | str) -> None:
        shape = (max_batch, num_parts(vocab_size))
        self.vocab_size = vocab_size
        self.best_BW = torch.empty(shape, dtype=torch.float32, device=device)
        self.token_BW = torch.empty(shape, dtype=torch.int32, device=device)
        self.bad_BW = torch.empty(shape, dtype=torch.int32, device=device)


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

    logits_BV: any float dtype; ids from parts.vocab_size on are never chosen. rows_B, last_token_R, position_R,
    num_prompt_R, token_B: int32. seed_R: int64 (the bits of a uint64). temperature_R: float32, 0 is greedy.
    is_finite_B: int8. The output index of the token is position + 1 - num_prompt. The last row of the state is scratch:
    it stays as it is. Raises ValueError where a tensor does not fit.
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
    if logits_BV.shape[1] < parts.vocab_size:
        raise ValueError(f"logits_BV has {logits_BV.shape[1]} columns, fewer than the {parts.vocab_size} ids")
    count = num_parts(parts.vocab_size)
    _reduce_parts_kernel[(B, count)](
        logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R,
        parts.best_BW, parts.token_BW, parts.bad_BW, logits_BV.shape[1], parts.vocab_size,
        PART=PART, PARTS=count, FAST=logits_BV.is_cuda, num_warps=WARPS,
    )  # fmt: skip
    _advance_kernel[(B,)](
        parts.best_BW, parts.token_BW, parts.bad_BW, rows_B, last_token_R, position_R, token_B, is_finite_B, R - 1,
        PARTS=count, WIDTH=next_power_of_2(count), num_warps=1,
    )  # fmt: skip
