"""Log-probabilities of the chosen token and of the most likely ones, from the raw logits, on the device.

Raw: before biases, penalties, masks and temperature. `find_largest` runs before those change the logits, and finds the
few largest without sorting: they are in the groups of 64 with the largest maxima. `take_chosen` runs once each row has
its token; the chosen token's own logit is then still in its place, or its sum with a bias is in the tail.

    answer of a row, words    | chosen (float32) | ids x MAX_TOP (int32) | log-probabilities x MAX_TOP (float32) |

Legend: B sequences of the batch · R rows of the state · V columns of the logits · W parts of a row · G groups · X words
of an answer.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.kernels.sampling.columns import GROUP, MAX_BIASES, PART, num_parts
from octavo.model.kernels.sampling.ordering import largest_groups, winner

MAX_TOP = 20
ANSWER_WORDS = 1 + 2 * MAX_TOP
_BEST_GROUPS = 32  # a power of two that MAX_TOP groups fit into


def logprobs_reference(
    logits_BV: torch.Tensor, token_B: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The obvious reference: chosen_B, top ids and log-probabilities [B, MAX_TOP]; of equal ones, the least id
    first."""
    logprobs_BV = logits_BV[:, :vocab_size].float().log_softmax(dim=-1)
    top, ids = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    chosen_B = logprobs_BV.gather(1, token_B.long()[:, None]).squeeze(1)
    return chosen_B, ids[:, :MAX_TOP], top[:, :MAX_TOP]


@triton.jit
def _load_raw(logits, token, vocab_size):
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("-inf"), x)


