"""The runner that executes plans with the model.

    launch(plan):   joins, table updates, block copies  ->  one forward pass  ->  logits of the sampled rows  ->  tokens
    collect():      the result of the oldest launched plan, or the error that it ended with

A launched step's tokens are in the rows as soon as ``launch`` returns, so that the next plan's decodes find them,
collected or not. Must not know: the block manager, the scheduler, sockets, text.

Legend: S sampled rows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from model.attention import get_backend
from model.attention_invariant import InvariantAttention
from model.kv_pool import KvPool
from model.numerics import NumericFinding, NumericsWatch
from model.qwen2 import Qwen2ForCausalLM
from model.sampler import Sampled, Sampler
from model.sampler_each import EachRowSampler
from model.sampling_masks import TokenMasks
from worker.masks import MaskedSlots, StepMasks
from worker.plan import SlotLogprobs, StepPlan, StepResult
from worker.runner import RunnerError, RunnerOutOfMemory
from worker.runner_batch import Batch, build_batch
from worker.runner_logprobs import PromptScorer, slot_logprobs
from worker.runner_pooling import Pooler
from worker.runner_rows import RunnerRows

OnNumerics = Callable[[int, NumericFinding], None]
"""Called with (step, first bad activation of it)."""

_ALLOCATION_FAILURES = ("can't allocate memory", "not enough memory", "out of memory")


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
class _Held:
    """A step whose forward pass is done and whose tokens are not chosen yet."""

    plan: StepPlan
    batch: Batch
    logits_SV: torch.Tensor
    embeddings: dict[int, torch.Tensor]
    scores: dict[int, list[SlotLogprobs]]


class TorchRunner:
    """Implements `worker.runner.Runner`."""

    def __init__(
        self, model: Qwen2ForCausalLM, config: TorchRunnerConfig, *, on_numerics: OnNumerics | None = None
    ) -> None:
        self.max_in_flight = config.max_in_flight
        self.config = config
        self._model = model
        self._backend = get_backend(config.backend)
        self.kv = KvPool(
            model.config, config.num_blocks, config.block_size, config.kv_dtype or model.dtype, model.device
        )
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
        self._landed: deque[StepResult | RunnerError | _Held] = deque()
        self._on_numerics = on_numerics
        self._watch: NumericsWatch | None = None
        if config.numerics_limit is not None:
            self._watch = NumericsWatch(model, limit=config.numerics_limit)
            self._watch.attach()

    def launch(self, plan: StepPlan) -> None:
        """Execute a step. What goes wrong in it is raised by the `collect` that belongs to it: its joins, updates and
        copies have happened by then. Raises RunnerError where more steps are in flight than `max_in_flight`."""
        if len(self._landed) >= self.max_in_flight:
            raise RunnerError(f"step {plan.step} would be one more in flight than {self.max_in_flight}")
        self._landed.append(self._outcome(plan.step, lambda: self._execute(plan)))

    def constrain(self, masks: StepMasks) -> None:
        """Choose the tokens of the newest launched step. What goes wrong is raised by its `collect`."""
        held = self._landed[-1]
        if isinstance(held, _Held):
            step = held  # of this very type, inside the lambda too
            chosen = TokenMasks(index_N=masks.index_N, bits_NW=masks.bits_NW)
            self._landed[-1] = self._outcome(step.plan.step, lambda: self._choose(step, chosen))

    def collect(self) -> StepResult:
        """The oldest launched step. Raises RunnerError, RunnerOutOfMemory, LookupError."""
        if not self._landed:
            raise LookupError("no step is in flight")
        outcome = self._landed.popleft()
        if isinstance(outcome, RunnerError):
            raise outcome
        assert not isinstance(outcome, _Held), "this step waits for masks"
        return outcome

    def close(self) -> None:
        """Forget the steps in flight and stop watching. Idempotent."""
        self._landed.clear()
        if self._watch is not None:
            self._watch.detach()

    def _outcome(self, step: int, work: Callable[[], StepResult | _Held]) -> StepResult | RunnerError | _Held:
        try:
            with torch.inference_mode():
                return work()
        except (RuntimeError, IndexError, MemoryError) as error:
            return as_runner_error(error)
        finally:
            self._report_numerics(step)

    def _execute(self, plan: StepPlan) -> StepResult | _Held:
        self._rows.apply(plan)
        for join in plan.joins:
            self._pooler.join(join)
            self._scorer.join(join)
            self._masked.join(join)
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
        held = _Held(
            plan=plan, batch=batch, logits_SV=self._model.logits(hidden_SD), embeddings=embeddings, scores=scores
        )
        return held if len(self._masked.index_of(plan)) else self._choose(held, None)

    def _choose(self, held: _Held, masks: TokenMasks | None) -> StepResult:
        batch = held.batch
        sampled = self._rows.sampler.sample(held.logits_SV, batch.slots_S, batch.lengths_S, masks)
        result = self._result(held.plan, batch, sampled, held.embeddings)
        return replace(result, prompt_logprobs=held.scores)

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


def empty_result(step: int) -> StepResult:
    """Of a step that samples nothing."""
    return StepResult(step=step, tokens_S=np.empty(0, np.int32), is_finite_S=np.empty(0, np.bool_))


def as_runner_error(error: Exception) -> RunnerError:
    """RunnerOutOfMemory where an allocator says so, in whichever words."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    is_memory = is_memory or any(words in str(error) for words in _ALLOCATION_FAILURES)
    kind = RunnerOutOfMemory if is_memory else RunnerError
    wrapped = kind(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
