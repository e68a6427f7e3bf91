"""The runner that executes plans on a CUDA device, one step ahead of its results.

    launch(plan):   changed rows and inputs of the chunks in one copy  ->  a recorded step  ->  sampling parameters
                    ->  copy of the tokens
    constrain():    where rows have grammars, the last two wait for it
    collect():      wait for the oldest step's copy, and for nothing else

Tokens, positions and block tables stay on the device: a decode step that follows another sends only new blocks, and the
batch where its rows are other ones. `plan.decode_positions_S` is therefore not sent; it finds missing blocks here. Must
not know: the block manager, the scheduler, sockets, text.

Legend: S sampled rows · R slots.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from octavo.model.gpu.decode_step import RESULT_BYTES
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.sampling.filter import EXHAUSTED
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, OnProgress, StepPrograms
from octavo.worker.runners.cuda.graphs import Launching
from octavo.worker.runners.cuda.layout import MixedLayout, worst_layout
from octavo.worker.runners.cuda.sampling import SpecialRows
from octavo.worker.runners.cuda.staging import RowChanges, Upload
from octavo.worker.runners.cuda.token_choice import Choosing, Chosen, RunStep, read_logprobs
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory, StepMasks
from octavo.worker.runners.outputs import Pooler, PromptScorer, as_runner_error, empty_result
from octavo.worker.scheduler.plan import NewRequest, SlotLogprobs, StepPlan, StepResult

_NO_TOKENS = np.empty(0, np.int32)


# How a step's tokens come back: a copy behind the step into pinned memory, and an event to wait for.
#
# The copy is in the step's own stream. A side stream would have to be waited for before the next step may overwrite the
# result, which costs the device more than these few hundred bytes (two events against about two microseconds).
#
# Legend: B rows of the step · X words of a row's log-probabilities (model/kernels/sampling/logprobs.py).


_FINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landed:
    """Of every row of the step as it was run: token_B (int32), is_finite_B and is_exhausted_B (bool; new arrays),
    answer_BX (int32). Views are overwritten by the next step but one."""

    token_B: np.ndarray
    is_finite_B: np.ndarray
    is_exhausted_B: np.ndarray
    answer_BX: np.ndarray


class Results:
    """Buffers used in turn, one for each step in flight.

    result: uint8 on the device, max_batch tokens (int32) and as many flags (int8). answer_BX: int32 on the device.
    """

    def __init__(self, result: torch.Tensor, answer_BX: torch.Tensor, *, num_buffers: int) -> None:
        self._result, self._answer_BX = result, answer_BX
        self._max_batch = len(result) // RESULT_BYTES
        is_cuda = result.is_cuda
        self._buffers = [torch.zeros_like(result, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        self._answers = [torch.zeros_like(answer_BX, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        self._events = [torch.cuda.Event() for _ in range(num_buffers)] if is_cuda else []
        self._turn = 0

    def send(self, *, num_answers: int) -> int:
        """Enqueue the copy of the result and of the first rows' log-probabilities; returns what to `wait` for."""
        turn = self._turn
        self._buffers[turn].copy_(self._result, non_blocking=True)
        if num_answers:
            self._answers[turn][:num_answers].copy_(self._answer_BX[:num_answers], non_blocking=True)
        if self._events:
            self._events[turn].record()
        self._turn = (turn + 1) % len(self._buffers)
        return turn

    def wait(self, turn: int) -> Landed:
        """Wait for that copy."""
        if self._events:
            self._events[turn].synchronize()
        array = self._buffers[turn].numpy()
        flags_B = array[4 * self._max_batch :]
        return Landed(
            token_B=array[: 4 * self._max_batch].view(np.int32),
            is_finite_B=(flags_B & _FINITE).view(np.bool_),
            is_exhausted_B=(flags_B & EXHAUSTED) != 0,
            answer_BX=self._answers[turn].numpy(),
        )


# What becomes of an error in a step on a CUDA device: the step's own, or the end of the process.
#
# After an illegal access, a device-side assertion or a lost device every further call fails with the same error: the
# context is gone and only a new process gets another one.


class DeviceLost(Exception):
    """The CUDA context is unusable. Not a RunnerError on purpose: the engine must end, and its supervisor start it
    again."""


