"""The runner that executes plans on a CUDA device, one step ahead of its results.

    launch(plan):   changed rows and inputs of the chunks in one copy  ->  a recorded step  ->  sampling parameters
                    ->  the tokens, written into the host's memory
    constrain():    if rows have grammars, the last two wait for it
    collect():      wait for the oldest step's tokens, and for nothing else

Tokens, positions and block tables stay on the device: a decode step that follows another sends only new blocks, and the
batch if its rows have changed. `plan.decode_positions_S` is therefore not sent, but used here to find missing blocks.
Must not know: the block manager, the scheduler, sockets, text.

Legend: S sampled rows · R slots · B rows of the step · X words of a row's log-probabilities.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.gpu.decode_step import RESULT_BYTES
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.row_changes import send_result
from octavo.model.kernels.sampling.filter import EXHAUSTED
from octavo.worker.runners.cuda.graph_runner import (
    CudaRunnerConfig,
    GraphRunner,
    Launching,
    OnProgress,
    Recorder,
    Work,
    make_recorder,
)
from octavo.worker.runners.cuda.host_copies import HostCopies, copy_one_block
from octavo.worker.runners.cuda.sampling import SpecialRows, StepLogprobs, StepRows, StepSampler, read_logprobs
from octavo.worker.runners.cuda.staging import MixedLayout, StagedRows, StagingBuffer, worst_layout
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.runners.outputs import Pooler, PromptScorer, as_runner_error
from octavo.worker.scheduler.plan import NewRequest, SlotLogprobs, StepMasks, StepPlan, StepResult

_NO_TOKENS = np.empty(0, np.int32)
_FINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutputs:
    """For every row of the step as it was run: token_B (int32), is_finite_B and is_exhausted_B (bool; new arrays),
    answer_BX (int32). Views are overwritten by the step after the next."""

    token_B: np.ndarray
    is_finite_B: np.ndarray
    is_exhausted_B: np.ndarray
    answer_BX: np.ndarray


class ResultBuffers:
    """Brings a step's tokens back: a kernel behind the step writes them into pinned memory, and an event to wait for.

    The kernel is in the step's own stream. A side stream would have to be waited for before the next step may overwrite
    the result, which costs the device more than these few hundred bytes (two events against about two microseconds).
    Buffers are used in turn, one for each step in flight. Recorded, kernel and event are one launch: by themselves they
    take the host as long as all the rest of a launch.

    result: uint8 on the device, max_batch tokens (int32) and as many flags (int8). answer_BX: int32 on the device.
    """

    def __init__(self, result: torch.Tensor, answer_BX: torch.Tensor, *, num_buffers: int) -> None:
        self._result, self._answer_BX = result, answer_BX
        self._max_batch = len(result) // RESULT_BYTES
        is_cuda = result.is_cuda
        self._buffers = [torch.zeros_like(result, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._answers = [torch.zeros_like(answer_BX, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        # External: recorded into a graph, each launch of it records the event anew.
        self._events = [torch.cuda.Event(external=True) for _ in range(num_buffers)] if is_cuda else []
        self._sends: list[Work] = [partial(self._send, turn) for turn in range(num_buffers)]
        self._turn = 0

    def record(self, recorder: Recorder) -> None:
        """Record what `send` enqueues for every step, so that it is a single launch."""
        self._sends = [recorder.record(partial(self._send, turn)) for turn in range(len(self._buffers))]

    def send(self, *, num_answers: int) -> int:
        """Enqueue the transfer of the tokens and of the first num_answers rows' log-probabilities. Returns what to
        `wait` for."""
        turn = self._turn
        if num_answers:
            self._answers[turn][:num_answers].copy_(self._answer_BX[:num_answers], non_blocking=True)
        self._sends[turn]()
        self._turn = (turn + 1) % len(self._buffers)
        return turn

    def _send(self, turn: int) -> None:
        send_result(self._result, self._buffers[turn])
        if self._events:
            self._events[turn].record()

    def wait(self, turn: int) -> StepOutputs:
        """Wait for that transfer."""
        if self._events:
            self._events[turn].synchronize()
        array = self._arrays[turn]
        flags_B = array[4 * self._max_batch :]
        return StepOutputs(
            token_B=array[: 4 * self._max_batch].view(np.int32),
            is_finite_B=(flags_B & _FINITE).view(np.bool_),
            is_exhausted_B=(flags_B & EXHAUSTED) != 0,
            answer_BX=self._answers[turn].numpy(),
        )


class DeviceLost(Exception):
    """The CUDA context is unusable: after an illegal access, a device-side assertion or a lost device, every further
    call fails with the same error. Deliberately not a RunnerError: the engine must end, so that its supervisor restarts
    it."""


def runner_error(error: Exception, device: torch.device) -> RunnerError:
    """The step's error, if the device still works; after an out-of-memory, the allocator's unused memory is released.
    Raises DeviceLost if the device no longer works."""
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
class _LaunchedStep:
    """A launched step. first_end: where tokens of ended chunks begin in the result. held: it waits for masks. error: it
    failed after its launch."""

    step: int
    num_decodes: int
    num_ends: int = 0
    first_end: int = 0
    turn: int | None = None
    chosen: StepLogprobs = field(default_factory=StepLogprobs)
    held: StepRows | None = None
    error: RunnerError | None = None
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)  # on the host, as complete as the turn
    prompt_logprobs: dict[int, list[SlotLogprobs]] = field(default_factory=dict)


class CudaRunner:
    """Implements `worker.runners.interface.Runner`. Takes the weights as they are; call `record` before serving.

    With Launching.EAGER it also runs on a CPU, in Triton's interpreter: the same steps, kernel by kernel.
    """

    def __init__(self, weights: GpuWeights, config: CudaRunnerConfig, *, host_blocks: HostBlocks | None = None) -> None:
        self.config = config
        self.host_blocks = host_blocks
        self.max_copies_in = config.max_copies_in
        self.max_in_flight = config.max_in_flight
        self._device = weights.embed_VD.device
        self.graphs = GraphRunner(weights, config)
        self.max_chunks = self.graphs.max_chunks
        self._rows = StagedRows(self.graphs.state.layout)
        worst = worst_layout(max_slots=config.max_slots, max_batch_tokens=config.max_batch_tokens)
        self._staging = StagingBuffer(
            self._rows, num_payload=worst.num_words, num_buffers=config.max_in_flight, device=self._device
        )
        self.graphs.read_from(self._staging.device_U)
        self._results = ResultBuffers(
            self.graphs.step.result, self.graphs.sampling.logprobs.answer_BX, num_buffers=config.max_in_flight
        )
        self._step_sampler = StepSampler(self.graphs, config, self._device)
        self._pooler = Pooler()
        self._scorer = PromptScorer(self.graphs.logits, vocab_size=config.vocab_size)
        self._host_copies: HostCopies | None = None
        if host_blocks is not None:
            self._host_copies = HostCopies(self.graphs.kv, host_blocks, rows=config.max_copies_in)
        self._tokens_R: list[np.ndarray] = [_NO_TOKENS] * config.max_slots
        self._in_flight: deque[_LaunchedStep] = deque()

    @property
    def special(self) -> SpecialRows:
        """Rows that are sampled by the whole sampler."""
        return self._step_sampler.special

    @property
    def kv(self) -> object:
        """The KV pool."""
        return self.graphs.kv

    def record(self, on_progress: OnProgress = lambda done, total: None) -> float:
        """Record every shape of step, so that serving launches graphs and compiles nothing. Returns the seconds
        taken."""
        if self.config.launching is Launching.EAGER:
            return 0.0
        with torch.inference_mode():
            self._step_sampler.warm_up()
            self._results.record(make_recorder(self.config.launching))
            return self.graphs.record(on_progress)

    def run_all(self) -> None:
        """Enqueue everything that serving launches, once, to compile it."""
        self.graphs.run_all()
        self._step_sampler.warm_up()
        self._results.send(num_answers=0)
        copy_one_block(self.graphs.kv)

    # ------------------------------------------------------------ the protocol

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Raises RunnerError, RunnerOutOfMemory; its rows must then join again, which the engine does.
        Raises DeviceLost if the process must end."""
        if len(self._in_flight) >= self.max_in_flight:
            raise RunnerError(f"step {plan.step} would be one more in flight than {self.max_in_flight}")
        try:
            with torch.inference_mode():
                self._in_flight.append(self._start(plan))
        except (RuntimeError, IndexError, ValueError, MemoryError) as error:
            raise runner_error(error, self._device) from error

    def constrain(self, masks: StepMasks) -> None:
        """Let the newest step choose its tokens, within these masks. Does nothing if the step does not wait for masks.
        Raises DeviceLost if the process must end."""
        launched = self._in_flight[-1] if self._in_flight else None
        if launched is None or launched.held is None:
            return
        try:
            with torch.inference_mode():
                chosen = self._step_sampler.run(launched.held, masks)
                turn = self._results.send(num_answers=chosen.num_answers)
            self._in_flight[-1] = replace(launched, held=None, chosen=chosen, turn=turn)
        except (RuntimeError, IndexError, ValueError, MemoryError) as error:
            self._in_flight[-1] = replace(launched, held=None, error=runner_error(error, self._device))

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises LookupError, also for a step that still waits for masks;
        RunnerError if choosing failed; DeviceLost if the process must end."""
        if not self._in_flight or self._in_flight[0].held is not None:
            raise LookupError("no step is in flight, or it waits for masks")
        launched = self._in_flight.popleft()
        if launched.error is not None:
            raise launched.error
        assert launched.turn is not None
        try:
            outputs = self._results.wait(launched.turn)
        except RuntimeError as error:
            raise DeviceLost(f"the CUDA device failed in step {launched.step} or before: {error}") from error
        is_exhausted_S = _sampled(outputs.is_exhausted_B, launched)
        num_copied_blocks, copy_s = (0, 0.0) if self._host_copies is None else self._host_copies.take_times()
        return StepResult(
            step=launched.step,
            tokens_S=_sampled(outputs.token_B, launched),
            is_finite_S=_sampled(outputs.is_finite_B, launched),
            is_exhausted_S=is_exhausted_S if is_exhausted_S.any() else None,
            logprobs=read_logprobs(launched.chosen, outputs.answer_BX),
            embeddings={index: embedding_D.numpy() for index, embedding_D in launched.embeddings.items()},
            prompt_logprobs=launched.prompt_logprobs,
            num_copied_blocks=num_copied_blocks,
            copy_s=copy_s,
        )

    def measure_copies(self) -> float:
        """Seconds per block, one way; on an idle runner with host blocks."""
        assert self._host_copies is not None
        with torch.inference_mode():
            return self._host_copies.measure(self.config.num_blocks)

    def close(self) -> None:
        """Drop the steps in flight and the recorded ones. Idempotent."""
        if self._host_copies is not None:
            self._host_copies.wait()
            self._host_copies = None
        self._in_flight.clear()
        self.graphs.forget()

    # ------------------------------------------------------------ a step

    def _start(self, plan: StepPlan) -> _LaunchedStep:
        if self._host_copies is not None:
            self._host_copies.begin(plan.copies_out_C2, plan.copies_in_C2)
        self._apply(plan)
        if not plan.num_tokens:  # it is waited for all the same: the next step but one writes to this one's buffers
            self._staging.send(0)
            self.graphs.run_changes()
            return _LaunchedStep(step=plan.step, num_decodes=0, turn=self._results.send(num_answers=0))
        self._check_blocks(plan)
        rows = self._start_mixed(plan) if plan.prefill else self._start_decode(plan)
        num_decodes, first_end = len(plan.decode_slots_S), rows.first_end
        is_held = rows.awaits_masks
        chosen = StepLogprobs() if is_held else self._step_sampler.run(rows, None)
        embeddings = self._pooler.take(plan, self.graphs.hidden, first_token=first_end) if plan.prefill else {}
        scores = self._scorer.take(plan, self.graphs.hidden, first_token=first_end) if plan.prefill else {}
        return _LaunchedStep(
            step=plan.step,
            num_decodes=num_decodes,
            num_ends=len(rows.slots_S) - num_decodes,
            first_end=first_end,
            held=rows if is_held else None,
            chosen=chosen,
            embeddings={index: _to_host(embedding_D) for index, embedding_D in embeddings.items()},
            prompt_logprobs=scores,
            turn=None if is_held else self._results.send(num_answers=chosen.num_answers),  # last: it finds everything
        )

    def _apply(self, plan: StepPlan) -> None:
        """Put joins and block updates into the changes; enqueue copies at once, after the steps in flight."""
        for new in plan.new_requests:
            self._join(new)
        self._rows.put_blocks(plan.block_updates_U3)
        if len(plan.block_copies_C2):
            pairs_C2 = torch.from_numpy(plan.block_copies_C2.astype(np.int64)).to(self._device)
            self.graphs.kv.copy_blocks(pairs_C2[:, 0], pairs_C2[:, 1])

    def _join(self, new: NewRequest) -> None:
        self._step_sampler.join(new, self._rows)
        self._pooler.join(new)
        self._scorer.join(new)
        self._tokens_R[new.slot] = new.token_ids_T

    def _check_blocks(self, plan: StepPlan) -> None:
        """Raises ValueError if a slot has no block where the plan writes: that is a defect of the plan, and must not
        become a write into another request's block."""
        table_RM, block_size = self._rows.table_RM, self.config.block_size
        slots_S = plan.decode_slots_S
        blocks_S = table_RM[slots_S, plan.decode_positions_S // block_size]
        if len(blocks_S) and blocks_S.min() < 0:
            bad = int(blocks_S.argmin())
            raise ValueError(f"slot {slots_S[bad]} has no block for position {plan.decode_positions_S[bad]}")
        for chunk in plan.prefill:
            end = chunk.start + chunk.num_tokens
            if table_RM[chunk.slot, chunk.start // block_size : -(-end // block_size)].min() < 0:
                raise ValueError(f"slot {chunk.slot} has no block somewhere in positions {chunk.start} to {end - 1}")

    def _start_decode(self, plan: StepPlan) -> StepRows:
        size = self.graphs.decode_size(len(plan.decode_slots_S))
        self._rows.set_batch(plan.decode_slots_S, size)
        self._staging.send(0)
        self.graphs.run_decode(size)
        return self._step_sampler.rows_of(plan, self.graphs.decode_rows(size), first_end=0)

    def _start_mixed(self, plan: StepPlan) -> StepRows:
        exact = MixedLayout.exact(plan)
        layout = self.graphs.find_shape(exact, len(plan.prefill))
        payload_U = self._staging.payload(layout.num_words)
        are_all_read = self._pooler.is_used or self._scorer.is_used
        scratch_row = self.config.max_slots
        layout.fill(payload_U, plan, self._tokens_R, scratch_row=scratch_row, are_all_read=are_all_read)
        self._staging.send(layout.num_words)
        self.graphs.run_mixed(layout)
        rows_B = self.graphs.sampled_rows(layout)
        return self._step_sampler.rows_of(plan, rows_B, first_end=layout.num_decodes)


def _to_host(values_D: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy into pinned memory."""
    host_D = torch.empty_like(values_D, device="cpu", pin_memory=values_D.is_cuda)
    return host_D.copy_(values_D, non_blocking=True)


def _sampled(values_B: np.ndarray, launched: _LaunchedStep) -> np.ndarray:
    """A copy of the step's own entries, decodes first."""
    decodes = values_B[: launched.num_decodes]
    if not launched.num_ends:
        return decodes.copy()
    return np.concatenate([decodes, values_B[launched.first_end : launched.first_end + launched.num_ends]])
