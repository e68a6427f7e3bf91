"""Sampling parameters beyond a temperature, kept on the device, and the kernels for them that follow a step. Nothing
waits for the device.

A step gives every row a token and advances it. If a row of the batch needs more, these kernels follow; each skips rows
that do not ask for it:

    log-probabilities of the raw logits  ->  masks, bad words, a step's grammar masks: -inf in place
    ->  biases: out of the logits  ->  penalties, filters, another token  ->  log-probability of that token

The logits are overwritten. Stages are those of model.sampling.params.Feature; masks may come before biases and
penalties, since -inf stays -inf.

Legend: B sequences · R rows · V vocabulary · T tokens of a request · W words of a mask · N masked rows · A biases · L
tokens of a bad word's beginning · H ring of newest tokens.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from octavo.model.gpu.sampling_columns import RowPlan, Stage, allowed_always, allowed_while_short, plan_row
from octavo.model.gpu.state import RowState
from octavo.model.kernels.sampling.bad_words import MAX_LENGTH, MAX_WORDS, RING, ban
from octavo.model.kernels.sampling.columns import IN_PROMPT, MAX_BIASES, MAX_COUNT, move_biased
from octavo.model.kernels.sampling.filter import FilterParts, SamplingColumns, filter_and_choose
from octavo.model.kernels.sampling.logprobs import LogprobParts, find_largest, take_chosen
from octavo.model.kernels.sampling.mask import ALWAYS, WHILE_SHORT, forbid, forbid_step, num_words, packed_mask
from octavo.model.sampling.params import Feature, SamplingParams, features_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledBatch:
    """A step's outcome on the device: logits_BV, rows_B and token_B (int32), is_finite_B (int8)."""

    logits_BV: torch.Tensor
    rows_B: torch.Tensor
    token_B: torch.Tensor
    is_finite_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMasks:
    """Masks of one step, int32 on the device: mask_NW[n] (model/kernels/sampling/mask.py) for row column_N[n] of the
    batch."""

    column_N: torch.Tensor
    mask_NW: torch.Tensor


