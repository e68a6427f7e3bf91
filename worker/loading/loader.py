"""Turns a worker's settings into a loaded model, with a warmed-up runner and a KV pool that fits.

Knows torch and the model, and nothing of sockets or requests.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from octavo.model.attention.invariant import InvariantAttention
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.cache_folder import (
    VARIABLE,
    CacheUnusable,
    cache_folder,
    require_executable,
    require_writable,
    triton_folder,
)
from octavo.model.causal_lm import CausalLM
from octavo.model.checkpoint.loading import draw_model, load_model
from octavo.model.checkpoint.packed import Packed
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.config import load_config
from octavo.model.cpu.native import native_library, why_missing
from octavo.model.dtypes import parse_dtype
from octavo.model.invariant import InvarianceUnavailable, arithmetic, make_invariant
from octavo.model.numerics import NumericFinding, default_limit
from octavo.model.parallel import ALONE, Ranks
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.wire.host import usable_cores
from octavo.worker.config import CheckNumerics, Deterministic, LoadFormat, SchedulerConfig, WorkerConfig
from octavo.worker.loading.combinations import why_not_deterministic
from octavo.worker.loading.compilers import MAX_PROCESSES, CompilerProcesses
from octavo.worker.loading.host_memory import allocate_host_blocks
from octavo.worker.loading.libraries import mapped_libraries, read_ahead
from octavo.worker.loading.loaded import Loaded, Meanwhile, scheduler_config
from octavo.worker.loading.memory import (
    is_small,
    keep_freed_memory,
    memory_needs,
    prefer_huge_pages,
    require_blocks,
    size_pool,
)
from octavo.worker.loading.model_card import Described, describe, served_name
from octavo.worker.loading.progress import OnProgress, staged
from octavo.worker.loading.warmup import WarmRunner, warm_up
from octavo.worker.loading.weight_format import (
    cache_dtype,
    check_cache_dtype,
    check_format,
    check_kernels,
    described_bits,
    rounding_of,
    rounding_of_cache,
    weight_format,
    with_rounding,
)
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig

log = structlog.get_logger(__name__)

DEFAULT_BACKEND = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A runner that has run nothing yet, and what it was made from."""

    runner: WarmRunner
    model: CausalLM
    described: Described
    scheduler: SchedulerConfig


def load_torch(
    config: WorkerConfig,
    on_progress: OnProgress,
    *,
    ranks: Ranks = ALONE,
    wrap: Callable[[WarmRunner], WarmRunner] = lambda runner: runner,
    meanwhile: Meanwhile = lambda described: None,
) -> Loaded:
    """Resolve (download) the checkpoint, load it, size the pool, warm up. ranks: of a tensor-parallel group; its other
    ranks call `prepare`, which does all but the warm-up. wrap: called with the runner; what it returns runs all steps,
    the warm-up included. Raises model.errors.CheckpointError, worker.loading.memory.DoesNotFit,
    worker.loading.model_card.CardError, model.cache_folder.CacheUnusable, ValueError, and RunnerError if a step of the
    warm-up fails."""
    prepared = prepare(config, on_progress, ranks=ranks, meanwhile=meanwhile)
    model, described, scheduler = prepared.model, prepared.described, prepared.scheduler
    runner = wrap(prepared.runner)
    warm_up(runner, max_batch_tokens=config.max_batch_tokens, on_progress=staged("warming_up", on_progress))
    host = runner.host_blocks
    if host is not None:
        copy_s = runner.measure_copies()
        scheduler = replace(scheduler, copy_s_per_block=copy_s)
        log.info("copies_measured", block_bytes=host.row_bytes, gb_per_s=round(host.row_bytes / copy_s / 1e9, 2))
    fingerprint = _fingerprint(config, model)
    return Loaded(
        runner=runner,
        card=described.card(
            name=config.served_name or served_name(config.model),
            fingerprint=fingerprint.hex(),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=scheduler.max_model_len,
            tensor_parallel_size=ranks.size,
            kv_cache_dtype=config.kv_cache_dtype or "auto",
        ),
        tokenizer_files=described.files,
        fingerprint=fingerprint,
        num_blocks=runner.config.num_blocks,
        block_size=config.block_size,
        scheduler=scheduler,
        device=_device(config, model),
        notes=described.notes + _cache_notes(config),
        products=model.lm_head.arithmetic,
        num_host_blocks=host.num_blocks if host else 0,
        host_bytes=host.num_bytes if host else 0,
        is_host_pinned=host is not None and host.is_pinned,
        max_copies_in=runner.max_copies_in,
    )


