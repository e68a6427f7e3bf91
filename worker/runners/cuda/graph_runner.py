"""The steps of a CUDA runner: decode and mixed, recorded as CUDA graphs for the shapes that come up, launched kernel by
kernel for the others. Each begins with the host's changes of the rows.

Must not know: requests, the order of plans, what becomes of the tokens.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.autotune import CAPTURE
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.invariant_steps import InvariantDecodeStep, InvariantMixedStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.sampling_columns import Stage
from octavo.model.gpu.sampling_state import DeviceMasks, SampledBatch, SamplingState
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.row_changes import HEADER_WORDS, apply_changes
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.staging import MAX_RECORDED_CHUNKS, MixedLayout, MixedShapes


class Launching(Enum):
    """How recorded work is repeated."""

    GRAPHS = "graphs"  # one launch for all kernels
    EAGER = "eager"  # kernel by kernel: on a CPU, and to look for mistakes


class Recorder(Protocol):
    """Turns work into a function that repeats it."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The repeatable work. It must read and write the same buffers every time."""


class EagerRecorder:
    """Runs the work itself every time."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as it is."""
        return work


class GraphRecorder:
    """CUDA graphs that share one memory pool, so only one of them runs at a time. Needs a CUDA device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once, so that kernels are compiled and libraries are initialised, then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=CAPTURE):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def make_recorder(launching: Launching) -> Recorder:
    """A recorder of this kind."""
    return GraphRecorder() if launching is Launching.GRAPHS else EagerRecorder()


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 128, of 16 up to 256, of 32 up to 512, of 64 beyond; the largest is always
    included. 27 sizes for 256."""
    sizes, size = [1, 2, 4], 8
    while size < largest:
        sizes.append(size)
        size += 8 if size < 128 else 16 if size < 256 else 32 if size < 512 else 64
    return (*(size for size in sizes if size < largest), largest)


TIMED_CONTEXT = 256
"""Tokens of context at which ways of a step are timed."""

OnProgress = Callable[[int, int], None]
"""Called with (shapes recorded, shapes in all)."""

Work = Callable[[], None]

_RECORDED_STAGES = (Stage.CHOICE, Stage.LOGPROBS, Stage.LOGPROBS | Stage.CHOICE)
"""What decode rows need most often; the rest is launched kernel by kernel behind the step, while that runs."""