class SamplingState:
    """Tables of R rows in addition to the row state's columns, and buffers for max_batch rows. state: None: creates one
    of its own, for tests."""

    def __init__(
        self,
        *,
        num_rows: int,
        max_batch: int,
        vocab_size: int,
        device: torch.device | str,
        state: RowState | None = None,
    ) -> None:
        self.state = state or RowState(num_slots=num_rows - 1, table_width=1, scratch_block=0, device=device)
        self.vocab_size = vocab_size
        self.parts = FilterParts(max_batch, vocab_size, device)
        self.logprobs = LogprobParts(max_batch, vocab_size, device)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self.always_RW, self.short_RW = table(num_words(vocab_size)), table(num_words(vocab_size))
        self.bias_RA = table(MAX_BIASES, dtype=torch.float32)
        self.last_RN, self.length_RN = table(MAX_WORDS), table(MAX_WORDS)
        self.begin_RLN = table(MAX_LENGTH, MAX_WORDS)
        columns = self.state.sampling_columns
        names = (field.name.removesuffix("_R") for field in fields(SamplingColumns))
        self.sampling = SamplingColumns(
            bias_id_RA=table(MAX_BIASES),
            count_RV=table(vocab_size, dtype=torch.int16),
            said_RH=table(RING),
            **{f"{name}_R": columns[name] for name in names if name in columns},
        )

    # ------------------------------------------------------------ rows

    def put(self, row: int, params: SamplingParams, token_ids_T: np.ndarray, num_prompt_tokens: int) -> None:
        """Set all columns and tables of a row, value by value. Raises ValueError if its parameters do not fit into a
        row."""
        plan = plan_row(params, features_of(params), vocab_size=self.vocab_size)
        if plan is None:
            raise ValueError("the sampling parameters need more room than a row has")
        for name, value in plan.columns.items():
            self.state.sampling_columns[name][row] = value
        self.put_tables(row, params, plan, token_ids_T, num_prompt_tokens)

    def put_tables(
        self, row: int, params: SamplingParams, plan: RowPlan, token_ids_T: np.ndarray, num_prompt_tokens: int
    ) -> None:
        """Set the tables (values too large for a column) that the plan needs. token_ids_T: int32, prompt and output so
        far."""
        V = self.vocab_size
        if Feature.PENALTY in plan.features:
            self._put_counts(row, token_ids_T, num_prompt_tokens)
        if int(plan.columns["mask"]) & ALWAYS:
            self._send(packed_mask(allowed_always(params, plan.forbidden, vocab_size=V)), self.always_RW[row])
        if int(plan.columns["mask"]) & WHILE_SHORT:
            self._send(packed_mask(allowed_while_short(params, vocab_size=V)), self.short_RW[row])
        if plan.biases:
            count = len(plan.biases)
            self._send(np.fromiter(plan.biases, np.int32, count), self.sampling.bias_id_RA[row, :count])
            self._send(np.fromiter(plan.biases.values(), np.float32, count), self.bias_RA[row, :count])
        if plan.words:
            self._put_words(row, plan.words, token_ids_T, num_prompt_tokens)

    def _put_counts(self, row: int, token_ids_T: np.ndarray, num_prompt_tokens: int) -> None:
        count_V = self.sampling.count_RV[row].zero_()
        ids_U, count_U = packed_counts(token_ids_T, num_prompt_tokens)
        count_V[to_device(ids_U, count_V.device)] = to_device(count_U, count_V.device)

    def _put_words(
        self, row: int, words: tuple[tuple[int, ...], ...], token_ids_T: np.ndarray, num_prompt_tokens: int
    ) -> None:
        begin_LN = np.zeros((MAX_LENGTH, len(words)), np.int32)
        for n, word in enumerate(words):
            begin_LN[: len(word) - 1, n] = word[-2::-1]
        count = len(words)
        self._send(np.asarray([word[-1] for word in words], np.int32), self.last_RN[row, :count])
        self._send(np.asarray([len(word) - 1 for word in words], np.int32), self.length_RN[row, :count])
        self._send(begin_LN, self.begin_RLN[row, :, :count])
        said_H = np.zeros(RING, np.int32)
        position = np.arange(max(num_prompt_tokens, len(token_ids_T) - RING), len(token_ids_T))
        said_H[position % RING] = token_ids_T[position]
        self._send(said_H, self.sampling.said_RH[row])

    def _send(self, array: np.ndarray, target: torch.Tensor) -> None:
        target.copy_(to_device(array, target.device))

    # ------------------------------------------------------------ a step

    def run(self, stages: Stage, batch: SampledBatch, masks: DeviceMasks | None = None) -> None:
        """Enqueue the kernels that the rows of a batch need. stages: the union of the rows' stages."""
        logits_BV, rows_B, state, columns = batch.logits_BV, batch.rows_B, self.state, self.state.sampling_columns
        if Stage.LOGPROBS in stages:
            find_largest(logits_BV, rows_B, columns["logprobs"], self.logprobs)
        if Stage.MASK in stages:
            forbid(
                logits_BV, rows_B, columns["mask"], state.position_R, state.num_prompt_R, columns["min_tokens"],
                self.always_RW, self.short_RW, self.vocab_size,
            )  # fmt: skip
        if Stage.BAD_WORDS in stages:
            ban(
                logits_BV, rows_B, state.position_R, state.num_prompt_R, columns["num_words"], self.last_RN,
                self.length_RN, self.begin_RLN, self.sampling.said_RH, self.vocab_size,
            )  # fmt: skip
        if masks is not None:
            forbid_step(logits_BV, masks.column_N, masks.mask_NW, self.vocab_size)
        biases = self.sampling.num_biases_R, self.sampling.bias_id_RA, self.bias_RA, self.parts.biased_BA
        if Stage.BIAS in stages:
            move_biased(logits_BV, rows_B, *biases)
        if Stage.CHOICE in stages:
            self.choose(batch)
        if Stage.LOGPROBS in stages:
            take_chosen(logits_BV, rows_B, batch.token_B, columns["logprobs"], *biases, self.logprobs)

    def choose(self, batch: SampledBatch) -> None:
        """Choose tokens for rows that have a method of their own, after the step's own sampler."""
        state = self.state
        filter_and_choose(
            batch.logits_BV, batch.rows_B, state.sampling_columns["temperature"], state.seed_R,
            state.position_R, state.num_prompt_R, state.last_token_R, batch.token_B, batch.is_finite_B, self.sampling,
            self.parts,
        )  # fmt: skip


def packed_counts(token_ids_T: np.ndarray, num_prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids (int64) and what count_RV holds for them (int16)."""
    ids_U, index_T = np.unique(token_ids_T, return_inverse=True)
    count_U = np.bincount(index_T[num_prompt_tokens:], minlength=len(ids_U)).clip(max=MAX_COUNT)
    count_U[index_T[:num_prompt_tokens]] |= IN_PROMPT
    return ids_U.astype(np.int64), count_U.astype(np.int16)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy the array to the device, after what is enqueued there; through pinned memory, so that nothing waits."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()
