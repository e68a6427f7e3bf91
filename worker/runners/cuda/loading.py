"""Turns a loaded model into a CUDA runner that is ready to serve: folds weights, compiles kernels, sizes the pool,
records steps.

Knows torch and the model, and nothing of sockets or requests. Imported only if triton is installed.
"""

from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.causal_lm import CausalLM
from octavo.model.gpu.divided_sums import with_divided_sums
from octavo.model.gpu.peer_joins import with_peer_joins
from octavo.model.gpu.peer_sums import with_peer_sums
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.precompile import Helpers, compiling
from octavo.model.kernels.precompile import OnProgress as OnKernels
from octavo.model.parallel import Ranks
from octavo.worker.config import Deterministic, PrefixCacheMode, WorkerConfig
from octavo.worker.loading.host_memory import begin_host_blocks
from octavo.worker.loading.loaded import Meanwhile
from octavo.worker.loading.memory import SpareMemory, size_pool, weights_bytes
from octavo.worker.loading.model_card import Described
from octavo.worker.loading.progress import OnProgress, staged
from octavo.worker.loading.weight_format import cache_dtype, weight_format
from octavo.worker.runners.cuda.graph_runner import Autotune, CudaRunnerConfig
from octavo.worker.runners.cuda.host_copies import staging_bytes, staging_rows
from octavo.worker.runners.cuda.memory import cuda_memory_needs
from octavo.worker.runners.cuda.runner import CudaRunner

log = structlog.get_logger(__name__)


def make_cuda_runner(
    config: WorkerConfig,
    model: CausalLM,
    described: Described,
    *,
    max_model_len: int,
    on_progress: OnProgress,
    helpers: Helpers | None = None,
    meanwhile: Meanwhile = lambda described: None,
) -> CudaRunner:
    """A runner that has recorded its steps and is ready for warm-up. Takes the model's weights: the model cannot be
    used afterwards. The ranks of a group all do this at the same time and agree on what must be equal. Raises
    worker.loading.memory.DoesNotFit."""
    ranks = model.ranks
    runner_config = _runner_config(config, described, max_model_len=max_model_len)
    on_progress("compiling_kernels", None, None)
    weights = GpuWeights.take(
        model,
        max_positions=runner_config.table_width * config.block_size,
        weight_format=weight_format(config.quantization),
    )
    torch.cuda.empty_cache()  # rounding leaves plain copies of the weights in the allocator
    if ranks.size > 1:
        weights = replace(weights, ranks=_find_fastest_sums(weights, runner_config))
    kv_dtype = runner_config.kv_dtype or weights.dtype
    block_bytes = kv_block_bytes(weights.config, block_size=config.block_size, dtype=kv_dtype)
    coming = begin_host_blocks(config.host_kv_gib, block_bytes, weights.embed_VD.device, ranks=ranks)
    compile_kernels(
        weights,
        runner_config,
        staged("compiling_kernels", on_progress),
        helpers=helpers,
        meanwhile=lambda: meanwhile(described),
    )
    if helpers is not None:
        helpers.close()
    host = coming.take(staged("taking_host_memory", on_progress))
    rows = ranks.least(staging_rows(block_bytes, torch.cuda.mem_get_info(weights.embed_VD.device)[0]))
    on_progress("rehearsing_steps", None, None)
    needs = cuda_memory_needs(
        weights,
        runner_config,
        weights_bytes=weights_bytes(model),
        memory_fraction=config.memory_fraction,
        spare=SpareMemory.TAKEN if config.prefix_cache is PrefixCacheMode.ON else SpareMemory.LEFT,
        staging_bytes=staging_bytes(rows, block_bytes) if host is not None else 0,
    )
    num_blocks = ranks.least(size_pool(needs, num_blocks=config.num_blocks))
    log.info(
        "kv_pool_sized",
        num_blocks=num_blocks,
        num_tokens=num_blocks * config.block_size,
        num_bytes=num_blocks * block_bytes,
        step_bytes=needs.activation_bytes,
    )
    serving_config = replace(runner_config, num_blocks=num_blocks, max_copies_in=rows)
    runner = CudaRunner(weights, serving_config, host_blocks=host)
    seconds = runner.record(staged("recording_steps", on_progress))
    log.info("steps_recorded", num_graphs=runner.graphs.num_shapes, seconds=round(seconds, 2))
    return runner


def _runner_config(config: WorkerConfig, described: Described, *, max_model_len: int) -> CudaRunnerConfig:
    """The configuration with a pool of one block, until the real one is sized."""
    return CudaRunnerConfig(
        num_blocks=1,
        block_size=config.block_size,
        max_slots=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=described.vocab_size,
        eos_token_ids=described.eos_token_ids,
        max_batch_tokens=config.max_batch_tokens,
        autotune=Autotune.MEASURED,
        deterministic=config.deterministic,
        kv_dtype=cache_dtype(config.kv_cache_dtype),
    )


def _find_fastest_sums(weights: GpuWeights, config: CudaRunnerConfig) -> Ranks:
    """The weights' ranks, with the fastest ways to sum and join that give correct results here. Call it on every rank
    at once."""
    model, dtype, device, ranks = weights.config, weights.dtype, weights.embed_VD.device, weights.ranks
    if config.deterministic is Deterministic.OFF:
        ranks = with_peer_sums(
            ranks,
            hidden_size=model.hidden_size,
            max_rows=config.max_rows,
            dtype=dtype,
            device=device,
            note=lambda told: log.info("sums_measured", found=told),
        )
        if weights.has_plain_products:
            ranks = with_divided_sums(
                ranks,
                hidden_size=model.hidden_size,
                num_inputs=model.num_attention_heads * model.head_dim,
                max_rows=config.max_rows,
                dtype=dtype,
                device=device,
                note=lambda told: log.info("shares_measured", found=told),
            )
    return with_peer_joins(
        ranks,
        {torch.int64: 1, dtype: len(weights.head_VD)},
        max_rows=config.max_sampled,
        device=device,
        note=lambda told: log.info("joins_measured", found=told),
    )


def compile_kernels(
    weights: GpuWeights,
    config: CudaRunnerConfig,
    on_progress: OnKernels = lambda done, total: None,
    *,
    helpers: Helpers | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Compile, in advance, every kernel that a runner of these shapes may launch on any path of a step: kernels that
    Triton does not have on disk take seconds rather than a minute one after the other. Kernels on disk are only loaded.
    Temporarily needs the memory of a runner with a pool of one block."""
    # Without other ranks: results do not matter, so nothing is summed.
    rehearsing = replace(weights.ranks, group=None, peers=None, joins=None, divided=None)
    # Two layers, since the last one is special: after its attention only the sampled tokens of a prompt go on.
    first_layers = replace(weights, layers=weights.layers[:2], ranks=rehearsing)
    try:
        with torch.inference_mode():
            with compiling(on_progress, helpers=helpers, meanwhile=meanwhile):
                runner = CudaRunner(first_layers, replace(config, num_blocks=1))
                runner.run_all()
            torch.cuda.synchronize(weights.embed_VD.device)
        del runner
    except torch.OutOfMemoryError:
        pass  # the rehearsal reports what does not fit, and what to do about it
    torch.cuda.empty_cache()