@triton.jit
def _measure_kernel(
    logits_BV, rows_B, logprobs_R, group_BG, mass_BW, most_BW, width, vocab_size,
    PART: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(logprobs_R + tl.load(rows_B + b)) == 0:
        return
    x = _load_raw(logits_BV + b.to(tl.int64) * width, part * PART + tl.arange(0, PART), vocab_size)
    most = tl.max(x, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(mass_BW + b * PARTS + part, tl.sum(tl.exp(x - base), 0))
    tl.store(most_BW + b * PARTS + part, most)
    maxima = tl.max(tl.reshape(x, [PART // GROUP, GROUP]), 1)
    g = part * (PART // GROUP) + tl.arange(0, PART // GROUP)
    tl.store(group_BG + b * PARTS * (PART // GROUP) + g, maxima)


@triton.jit
def _top_kernel(
    logits_BV, rows_B, logprobs_R, group_BG, mass_BW, most_BW, best_BG, log_mass_B, answer_BX, width, vocab_size,
    GROUP: tl.constexpr, BEST: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, PART_WIDTH: tl.constexpr,
    GROUP_WIDTH: tl.constexpr, MAX_TOP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    num_top = tl.load(logprobs_R + tl.load(rows_B + b)) - 1
    if num_top < 0:
        return
    part = tl.arange(0, PART_WIDTH)
    part_most = tl.load(most_BW + b * PARTS + part, mask=part < PARTS, other=float("-inf"))
    part_mass = tl.load(mass_BW + b * PARTS + part, mask=part < PARTS, other=0.0)
    most = tl.max(part_most, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    # A row without any finite logit still gets a number.
    log_mass = most + tl.log(tl.maximum(tl.sum(part_mass * tl.exp(part_most - most), 0), 1e-37))
    tl.store(log_mass_B + b, log_mass)
    if num_top > 0:
        g = tl.arange(0, GROUP_WIDTH)
        maxima = tl.load(group_BG + b * GROUPS + g, mask=g < GROUPS, other=float("-inf"))
        is_best, place, _ = largest_groups(maxima, g, BEST)
        tl.store(best_BG + b * BEST + place, g, mask=is_best)
        tl.debug_barrier()
        best = tl.load(best_BG + b * BEST + tl.arange(0, BEST))
        token = tl.reshape(best[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [BEST * GROUP])
        x = _load_raw(logits_BV + b.to(tl.int64) * width, token, vocab_size)
        is_left = token < vocab_size
        answer = answer_BX + b * (1 + 2 * MAX_TOP) + 1
        for i in range(num_top):
            largest, chosen = winner(tl.where(is_left, x, float("-inf")), tl.where(is_left, token, 0x7FFFFFFF))
            tl.store(answer + i, chosen)
            tl.store(answer + MAX_TOP + i, (largest - log_mass).to(tl.int32, bitcast=True))
            is_left &= token != chosen


@triton.jit
def _chosen_kernel(
    logits_BV, rows_B, token_B, logprobs_R, num_biases_R, bias_id_RA, bias_RA, biased_BA, log_mass_B, answer_BX,
    width, A: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_B + b)
    if tl.load(logprobs_R + row) == 0:
        return
    token = tl.load(token_B + b)
    x = tl.load(logits_BV + b.to(tl.int64) * width + token).to(tl.float32)
    num_biases = tl.load(num_biases_R + row)
    if num_biases > 0:
        i = tl.arange(0, A)
        is_it = (tl.load(bias_id_RA + row * A + i, mask=i < num_biases, other=-1) == token) & (i < num_biases)
        raw = tl.load(biased_BA + b * A + i, mask=is_it, other=0.0) - tl.load(
            bias_RA + row * A + i, mask=is_it, other=0.0
        )
        x = tl.where(tl.max(is_it.to(tl.int32), 0) > 0, tl.sum(raw, 0), x)
    tl.store(answer_BX + b * WORDS, (x - tl.load(log_mass_B + b)).to(tl.int32, bitcast=True))


class LogprobParts:
    """Intermediate results of the kernels, and the answers, for up to max_batch rows.

    answer_BX: int32 [max_batch, ANSWER_WORDS]; rows that asked for fewer than MAX_TOP have stale words after theirs.
    """

    def __init__(self, max_batch: int, vocab_size: int, device: torch.device | str) -> None:
        parts = num_parts(vocab_size)
        self.vocab_size, self.num_parts = vocab_size, parts
        self.group_BG = torch.empty(max_batch, parts * (PART // GROUP), dtype=torch.float32, device=device)
        self.best_BG = torch.empty(max_batch, _BEST_GROUPS, dtype=torch.int32, device=device)
        self.mass_BW = torch.empty(max_batch, parts, dtype=torch.float32, device=device)
        self.most_BW = torch.empty(max_batch, parts, dtype=torch.float32, device=device)
        self.log_mass_B = torch.empty(max_batch, dtype=torch.float32, device=device)
        self.answer_BX = torch.zeros(max_batch, ANSWER_WORDS, dtype=torch.int32, device=device)


def find_largest(logits_BV: torch.Tensor, rows_B: torch.Tensor, logprobs_R: torch.Tensor, parts: LogprobParts) -> None:
    """Find the most likely tokens of the rows that ask for some.

    logprobs_R: int32, 0 for no log-probabilities, n + 1 for the chosen token's and n more (0 to MAX_TOP). Raises
    ValueError if a tensor does not fit.
    """
    (B,) = rows_B.shape
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("logprobs_R", logprobs_R, shape=(None,), dtype=torch.int32)
    if logits_BV.shape[1] < parts.vocab_size or len(parts.group_BG) < B:
        raise ValueError(
            f"logits_BV is {tuple(logits_BV.shape)}: need {parts.vocab_size} ids, {len(parts.group_BG)} rows"
        )
    sizes = logits_BV.shape[1], parts.vocab_size
    _measure_kernel[(B, parts.num_parts)](
        logits_BV, rows_B, logprobs_R, parts.group_BG, parts.mass_BW, parts.most_BW, *sizes,
        PART=PART, GROUP=GROUP, PARTS=parts.num_parts, num_warps=8,
    )  # fmt: skip
    groups = parts.group_BG.shape[1]
    _top_kernel[(B,)](
        logits_BV, rows_B, logprobs_R, parts.group_BG, parts.mass_BW, parts.most_BW, parts.best_BG,
        parts.log_mass_B, parts.answer_BX, *sizes,
        GROUP=GROUP, BEST=_BEST_GROUPS, PARTS=parts.num_parts, GROUPS=groups,
        PART_WIDTH=next_power_of_2(parts.num_parts), GROUP_WIDTH=next_power_of_2(groups), MAX_TOP=MAX_TOP, num_warps=4,
    )  # fmt: skip


def take_chosen(
    logits_BV: torch.Tensor,
    rows_B: torch.Tensor,
    token_B: torch.Tensor,
    logprobs_R: torch.Tensor,
    num_biases_R: torch.Tensor,
    bias_id_RA: torch.Tensor,
    bias_RA: torch.Tensor,
    biased_BA: torch.Tensor,
    parts: LogprobParts,
) -> None:
    """After `find_largest` and the choice, with the same logits: the log-probability of token_B (int32). Biases as in
    model/kernels/sampling/columns.py. Raises ValueError if a tensor does not fit."""
    (B,) = rows_B.shape
    check_tensor("logits_BV", logits_BV, shape=(B, None), dtype=logits_BV.dtype)
    check_tensor("token_B", token_B, shape=(B,), dtype=torch.int32)
    check_tensor("bias_id_RA", bias_id_RA, shape=(None, MAX_BIASES), dtype=torch.int32)
    check_tensor("biased_BA", biased_BA, shape=(None, MAX_BIASES), dtype=torch.float32)
    _chosen_kernel[(B,)](
        logits_BV, rows_B, token_B, logprobs_R, num_biases_R, bias_id_RA, bias_RA, biased_BA, parts.log_mass_B,
        parts.answer_BX, logits_BV.shape[1], A=MAX_BIASES, WORDS=ANSWER_WORDS, num_warps=1,
    )  # fmt: skip
