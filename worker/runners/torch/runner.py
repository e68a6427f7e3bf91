"""The runner that executes plans with the model.

    launch(plan):   joins, table updates, block copies  ->  one forward pass  ->  logits of the sampled rows  ->  tokens
    collect():      the result of the oldest launched plan, or the error that it ended with

A launched step's tokens are in the rows as soon as ``launch`` returns, so that the next plan's decodes find them,
collected or not. Must not know: the block manager, the scheduler, sockets, text.

Legend: R slots · M table width · T tokens in this step · A sequences in this step · S those sampled for · U updates of
tables · C copies · N blocks of a copy · W bytes of a row · D model dim · V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.model.attention.host_blocks import HostBlocks, gather_rows, scatter_rows
from octavo.model.attention.interface import AttentionInputs, get_backend
from octavo.model.attention.invariant import InvariantAttention
from octavo.model.attention.kv_pool import KvPool
from octavo.model.causal_lm import CausalLM
from octavo.model.numerics import NumericFinding, NumericsWatch
from octavo.model.sampling.logits_processors import TokenHistory
from octavo.model.sampling.masks import TokenMasks
from octavo.model.sampling.row_by_row import EachRowSampler
from octavo.model.sampling.sampler import Sampled, Sampler
from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.outputs import (
    Pooler,
    PromptScorer,
    as_runner_error,
    empty_result,
    sampler_params,
    slot_logprobs,
)
from octavo.worker.scheduler.plan import MaskedSlots, NewRequest, SlotLogprobs, StepMasks, StepPlan, StepResult

MAX_COPIES_IN = 64
"""Blocks that one step brings back from the host: it waits for them."""

OnNumerics = Callable[[int, NumericFinding], None]
"""Called with (step, first bad activation of it)."""


class RunnerRows:
    """What the runner knows of every slot, from plans alone: joins, block updates, sampled tokens.

    Numpy arrays with one row per slot; entries past a row's length are stale. table_RM: int32 block ids, -1 if unset.
    history: tokens. sampler: the parameters of each row.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        sampler: type[Sampler] = Sampler,
    ) -> None:
        # One token more than a request may have: a step that runs ahead samples one past the last, which is dropped.
        self.history = TokenHistory(max_rows=max_slots, max_len=max_model_len + 1)
        self.table_RM = np.full((max_slots, -(-(max_model_len + 1) // block_size)), -1, np.int32)
        self.sampler = sampler(vocab_size=vocab_size, history=self.history, device=device)
        self._eos_token_ids = eos_token_ids

    def apply(self, plan: StepPlan) -> None:
        """Joins, then block updates; copies of blocks are done by the KV pool."""
        for new in plan.new_requests:
            self._join(new)
        if len(plan.block_updates_U3):
            slot_U, column_U, block_U = plan.block_updates_U3.T
            self.table_RM[slot_U, column_U] = block_U

    def append(self, slots_S: np.ndarray, lengths_S: np.ndarray, tokens_S: np.ndarray) -> None:
        """Each row holds ``lengths_S`` tokens and gets one more."""
        self.history.tokens_RT[slots_S, lengths_S] = tokens_S

    def _join(self, new: NewRequest) -> None:
        self.table_RM[new.slot] = -1
        self.history.put(new.slot, new.token_ids_T, new.num_prompt_tokens)
        params = sampler_params(new.sampling, self._eos_token_ids)
        self.sampler.join(new.slot, params, new.token_ids_T[new.num_prompt_tokens :])


class MissingBlock(RuntimeError):
    """A plan writes to a slot that has no block there. Nothing was computed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's inputs on the device, and which rows of its output are sampled.

    Decodes come first, then the chunks, as in ``plan.sampled_slots``. A decode is a sequence with one new token.
    ids_T, positions_T: int64. last_S: int64, rows of the hidden states to sample after; None for all of them, in order.
    slots_S: int32. lengths_S: int64, tokens of each sampled sequence, its newest one included.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    inputs: AttentionInputs
    last_S: torch.Tensor | None
    slots_S: np.ndarray
    lengths_S: np.ndarray


def build_batch(plan: StepPlan, rows: RunnerRows, *, block_size: int, device: torch.device) -> Batch:
    """The plan's tokens, looked up in the rows without a loop over requests. Raises MissingBlock."""
    slots_A, starts_A, lens_A, source_S = _sequences(plan)
    cu_A1 = np.zeros(len(slots_A) + 1, np.int64)
    np.cumsum(lens_A, out=cu_A1[1:])
    slot_T = np.repeat(slots_A, lens_A)
    positions_T = np.arange(cu_A1[-1]) + np.repeat(starts_A - cu_A1[:-1], lens_A)
    contexts_A = starts_A + lens_A

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    inputs = AttentionInputs(
        slot_mapping_T=put(_slot_mapping(slot_T, positions_T, rows, block_size)),
        table_SM=put(rows.table_RM[slots_A, : -(-int(contexts_A.max()) // block_size)]),
        cu_query_lens_S1=put(cu_A1.astype(np.int32)),
        context_lens_S=put(contexts_A.astype(np.int32)),
        max_query_len=int(lens_A.max()),
        max_context_len=int(contexts_A.max()),
    )
    return Batch(
        ids_T=put(rows.history.tokens_RT[slot_T, positions_T].astype(np.int64)),
        positions_T=put(positions_T),
        inputs=inputs,
        last_S=None if not plan.prefill else put(cu_A1[1:][source_S] - 1),
        slots_S=plan.sampled_slots,
        lengths_S=contexts_A[source_S],
    )


def _sequences(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slot (int32), first position and number of new tokens (int64) of each sequence; and, for each sampled slot, the
    sequence (int64) after which its token comes: forks have no sequence of their own yet."""
    num_decodes = len(plan.decode_slots_S)
    chunks = np.asarray([(c.slot, c.start, c.num_tokens) for c in plan.prefill], np.int64).reshape(-1, 3)
    num_tokens = [(1 + len(c.forks)) * c.is_last for c in plan.prefill]
    return (
        np.concatenate([plan.decode_slots_S, chunks[:, 0].astype(np.int32)]),
        np.concatenate([plan.decode_positions_S.astype(np.int64), chunks[:, 1]]),
        np.concatenate([np.ones(num_decodes, np.int64), chunks[:, 2]]),
        np.concatenate([np.arange(num_decodes), num_decodes + np.repeat(np.arange(len(chunks)), num_tokens)]),
    )


def _slot_mapping(slot_T: np.ndarray, positions_T: np.ndarray, rows: RunnerRows, block_size: int) -> np.ndarray:
    """int64: where each token's key and value go. A slot without a block there is a defect of the plan, and must not
    become a hole in the cache."""
    blocks_T = rows.table_RM[slot_T, positions_T // block_size].astype(np.int64)
    if blocks_T.min() < 0:
        bad = int(np.flatnonzero(blocks_T < 0)[0])
        raise MissingBlock(f"slot {slot_T[bad]} has no block for position {positions_T[bad]}")
    return blocks_T * block_size + positions_T % block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRunnerConfig:
    """num_blocks, block_size: of the KV pool. max_slots: rows. vocab_size: ids that may be sampled (the tokenizer's).

    eos_token_ids: masked while fewer than min_tokens are out. backend: of attention; with "invariant", for
    models of model/invariant.py, rows are sampled one by one too. numerics_limit: None does not
    watch activations (watching is slow). kv_dtype: of the KV pool, None for the model's.
    """

    num_blocks: int
    block_size: int
    max_slots: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    backend: str = "sdpa"
    max_in_flight: int = 1
    kv_dtype: torch.dtype | None = None
    numerics_limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Unsampled:
    """A step whose forward pass is done and whose tokens are not chosen yet."""

    plan: StepPlan
    batch: Batch
    logits_SV: torch.Tensor
    embeddings: dict[int, torch.Tensor]
    scores: dict[int, list[SlotLogprobs]]


class TorchRunner:
    """Implements `worker.runners.interface.Runner`."""

    def __init__(
        self,
        model: CausalLM,
        config: TorchRunnerConfig,
        *,
        on_numerics: OnNumerics | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self.max_in_flight = config.max_in_flight
        self.config = config
        self._model = model
        self._backend = get_backend(config.backend)
        self.kv = KvPool(
            model.config, config.num_blocks, config.block_size, config.kv_dtype or model.dtype, model.device
        )
        self.host_blocks = host_blocks
        self.max_copies_in = MAX_COPIES_IN
        self.max_chunks: int | None = None  # as many as there are
        self._num_copied_blocks, self._copy_s = 0, 0.0  # since the last result
        self._rows = RunnerRows(
            max_slots=config.max_slots,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            device=model.device,
            sampler=EachRowSampler if config.backend == InvariantAttention.name else Sampler,
        )
        self._pooler = Pooler()
        self._scorer = PromptScorer(model.logits, vocab_size=config.vocab_size)
        self._masked = MaskedSlots(max_slots=config.max_slots)
        self._in_flight: deque[StepResult | RunnerError | _Unsampled] = deque()
        self._on_numerics = on_numerics
        self._watch: NumericsWatch | None = None
        if config.numerics_limit is not None:
            self._watch = NumericsWatch(model, limit=config.numerics_limit)
            self._watch.attach()

    def launch(self, plan: StepPlan) -> None:
        """Execute a step. Its errors are raised by the `collect` that belongs to it; joins, updates and copies have
        happened by then. Raises RunnerError if more than `max_in_flight` steps are in flight."""
        if len(self._in_flight) >= self.max_in_flight:
            raise RunnerError(f"step {plan.step} would be one more in flight than {self.max_in_flight}")
        self._in_flight.append(self._outcome(plan.step, lambda: self._execute(plan)))

    def constrain(self, masks: StepMasks) -> None:
        """Choose the tokens of the newest launched step. Errors are raised by its `collect`."""
        unsampled = self._in_flight[-1]
        if isinstance(unsampled, _Unsampled):
            step = unsampled  # of this very type, inside the lambda too
            chosen = TokenMasks(index_N=masks.index_N, bits_NW=masks.bits_NW)
            self._in_flight[-1] = self._outcome(step.plan.step, lambda: self._choose(step, chosen))

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises RunnerError, RunnerOutOfMemory, LookupError."""
        if not self._in_flight:
            raise LookupError("no step is in flight")
        outcome = self._in_flight.popleft()
        if isinstance(outcome, RunnerError):
            raise outcome
        assert not isinstance(outcome, _Unsampled), "this step waits for masks"
        num_copied_blocks, self._num_copied_blocks = self._num_copied_blocks, 0
        copy_s, self._copy_s = self._copy_s, 0.0
        return replace(outcome, num_copied_blocks=num_copied_blocks, copy_s=copy_s) if num_copied_blocks else outcome

    def measure_copies(self) -> float:
        """Seconds to copy a block, one way; measured on idle blocks, there and back. Requires host blocks."""
        assert self.host_blocks is not None
        num = min(16, self.host_blocks.num_blocks, self.config.num_blocks)
        pairs_C2 = np.repeat(np.arange(num, dtype=np.int32)[:, None], 2, axis=1)
        for _ in range(2):  # the first time touches the memory
            self._num_copied_blocks, self._copy_s = 0, 0.0
            self._copy_out(pairs_C2)
            self._copy_in(pairs_C2)
        seconds = self._copy_s / self._num_copied_blocks
        self._num_copied_blocks, self._copy_s = 0, 0.0
        return seconds

    def close(self) -> None:
        """Forget the steps in flight and stop watching. Idempotent."""
        self._in_flight.clear()
        if self._watch is not None:
            self._watch.detach()

    def _outcome(self, step: int, work: Callable[[], StepResult | _Unsampled]) -> StepResult | RunnerError | _Unsampled:
        try:
            with torch.inference_mode():
                return work()
        except (RuntimeError, IndexError, MemoryError) as error:
            return as_runner_error(error)
        finally:
            self._report_numerics(step)

    def _execute(self, plan: StepPlan) -> StepResult | _Unsampled:
        self._copy_out(plan.copies_out_C2)
        outcome = self._compute(plan)
        self._copy_in(plan.copies_in_C2)
        return outcome

    def _copy_out(self, copies_C2: np.ndarray) -> None:
        if not len(copies_C2) or self.host_blocks is None:
            return
        start_s = time.perf_counter()
        rows_NW = gather_rows(self.kv, self._ids(copies_C2[:, 0]))
        self.host_blocks.put(copies_C2[:, 1], rows_NW)
        self._note_copies(len(copies_C2), time.perf_counter() - start_s)

    def _copy_in(self, copies_C2: np.ndarray) -> None:
        if not len(copies_C2) or self.host_blocks is None:
            return
        start_s = time.perf_counter()
        scatter_rows(self.kv, self._ids(copies_C2[:, 1]), self.host_blocks.get(copies_C2[:, 0]))
        self._note_copies(len(copies_C2), time.perf_counter() - start_s)

    def _note_copies(self, num_blocks: int, seconds: float) -> None:
        self._num_copied_blocks += num_blocks
        self._copy_s += seconds

    def _ids(self, blocks_N: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(blocks_N.astype(np.int64)).to(self._model.device)

    def _compute(self, plan: StepPlan) -> StepResult | _Unsampled:
        self._rows.apply(plan)
        for new in plan.new_requests:
            self._pooler.join(new)
            self._scorer.join(new)
            self._masked.join(new)
        self._copy_blocks(plan)
        if not plan.num_tokens:
            return empty_result(plan.step)
        batch = build_batch(plan, self._rows, block_size=self.config.block_size, device=self._model.device)
        are_all_read = self._pooler.is_used or self._scorer.is_used or self._watch is not None
        wanted_S = None if are_all_read else batch.last_S
        hidden_TD = self._model(batch.ids_T, batch.positions_T, self.kv, batch.inputs, self._backend, wanted_S)
        first_token = len(plan.decode_slots_S)
        embeddings = self._pooler.take(plan, hidden_TD.__getitem__, first_token=first_token)
        scores = self._scorer.take(plan, hidden_TD.__getitem__, first_token=first_token)
        if not len(batch.slots_S):
            return replace(empty_result(plan.step), prompt_logprobs=scores)
        hidden_SD = hidden_TD[batch.last_S] if are_all_read and batch.last_S is not None else hidden_TD
        unsampled = _Unsampled(
            plan=plan, batch=batch, logits_SV=self._model.logits(hidden_SD), embeddings=embeddings, scores=scores
        )
        return unsampled if len(self._masked.index_of(plan)) else self._choose(unsampled, None)

    def _choose(self, unsampled: _Unsampled, masks: TokenMasks | None) -> StepResult:
        batch = unsampled.batch
        sampled = self._rows.sampler.sample(unsampled.logits_SV, batch.slots_S, batch.lengths_S, masks)
        result = self._result(unsampled.plan, batch, sampled, unsampled.embeddings)
        return replace(result, prompt_logprobs=unsampled.scores)

    def _copy_blocks(self, plan: StepPlan) -> None:
        if len(plan.block_copies_C2):
            pairs_C2 = torch.from_numpy(plan.block_copies_C2.astype(np.int64)).to(self._model.device)
            self.kv.copy_blocks(pairs_C2[:, 0], pairs_C2[:, 1])

    def _result(
        self, plan: StepPlan, batch: Batch, sampled: Sampled, embeddings: dict[int, torch.Tensor]
    ) -> StepResult:
        tokens_S = sampled.tokens_S.cpu().numpy().astype(np.int32)
        self._rows.append(batch.slots_S, batch.lengths_S, tokens_S)
        return StepResult(
            step=plan.step,
            tokens_S=tokens_S,
            is_finite_S=sampled.is_finite_S.cpu().numpy(),
            logprobs={} if sampled.logprobs is None else slot_logprobs(sampled.logprobs),
            embeddings={index: embedding_D.cpu().numpy() for index, embedding_D in embeddings.items()},
            is_exhausted_S=None if sampled.is_exhausted_S is None else sampled.is_exhausted_S.cpu().numpy(),
        )

    def _report_numerics(self, step: int) -> None:
        if self._watch is None or self._watch.first is None:
            return
        if self._on_numerics is not None:
            self._on_numerics(step, self._watch.first)
        self._watch.reset()
