"""A CUDA runner made as a worker makes it, over random weights of a published shape, and the times of its start.

Must not know: engines, workloads.
"""

import gc
import time
from dataclasses import dataclass, field, replace

import torch

from bench.gpu.models import WEIGHTS, random_model
from bench.shapes import NUM_IDS, PUBLISHED
from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.gpu.weights import GpuWeights
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from octavo.worker.loading.libraries import mapped_libraries, read_ahead
from octavo.worker.loading.memory import size_pool
from octavo.worker.loading.warmup import warm_up
from octavo.worker.runners.cuda.graph_runner import Autotune, CudaRunnerConfig
from octavo.worker.runners.cuda.host_copies import staging_bytes, staging_rows
from octavo.worker.runners.cuda.loading import compile_kernels
from octavo.worker.runners.cuda.memory import cuda_memory_needs
from octavo.worker.runners.cuda.runner import CudaRunner

BLOCK_SIZE = 16


@dataclass(slots=True)
class Phases:
    """Seconds of each phase of a start."""

    begin_s: float = field(default_factory=time.perf_counter)
    ends_s: dict[str, float] = field(default_factory=dict)

    def end(self, name: str) -> None:
        """End the current phase, under this name."""
        self.ends_s[name] = time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        begins_s = [self.begin_s, *self.ends_s.values()]
        return {name: end_s - begin_s for (name, end_s), begin_s in zip(self.ends_s.items(), begins_s, strict=False)}


def make_runner(
    shape: str,
    *,
    max_slots: int,
    max_batch_tokens: int,
    max_model_len: int,
    host_bytes: int = 0,
    autotune: Autotune = Autotune.MEASURED,
    weights: str = "bf16",
    kv_dtype: torch.dtype | None = None,
    num_blocks: int | None = None,
) -> CudaRunner:
    """A runner that is compiled, recorded and warm; prints a line with the times. The pool takes nine tenths of the
    memory that is left, or num_blocks, without a rehearsal. host_bytes: of pinned memory for a second tier. weights: a
    key of WEIGHTS."""
    phases = Phases()
    read_ahead(mapped_libraries())
    model = random_model(PUBLISHED[shape].config)
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if kv_dtype is FP8:
        fold_cache_scales(model)
    config = CudaRunnerConfig(
        num_blocks=1,
        block_size=BLOCK_SIZE,
        max_slots=max_slots,
        max_model_len=max_model_len,
        vocab_size=min(NUM_IDS, model.config.vocab_size),
        max_batch_tokens=max_batch_tokens,
        autotune=autotune,
        kv_dtype=kv_dtype,
    )
    taken = GpuWeights.take(model, max_positions=config.table_width * BLOCK_SIZE, weight_format=WEIGHTS[weights])
    torch.cuda.empty_cache()  # frees the plain copies of weights that were rounded
    phases.end("weights")
    compile_kernels(taken, config)
    phases.end("kernels")
    row_bytes = kv_block_bytes(model.config, block_size=BLOCK_SIZE, dtype=kv_dtype or taken.dtype)
    rows = staging_rows(row_bytes, torch.cuda.mem_get_info()[0])
    staging = staging_bytes(rows, row_bytes) if host_bytes else 0
    if num_blocks is None:
        needs = cuda_memory_needs(
            taken, config, weights_bytes=weights_bytes, memory_fraction=0.9, staging_bytes=staging
        )
        num_blocks, rehearsed_gib = size_pool(needs), f"{needs.activation_bytes / 2**30:.2f}"
    else:
        rehearsed_gib = "not measured"
    phases.end("rehearsal")
    host = HostBlocks(host_bytes // row_bytes, row_bytes, is_pinned=True) if host_bytes else None
    phases.end("host memory")
    free_bytes = torch.cuda.mem_get_info()[0] - num_blocks * row_bytes
    runner = CudaRunner(taken, replace(config, num_blocks=num_blocks, max_copies_in=rows), host_blocks=host)
    recorded_s = runner.record()
    warm_up(runner, max_batch_tokens=max_batch_tokens)
    gc.collect()
    gc.freeze()
    took_s, in_all_s = phases.seconds, time.perf_counter() - phases.begin_s
    print(
        f"{shape}: {max_slots} slots, {max_batch_tokens} tokens a step; weights {took_s['weights']:.1f} s, kernels "
        f"{took_s['kernels']:.1f} s, rehearsal {took_s['rehearsal']:.1f} s, host memory {took_s['host memory']:.1f} s, "
        f"{runner.graphs.num_shapes} graphs {recorded_s:.1f} s, in all "
        f"{in_all_s:.1f} s; steps take {rehearsed_gib} GiB by rehearsal, "
        f"{(free_bytes - torch.cuda.mem_get_info()[0]) / 2**30:.2f} in fact, pool {num_blocks * BLOCK_SIZE} tokens",
        flush=True,
    )
    return runner
