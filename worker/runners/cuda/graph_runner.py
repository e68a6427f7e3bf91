"""The steps of a runner on its device: decode and mixed, recorded for the shapes that come up, launched kernel by
kernel for the others. Each begins with the host's changes of the rows.

Must not know: requests, plans' order, what becomes of the tokens.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.invariant_steps import InvariantDecodeStep, InvariantMixedStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.sampling_columns import Stage
from octavo.model.gpu.sampling_state import DeviceMasks, SampledBatch, SamplingState
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.row_changes import HEADER_WORDS, apply_changes
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graphs import Launching, Recorder, batch_sizes, make_recorder
from octavo.worker.runners.cuda.layout import MAX_RECORDED_CHUNKS, MixedLayout, MixedShapes

OnProgress = Callable[[int, int], None]
"""Called with (shapes recorded, shapes in all)."""

Program = Callable[[], None]

_RECORDED_STAGES = (Stage.CHOICE, Stage.LOGPROBS, Stage.LOGPROBS | Stage.CHOICE)
"""What decode rows need most often; the rest is launched kernel by kernel behind the step, while that runs."""


class PathChoice(Enum):
    """How steps of a few rows are chosen among the ways there are (model/gpu/autotune.py)."""

    KEPT = "kept"  # as measured once on this device; by a rule where nothing has been
    MEASURED = "measured"  # measure what has not been yet, before serving, and keep it on disk: a minute, once


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaRunnerConfig:
    """num_blocks, block_size: of the KV pool, which has one block more, for scratch. max_slots: rows.

    vocab_size: ids that may be sampled (the tokenizer's). eos_token_ids: masked while fewer than min_tokens are out.
    max_batch_tokens: of a step. kv_dtype: of the KV pool, None for the weights' dtype.
    """

    num_blocks: int
    block_size: int
    max_slots: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_batch_tokens: int = 2048
    max_in_flight: int = 2
    launching: Launching = Launching.GRAPHS
    path_choice: PathChoice = PathChoice.KEPT
    deterministic: Deterministic = Deterministic.OFF
    kv_dtype: torch.dtype | None = None

    @property
    def table_width(self) -> int:
        """Blocks of the longest request, with one token more: a step that runs ahead samples one for nobody."""
        return -(-(self.max_model_len + 1) // self.block_size)


class StepPrograms:
    """State, KV pool and steps, with static buffers."""

    def __init__(self, weights: GpuWeights, config: CudaRunnerConfig) -> None:
        device = weights.embed_VD.device
        self.state = RowState(
            num_slots=config.max_slots,
            table_width=config.table_width,
            scratch_block=config.num_blocks,
            device=device,
        )
        self.kv = KvPool(
            weights.config, config.num_blocks + 1, config.block_size, config.kv_dtype or weights.dtype, device
        )
        self._shapes = MixedShapes.of(max_slots=config.max_slots, max_batch_tokens=config.max_batch_tokens)
        largest = max(layout.num_tokens for layout in self._shapes.layouts())
        self.step, self._mixed_step = make_steps(
            weights, self.state, self.kv, config, max_tokens=max(largest, config.max_batch_tokens)
        )
        self.sampling = SamplingState(
            num_rows=config.max_slots + 1,
            max_batch=config.max_slots + MAX_RECORDED_CHUNKS,
            vocab_size=config.vocab_size,
            device=device,
            state=self.state,
        )
        self._sizes = batch_sizes(config.max_slots)
        self._recorder = make_recorder(config.launching)
        self._path_choice = config.path_choice
        self._upload_U = torch.empty(0)
        self._decodes: dict[int, Program] = {}
        self._sampling: dict[tuple[int, Stage], Program] = {}
        self._mixed: dict[MixedLayout, Program] = {}

    def read_from(self, upload_U: torch.Tensor) -> None:
        """Where the host's copies arrive, before anything runs."""
        self._upload_U = upload_U

    @property
    def num_shapes(self) -> int:
        """How many steps `record` records."""
        return len(self._sizes) + len(self._shapes.layouts())

    def record(self, on_progress: OnProgress) -> float:
        """Record all shapes, largest first; the seconds that it took. Rows and pool must be idle."""
        start_s, total = time.perf_counter(), self.num_shapes
        on_progress(0, total)
        if self._path_choice is PathChoice.MEASURED:
            self.step.paths.choose(self._sizes, self.step.run)
        for layout in self._shapes.layouts():
            on_progress(len(self._mixed), total)
            self._mixed[layout] = self._recorder.record(self._mixed_program(layout))
        for size in reversed(self._sizes):
            on_progress(len(self._mixed) + len(self._decodes), total)
            self._decodes[size] = self._recorder.record(self._decode_program(size))
            for stages in _RECORDED_STAGES:
                self._sampling[size, stages] = self._recorder.record(self._sampling_program(size, stages))
        on_progress(total, total)
        return time.perf_counter() - start_s

    def run_all(self) -> None:
        """Enqueue every shape of step, the small ones on every path: for whoever compiles what that launches."""
        for layout in self._shapes.layouts():
            self._mixed_program(layout)()
        for size in self._sizes:
            for _ in self.step.paths.try_all(size):
                self._decode_program(size)()
            self.run_sampling(self.step.rows_B[:size])

    def forget(self) -> None:
        """Drop what was recorded. Idempotent."""
        self._mixed.clear()
        self._decodes.clear()
        self._sampling.clear()

    def record_largest(self, recorder: Recorder) -> tuple[Program, Program]:
        """The widest decode and the largest mixed step, recorded for whoever measures."""
        layout = self._shapes.layouts()[0]
        return recorder.record(self._decode_program(self._sizes[-1])), recorder.record(self._mixed_program(layout))

    def decode_size(self, num_rows: int) -> int:
        """The batch size that runs for so many rows."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run_decode(self, size: int) -> None:
        """Enqueue the changes and a decode step of one of the batch sizes."""
        program = self._decodes.get(size)
        program() if program else self._decode_program(size)()

    def find_shape(self, exact: MixedLayout, num_chunks: int) -> MixedLayout:
        """The recorded shape that fits, or the step's own."""
        return self._shapes.find(exact, num_chunks) or exact

    def run_mixed(self, layout: MixedLayout) -> None:
        """Enqueue the changes and a mixed step whose inputs lie in the upload as the layout says."""
        program = self._mixed.get(layout)
        program() if program else self._mixed_program(layout)()

    def run_sampling(self, rows_B: torch.Tensor, stages: Stage = ~Stage.NONE, masks: DeviceMasks | None = None) -> None:
        """Enqueue the kernels that the rows (int32) of the step before need; stages: at least the union of theirs."""
        step, B = self.step, len(rows_B)
        program = (
            self._sampling.get((B, stages)) if masks is None and rows_B.data_ptr() == step.rows_B.data_ptr() else None
        )
        if program is not None:
            program()
            return
        batch = SampledBatch(
            logits_BV=step.logits_BV[:B], rows_B=rows_B, token_B=step.token_B[:B], is_finite_B=step.is_finite_B[:B]
        )
        self.sampling.run(stages, batch, masks)

    def sampled_rows(self, layout: MixedLayout) -> torch.Tensor:
        """int32: rows that a mixed step of this layout samples, as they lie in the upload."""
        return layout.inputs(self._upload_U[HEADER_WORDS:]).rows_S

    def run_inputs(self, inputs: MixedInputs) -> None:
        """Enqueue a mixed step of inputs that lie elsewhere, without changes."""
        self._mixed_step.run(inputs)

    def hidden(self, tokens: slice) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, D], of these tokens of the mixed step enqueued last."""
        return self._mixed_step.hidden(tokens)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V] of hidden states after the final norm, in memory of their own."""
        return self.step.project(hidden_SD).float()

    def run_changes(self) -> None:
        """Enqueue the changes alone."""
        apply_changes(self._upload_U, self.state.words_W)

    def _decode_program(self, size: int) -> Program:
        def run() -> None:
            self.run_changes()
            self.step.run(size)

        return run

    def _sampling_program(self, size: int, stages: Stage) -> Program:
        rows_B = self.step.rows_B[:size]
        return lambda: self.run_sampling(rows_B, stages)

    def _mixed_program(self, layout: MixedLayout) -> Program:
        inputs = layout.inputs(self._upload_U[HEADER_WORDS:])

        def run() -> None:
            self.run_changes()
            self._mixed_step.run(inputs)

        return run


def make_steps(
    weights: GpuWeights, state: RowState, kv: KvPool, config: CudaRunnerConfig, *, max_tokens: int
) -> tuple[DecodeStep, MixedStep]:
    """The decode step and the mixed step, of the kind that is wanted."""
    sizes: dict[str, int] = {"max_batch": config.max_slots + MAX_RECORDED_CHUNKS, "vocab_size": config.vocab_size}
    if config.deterministic is Deterministic.ON:
        invariant = InvariantDecodeStep(weights, state, kv, rows_B=state.batch_A, **sizes)
        return invariant, InvariantMixedStep(invariant, max_tokens=max_tokens)
    decode = DecodeStep(weights, state, kv, rows_B=state.batch_A, **sizes)
    return decode, MixedStep(decode, max_tokens=max_tokens)
