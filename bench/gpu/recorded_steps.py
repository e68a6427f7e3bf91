"""Times the steps of one shape over a pool of random keys and values, without an engine or requests.

Must not know: engines, what is printed.

Legend: T tokens in this step · S sequences · B rows of a decode · R rows of the state · E ended prompts · W tiles.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.device import elapsed_ms
from bench.gpu.models import random_model, take_weights
from bench.shapes import NUM_IDS, PUBLISHED
from octavo.model import KvPool, ModelConfig
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.state import RowState
from octavo.model.kernels.attention.prefill import list_last_tiles, list_tiles
from octavo.worker.runners.cuda.graph_runner import TIMED_CONTEXT, batch_sizes

BLOCK_SIZE = 16


class Bench:
    """The steps of one shape over a pool of random keys and values."""

    def __init__(
        self,
        shape: str,
        *,
        weights: str = "bf16",
        kv_dtype: torch.dtype = torch.bfloat16,
        num_rows: int = 256,
        pool_tokens: int = 300_000,
        max_tokens: int = 16384,
    ) -> None:
        self.config = PUBLISHED[shape].config
        self.weight_bytes, taken = take_weights(random_model(self.config), weights)
        self.num_blocks = min(pool_tokens // BLOCK_SIZE, blocks_that_fit(self.config, kv_dtype))
        self.kv = KvPool(self.config, self.num_blocks + 1, BLOCK_SIZE, kv_dtype, "cuda")
        for pool in (*self.kv.k_pools, *self.kv.v_pools):
            pool.copy_(torch.randn(pool.shape, dtype=torch.bfloat16, device="cuda"))
        self.state = RowState(
            num_slots=num_rows, table_width=2048, scratch_block=self.num_blocks, device=torch.device("cuda")
        )
        self.decode = DecodeStep(
            taken, self.state, self.kv, max_batch=num_rows, vocab_size=min(NUM_IDS, self.config.vocab_size)
        )
        self.mixed = MixedStep(self.decode, max_tokens=max_tokens)

    def choose_ways(self) -> None:
        """Time the kernel variants for few rows as a start does, unless results for this device are cached."""
        position_R, scratch = self.state.position_R, self.state.scratch_row
        position_R[scratch] = TIMED_CONTEXT
        self.decode.autotuner.choose(batch_sizes(len(self.decode.rows_B)), self.decode.run)
        position_R[scratch] = 0

    def holds(self, batch: int, context: int) -> bool:
        """Whether the pool is large enough for this many rows at this context, and for their growth."""
        return batch * row_blocks(context) <= self.num_blocks

    def spread(self, batch: int, context: int) -> None:
        """Place the first `batch` rows at `context` tokens, each with its own blocks."""
        width = row_blocks(context)
        assert self.holds(batch, context), "the pool is too small"
        order = torch.randperm(self.num_blocks, device="cuda")[: batch * width]
        self.state.table_RM[:batch, :width] = order.view(batch, width).int()
        self.state.position_R[:batch] = context
        self.state.last_token_R[:batch] = torch.randint(0, 10000, (batch,), device="cuda", dtype=torch.int32)
        self.decode.rows_B[:batch] = torch.arange(batch, device="cuda", dtype=torch.int32)

    def floor_ms(self, batch: int, context: int, rate: float) -> float:
        """Milliseconds to read everything once, at `rate` bytes per second."""
        per_token = self.kv.num_bytes / (self.kv.num_blocks * BLOCK_SIZE)
        return (self.weight_bytes + batch * context * per_token) / rate * 1e3


def row_blocks(context: int) -> int:
    """Number of blocks of a row that starts at this context."""
    return -(-(context + 512) // BLOCK_SIZE)


def blocks_that_fit(config: ModelConfig, dtype: torch.dtype) -> int:
    """Number of blocks that fit in nine tenths of the device's free memory."""
    return int(0.9 * torch.cuda.mem_get_info()[0]) // kv_block_bytes(config, block_size=BLOCK_SIZE, dtype=dtype)


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def time_decode(bench: Bench, batch: int, context: int, temperature: float) -> float:
    """Median milliseconds of a step at about this context."""
    bench.spread(batch, context)
    bench.state.temperature_R.fill_(temperature)
    return time_recorded(bench, batch, context, num_steps=50)


def time_recorded(bench: Bench, batch: int, context: int | torch.Tensor, *, num_steps: int) -> float:
    """Median milliseconds of a recorded step, from five timings of num_steps steps, each starting at these contexts.
    The rows must be spread already."""
    bench.state.position_R[:batch] = context
    graph = capture(lambda: bench.decode.run(batch))
    times = []
    for _ in range(5):
        bench.state.position_R[:batch] = context
        graph.replay()
        times.append(elapsed_ms(graph.replay, num_steps))
    return statistics.median(times)


def prefill_inputs(bench: Bench, num_prompts: int, length: int) -> MixedInputs:
    """The inputs of a step of this many whole prompts."""
    bench.spread(num_prompts, length)
    host = np.arange(num_prompts * length, dtype=np.int32)
    rows, positions = host // length, host % length
    prompts = [(row, row * length, 0, length) for row in range(num_prompts)]

    def device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).cuda()

    return MixedInputs(
        num_decodes=0, ids_T=device(host * 7919 % 10000), row_T=device(rows), position_T=device(positions),
        tiles_W4=device(list_tiles(prompts)), last_tiles_W4=device(list_last_tiles(prompts)),
        last_S=device(np.arange(1, num_prompts + 1) * length - 1),
        rows_S=device(np.arange(num_prompts)), ended_E=device(np.arange(num_prompts)),
        position_E=device(np.full(num_prompts, length - 1)),
    )  # fmt: skip


def time_prefill(bench: Bench, num_prompts: int, length: int) -> float:
    """Median milliseconds of a recorded step of whole prompts."""
    inputs = prefill_inputs(bench, num_prompts, length)
    graph = capture(lambda: bench.mixed.run(inputs))
    graph.replay()
    return statistics.median(elapsed_ms(graph.replay, 3) for _ in range(5))