def prepare(
    config: WorkerConfig,
    on_progress: OnProgress,
    *,
    ranks: Ranks = ALONE,
    meanwhile: Meanwhile = lambda described: None,
) -> Prepared:
    """`load_torch` up to the first step. Raises the same errors."""
    check_deterministic(config)
    has_cuda_runner = wants_cuda_runner(config)
    with ExitStack() as stack:
        helpers = None
        if has_cuda_runner:
            require_executable(triton_folder(), "TRITON_CACHE_DIR")
            helpers = _fork_compilers(ranks)
            if helpers is not None:
                stack.callback(helpers.close)
            _wake_compiler(torch.device(config.device))
            if ranks.rank == 0:
                read_ahead(mapped_libraries())
        prefer_huge_pages()
        if (num_threads := _num_threads(config, ranks)) != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        folder = _resolve(config, on_progress)
        described = describe(folder)
        scheduler = scheduler_config(config, described, max_in_flight=2 if has_cuda_runner else 1)
        max_model_len = scheduler.max_model_len
        model = _load_weights(config, folder, on_progress, ranks, max_model_len=max_model_len)
        runner: WarmRunner
        if has_cuda_runner:
            from octavo.worker.runners.cuda.loading import make_cuda_runner  # imports triton

            runner = make_cuda_runner(
                config,
                model,
                described,
                max_model_len=max_model_len,
                on_progress=on_progress,
                helpers=helpers,
                meanwhile=meanwhile,
            )
        else:
            keep_freed_memory()
            runner = _make_torch_runner(config, model, described, on_progress, max_model_len=max_model_len)
    scheduler = replace(scheduler, max_chunks=runner.max_chunks, attended_share=model.config.attended_share)
    return Prepared(runner=runner, model=model, described=described, scheduler=scheduler)


