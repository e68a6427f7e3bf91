"""A runner without a model: its KV store (`worker.oracle_store`) holds token ids, and the next token is a hash of all
that it reads back.

A leaked, doubly used or stale block, a wrong resume or a table that missed an update changes the bytes of some output
(`worker.oracle_model.oracle_tokens` is the expectation). A launched step is executed only when it is collected, so
that with ``max_in_flight=2`` the writes of a step really happen after the next one was planned. Knows no block
manager and no scheduler: only plans.

Shapes: T tokens · S sampled rows · N rows with a grammar
"""

import os
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from wire.messages import Pooling
from worker.masks import MaskedSlots, StepMasks
from worker.oracle_faults import OracleFaults
from worker.oracle_model import OracleModel, choose_allowed, choose_token
from worker.oracle_row import OracleRow
from worker.oracle_store import NOT_A_NUMBER, OracleStore, OracleViolation
from worker.plan import Chunk, Join, SlotLogprobs, StepPlan, StepResult


class OracleRunner:
    """Implements `worker.runner.Runner`."""

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
        self.store = OracleStore(
            num_blocks=num_blocks,
            block_size=block_size,
            max_slots=max_slots,
            max_blocks_per_slot=max_blocks_per_slot,
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
        self.store.poison(block_ids)

    # ------------------------------------------------------------ differences

    def _apply_differences(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._rows[join.slot] = self._new_row(join)
            self.store.empty_table(join.slot)
        self.store.update(plan.block_updates_U3, plan.block_copies_C2)

    def _new_row(self, join: Join) -> OracleRow:
        token_ids = join.token_ids_T.tolist()
        if self._faults.crash_token_id is not None and self._faults.crash_token_id in token_ids:
            os._exit(139)
        has_nan_token = self._faults.nan_token_id in token_ids[: join.num_prompt_tokens]
        return OracleRow(token_ids, join.num_prompt_tokens, join.sampling, has_nan_token, join.pooling)

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
        """After all of its tokens; None where that is NaN, and then nothing of the row counts any more."""
        row = self._rows[slot]
        state = None if row.is_suspect else self.store.read(slot, len(row.token_ids))
        row.is_suspect = state is None
        return state

    def _choose(self, row: OracleRow, state: int, allowed: list[int] | None) -> int | None:
        """The next token; None where the request forbids all. allowed: by its grammar."""
        sampling, output_index = row.sampling, row.num_output_tokens
        output = row.output_ids if sampling.bad_words else ()
        if allowed is None:
            return choose_token(self._model, state, sampling, output_index, output)
        return choose_allowed(self._model, state, sampling, output_index, allowed, output)

    def _allowed(self, plan: StepPlan) -> dict[int, list[int]]:
        """Tokens by sampled row, for those with a grammar."""
        masks = self._masks.pop(plan.step, None)
        if masks is None:
            return {}
        bits_NV = np.unpackbits(masks.bits_NW.view(np.uint8), axis=1, count=self._model.vocab_size, bitorder="little")
        return {index: bits_NV[n].nonzero()[0].tolist() for n, index in enumerate(masks.index_N.tolist())}

    def _logprobs(self, rows: dict[int, OracleRow]) -> dict[int, SlotLogprobs]:
        """Of the newest token of the rows that want them."""
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
        """Plausible and reproducible: the chosen token first, its neighbours behind it, each half as likely."""
        scale = float(np.log(2.0))
        return SlotLogprobs(
            logprob=-scale,
            top_ids=tuple((token + index) % self._model.vocab_size for index in range(num_top)),
            top_logprobs=tuple(-scale * (index + 1) for index in range(num_top)),
        )


def _exhausted_S(tokens: Mapping[int, int | None], num_sampled: int) -> np.ndarray | None:
    """bool [S]: the rows for which no token is left; None where there is none such."""
    if None not in tokens.values():
        return None
    return np.asarray([index in tokens and tokens[index] is None for index in range(num_sampled)], np.bool_)
