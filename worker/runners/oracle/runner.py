"""A runner without a model: its KV store holds token ids, and the next token is a hash of all that it reads back.

A leaked, doubly used or stale block, a wrong resume or a table that missed an update changes the bytes of some output
(`worker.runners.oracle.model.oracle_tokens` is the expectation). A launched step is executed only when it is collected,
so that with ``max_in_flight=2`` the writes of a step really happen after the next one was planned. Knows no block
manager and no scheduler: only plans.

Shapes: P blocks · B block size · M table width · S slots, or sampled rows of a step · T tokens · U updates · C copies ·
D embedding width · N rows with a grammar
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from octavo.wire.messages import Pooling, SamplingParams
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import (
    EMBEDDING_WIDTH,
    MASK_64,
    POSITION_FACTOR,
    TOKEN_FACTOR,
    OracleModel,
    choose_allowed,
    choose_token,
    state_vector,
)
from octavo.worker.scheduler.plan import Chunk, MaskedSlots, NewRequest, SlotLogprobs, StepMasks, StepPlan, StepResult

EMPTY = -1  # never written, or poisoned after it was freed
NOT_A_NUMBER = -2  # written by a row whose activations were NaN: what reads it is NaN too
_TOKEN_FACTOR, _POSITION_FACTOR = np.uint64(TOKEN_FACTOR), np.uint64(POSITION_FACTOR)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_THIRTY, _TWENTY_SEVEN, _THIRTY_ONE = np.uint64(30), np.uint64(27), np.uint64(31)


class OracleViolation(AssertionError):
    """A plan asked for something that a correct scheduler never asks for."""


class OracleStore:
    """Token ids and their positions in blocks, read and written through block tables: tokens_PB, positions_PB, int32.
    host_H2B: tokens and positions of the host's blocks.

    What a request reads back is one number: the sum of a hash over everything. Knows only arrays: no requests, no
    plans.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_slots: int, max_blocks_per_slot: int, num_host_blocks: int = 0
    ) -> None:
        self.host_H2B = np.full((num_host_blocks, 2, block_size), EMPTY, np.int32)
        self.tokens_PB = np.full((num_blocks, block_size), EMPTY, np.int32)
        self.positions_PB = np.full((num_blocks, block_size), EMPTY, np.int32)
        self._block_size = block_size
        self._table_SM = np.full((max_slots, max_blocks_per_slot), -1, np.int32)

    def empty_table(self, slot: int) -> None:
        """A new request has the slot: its table has no blocks yet."""
        self._table_SM[slot] = -1

    def update(self, block_updates_U3: np.ndarray, block_copies_C2: np.ndarray) -> None:
        """Table updates first, then block copies, as `worker.scheduler.plan.StepPlan` has them."""
        for slot, column, block in block_updates_U3.tolist():
            self._table_SM[slot, column] = block
        for source, target in block_copies_C2.tolist():
            self.tokens_PB[target] = self.tokens_PB[source]
            self.positions_PB[target] = self.positions_PB[source]

    def copy_out(self, copies_C2: np.ndarray) -> None:
        """Pairs of (device, host), one after the other."""
        for block, host_block in copies_C2.tolist():
            self.host_H2B[host_block, 0], self.host_H2B[host_block, 1] = self.tokens_PB[block], self.positions_PB[block]

    def copy_in(self, copies_C2: np.ndarray) -> None:
        """Pairs of (host, device), one after the other."""
        for host_block, block in copies_C2.tolist():
            self.tokens_PB[block], self.positions_PB[block] = self.host_H2B[host_block]

    def poison(self, block_ids: np.ndarray) -> None:
        """Overwrite what these blocks hold."""
        self.tokens_PB[block_ids] = EMPTY

    def write_token(self, slot: int, position: int, token: int) -> None:
        """`write` for one token; simulations spend their time here. Raises OracleViolation."""
        block, offset = int(self._table_SM[slot, position // self._block_size]), position % self._block_size
        if block < 0:
            raise OracleViolation(f"slot {slot} writes {[position]} without a block")
        self.tokens_PB[block, offset] = token
        self.positions_PB[block, offset] = position

    def write(self, slot: int, start: int, tokens_T: np.ndarray) -> None:
        """Write from position `start` on. Raises OracleViolation if the table has no block there."""
        positions_T = np.arange(start, start + len(tokens_T))
        blocks_T = self._table_SM[slot, positions_T // self._block_size]
        if blocks_T.min() < 0:
            raise OracleViolation(f"slot {slot} writes {positions_T.tolist()} without a block")
        offsets_T = positions_T % self._block_size
        self.tokens_PB[blocks_T, offsets_T] = tokens_T
        self.positions_PB[blocks_T, offsets_T] = positions_T

    def read(self, slot: int, num_tokens: int) -> int | None:
        """The state after this many tokens: the sum over everything that the table leads to; None if a NaN is among it.
        Raises OracleViolation."""
        blocks = self._table_SM[slot, : -(-num_tokens // self._block_size)]
        if blocks.min() < 0:
            raise OracleViolation(f"slot {slot} reads {num_tokens} tokens through {blocks.tolist()}")
        tokens_T = self.tokens_PB[blocks].reshape(-1)[:num_tokens]
        positions_T = self.positions_PB[blocks].reshape(-1)[:num_tokens]
        if tokens_T.min() == NOT_A_NUMBER:  # nothing is below it
            return None
        return int(mix_tokens(tokens_T, positions_T).sum(dtype=np.uint64)) & MASK_64


def mix_tokens(tokens_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """`worker.runners.oracle.model.mix_token` on arrays: uint64 wraps around by itself."""
    values = tokens_T.astype(np.int64).view(np.uint64) * _TOKEN_FACTOR
    values += positions_T.astype(np.int64).view(np.uint64) * _POSITION_FACTOR
    values ^= values >> _THIRTY
    values *= _FIRST_FACTOR
    values ^= values >> _TWENTY_SEVEN
    values *= _SECOND_FACTOR
    values ^= values >> _THIRTY_ONE
    return values


@dataclass(slots=True)
class OracleRow:
    """The request in a slot.

    token_ids: prompt and output. is_suspect: a step failed or gave NaN, so its tokens are no longer what plans assume.
    pooled_D: float64, sum of num_pooled states.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    has_nan_token: bool
    pooling: Pooling | None = None
    pooled_D: np.ndarray = field(default_factory=lambda: np.zeros(EMBEDDING_WIDTH))
    num_pooled: int = 0
    is_suspect: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def embedding_D(self) -> np.ndarray:
        """float32: of what was pooled so far."""
        return (self.pooled_D / self.num_pooled).astype(np.float32)

    def is_nan_at(self, num_tokens: int, faults: OracleFaults) -> bool:
        """Whether its activations are NaN once num_tokens of its tokens are in the cache."""
        return self.has_nan_token and num_tokens - self.num_prompt_tokens >= faults.nan_output_index

    def pool(self, state: int | None) -> None:
        """Add the state after its next token; None: NaN. With LAST_TOKEN only the last one counts."""
        vector_D = np.full(EMBEDDING_WIDTH, np.nan) if state is None else np.asarray(state_vector(state))
        if self.pooling is Pooling.MEAN:
            self.pooled_D, self.num_pooled = self.pooled_D + vector_D, self.num_pooled + 1
        else:
            self.pooled_D, self.num_pooled = vector_D, 1


class OracleRunner:
    """Implements `worker.runners.interface.Runner`."""

    def __init__(
        self,
        model: OracleModel,
        *,
        num_blocks: int,
        block_size: int,
        max_slots: int,
        max_blocks_per_slot: int,
        max_in_flight: int = 1,
        num_host_blocks: int = 0,
        step_delay_s: float = 0.0,
        faults: OracleFaults | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.store = OracleStore(
            num_blocks=num_blocks,
            block_size=block_size,
            max_slots=max_slots,
            max_blocks_per_slot=max_blocks_per_slot,
            num_host_blocks=num_host_blocks,
        )
        self._model = model
        self._rows: dict[int, OracleRow] = {}
        self._launched: deque[StepPlan] = deque()
        self._masked = MaskedSlots(max_slots=max_slots)
        self._awaits_masks = False
        self._masks: dict[int, StepMasks] = {}  # by step
        self._step_delay_s = step_delay_s
        self._faults = faults or OracleFaults()

    def launch(self, plan: StepPlan) -> None:
        """Take the plan; ``collect`` executes it."""
        if len(self._launched) >= self.max_in_flight:
            raise OracleViolation(f"step {plan.step} is one more in flight than {self.max_in_flight}")
        if self._awaits_masks:
            raise OracleViolation(f"step {plan.step} is launched while the former one waits for masks")
        if error := self._faults.launch_errors.get(plan.step):
            raise error
        self._launched.append(plan)
        for new in plan.new_requests:
            self._masked.join(new)
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
        error = self._faults.collect_errors.get(plan.step)
        if error is None:
            self.store.copy_out(plan.copies_out_C2)
        self._apply_differences(plan)
        if error is not None:  # which did no copies between the tiers
            self._suspect_rows_of(plan)
            raise error
        for slot, position in zip(plan.decode_slots_S.tolist(), plan.decode_positions_S.tolist(), strict=True):
            self._write_decode(slot, position)
        for chunk in plan.prefill:
            self._write_chunk(chunk)
        result = self._sample(plan)
        self.store.copy_in(plan.copies_in_C2)  # at the very end: a step that reads such a block too early shows
        return result

    def close(self) -> None:
        """Nothing to release."""

    def poison(self, block_ids: np.ndarray) -> None:
        """Overwrite what these blocks hold: for tests that know which blocks are free."""
        self.store.poison(block_ids)

    # ------------------------------------------------------------ differences

    def _apply_differences(self, plan: StepPlan) -> None:
        for new in plan.new_requests:
            self._rows[new.slot] = self._new_row(new)
            self.store.empty_table(new.slot)
        self.store.update(plan.block_updates_U3, plan.block_copies_C2)

    def _new_row(self, new: NewRequest) -> OracleRow:
        token_ids = new.token_ids_T.tolist()
        if self._faults.crash_token_id is not None and self._faults.crash_token_id in token_ids:
            os._exit(139)
        has_nan_token = self._faults.nan_token_id in token_ids[: new.num_prompt_tokens]
        return OracleRow(token_ids, new.num_prompt_tokens, new.sampling, has_nan_token, new.pooling)

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
        is_nan = row.is_nan_at(position + 1, self._faults)
        self.store.write_token(slot, position, NOT_A_NUMBER if is_nan else row.token_ids[-1])

    def _write_chunk(self, chunk: Chunk) -> None:
        row = self._rows[chunk.slot]
        if row.is_suspect:
            return
        end = chunk.start + chunk.num_tokens
        if end > len(row.token_ids) or chunk.is_last != (end == len(row.token_ids)) or chunk.num_tokens < 1:
            raise OracleViolation(f"{chunk} of a request with {len(row.token_ids)} tokens")
        tokens_T = np.asarray(row.token_ids[chunk.start : end], np.int32)
        if row.is_nan_at(end, self._faults):
            tokens_T[:] = NOT_A_NUMBER
        self.store.write(chunk.slot, chunk.start, tokens_T)
        if row.pooling is not None:
            self._pool(chunk, row)

    def _pool(self, chunk: Chunk, row: OracleRow) -> None:
        """Add the states after each token of the chunk, as the block table gives them."""
        end = chunk.start + chunk.num_tokens
        for num_tokens in range(chunk.start + 1, end + 1) if row.pooling is Pooling.MEAN else (end,):
            row.pool(self.store.read(chunk.slot, num_tokens))

    # ------------------------------------------------------------ results

    def _sample(self, plan: StepPlan) -> StepResult:
        rows = [self._rows[slot] for slot in plan.sampled_slots.tolist()]
        states, allowed = [self._state_of(slot) for slot in plan.sampled_slots.tolist()], self._allowed(plan)
        tokens = {
            index: self._choose(rows[index], state, allowed.get(index))
            for index, state in enumerate(states)
            if state is not None
        }
        for index, token in tokens.items():
            rows[index].token_ids.append(token or 0)
        return StepResult(
            step=plan.step,
            tokens_S=np.asarray([tokens.get(index) or 0 for index in range(len(rows))], np.int32),
            is_finite_S=np.asarray([state is not None for state in states], np.bool_),
            logprobs=self._logprobs({index: rows[index] for index in tokens}),
            embeddings={index: rows[index].embedding_D for index in tokens if rows[index].pooling is not None},
            is_exhausted_S=_exhausted_S(tokens, len(rows)),
            prompt_logprobs={
                index: self._prompt_logprobs(chunk)
                for index, chunk in enumerate(plan.prefill)
                if self._rows[chunk.slot].sampling.num_prompt_logprobs is not None
            },
        )

    def _state_of(self, slot: int) -> int | None:
        """The state after all of its tokens; None if that is NaN, after which nothing of the row counts."""
        row = self._rows[slot]
        state = None if row.is_suspect else self.store.read(slot, len(row.token_ids))
        row.is_suspect = state is None
        return state

    def _choose(self, row: OracleRow, state: int, allowed: list[int] | None) -> int | None:
        """The next token; None if the request forbids all. allowed: by its grammar."""
        sampling, output_index = row.sampling, row.num_output_tokens
        output = row.output_ids if sampling.bad_words else ()
        if allowed is None:
            return choose_token(self._model, state, sampling, output_index, output)
        return choose_allowed(self._model, state, sampling, output_index, allowed, output)

    def _allowed(self, plan: StepPlan) -> dict[int, list[int]]:
        """Allowed tokens by sampled row, for rows with a grammar."""
        masks = self._masks.pop(plan.step, None)
        if masks is None:
            return {}
        bits_NV = np.unpackbits(masks.bits_NW.view(np.uint8), axis=1, count=self._model.vocab_size, bitorder="little")
        return {index: bits_NV[n].nonzero()[0].tolist() for n, index in enumerate(masks.index_N.tolist())}

    def _logprobs(self, rows: dict[int, OracleRow]) -> dict[int, SlotLogprobs]:
        """Of the newest token of each row that wants them."""
        return {
            index: self._fake_logprobs(row.token_ids[-1], row.sampling.num_logprobs)
            for index, row in rows.items()
            if row.sampling.num_logprobs is not None
        }

    def _prompt_logprobs(self, chunk: Chunk) -> list[SlotLogprobs]:
        row = self._rows[chunk.slot]
        end = min(chunk.start + chunk.num_tokens, row.num_prompt_tokens - 1)
        num_top = row.sampling.num_prompt_logprobs or 0
        return [self._fake_logprobs(row.token_ids[index + 1], num_top) for index in range(chunk.start, end)]

    def _fake_logprobs(self, token: int, num_top: int) -> SlotLogprobs:
        """Plausible and reproducible: the chosen token first, then its neighbours, each half as likely."""
        scale = float(np.log(2.0))
        return SlotLogprobs(
            logprob=-scale,
            top_ids=tuple((token + index) % self._model.vocab_size for index in range(num_top)),
            top_logprobs=tuple(-scale * (index + 1) for index in range(num_top)),
        )


def _exhausted_S(tokens: Mapping[int, int | None], num_sampled: int) -> np.ndarray | None:
    """bool [S]: rows for which no token is left; None if there are none."""
    if None not in tokens.values():
        return None
    return np.asarray([index in tokens and tokens[index] is None for index in range(num_sampled)], np.bool_)
