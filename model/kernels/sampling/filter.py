"""Biases, penalties, top-n-sigma, min-p, top-k, top-p and typical-p on the device, for the rows of a batch that have
them.

It runs after the step's own sampler (model/kernels/sampling/sample.py), which has already given every row a token and
advanced it; rows that need more get another token from the same logits, and nothing waits. The rules are those of
model/sampling/filters.py: each filter keeps a prefix of the logits in descending order (typical-p: a range around the
mean), equal logits are kept or dropped together, and the draw among the survivors is Gumbel-max with the same noise as
everywhere.

Nothing is sorted: the K largest logits are in the K groups of 64 with the largest maxima. The first kernel computes
every group's maximum, the second takes the best 64 groups and finds the cut among their 4096 logits by bisection. For
rows whose cut is beyond those, a third searches the whole row (model/kernels/sampling/whole_row.py).

    method  0: keep the token · 1: filters, or a temperature near zero · 2: a race (or argmax) of all tokens

Legend: B sequences of the batch · R rows of the state · V columns of the logits · W parts of a row · G groups · A room
for biases · H ring of newest tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.kernels.sampling.bad_words import RING
from octavo.model.kernels.sampling.columns import (
    GROUP,
    MAX_BIASES,
    MAX_COUNT,
    PART,
    load_columns,
    load_part,
    num_parts,
    row_of_columns,
)
from octavo.model.kernels.sampling.noise import draw_key, log_exponential
from octavo.model.kernels.sampling.ordering import float_of, kth_largest, largest_groups, ordered, winner
from octavo.model.kernels.sampling.whole_row import FARTHEST, choose_in_row

BEST_GROUPS = 64
KEEP, FILTERS, RACE = 0, 1, 2
EXHAUSTED = 2
"""Bit of is_finite_B: masks left no token for the row."""
_GREEDY_TEMPERATURE = tl.constexpr(1.0)
_COLDEST = tl.constexpr(1e-37)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingColumns:
    """How rows are sampled, and their output so far. [R] each; int32: method_R, top_k_R (0: off), num_biases_R.

    float32: top_p_R, typical_p_R, repetition_R (1: off), top_n_sigma_R, presence_R, frequency_R (0: off), log_min_p_R
    (-inf: off). count_RV: int16 [R, vocab_size], how often a token is in the output (at most MAX_COUNT), plus IN_PROMPT
    if it is in the prompt; read if one of the penalties is on. bias_id_RA: int32, as in
    model/kernels/sampling/columns.py. said_RH: int32, as in model/kernels/sampling/bad_words.py.
    """

    method_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    log_min_p_R: torch.Tensor
    top_n_sigma_R: torch.Tensor
    typical_p_R: torch.Tensor
    repetition_R: torch.Tensor
    presence_R: torch.Tensor
    frequency_R: torch.Tensor
    num_biases_R: torch.Tensor
    bias_id_RA: torch.Tensor
    count_RV: torch.Tensor
    said_RH: torch.Tensor


class FilterParts:
    """Intermediate results of the kernels, for up to max_batch rows. biased_BA: filled by `move_biased` in
    model/kernels/sampling/columns.py."""

    def __init__(self, max_batch: int, vocab_size: int, device: torch.device | str) -> None:
        parts = num_parts(vocab_size) + 1
        self.num_parts = parts
        self.group_BG = torch.empty(max_batch, parts * (PART // GROUP), dtype=torch.float32, device=device)
        self.best_BG = torch.empty(max_batch, BEST_GROUPS, dtype=torch.int32, device=device)
        self.mass_BW = torch.empty(max_batch, parts, dtype=torch.float32, device=device)
        self.most_BW = torch.empty(max_batch, parts, dtype=torch.float32, device=device)
        # For each part, for top-n-sigma: number of finite logits, their mean, sum of squared distances from it.
        self.moments_B3W = torch.empty(max_batch, 3, parts, dtype=torch.float32, device=device)
        self.undecided_B = torch.empty(max_batch, dtype=torch.int32, device=device)
        self.biased_BA = torch.empty(max_batch, MAX_BIASES, dtype=torch.float32, device=device)


@triton.jit
def _draw_key(seed_R, position_R, num_prompt_R, row):
    # The row has already advanced: its position is the index of the token in question.
    return draw_key(tl.load(seed_R + row), tl.load(position_R + row) - tl.load(num_prompt_R + row))


@triton.jit
def _scale(temperature):
    return tl.where(temperature > 0.0, tl.maximum(temperature, _COLDEST), _GREEDY_TEMPERATURE)


@triton.jit
def _group_maxima_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, method_R,
    count_RV, bias_id_RA, biased_BA, num_biases_R, repetition_R, presence_R, frequency_R,
    top_n_sigma_R, moments_B3W, group_BG, mass_BW, most_BW, width, vocab_size,
    PART: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, A: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_B + b)
    method = tl.load(method_R + row)
    is_tail = part == PARTS - 1
    if (method == 0) | (is_tail & (tl.load(num_biases_R + row) == 0)):
        return
    columns = row_of_columns(
        b, row, logits_BV, width, count_RV, vocab_size, bias_id_RA, biased_BA, num_biases_R, (PARTS - 1) * PART,
        repetition_R, presence_R, frequency_R, A,
    )  # fmt: skip
    token, x, is_token = load_part(columns, part * PART, PART)
    temperature = tl.load(temperature_R + row)
    if (method == 2) & (temperature > 0.0):
        key_low, key_high = _draw_key(seed_R, position_R, num_prompt_R, row)
        x = tl.where(is_token, x / temperature - log_exponential(token, key_low, key_high, FAST), float("-inf"))
    if tl.load(top_n_sigma_R + row) > 0.0:
        is_left = x > float("-inf")
        count = tl.sum(tl.where(is_left, 1.0, 0.0), 0)
        mean = tl.sum(tl.where(is_left, x, 0.0), 0) / tl.maximum(count, 1.0)
        away = tl.where(is_left, x - mean, 0.0)
        moments = moments_B3W + b * 3 * PARTS + part
        tl.store(moments, count)
        tl.store(moments + PARTS, mean)
        tl.store(moments + 2 * PARTS, tl.sum(away * away, 0))
    most = tl.max(x, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(mass_BW + b * PARTS + part, tl.sum(tl.exp((x - base) / _scale(temperature)), 0))
    tl.store(most_BW + b * PARTS + part, most)
    maxima = tl.max(tl.reshape(x, [PART // GROUP, GROUP]), 1)
    g = part * (PART // GROUP) + tl.arange(0, PART // GROUP)
    tl.store(group_BG + b * PARTS * (PART // GROUP) + g, maxima)


@triton.jit
def _mass_of_parts(most, mass, top, scale):
    return tl.sum(tl.where(mass > 0.0, mass * tl.exp((most - top) / scale), 0.0), 0)


@triton.jit
def _floor(b, row, scale, num_parts, log_min_p_R, top_n_sigma_R, moments_B3W, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """The least v that min-p and top-n-sigma keep, at least -FARTHEST. The standard deviation of the row is computed
    from the parts' moments: Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances"
    (1979)."""
    floor = tl.maximum(tl.load(log_min_p_R + row), -FARTHEST)
    n = tl.load(top_n_sigma_R + row)
    if n > 0.0:
        part = tl.arange(0, WIDTH)
        is_part = part < num_parts
        moments = moments_B3W + b * 3 * PARTS + part
        count = tl.load(moments, mask=is_part, other=0.0)
        mean = tl.load(moments + PARTS, mask=is_part, other=0.0)
        square = tl.load(moments + 2 * PARTS, mask=is_part, other=0.0)
        total = tl.maximum(tl.sum(count, 0), 1.0)
        away = mean - tl.sum(count * mean, 0) / total
        sigma = tl.sqrt(tl.sum(square + count * away * away, 0) / total)
        floor = tl.maximum(floor, -n * sigma / scale)
    return floor


@triton.jit
def _least_of_mass(v, mass, goal):
    # Bisects the magnitude of the cut (v <= 0), as bits: the smallest that leaves enough mass above the cut.
    near = tl.full([], 0, tl.int64)
    far = tl.full([], 0x7F800000, tl.int64)
    for _ in range(32):
        middle = (near + far) >> 1
        value = -(middle.to(tl.int32).to(tl.float32, bitcast=True))
        has = tl.sum(tl.where(v >= value, mass, 0.0), 0) >= goal
        far = tl.where(has, middle, far)
        near = tl.minimum(tl.where(has, near, middle + 1), far)
    return -(far.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _cut_candidates(v, beyond, row_mass, floor, top_k, top_p):
    """The cut among candidates, and whether it is exact: no column beyond them can be above it or be part of the mass
    from which it was computed."""
    least = floor
    if top_k > 0:
        least = tl.maximum(least, float_of(kth_largest(ordered(v), top_k)))
    is_whole = (top_k == 0) & (floor <= -FARTHEST)
    cut = least
    if top_p < 1.0:
        mass = tl.where(v >= least, tl.exp(v), 0.0)
        cut = tl.maximum(least, _least_of_mass(v, mass, top_p * tl.where(is_whole, row_mass, tl.sum(mass, 0))))
    is_mass_right = is_whole | (beyond < least) | (top_p >= 1.0)
    # There are at least top_k candidates, so that `least` is a number, or no column is missing among them.
    is_right = (beyond < cut) & is_mass_right
    return cut, is_right


@triton.jit
def _keep(
    chosen, most, b, row, vocab_size, position_R, last_token_R, token_B, is_finite_B, said_RH, count_RV, has_penalty,
    RING: tl.constexpr, MAX_COUNT: tl.constexpr,
):  # fmt: skip
    chosen = tl.minimum(chosen, vocab_size - 1)
    tl.store(token_B + b, chosen)
    tl.store(last_token_R + row, chosen)
    tl.store(said_RH + row * RING + tl.load(position_R + row) % RING, chosen)
    if most == float("-inf"):
        is_finite = tl.load(is_finite_B + b)
        tl.store(is_finite_B + b, tl.where(is_finite == 1, 3, is_finite).to(tl.int8))
    if has_penalty:
        said = tl.load(count_RV + row.to(tl.int64) * vocab_size + chosen)
        more = tl.where((said & 0x3FFF) < MAX_COUNT, said + 1, said).to(tl.int16)
        tl.store(count_RV + row.to(tl.int64) * vocab_size + chosen, more)


@triton.jit
def _has_penalty(repetition_R, presence_R, frequency_R, row):
    is_on = (tl.load(repetition_R + row) != 1.0) | (tl.load(presence_R + row) != 0.0)
    return is_on | (tl.load(frequency_R + row) != 0.0)


@triton.jit
def _choose_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, last_token_R, token_B, is_finite_B,
    method_R, top_k_R, top_p_R, log_min_p_R, top_n_sigma_R, typical_p_R, said_RH, moments_B3W,
    count_RV, bias_id_RA, biased_BA, num_biases_R, repetition_R, presence_R, frequency_R,
    group_BG, mass_BW, most_BW, best_BG, undecided_B, width, vocab_size,
    PART: tl.constexpr, GROUP: tl.constexpr, BEST: tl.constexpr, PARTS: tl.constexpr, PART_WIDTH: tl.constexpr,
    GROUP_WIDTH: tl.constexpr, A: tl.constexpr, RING: tl.constexpr, MAX_COUNT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    method = tl.load(method_R + row)
    if method == 0:
        tl.store(undecided_B + b, 0)
        return
    columns = row_of_columns(
        b, row, logits_BV, width, count_RV, vocab_size, bias_id_RA, biased_BA, num_biases_R, (PARTS - 1) * PART,
        repetition_R, presence_R, frequency_R, A,
    )  # fmt: skip
    num_parts = tl.where(tl.load(num_biases_R + row) > 0, PARTS, PARTS - 1)
    temperature = tl.load(temperature_R + row)
    scale = _scale(temperature)
    key_low, key_high = _draw_key(seed_R, position_R, num_prompt_R, row)

    g = tl.arange(0, GROUP_WIDTH)
    is_group = g < num_parts * (PART // GROUP)
    maxima = tl.load(group_BG + b * PARTS * (PART // GROUP) + g, mask=is_group, other=float("-inf"))
    most = tl.max(maxima, 0)
    top = tl.where(most == float("-inf"), 0.0, most)
    is_best, place, beyond = largest_groups(maxima, g, BEST)
    tl.store(best_BG + b * BEST + place, g, mask=is_best)
    tl.debug_barrier()
    best = tl.load(best_BG + b * BEST + tl.arange(0, BEST))
    column = tl.reshape(best[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [BEST * GROUP])
    token, x, is_token = load_columns(columns, column)
    is_right = True
    if method == 2:
        if temperature > 0.0:
            x = x / temperature - log_exponential(token, key_low, key_high, FAST)
        score = tl.where(is_token, x, float("-inf"))
    else:
        # From here on everything is in units of the draw: v = (x - maximum) / temperature.
        v = tl.where(is_token, (x - top) / scale, float("-inf"))
        part = tl.arange(0, PART_WIDTH)
        part_most = tl.load(most_BW + b * PARTS + part, mask=part < num_parts, other=float("-inf"))
        part_mass = tl.load(mass_BW + b * PARTS + part, mask=part < num_parts, other=0.0)
        floor = _floor(b, row, scale, num_parts, log_min_p_R, top_n_sigma_R, moments_B3W, PARTS, PART_WIDTH)
        top_k = tl.load(top_k_R + row)
        row_mass = _mass_of_parts(part_most, part_mass, top, scale)
        top_p = tl.load(top_p_R + row)
        cut, is_right = _cut_candidates(v, (beyond - top) / scale, row_mass, floor, top_k, top_p)
        is_right &= (tl.load(typical_p_R + row) >= 1.0) & (top_k <= BEST * GROUP)
        score = tl.where(v >= cut, v - log_exponential(token, key_low, key_high, FAST), float("-inf"))
    if is_right:
        _, chosen = winner(score, token)
        _keep(
            chosen, most, b, row, vocab_size, position_R, last_token_R, token_B, is_finite_B, said_RH, count_RV,
            _has_penalty(repetition_R, presence_R, frequency_R, row), RING, MAX_COUNT,
        )  # fmt: skip
    tl.store(undecided_B + b, tl.where(is_right, 0, 1))


@triton.jit
def _search_kernel(
    logits_BV, rows_B, temperature_R, seed_R, position_R, num_prompt_R, last_token_R, token_B, is_finite_B,
    top_k_R, top_p_R, log_min_p_R, top_n_sigma_R, typical_p_R, said_RH, moments_B3W,
    count_RV, bias_id_RA, biased_BA, num_biases_R, repetition_R, presence_R, frequency_R,
    most_BW, undecided_B, width, vocab_size,
    PART: tl.constexpr, PARTS: tl.constexpr, PART_WIDTH: tl.constexpr, A: tl.constexpr, RING: tl.constexpr,
    MAX_COUNT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if tl.load(undecided_B + b) == 0:
        return
    row = tl.load(rows_B + b)
    columns = row_of_columns(
        b, row, logits_BV, width, count_RV, vocab_size, bias_id_RA, biased_BA, num_biases_R, (PARTS - 1) * PART,
        repetition_R, presence_R, frequency_R, A,
    )  # fmt: skip
    num_parts = tl.where(tl.load(num_biases_R + row) > 0, PARTS, PARTS - 1)
    key_low, key_high = _draw_key(seed_R, position_R, num_prompt_R, row)
    part = tl.arange(0, PART_WIDTH)
    most = tl.max(tl.load(most_BW + b * PARTS + part, mask=part < num_parts, other=float("-inf")), 0)
    scale = _scale(tl.load(temperature_R + row))
    floor = _floor(b, row, scale, num_parts, log_min_p_R, top_n_sigma_R, moments_B3W, PARTS, PART_WIDTH)
    chosen = choose_in_row(
        columns, num_parts * PART, most, scale, tl.load(top_k_R + row), tl.load(top_p_R + row), floor,
        tl.load(typical_p_R + row), key_low, key_high, FAST,
    )  # fmt: skip
    _keep(
        chosen, most, b, row, vocab_size, position_R, last_token_R, token_B, is_finite_B, said_RH, count_RV,
        _has_penalty(repetition_R, presence_R, frequency_R, row), RING, MAX_COUNT,
    )  # fmt: skip


def filter_and_choose(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    temperature_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    num_prompt_R: torch.Tensor,
    last_token_R: torch.Tensor,
    token_B: torch.Tensor,
    is_finite_B: torch.Tensor,
    sampling: SamplingColumns,
    parts: FilterParts,
) -> None:
    """Give each of rows_B that has a method of its own another token, in token_B and last_token_R; count it, and record
    it in said_RH.

    Runs after `sample_and_advance` with the same arguments: position_R is that of the token. is_finite_B gets the bit
    EXHAUSTED if no token is left. Rows are distinct, except those that keep their token. Dtypes as there. Raises
    ValueError if a tensor does not fit.
    """
    (B,), (R,), vocab_size = rows_B.shape, position_R.shape, sampling.count_RV.shape[1]
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("token_B", token_B, shape=(B,), dtype=torch.int32)
    check_tensor("is_finite_B", is_finite_B, shape=(B,), dtype=torch.int8)
    check_tensor("count_RV", sampling.count_RV, shape=(R, None), dtype=torch.int16)
    check_tensor("bias_id_RA", sampling.bias_id_RA, shape=(R, MAX_BIASES), dtype=torch.int32)
    check_tensor("said_RH", sampling.said_RH, shape=(R, RING), dtype=torch.int32)
    if logits_BV.shape[1] < vocab_size or len(parts.group_BG) < B:
        raise ValueError(f"logits_BV is {tuple(logits_BV.shape)}: need {vocab_size} ids, {len(parts.group_BG)} rows")
    state = (temperature_R, seed_R, position_R, num_prompt_R)
    outcome = (last_token_R, token_B, is_finite_B)
    filters = (
        sampling.top_k_R, sampling.top_p_R, sampling.log_min_p_R, sampling.top_n_sigma_R, sampling.typical_p_R,
        sampling.said_RH, parts.moments_B3W,
    )  # fmt: skip
    columns = (
        sampling.count_RV, sampling.bias_id_RA, parts.biased_BA, sampling.num_biases_R, sampling.repetition_R,
        sampling.presence_R, sampling.frequency_R,
    )  # fmt: skip
    found = (parts.group_BG, parts.mass_BW, parts.most_BW)
    sizes, groups = (logits_BV.shape[1], vocab_size), parts.group_BG.shape[1]
    tiles = {"PART": PART, "PARTS": parts.num_parts, "A": MAX_BIASES, "FAST": logits_BV.is_cuda}
    rest = {"PART_WIDTH": next_power_of_2(parts.num_parts), "RING": RING, "MAX_COUNT": MAX_COUNT}
    _group_maxima_kernel[(B, parts.num_parts)](
        logits_BV, rows_B, *state, sampling.method_R, *columns, sampling.top_n_sigma_R, parts.moments_B3W, *found,
        *sizes, **tiles, GROUP=GROUP, num_warps=16,
    )  # fmt: skip
    _choose_kernel[(B,)](
        logits_BV, rows_B, *state, *outcome, sampling.method_R, *filters, *columns, *found, parts.best_BG,
        parts.undecided_B, *sizes, **tiles, **rest, GROUP=GROUP, BEST=BEST_GROUPS, GROUP_WIDTH=next_power_of_2(groups),
        num_warps=8, maxnreg=128,
    )  # fmt: skip
    _search_kernel[(B,)](
        logits_BV, rows_B, *state, *outcome, *filters, *columns, parts.most_BW, parts.undecided_B, *sizes, **tiles,
        **rest, num_warps=16,
    )  # fmt: skip
