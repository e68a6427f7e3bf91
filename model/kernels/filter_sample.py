"""Penalties, min-p, top-k and top-p on the device, for the rows of a batch that wish for them; nothing waits.

It runs behind the step's own sampler (model/kernels/sample.py), which has given every row a token already and moved it
on; rows that wish for more get another token from the same logits. The rules are model/sampling_filters.py's: each of
the three filters keeps a prefix of the logits in falling order, equal logits stay or fall together, and the draw among
the survivors is Gumbel-max with the same noise as everywhere.

Nothing is sorted: the K largest logits lie in the K groups of 64 with the largest maxima. The first kernel gives every
group's maximum, the second one takes the best 64 groups and finds the cut among their 4096 logits by bisection. Where
it lies past those (a flat distribution under top-p alone), the bisection goes over the whole row.

    wish    0: none · 1: filters (and penalties) · 2: penalties alone, the whole vocabulary races

Legend: B sequences of the batch · R rows of the state · V columns of the logits · W parts of a row · G groups.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor, next_power_of_2
from model.kernels.sample import _log2_exponential, _mix64

PART = 4096
GROUP = 64
BEST_GROUPS = 64
MAX_TOP_K = BEST_GROUPS
IN_PROMPT = 0x4000
MAX_COUNT = IN_PROMPT - 1
NO_WISH, FILTERS, PENALTIES_ONLY = 0, 1, 2
_LOG_2 = tl.constexpr(0.6931471805599453)
_GREEDY_TEMPERATURE = tl.constexpr(1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wishes:
    """What rows wish for, and what they have said. [R] each; int32: wish_R, top_k_R (0: off, at most MAX_TOP_K).

    float32: top_p_R (1: off), log_min_p_R (-inf: off), repetition_R (1: off), presence_R, frequency_R (0: off).
    count_RV: int16 [R, vocab_size], how often a token is in the output (at most MAX_COUNT), and IN_PROMPT where it is
    in the prompt; read where one of the penalties is on.
    """

    wish_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    log_min_p_R: torch.Tensor
    repetition_R: torch.Tensor
    presence_R: torch.Tensor
    frequency_R: torch.Tensor
    count_RV: torch.Tensor


class FilterParts:
    """What the first kernel leaves for the second one, for up to max_batch rows."""

    def __init__(self, max_batch: int, vocab_size: int, device: torch.device | str) -> None:
        parts = -(-vocab_size // PART)
        self.num_parts = parts
        self.group_BG = torch.empty(max_batch, parts * (PART // GROUP), dtype=torch.float32, device=device)
        self.best_BG = torch.empty(max_batch, BEST_GROUPS, dtype=torch.int32, device=device)
        self.mass_BW = torch.empty(max_batch, parts, dtype=torch.float32, device=device)
        self.most_BW = torch.empty(max_batch, parts, dtype=torch.float32, device=device)


@triton.jit
def _row_key(seed_R, position_R, num_prompt_R, row):
    # The row has moved on already: its position is the index of the token in question.
    index = tl.load(position_R + row) - tl.load(num_prompt_R + row)
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix64(tl.load(seed_R + row).to(tl.uint64, bitcast=True) + golden) + index.to(tl.uint64) * golden
    key = _mix64(key)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _penalised(logits, counts, token, is_token, repetition, presence, frequency):
    x = tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        packed = tl.load(counts + token, mask=is_token, other=0).to(tl.int32)
        count = (packed & 0x3FFF).to(tl.float32)
        repeated = tl.where(x < 0.0, x * repetition, x / repetition)
        x = tl.where(packed != 0, repeated, x)
        x = x - frequency * count - tl.where(count > 0.0, presence, 0.0)
    return x


@triton.jit
def _noise(token, key_low, key_high, FAST: tl.constexpr):
    return _log2_exponential(token, key_low, key_high, FAST) * _LOG_2


@triton.jit
def _group_maxima_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R,
    wish_R, repetition_R, presence_R, frequency_R, count_RV, group_BG, mass_BW, most_BW, width, vocab_size,
    PART: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_B + b)
    wish = tl.load(wish_R + row)
    if wish == 0:
        return
    token = part * PART + tl.arange(0, PART)
    is_token = token < vocab_size
    x = _penalised(
        logits_BV + b.to(tl.int64) * width, count_RV + row.to(tl.int64) * vocab_size, token, is_token,
        tl.load(repetition_R + row), tl.load(presence_R + row), tl.load(frequency_R + row),
    )  # fmt: skip
    temperature = tl.load(temperature_R + row)
    if (wish == 2) & (temperature > 0.0):
        key_low, key_high = _row_key(seed_R, position_R, num_prompt_R, row)
        x = tl.where(is_token, x / temperature - _noise(token, key_low, key_high, FAST), float("-inf"))
    most = tl.max(x, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    scale = tl.where(temperature > 0.0, temperature, _GREEDY_TEMPERATURE)
    tl.store(mass_BW + b * PARTS + part, tl.sum(tl.exp((x - base) / scale), 0))
    tl.store(most_BW + b * PARTS + part, most)
    maxima = tl.max(tl.reshape(x, [PART // GROUP, GROUP]), 1)
    g = tl.arange(0, PART // GROUP)
    tl.store(group_BG + b.to(tl.int64) * PARTS * (PART // GROUP) + part * (PART // GROUP) + g, maxima)


@triton.jit
def _ordered(value):
    # Integers in the order of the floats.
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest(ordered, k):
    low = tl.full([], -0x80000000, tl.int64)
    high = tl.full([], 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        has = tl.sum((ordered >= middle).to(tl.int32), 0) >= k
        low = tl.where(has, middle, low)
        high = tl.where(has, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _winner(score, token):
    most = tl.max(score, 0)
    return most, tl.min(tl.where(score == most, token, 0x7FFFFFFF), 0)


@triton.jit
def _mass_from(least, logits, counts, repetition, presence, frequency, top, scale, vocab_size, PART: tl.constexpr):
    total = tl.zeros([PART], tl.float32)
    for start in range(0, vocab_size, PART):
        token = start + tl.arange(0, PART)
        is_token = token < vocab_size
        v = (_penalised(logits, counts, token, is_token, repetition, presence, frequency) - top) / scale
        total += tl.where(is_token & (v >= least), tl.exp(v), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _choose_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, last_token_R, token_B,
    wish_R, top_k_R, top_p_R, log_min_p_R, repetition_R, presence_R, frequency_R, count_RV,
    group_BG, mass_BW, most_BW, best_BG, width, vocab_size,
    PART: tl.constexpr, GROUP: tl.constexpr, BEST: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    PART_WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr, MAX_COUNT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    wish = tl.load(wish_R + row)
    if wish == 0:
        return
    temperature = tl.load(temperature_R + row)
    repetition = tl.load(repetition_R + row)
    presence = tl.load(presence_R + row)
    frequency = tl.load(frequency_R + row)
    logits = logits_BV + b.to(tl.int64) * width
    counts = count_RV + row.to(tl.int64) * vocab_size
    key_low, key_high = _row_key(seed_R, position_R, num_prompt_R, row)
    scale = tl.where(temperature > 0.0, temperature, _GREEDY_TEMPERATURE)

    g = tl.arange(0, GROUP_WIDTH)
    maxima = tl.load(group_BG + b.to(tl.int64) * GROUPS + g, mask=g < GROUPS, other=float("-inf"))
    top = tl.max(maxima, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    ordered = _ordered(maxima)
    last = _kth_largest(ordered, BEST)
    is_above = ordered > last
    is_last = ordered == last
    num_above = tl.sum(is_above.to(tl.int32), 0)
    place = tl.where(is_above, tl.cumsum(is_above.to(tl.int32), 0), num_above + tl.cumsum(is_last.to(tl.int32), 0)) - 1
    is_best = (ordered >= last) & (place < BEST)
    next_best = tl.max(tl.where(is_best, float("-inf"), maxima), 0)
    tl.store(best_BG + b * BEST + place, g, mask=is_best)
    tl.debug_barrier()
    best = tl.load(best_BG + b * BEST + tl.arange(0, BEST))
    token = tl.reshape(best[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [BEST * GROUP])
    is_token = token < vocab_size
    x = _penalised(logits, counts, token, is_token, repetition, presence, frequency)
    if wish == 2:
        if temperature > 0.0:
            x = tl.where(is_token, x / temperature - _noise(token, key_low, key_high, FAST), float("-inf"))
        _, chosen = _winner(x, token)
    else:
        # Everything from here on in units of the draw: v = (x - maximum) / temperature.
        v = tl.where(is_token, (x - top) / scale, float("-inf"))
        beyond = (next_best - top) / scale
        top_k = tl.load(top_k_R + row)
        top_p = tl.load(top_p_R + row)
        least = tl.load(log_min_p_R + row)
        if top_k > 0:
            least = tl.maximum(least, _float_of(_kth_largest(_ordered(v), top_k)))
        part = tl.arange(0, PART_WIDTH)
        part_most = tl.load(most_BW + b * PARTS + part, mask=part < PARTS, other=float("-inf"))
        part_mass = tl.load(mass_BW + b * PARTS + part, mask=part < PARTS, other=0.0)
        mass = tl.where(v >= least, tl.exp(v), 0.0)
        row_mass = tl.sum(tl.where(part_mass > 0.0, part_mass * tl.exp((part_most - top) / scale), 0.0), 0)
        is_all = least == float("-inf")
        goal = top_p * tl.where(is_all, row_mass, tl.sum(mass, 0))
        cut = least
        if top_p < 1.0:
            # The magnitude of the cut (v <= 0), as bits: the smallest that leaves enough mass above it.
            near = tl.full([], 0, tl.int64)
            far = tl.full([], 0x7F800000, tl.int64)
            for _ in range(32):
                middle = (near + far) >> 1
                value = -(middle.to(tl.int32).to(tl.float32, bitcast=True))
                has = tl.sum(tl.where(v >= value, mass, 0.0), 0) >= goal
                far = tl.where(has, middle, far)
                near = tl.minimum(tl.where(has, near, middle + 1), far)
            cut = tl.maximum(-(far.to(tl.int32).to(tl.float32, bitcast=True)), least)
        # Right where no logit outside the candidates can be above the cut, nor part of a total that it came from.
        is_right = (beyond < cut) & (is_all | (beyond < least))
        if is_right:
            _, chosen = _winner(tl.where(v >= cut, v - _noise(token, key_low, key_high, FAST), float("-inf")), token)
        else:
            cut = least
            if top_p < 1.0:
                goal = top_p * _mass_from(
                    least, logits, counts, repetition, presence, frequency, top, scale, vocab_size, PART
                )
                near = tl.full([], 0, tl.int64)
                far = tl.full([], 0x7F800000, tl.int64)
                for _ in range(32):
                    middle = (near + far) >> 1
                    value = -(middle.to(tl.int32).to(tl.float32, bitcast=True))
                    found = _mass_from(
                        tl.maximum(value, least), logits, counts, repetition, presence, frequency, top, scale,
                        vocab_size, PART,
                    )  # fmt: skip
                    far = tl.where(found >= goal, middle, far)
                    near = tl.minimum(tl.where(found >= goal, near, middle + 1), far)
                cut = tl.maximum(-(far.to(tl.int32).to(tl.float32, bitcast=True)), least)
            most = tl.full([], float("-inf"), tl.float32)
            chosen = tl.full([], 0, tl.int32)
            for start in range(0, vocab_size, PART):
                t = start + tl.arange(0, PART)
                is_t = t < vocab_size
                w = (_penalised(logits, counts, t, is_t, repetition, presence, frequency) - top) / scale
                here, where = _winner(
                    tl.where(is_t & (w >= cut), w - _noise(t, key_low, key_high, FAST), float("-inf")), t
                )
                chosen = tl.where(here > most, where, chosen)
                most = tl.maximum(here, most)
    chosen = tl.minimum(chosen, vocab_size - 1)
    tl.store(token_B + b, chosen)
    tl.store(last_token_R + row, chosen)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        said = tl.load(counts + chosen)
        tl.store(counts + chosen, tl.where((said & 0x3FFF) < MAX_COUNT, said + 1, said).to(tl.int16))


def filter_and_choose(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    temperature_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    num_prompt_R: torch.Tensor,
    last_token_R: torch.Tensor,
    token_B: torch.Tensor,
    wishes: Wishes,
    parts: FilterParts,
) -> None:
    """Give each of rows_B that has a wish another token, in token_B and last_token_R, and count it.

    Behind `sample_and_advance` with the same arguments: position_R is that of the token. Rows are distinct, except
    those without a wish. Dtypes as there. Raises ValueError where a tensor does not fit.
    """
    (B,), (R,), vocab_size = rows_B.shape, position_R.shape, wishes.count_RV.shape[1]
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("token_B", token_B, shape=(B,), dtype=torch.int32)
    check_tensor("count_RV", wishes.count_RV, shape=(R, None), dtype=torch.int16)
    if logits_BV.shape[1] < vocab_size or len(parts.group_BG) < B:
        raise ValueError(f"logits_BV is {tuple(logits_BV.shape)}: need {vocab_size} ids, {len(parts.group_BG)} rows")
    tail = (wishes.repetition_R, wishes.presence_R, wishes.frequency_R, wishes.count_RV, parts.group_BG, parts.mass_BW)
    sizes, groups = (logits_BV.shape[1], vocab_size), parts.group_BG.shape[1]
    _group_maxima_kernel[(B, parts.num_parts)](
        logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, wishes.wish_R, *tail, parts.most_BW, *sizes,
        PART=PART, GROUP=GROUP, PARTS=parts.num_parts, FAST=logits_BV.is_cuda, num_warps=8,
    )  # fmt: skip
    _choose_kernel[(B,)](
        logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, last_token_R, token_B, wishes.wish_R,
        wishes.top_k_R, wishes.top_p_R, wishes.log_min_p_R, *tail, parts.most_BW, parts.best_BG, *sizes,
        PART=PART, GROUP=GROUP, BEST=BEST_GROUPS, PARTS=parts.num_parts, GROUPS=groups,
        PART_WIDTH=next_power_of_2(parts.num_parts), GROUP_WIDTH=max(next_power_of_2(groups), BEST_GROUPS),
        MAX_COUNT=MAX_COUNT, FAST=logits_BV.is_cuda, num_warps=8,
    )  # fmt: skip
