"""The runner that executes plans on a CUDA device, one step ahead of its results.

    launch(plan):   changed rows and inputs of the chunks in one copy  ->  a recorded step  ->  copy of the tokens
    collect():      wait for the oldest step's copy, and for nothing else

Tokens, positions and block tables stay on the device: a decode step that follows another sends only new blocks, and the
batch where its rows are other ones. `plan.decode_positions_S` is therefore not sent; it finds missing blocks here. Must
not know: the block manager, the scheduler, sockets, text.

Legend: S sampled rows · N special ones of them · R slots.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from model.gpu.weights import GpuWeights
from model.gpu.wishes import wish_columns
from model.sampler import Sampler
from model.sampler_each import EachRowSampler
from model.sampling import Feature
from worker.config import Deterministic
from worker.cuda_changes import RowChanges
from worker.cuda_errors import DeviceLost, runner_error
from worker.cuda_graphs import Launching
from worker.cuda_layout import MixedLayout, worst_layout
from worker.cuda_programs import CudaRunnerConfig, OnProgress, StepPrograms
from worker.cuda_results import Results
from worker.cuda_sampling import SpecialRows
from worker.cuda_upload import Upload
from worker.plan import Join, SlotLogprobs, StepPlan, StepResult
from worker.runner import RunnerError
from worker.runner_rows import sampling_params
from worker.torch_runner import empty_result, slot_logprobs

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """A launched step. first_end: where the tokens of ended chunks begin in the result."""

    step: int
    num_decodes: int
    num_ends: int = 0
    first_end: int = 0
    turn: int | None = None
    logprobs: dict[int, SlotLogprobs] = field(default_factory=dict)


class CudaRunner:
    """Implements `worker.runner.Runner`. Takes the weights as they are; `record` before serving.

    With Launching.EAGER it also runs on a CPU, in Triton's interpreter: the same steps, kernel by kernel.
    """

    def __init__(self, weights: GpuWeights, config: CudaRunnerConfig) -> None:
        self.config = config
        self.max_in_flight = config.max_in_flight
        self._device = weights.embed_VD.device
        self.programs = StepPrograms(weights, config)
        self._changes = RowChanges(self.programs.state.layout)
        worst = worst_layout(max_slots=config.max_slots, max_batch_tokens=config.max_batch_tokens)
        self._upload = Upload(
            self._changes, num_payload=worst.num_words, num_buffers=config.max_in_flight, device=self._device
        )
        self.programs.read_from(self._upload.device_U)
        self._results = Results(self.programs.step.result, num_buffers=config.max_in_flight)
        self.special = SpecialRows(
            max_slots=config.max_slots,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            device=self._device,
            sampler=EachRowSampler if config.deterministic is Deterministic.ON else Sampler,
        )
        self._tokens_R: list[np.ndarray] = [_NO_TOKENS] * config.max_slots
        self._flights: deque[_Flight] = deque()

    @property
    def kv(self) -> object:
        """The KV pool."""
        return self.programs.kv

    def record(self, on_progress: OnProgress) -> float:
        """Record every shape of step, so that serving launches graphs and compiles nothing. Seconds taken."""
        if self.config.launching is Launching.EAGER:
            return 0.0
        with torch.inference_mode():
            return self.programs.record(on_progress)

    # ------------------------------------------------------------ the protocol

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Raises RunnerError, RunnerOutOfMemory: its rows must join again then, as the engine has it.
        Raises DeviceLost where the process must end."""
        if len(self._flights) >= self.max_in_flight:
            raise RunnerError(f"step {plan.step} would be one more in flight than {self.max_in_flight}")
        try:
            with torch.inference_mode():
                self._flights.append(self._start(plan))
        except (RuntimeError, IndexError, ValueError, MemoryError) as error:
            raise runner_error(error, self._device) from error

    def collect(self) -> StepResult:
        """The oldest launched step. Raises LookupError; DeviceLost where the process must end."""
        if not self._flights:
            raise LookupError("no step is in flight")
        flight = self._flights.popleft()
        if flight.turn is None:
            return empty_result(flight.step)
        try:
            tokens_B, is_finite_B = self._results.wait(flight.turn)
        except RuntimeError as error:
            raise DeviceLost(f"the CUDA device failed in step {flight.step} or before: {error}") from error
        return StepResult(
            step=flight.step,
            tokens_S=_sampled(tokens_B, flight),
            is_finite_S=_sampled(is_finite_B, flight),
            logprobs=flight.logprobs,
        )

    def close(self) -> None:
        """Forget the steps in flight and the recorded ones. Idempotent."""
        self._flights.clear()
        self.programs.forget()

    # ------------------------------------------------------------ a step

    def _start(self, plan: StepPlan) -> _Flight:
        self._apply(plan)
        if not plan.num_tokens:
            self._upload.send(0)
            self.programs.run_changes()
            return _Flight(step=plan.step, num_decodes=0)
        self._check_blocks(plan)
        first_end = self._start_mixed(plan) if plan.prefill else self._start_decode(plan)
        num_decodes = len(plan.decode_slots_S)
        logprobs = self._choose_again(plan, first_end)
        return _Flight(
            step=plan.step,
            num_decodes=num_decodes,
            num_ends=sum(chunk.is_last for chunk in plan.prefill),
            first_end=first_end,
            turn=self._results.send(),
            logprobs=logprobs,
        )

    def _apply(self, plan: StepPlan) -> None:
        """Joins and block updates into the changes; copies at once, behind the steps in flight."""
        for join in plan.joins:
            self._join(join)
        self._changes.put_blocks(plan.block_updates_U3)
        if len(plan.block_copies_C2):
            pairs_C2 = torch.from_numpy(plan.block_copies_C2.astype(np.int64)).to(self._device)
            self.programs.kv.copy_blocks(pairs_C2[:, 0], pairs_C2[:, 1])

    def _join(self, join: Join) -> None:
        params = sampling_params(join.sampling, self.config.eos_token_ids)
        self._changes.join(join, wish_columns(params, vocab_size=self.config.vocab_size))
        self.special.join(join, params)
        self._tokens_R[join.slot] = join.token_ids_T
        if self.special.has_wish_R[join.slot] and params.features & Feature.PENALTY:
            self.programs.wishes.put_counts(join.slot, join.token_ids_T, join.num_prompt_tokens)

    def _check_blocks(self, plan: StepPlan) -> None:
        """A slot without a block where the plan writes is a mistake of the plan: it must not become a write into
        somebody else's block. Raises ValueError."""
        table_RM, block_size = self._changes.table_RM, self.config.block_size
        slots_S = plan.decode_slots_S
        blocks_S = table_RM[slots_S, plan.decode_positions_S // block_size]
        if len(blocks_S) and blocks_S.min() < 0:
            bad = int(blocks_S.argmin())
            raise ValueError(f"slot {slots_S[bad]} has no block for position {plan.decode_positions_S[bad]}")
        for chunk in plan.prefill:
            end = chunk.start + chunk.num_tokens
            if table_RM[chunk.slot, chunk.start // block_size : -(-end // block_size)].min() < 0:
                raise ValueError(f"slot {chunk.slot} has no block somewhere in positions {chunk.start} to {end - 1}")

    def _start_decode(self, plan: StepPlan) -> int:
        size = self.programs.decode_size(len(plan.decode_slots_S))
        self._changes.set_batch(plan.decode_slots_S, size)
        self._upload.send(0)
        self.programs.run_decode(size)
        if self.special.has_wish_R[plan.decode_slots_S].any():
            self.programs.run_wishes(self.programs.step.rows_B[:size])
        return 0

    def _start_mixed(self, plan: StepPlan) -> int:
        exact = MixedLayout.exact(plan)
        layout = self.programs.find_shape(exact, len(plan.prefill))
        payload_U = self._upload.payload(layout.num_words)
        layout.fill(payload_U, plan, self._tokens_R, scratch_row=self.config.max_slots)
        self._upload.send(layout.num_words)
        self.programs.run_mixed(layout)
        if self.special.has_wish_R[plan.sampled_slots].any():
            self.programs.run_wishes(self.programs.sampled_rows(layout))
        return layout.num_decodes

    # ------------------------------------------------------------ special rows

    def _choose_again(self, plan: StepPlan, first_end: int) -> dict[int, SlotLogprobs]:
        """Tokens of rows that only the whole sampler can serve, and their log-probabilities."""
        slots_S = plan.sampled_slots
        index_N = np.flatnonzero(self.special.is_special_R[slots_S])
        if not len(index_N):
            return {}
        slots_N, num_decodes = slots_S[index_N], len(plan.decode_slots_S)
        column_N = np.where(index_N < num_decodes, index_N, index_N - num_decodes + first_end)
        column = torch.from_numpy(column_N).to(self._device)
        step, state = self.programs.step, self.programs.state
        sampled = self.special.sample(step.logits_BV[column].float(), slots_N, _lengths(plan)[index_N])
        tokens_N = sampled.tokens_S.to(torch.int32)
        step.token_B[column] = tokens_N
        state.last_token_R[torch.from_numpy(slots_N).to(self._device)] = tokens_N
        if sampled.logprobs is None:
            return {}
        return {int(index_N[index]): logprobs for index, logprobs in slot_logprobs(sampled.logprobs).items()}


def _lengths(plan: StepPlan) -> np.ndarray:
    """int64: tokens that each sampled row holds, the one to be sampled not counted."""
    ends = [chunk.start + chunk.num_tokens for chunk in plan.prefill if chunk.is_last]
    return np.concatenate([plan.decode_positions_S.astype(np.int64) + 1, np.asarray(ends, np.int64)])


def _sampled(values_B: np.ndarray, flight: _Flight) -> np.ndarray:
    """A copy of the step's own entries, decodes first."""
    decodes = values_B[: flight.num_decodes]
    if not flight.num_ends:
        return decodes.copy()
    return np.concatenate([decodes, values_B[flight.first_end : flight.first_end + flight.num_ends]])