def _num_threads(config: WorkerConfig, ranks: Ranks) -> int:
    """The threads asked for, else this rank's share of the usable cores: a container's quota may allow fewer than torch
    counts."""
    if config.num_threads is not None:
        return config.num_threads
    cores = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        cores = min(cores, usable_cores())
    return max(1, cores // ranks.size)


def _device(config: WorkerConfig, model: CausalLM) -> str:
    """The device, with quantization, ranks and deterministic mode."""
    bits = described_bits(config.quantization, config.kv_cache_dtype, model.config.quantization)
    ranks = f", {model.ranks.size} ranks" if model.ranks.size > 1 else ""
    mode = ", deterministic" if config.deterministic is Deterministic.ON else ""
    return str(model.device) + bits + ranks + mode


def _cache_notes(config: WorkerConfig) -> tuple[str, ...]:
    """What this worker lacks for want of a compiler or a writable folder, in sentences."""
    if not wants_cuda_runner(config):
        why = why_missing() if torch.device(config.device).type == "cpu" else None
        return () if why is None else (f"steps run on torch alone, which is slower: {why}",)
    try:
        require_writable(cache_folder("paths"), VARIABLE)
    except CacheUnusable as error:
        return (f"kernels are chosen by new measurements at each start: {error}",)
    return ()


def check_deterministic(config: WorkerConfig) -> None:
    """Raises InvarianceUnavailable for settings that deterministic mode excludes."""
    if config.deterministic is Deterministic.OFF:
        return
    device = torch.device(config.device).type
    why = why_not_deterministic(
        device,
        attention_backend=config.attention_backend,
        is_checking_numerics=config.check_numerics is CheckNumerics.ON,
        dtype=config.dtype,
        quantization=config.quantization,
    )
    if why is None and device == "cuda" and not wants_cuda_runner(config):
        why = "deterministic mode on a GPU needs triton"
    if why is not None:
        raise InvarianceUnavailable(why)


def _resolve(config: WorkerConfig, on_progress: OnProgress) -> Path:
    on_progress("resolving_checkpoint", None, None)
    return resolve_checkpoint(
        config.model,
        revision=config.revision,
        on_progress=staged("downloading", on_progress),
    )


def _load_weights(
    config: WorkerConfig, folder: Path, on_progress: OnProgress, ranks: Ranks, *, max_model_len: int
) -> CausalLM:
    dtype = parse_dtype(config.dtype)
    wanted, has_cuda_runner = weight_format(config.quantization), wants_cuda_runner(config)
    model_config = load_config(folder)
    is_packed = model_config.quantization is not None
    device, is_deterministic = torch.device(config.device), config.deterministic is Deterministic.ON
    check_kernels(model_config.head_dim, device, has_cuda_runner=has_cuda_runner)
    check_format(wanted, device, is_packed=is_packed, has_cuda_runner=has_cuda_runner)
    check_cache_dtype(config.kv_cache_dtype, device, is_deterministic=is_deterministic)
    if config.num_blocks is not None:
        require_blocks(
            config.num_blocks,
            model_config,
            block_size=config.block_size,
            kv_dtype=cache_dtype(config.kv_cache_dtype) or model_config.computed_in(dtype),
            device=device,
            num_ranks=ranks.size,
        )
    if device.type == "cpu":
        on_progress("compiling_kernels", None, None)
        native_library()
    if config.load_format is LoadFormat.RANDOM:
        on_progress("loading_weights", None, None)
        model = draw_model(folder, dtype=dtype, device=config.device, ranks=ranks)
    else:
        model = load_model(
            folder,
            dtype=dtype,
            device=config.device,
            on_progress=staged("loading_weights", on_progress),
            # Deterministic steps multiply with plain weights only.
            packed=Packed.KEPT if has_cuda_runner and not is_deterministic else Packed.UNPACKED,
            ranks=ranks,
        )
    if config.kv_cache_dtype is not None:
        fold_cache_scales(model)
    on_progress("packing_weights", None, None)
    if is_deterministic and not has_cuda_runner:
        # Positions of the longest request and one more, for a step that runs ahead.
        make_invariant(model, max_positions=max_model_len + 1, wanted=wanted)
    elif not has_cuda_runner:  # the CUDA runner packs them itself
        model.pack_weights(wanted)
    return model


def wants_cuda_runner(config: WorkerConfig) -> bool:
    """Whether steps run in the kernels of model/kernels: on a CUDA device with triton, unless an attention backend is
    named or activations are checked, which only the torch runner does."""
    if torch.device(config.device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return config.attention_backend is None and config.check_numerics is CheckNumerics.OFF


def _wake_compiler(device: torch.device) -> None:
    from octavo.model.kernels.precompile import wake_compiler

    wake_compiler(device)


def _fork_compilers(ranks: Ranks) -> CompilerProcesses | None:
    import octavo.worker.runners.cuda.loading  # noqa: F401  (imports every kernel, so that the forks have them too)
    from octavo.model.kernels.precompile import help_compiling, wake_helper

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = max(1, min(MAX_PROCESSES, num_cores // ranks.size))
    return CompilerProcesses.fork(size, wake=wake_helper, answer=help_compiling)


def _make_torch_runner(
    config: WorkerConfig, model: CausalLM, described: Described, on_progress: OnProgress, *, max_model_len: int
) -> TorchRunner:
    kv_dtype = cache_dtype(config.kv_cache_dtype)
    block_bytes = kv_block_bytes(model.config, block_size=config.block_size, dtype=kv_dtype or model.dtype)
    host = allocate_host_blocks(
        config.host_kv_gib,
        block_bytes,
        model.device,
        staged("taking_host_memory", on_progress),
        ranks=model.ranks,
    )
    needs = memory_needs(
        model,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        memory_fraction=config.memory_fraction,
        kv_dtype=kv_dtype,
    )
    # All ranks must have the same number of blocks.
    num_blocks = model.ranks.least(size_pool(needs, num_blocks=config.num_blocks))
    log.info(
        "kv_pool_sized",
        num_blocks=num_blocks,
        num_tokens=num_blocks * config.block_size,
        num_bytes=num_blocks * block_bytes,
    )
    runner_config = TorchRunnerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_slots=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=described.vocab_size,
        eos_token_ids=described.eos_token_ids,
        backend=_backend(config),
        numerics_limit=_numerics_limit(config, model),
        kv_dtype=kv_dtype,
    )
    runner = TorchRunner(model, runner_config, on_numerics=_log_finding, host_blocks=host)
    if model.device.type == "cpu" and not is_small(needs, num_blocks):
        runner.kv.touch()
    return runner


def _backend(config: WorkerConfig) -> str:
    if config.deterministic is Deterministic.ON:
        return InvariantAttention.name
    return config.attention_backend or DEFAULT_BACKEND


def _numerics_limit(config: WorkerConfig, model: CausalLM) -> float | None:
    if config.check_numerics is CheckNumerics.OFF:
        return None
    return config.check_numerics_limit or default_limit(model.dtype)


def _fingerprint(config: WorkerConfig, model: CausalLM) -> bytes:
    """Workers whose weights are rounded differently must not count as the same model; nor must deterministic ones,
    which promise the same tokens, if their sums are rounded differently."""
    is_deterministic = config.deterministic is Deterministic.ON
    order_of_sums = arithmetic(model.device).encode() if is_deterministic else b""
    roundings = rounding_of(config.quantization, model.device), rounding_of_cache(config.kv_cache_dtype)
    return with_rounding(model.fingerprint, *roundings, order_of_sums)


def _log_finding(step: int, finding: NumericFinding) -> None:
    log.error("numerics", step=step, finding=str(finding))