class Autotune(Enum):
    """How small-batch steps choose among the available implementations (model/gpu/autotune.py)."""

    CACHED = "cached"  # as measured before on this device; by a rule if nothing has been
    MEASURED = "measured"  # measure what has not been yet, before serving, and keep it on disk: a minute, once


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaRunnerConfig:
    """num_blocks, block_size: of the KV pool, which has one extra block for scratch. max_slots: rows.

    vocab_size: ids that may be sampled (the tokenizer's). eos_token_ids: masked before min_tokens. max_batch_tokens: of
    a step. max_copies_in: blocks that a step may bring back from the host. kv_dtype: of the KV pool; None: the weights'
    dtype.
    """

    num_blocks: int
    block_size: int
    max_slots: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_batch_tokens: int = 2048
    max_in_flight: int = 2
    max_copies_in: int = 64
    launching: Launching = Launching.GRAPHS
    autotune: Autotune = Autotune.CACHED
    deterministic: Deterministic = Deterministic.OFF
    kv_dtype: torch.dtype | None = None

    @property
    def table_width(self) -> int:
        """Blocks of the longest request plus one token: a step that runs ahead samples one that is dropped."""
        return -(-(self.max_model_len + 1) // self.block_size)

    @property
    def shapes(self) -> MixedShapes:
        """Shapes of the mixed steps that are recorded."""
        return MixedShapes.of(max_slots=self.max_slots, max_batch_tokens=self.max_batch_tokens)

    @property
    def max_rows(self) -> int:
        """Tokens of a step, including the padding of recorded ones."""
        return max(self.max_batch_tokens, *(layout.num_tokens for layout in self.shapes.layouts()))

    @property
    def max_sampled(self) -> int:
        """Rows that a step samples at most."""
        return self.max_slots + MAX_RECORDED_CHUNKS


class GraphRunner:
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
        self._shapes = config.shapes
        self.step, self._mixed_step = make_steps(weights, self.state, self.kv, config, max_tokens=config.max_rows)
        self.sampling = SamplingState(
            num_rows=config.max_slots + 1,
            max_batch=config.max_sampled,
            vocab_size=config.vocab_size,
            device=device,
            state=self.state,
        )
        self._sizes = batch_sizes(config.max_slots)
        self._rows_B = {size: self.step.rows_B[:size] for size in self._sizes}
        self._longest = config.table_width * config.block_size
        self._recorder = make_recorder(config.launching)
        self._autotune = config.autotune
        self._staged_U = torch.empty(0)
        self._decodes: dict[int, Work] = {}
        self._sampling: dict[tuple[int, Stage], Work] = {}
        self._mixed: dict[MixedLayout, Work] = {}

    def read_from(self, staged_U: torch.Tensor) -> None:
        """Set where the host's copies arrive; before anything runs."""
        self._staged_U = staged_U

    @property
    def max_chunks(self) -> int:
        """How many chunks a recorded mixed step has room for."""
        return self._shapes.max_chunks

    @property
    def num_shapes(self) -> int:
        """How many steps `record` records."""
        return len(self._sizes) + len(self._shapes.layouts())

    def record(self, on_progress: OnProgress) -> float:
        """Record all shapes, largest first; returns the seconds taken. Rows and pool must be idle."""
        start_s, total = time.perf_counter(), self.num_shapes
        on_progress(0, total)
        if self._autotune is Autotune.MEASURED:
            self.choose_ways()
        for layout in self._shapes.layouts():
            on_progress(len(self._mixed), total)
            self._mixed[layout] = self._recorder.record(self._mixed_work(layout))
        for size in reversed(self._sizes):
            on_progress(len(self._mixed) + len(self._decodes), total)
            self._decodes[size] = self._recorder.record(self._decode_work(size))
            for stages in _RECORDED_STAGES:
                self._sampling[size, stages] = self._recorder.record(self._sampling_work(size, stages))
        on_progress(total, total)
        return time.perf_counter() - start_s

    def choose_ways(self) -> None:
        """Time the alternatives for few rows, if that was not done yet. Rows get a realistic context: the alternatives
        differ in attention, which costs nothing over an empty one."""
        position_R, scratch = self.state.position_R, self.state.scratch_row
        position_R[scratch] = min(TIMED_CONTEXT, self._longest - 1)
        self.step.autotuner.choose(self._sizes, self.step.run)
        position_R[scratch] = 0

    def run_all(self) -> None:
        """Enqueue every shape of step, small ones on every path, to compile the kernels they launch. What takes longest
        to compile, sampling, comes first."""
        for size in self._sizes:
            self.run_sampling(self.step.rows_B[:size])
        for layout in self._shapes.layouts():
            for _ in self.step.autotuner.try_all(layout.num_tokens):
                self._mixed_work(layout)()
        for size in self._sizes:
            for _ in self.step.autotuner.try_all(size):
                self._decode_work(size)()

    def forget(self) -> None:
        """Drop the recorded steps. Idempotent."""
        self._mixed.clear()
        self._decodes.clear()
        self._sampling.clear()

    def record_largest(self, recorder: Recorder) -> tuple[Work, Work]:
        """The widest decode and the largest mixed step, recorded to be measured."""
        layout = self._shapes.layouts()[0]
        return recorder.record(self._decode_work(self._sizes[-1])), recorder.record(self._mixed_work(layout))

    def decode_size(self, num_rows: int) -> int:
        """The recorded batch size that runs num_rows rows."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def decode_rows(self, size: int) -> torch.Tensor:
        """int32: rows that a decode step of one of the batch sizes samples."""
        return self._rows_B[size]

    def run_decode(self, size: int) -> None:
        """Enqueue the changes and a decode step of one of the batch sizes."""
        recorded = self._decodes.get(size)
        recorded() if recorded else self._decode_work(size)()

    def find_shape(self, exact: MixedLayout, num_chunks: int) -> MixedLayout:
        """The recorded shape that fits, or else the step's own."""
        return self._shapes.find(exact, num_chunks) or exact

    def run_mixed(self, layout: MixedLayout) -> None:
        """Enqueue the changes and a mixed step whose inputs are in the staging buffer in this layout."""
        recorded = self._mixed.get(layout)
        recorded() if recorded else self._mixed_work(layout)()

    def run_sampling(self, rows_B: torch.Tensor, stages: Stage = ~Stage.NONE, masks: DeviceMasks | None = None) -> None:
        """Gather the logits of all ranks, and enqueue the kernels that the previous step's rows (int32) need; stages:
        at least the union of theirs."""
        step, B = self.step, len(rows_B)
        recorded = (
            self._sampling.get((B, stages)) if masks is None and rows_B.data_ptr() == step.rows_B.data_ptr() else None
        )
        if recorded is not None:
            recorded()
            return
        batch = SampledBatch(
            logits_BV=step.join_logits(B), rows_B=rows_B, token_B=step.token_B[:B], is_finite_B=step.is_finite_B[:B]
        )
        self.sampling.run(stages, batch, masks)

    def sampled_rows(self, layout: MixedLayout) -> torch.Tensor:
        """int32: rows that a mixed step of this layout samples, in the order of the staging buffer."""
        return self._staged_U[HEADER_WORDS:][layout.sections["rows_S"]]

    def run_inputs(self, inputs: MixedInputs) -> None:
        """Enqueue a mixed step with inputs that are elsewhere, without changes."""
        self._mixed_step.run(inputs)

    def hidden(self, tokens: slice) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, D], of these tokens of the mixed step enqueued last."""
        return self._mixed_step.hidden(tokens)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V] of hidden states after the final norm, in new memory."""
        return self.step.project(hidden_SD).float()

    def run_changes(self) -> None:
        """Enqueue only the changes."""
        apply_changes(self._staged_U, self.state.words_W)

    def _decode_work(self, size: int) -> Work:
        def run() -> None:
            self.run_changes()
            self.step.run(size)

        return run

    def _sampling_work(self, size: int, stages: Stage) -> Work:
        rows_B = self.step.rows_B[:size]
        return lambda: self.run_sampling(rows_B, stages)

    def _mixed_work(self, layout: MixedLayout) -> Work:
        inputs = layout.inputs(self._staged_U[HEADER_WORDS:])

        def run() -> None:
            self.run_changes()
            self._mixed_step.run(inputs)

        return run


def make_steps(
    weights: GpuWeights, state: RowState, kv: KvPool, config: CudaRunnerConfig, *, max_tokens: int
) -> tuple[DecodeStep, MixedStep]:
    """The decode step and the mixed step, of the kind that the configuration asks for."""
    sizes: dict[str, int] = {"max_batch": config.max_sampled, "vocab_size": config.vocab_size}
    if config.deterministic is Deterministic.ON:
        invariant = InvariantDecodeStep(weights, state, kv, rows_B=state.batch_A, **sizes)
        return invariant, InvariantMixedStep(invariant, max_tokens=max_tokens)
    decode = DecodeStep(weights, state, kv, rows_B=state.batch_A, **sizes)
    return decode, MixedStep(decode, max_tokens=max_tokens)
