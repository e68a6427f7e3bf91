"""A runner without a model: its KV store holds token ids, and the next token is a hash of all that it reads back.

A leaked, doubly used or stale block, a wrong resume or a table that missed an update changes the bytes of some output
(`worker.oracle_model.oracle_tokens` is the expectation). A launched step is executed only when it is collected, so
that with ``max_in_flight=2`` the writes of a step really happen after the next one was planned. Knows no block
manager and no scheduler: only plans.

Shapes: P blocks · B block size · M table width · T tokens · U updates
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from wire.messages import Pooling, Sampling
from worker.masks import MaskedSlots, StepMasks
from worker.oracle_model import (
    EMBEDDING_WIDTH,
    MASK_64,
    POSITION_FACTOR,
    TOKEN_FACTOR,
    OracleModel,
    choose_allowed,
    choose_token,
    state_vector,
)
from worker.plan import Chunk, Join, SlotLogprobs, StepPlan, StepResult
from worker.runner import RunnerError

EMPTY = -1  # never written, or poisoned after it was freed
NOT_A_NUMBER = -2  # written by a row whose activations were NaN: whoever reads it is NaN too
_TOKEN_FACTOR, _POSITION_FACTOR = np.uint64(TOKEN_FACTOR), np.uint64(POSITION_FACTOR)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_THIRTY, _TWENTY_SEVEN, _THIRTY_ONE = np.uint64(30), np.uint64(27), np.uint64(31)


class OracleViolation(AssertionError):
    """A plan asked for what no correct scheduler asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFaults:
    """What goes wrong, on purpose.

    crash_token_id: the process ends (status 139) when a request with it joins.
    nan_token_id: a request with it in its prompt turns NaN at output index ``nan_output_index``.
    launch_errors, collect_errors: by step.
    """

    crash_token_id: int | None = None
    nan_token_id: int | None = None
    nan_output_index: int = 0
    launch_errors: Mapping[int, RunnerError] = field(default_factory=dict)
    collect_errors: Mapping[int, RunnerError] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    """What the runner knows of the request in a slot."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    has_nan_token: bool
    pooling: Pooling | None = None
    pooled_D: np.ndarray = field(default_factory=lambda: np.zeros(EMBEDDING_WIDTH))
    num_pooled: int = 0
    is_suspect: bool = False  # a step failed or gave NaN: its tokens are no longer what the plans assume

    def is_nan_at(self, output_index: int, faults: OracleFaults) -> bool:
        return self.has_nan_token and output_index >= faults.nan_output_index


class OracleRunner:
    """Implements `worker.runner.Runner`. ``kv_tokens_PB`` and ``kv_positions_PB`` (int32) are the fake KV store."""

    def __init__(
        self,
        model: OracleModel,
        *,
        num_blocks: int,
        block_size: int,
        max_slots: int,
        max_blocks_per_slot: int,
        max_in_flight: int = 1,
        step_delay_s: float = 0.0,
        faults: OracleFaults | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.kv_tokens_PB = np.full((num_blocks, block_size), EMPTY, np.int32)
        self.kv_positions_PB = np.full((num_blocks, block_size), EMPTY, np.int32)
        self._model = model
        self._block_size = block_size
        self._table_SM = np.full((max_slots, max_blocks_per_slot), -1, np.int32)
        self._rows: dict[int, _Row] = {}
        self._launched: deque[StepPlan] = deque()
        self._masked = MaskedSlots(max_slots=max_slots)
        self._awaits_masks = False
        self._masks: dict[int, StepMasks] = {}  # by step
        self._step_delay_s = step_delay_s
        self._faults = faults or OracleFaults()

    def launch(self, plan: StepPlan) -> None:
        """Take the plan; it is executed by ``collect``."""
        if len(self._launched) >= self.max_in_flight:
            raise OracleViolation(f"step {plan.step} is one more in flight than {self.max_in_flight}")
        if self._awaits_masks:
            raise OracleViolation(f"step {plan.step} is launched while the former one waits for masks")
        if error := self._faults.launch_errors.get(plan.step):
            raise error
        self._launched.append(plan)
        for join in plan.joins:
            self._masked.join(join)
        self._awaits_masks = len(self._masked.index_of(plan)) > 0

    def constrain(self, masks: StepMasks) -> None:
        """Keep the masks of the newest plan until it is executed."""
        plan = self._launched[-1]
        index_N = self._masked.index_of(plan)
        if not self._awaits_masks or masks.index_N.tolist() != index_N.tolist():
            raise OracleViolation(f"step {plan.step} needs masks for {index_N.tolist()}, not {masks.index_N.tolist()}")
        self._masks[plan.step], self._awaits_masks = masks, False

    def collect(self) -> StepResult:
        """Execute the oldest launched plan."""
        if not self._launched:
            raise LookupError("no step is in flight")
        plan = self._launched.popleft()
        if self._awaits_masks and not self._launched:
            raise OracleViolation(f"step {plan.step} is collected without its masks")
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        self._apply_differences(plan)
        if error := self._faults.collect_errors.get(plan.step):
            self._suspect_rows_of(plan)
            raise error
        for slot, position in zip(plan.decode_slots_S.tolist(), plan.decode_positions_S.tolist(), strict=True):
            self._write_decode(slot, position)
        for chunk in plan.prefill:
            self._write_chunk(chunk)
        return self._sample(plan)

    def close(self) -> None:
        """Nothing to give back."""

    def poison(self, block_ids: np.ndarray) -> None:
        """Forget what these blocks hold: for tests that know which blocks are free."""
        self.kv_tokens_PB[block_ids] = EMPTY

    # ------------------------------------------------------------ differences

    def _apply_differences(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._rows[join.slot] = self._new_row(join)
            self._table_SM[join.slot] = -1
        for slot, column, block in plan.block_updates_U3.tolist():
            self._table_SM[slot, column] = block
        for source, target in plan.block_copies_C2.tolist():
            self.kv_tokens_PB[target] = self.kv_tokens_PB[source]
            self.kv_positions_PB[target] = self.kv_positions_PB[source]

    def _new_row(self, join: Join) -> _Row:
        token_ids = join.token_ids_T.tolist()
        if self._faults.crash_token_id is not None and self._faults.crash_token_id in token_ids:
            os._exit(139)
        has_nan_token = self._faults.nan_token_id in token_ids[: join.num_prompt_tokens]
        return _Row(token_ids, join.num_prompt_tokens, join.sampling, has_nan_token, join.pooling)

    def _suspect_rows_of(self, plan: StepPlan) -> None:
        for slot in {*plan.sampled_slots.tolist(), *(int(chunk.slot) for chunk in plan.prefill)}:
            self._rows[slot].is_suspect = True

    # ------------------------------------------------------------ writes

    def _write_decode(self, slot: int, position: int) -> None:
        row = self._rows[slot]
        if row.is_suspect:
            return
        if position != len(row.token_ids) - 1:
            raise OracleViolation(f"slot {slot} decodes at {position}, its last token is at {len(row.token_ids) - 1}")
        block, offset = int(self._table_SM[slot, position // self._block_size]), position % self._block_size
        if block < 0:
            raise OracleViolation(f"slot {slot} writes {[position]} without a block")
        is_nan = row.is_nan_at(position + 1 - row.num_prompt_tokens, self._faults)
        self.kv_tokens_PB[block, offset] = NOT_A_NUMBER if is_nan else row.token_ids[-1]
        self.kv_positions_PB[block, offset] = position

    def _write_chunk(self, chunk: Chunk) -> None:
        row = self._rows[chunk.slot]
        if row.is_suspect:
            return
        end = chunk.start + chunk.num_tokens
        if end > len(row.token_ids) or chunk.is_last != (end == len(row.token_ids)) or chunk.num_tokens < 1:
            raise OracleViolation(f"{chunk} of a request with {len(row.token_ids)} tokens")
        self._write(chunk.slot, np.arange(chunk.start, end), np.asarray(row.token_ids[chunk.start : end], np.int32))
        if row.pooling is not None:
            self._pool(chunk, row)

    def _pool(self, chunk: Chunk, row: _Row) -> None:
        """Add the states after each token of the chunk, as the block table gives them."""
        end = chunk.start + chunk.num_tokens
        for num_tokens in range(chunk.start + 1, end + 1) if row.pooling is Pooling.MEAN else (end,):
            state = self._read_state(chunk.slot, num_tokens)
            vector_D = np.full(EMBEDDING_WIDTH, np.nan) if state is None else np.asarray(state_vector(state))
            is_sum = row.pooling is Pooling.MEAN
            row.pooled_D = row.pooled_D + vector_D if is_sum else vector_D
            row.num_pooled = row.num_pooled + 1 if is_sum else 1

    def _write(self, slot: int, positions_T: np.ndarray, tokens_T: np.ndarray) -> None:
        blocks_T = self._table_SM[slot, positions_T // self._block_size]
        if blocks_T.min() < 0:
            raise OracleViolation(f"slot {slot} writes {positions_T.tolist()} without a block")
        offsets_T = positions_T % self._block_size
        row = self._rows[slot]
        is_nan = row.is_nan_at(int(positions_T[-1]) + 1 - row.num_prompt_tokens, self._faults)
        self.kv_tokens_PB[blocks_T, offsets_T] = NOT_A_NUMBER if is_nan else tokens_T
        self.kv_positions_PB[blocks_T, offsets_T] = positions_T

    # ------------------------------------------------------------ reads

    def _sample(self, plan: StepPlan) -> StepResult:
        slots = plan.sampled_slots
        tokens_S = np.zeros(len(slots), np.int32)
        is_finite_S = np.ones(len(slots), np.bool_)
        is_exhausted_S = np.zeros(len(slots), np.bool_)
        allowed, logprobs, embeddings = self._allowed(plan), {}, {}
        for index, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            state = None if row.is_suspect else self._read_state(slot, len(row.token_ids))
            if state is None:
                is_finite_S[index], row.is_suspect = False, True
                continue
            output_index = len(row.token_ids) - row.num_prompt_tokens
            output = row.token_ids[row.num_prompt_tokens :] if row.sampling.bad_words else ()
            if index in allowed:
                token = choose_allowed(self._model, state, row.sampling, output_index, allowed[index], output)
            else:
                token = choose_token(self._model, state, row.sampling, output_index, output)
            is_exhausted_S[index] = token is None
            tokens_S[index] = token or 0
            row.token_ids.append(int(tokens_S[index]))
            if row.sampling.num_logprobs is not None:
                logprobs[index] = self._fake_logprobs(row.token_ids[-1], row.sampling.num_logprobs)
            if row.pooling is not None:
                embeddings[index] = (row.pooled_D / row.num_pooled).astype(np.float32)
        return StepResult(
            step=plan.step,
            tokens_S=tokens_S,
            is_finite_S=is_finite_S,
            logprobs=logprobs,
            embeddings=embeddings,
            is_exhausted_S=is_exhausted_S if np.count_nonzero(is_exhausted_S) else None,
            prompt_logprobs={
                index: self._prompt_logprobs(chunk)
                for index, chunk in enumerate(plan.prefill)
                if self._rows[chunk.slot].sampling.num_prompt_logprobs is not None
            },
        )

    def _allowed(self, plan: StepPlan) -> dict[int, list[int]]:
        """Tokens by sampled row, for those with a grammar."""
        masks = self._masks.pop(plan.step, None)
        if masks is None:
            return {}
        bits_NV = np.unpackbits(masks.bits_NW.view(np.uint8), axis=1, count=self._model.vocab_size, bitorder="little")
        return {index: bits_NV[n].nonzero()[0].tolist() for n, index in enumerate(masks.index_N.tolist())}

    def _read_state(self, slot: int, num_tokens: int) -> int | None:
        """The sum over everything the table leads to; None where a NaN is among it."""
        blocks = self._table_SM[slot, : -(-num_tokens // self._block_size)]
        if blocks.min() < 0:
            raise OracleViolation(f"slot {slot} reads {num_tokens} tokens through {blocks.tolist()}")
        tokens_T = self.kv_tokens_PB[blocks].reshape(-1)[:num_tokens]
        positions_T = self.kv_positions_PB[blocks].reshape(-1)[:num_tokens]
        if tokens_T.min() == NOT_A_NUMBER:  # nothing is below it
            return None
        return int(_mix_tokens(tokens_T, positions_T).sum(dtype=np.uint64)) & MASK_64

    def _prompt_logprobs(self, chunk: Chunk) -> list[SlotLogprobs]:
        row = self._rows[chunk.slot]
        end = min(chunk.start + chunk.num_tokens, row.num_prompt_tokens - 1)
        num_top = row.sampling.num_prompt_logprobs or 0
        return [self._fake_logprobs(row.token_ids[index + 1], num_top) for index in range(chunk.start, end)]

    def _fake_logprobs(self, token: int, num_top: int) -> SlotLogprobs:
        """Plausible and reproducible: the chosen token first, its neighbours behind it, each half as likely."""
        scale = float(np.log(2.0))
        return SlotLogprobs(
            logprob=-scale,
            top_ids=tuple((token + index) % self._model.vocab_size for index in range(num_top)),
            top_logprobs=tuple(-scale * (index + 1) for index in range(num_top)),
        )


def _mix_tokens(tokens_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """`worker.oracle_model.mix_token` on arrays: uint64 wraps around by itself."""
    values = tokens_T.astype(np.int64).view(np.uint64) * _TOKEN_FACTOR
    values += positions_T.astype(np.int64).view(np.uint64) * _POSITION_FACTOR
    values ^= values >> _THIRTY
    values *= _FIRST_FACTOR
    values ^= values >> _TWENTY_SEVEN
    values *= _SECOND_FACTOR
    values ^= values >> _THIRTY_ONE
    return values