def runner_error(error: Exception, device: torch.device) -> RunnerError:
    """The error for the step, where the device still works; frees what the allocator hoards after a lack of memory.
    Raises DeviceLost where it does not."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as dead:
            raise DeviceLost(f"the CUDA device no longer answers: {error}") from dead
    wrapped = as_runner_error(error)
    if isinstance(wrapped, RunnerOutOfMemory) and device.type == "cuda":
        torch.cuda.empty_cache()
    return wrapped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """A launched step. first_end: where the tokens of ended chunks begin in the result. held: it waits for masks.
    error: it failed after its launch."""

    step: int
    num_decodes: int
    num_ends: int = 0
    first_end: int = 0
    turn: int | None = None
    chosen: Chosen = field(default_factory=Chosen)
    held: RunStep | None = None
    error: RunnerError | None = None
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)  # on the host, as complete as the turn
    prompt_logprobs: dict[int, list[SlotLogprobs]] = field(default_factory=dict)


class CudaRunner:
    """Implements `worker.runners.interface.Runner`. Takes the weights as they are; `record` before serving.

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
        self._results = Results(
            self.programs.step.result, self.programs.sampling.logprobs.answer_BX, num_buffers=config.max_in_flight
        )
        self._choosing = Choosing(self.programs, config, self._device)
        self._pooler = Pooler()
        self._scorer = PromptScorer(self.programs.logits, vocab_size=config.vocab_size)
        self._tokens_R: list[np.ndarray] = [_NO_TOKENS] * config.max_slots
        self._flights: deque[_Flight] = deque()

    @property
    def special(self) -> SpecialRows:
        """Rows that the whole sampler serves."""
        return self._choosing.special

    @property
    def kv(self) -> object:
        """The KV pool."""
        return self.programs.kv

    def record(self, on_progress: OnProgress) -> float:
        """Record every shape of step, so that serving launches graphs and compiles nothing. Seconds taken."""
        if self.config.launching is Launching.EAGER:
            return 0.0
        with torch.inference_mode():
            self._choosing.warm_up()
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

    def constrain(self, masks: StepMasks) -> None:
        """Let the newest step choose its tokens, whose grammars allow what these masks say. Nothing where it does not
        wait. Raises DeviceLost where the process must end."""
        flight = self._flights[-1] if self._flights else None
        if flight is None or flight.held is None:
            return
        try:
            with torch.inference_mode():
                chosen = self._choosing.run(flight.held, masks)
                turn = self._results.send(num_answers=chosen.num_answers)
            self._flights[-1] = replace(flight, held=None, chosen=chosen, turn=turn)
        except (RuntimeError, IndexError, ValueError, MemoryError) as error:
            self._flights[-1] = replace(flight, held=None, error=runner_error(error, self._device))

    def collect(self) -> StepResult:
        """The oldest launched step. Raises LookupError, also for a step that still waits for masks; RunnerError where
        choosing failed; DeviceLost where the process must end."""
        if not self._flights or self._flights[0].held is not None:
            raise LookupError("no step is in flight, or it waits for masks")
        flight = self._flights.popleft()
        if flight.error is not None:
            raise flight.error
        if flight.turn is None:
            return empty_result(flight.step)
        try:
            landed = self._results.wait(flight.turn)
        except RuntimeError as error:
            raise DeviceLost(f"the CUDA device failed in step {flight.step} or before: {error}") from error
        is_exhausted_S = _sampled(landed.is_exhausted_B, flight)
        return StepResult(
            step=flight.step,
            tokens_S=_sampled(landed.token_B, flight),
            is_finite_S=_sampled(landed.is_finite_B, flight),
            is_exhausted_S=is_exhausted_S if is_exhausted_S.any() else None,
            logprobs=read_logprobs(flight.chosen, landed.answer_BX),
            embeddings={index: embedding_D.numpy() for index, embedding_D in flight.embeddings.items()},
            prompt_logprobs=flight.prompt_logprobs,
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
        run = self._start_mixed(plan) if plan.prefill else self._start_decode(plan)
        num_decodes, first_end = len(plan.decode_slots_S), run.first_end
        is_held = run.awaits_masks
        chosen = Chosen() if is_held else self._choosing.run(run, None)
        embeddings = self._pooler.take(plan, self.programs.hidden, first_token=first_end) if plan.prefill else {}
        scores = self._scorer.take(plan, self.programs.hidden, first_token=first_end) if plan.prefill else {}
        return _Flight(
            step=plan.step,
            num_decodes=num_decodes,
            num_ends=len(run.slots_S) - num_decodes,
            first_end=first_end,
            held=run if is_held else None,
            chosen=chosen,
            embeddings={index: _to_host(embedding_D) for index, embedding_D in embeddings.items()},
            prompt_logprobs=scores,
            turn=None if is_held else self._results.send(num_answers=chosen.num_answers),  # last: it finds everything
        )

    def _apply(self, plan: StepPlan) -> None:
        """Joins and block updates into the changes; copies at once, behind the steps in flight."""
        for join in plan.new_requests:
            self._join(join)
        self._changes.put_blocks(plan.block_updates_U3)
        if len(plan.block_copies_C2):
            pairs_C2 = torch.from_numpy(plan.block_copies_C2.astype(np.int64)).to(self._device)
            self.programs.kv.copy_blocks(pairs_C2[:, 0], pairs_C2[:, 1])

    def _join(self, join: NewRequest) -> None:
        self._choosing.join(join, self._changes)
        self._pooler.join(join)
        self._scorer.join(join)
        self._tokens_R[join.slot] = join.token_ids_T

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

    def _start_decode(self, plan: StepPlan) -> RunStep:
        size = self.programs.decode_size(len(plan.decode_slots_S))
        self._changes.set_batch(plan.decode_slots_S, size)
        self._upload.send(0)
        self.programs.run_decode(size)
        return self._choosing.started(plan, self.programs.step.rows_B[:size], first_end=0)

    def _start_mixed(self, plan: StepPlan) -> RunStep:
        exact = MixedLayout.exact(plan)
        layout = self.programs.find_shape(exact, len(plan.prefill))
        payload_U = self._upload.payload(layout.num_words)
        layout.fill(payload_U, plan, self._tokens_R, scratch_row=self.config.max_slots)
        self._upload.send(layout.num_words)
        self.programs.run_mixed(layout)
        rows_B = self.programs.sampled_rows(layout)
        return self._choosing.started(plan, rows_B, first_end=layout.num_decodes)


def _to_host(values_D: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy into pinned memory."""
    host_D = torch.empty_like(values_D, device="cpu", pin_memory=values_D.is_cuda)
    return host_D.copy_(values_D, non_blocking=True)


def _sampled(values_B: np.ndarray, flight: _Flight) -> np.ndarray:
    """A copy of the step's own entries, decodes first."""
    decodes = values_B[: flight.num_decodes]
    if not flight.num_ends:
        return decodes.copy()
    return np.concatenate([decodes, values_B[flight.first_end : flight.first_end + flight.num_ends]])
