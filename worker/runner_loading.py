"""From a worker's settings to a loaded model with a warm runner and a KV pool that fits.

Knows torch and the model, and nothing of sockets or requests.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from model.attention_invariant import InvariantAttention
from model.cache_folder import (
    VARIABLE,
    CacheUnusable,
    cache_folder,
    require_executable,
    require_writable,
    triton_folder,
)
from model.cache_scales import fold_cache_scales
from model.checkpoint import resolve_checkpoint
from model.config import load_config
from model.cpu.native import why_missing
from model.dtypes import parse_dtype
from model.invariant import InvarianceUnavailable, arithmetic, make_invariant
from model.loading import load_model
from model.numerics import NumericFinding, default_limit
from model.packed_loading import Packed
from model.qwen2 import Qwen2ForCausalLM
from worker.config import CheckNumerics, Deterministic, WorkerConfig
from worker.loaded import Loaded, scheduler_config, served_name
from worker.memory import PoolSize, size_pool
from worker.model_card import Described, describe
from worker.progress import OnProgress
from worker.runner_memory import memory_needs, prefer_huge_pages
from worker.runner_warmup import WarmRunner, warm_up
from worker.runner_weights import (
    cache_dtype,
    check_cache_dtype,
    check_format,
    check_head_dim,
    rounding_of,
    rounding_of_cache,
    spoken,
    weight_format,
    with_rounding,
)
from worker.torch_runner import TorchRunner, TorchRunnerConfig

log = structlog.get_logger(__name__)

DEFAULT_BACKEND = "sdpa"


def load_torch(config: WorkerConfig, on_progress: OnProgress) -> Loaded:
    """Resolve (download), load, size the pool, warm up. Raises model.CheckpointError, worker.memory.DoesNotFit,
    worker.model_card.CardError, model.cache_folder.CacheUnusable, ValueError."""
    check_deterministic(config)
    if wants_cuda_runner(config):
        require_executable(triton_folder(), "TRITON_CACHE_DIR")
    prefer_huge_pages()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = _resolve(config, on_progress)
    described = describe(folder)
    make_runner = _make_cuda_runner if wants_cuda_runner(config) else _make_torch_runner
    scheduler = scheduler_config(config, described, max_in_flight=2 if wants_cuda_runner(config) else 1)
    model = _load_weights(config, folder, on_progress)
    runner = make_runner(config, model, described, scheduler.max_model_len, on_progress)
    warm_up(runner, max_batch_tokens=config.max_batch_tokens, on_progress=_staged("warming_up", on_progress))
    fingerprint = _fingerprint(config, model)
    return Loaded(
        runner=runner,
        card=described.card(
            name=config.served_name or served_name(config.model),
            fingerprint=fingerprint.hex(),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=scheduler.max_model_len,
        ),
        tokenizer_files=described.files,
        fingerprint=fingerprint,
        num_blocks=runner.config.num_blocks,
        block_size=config.block_size,
        scheduler=scheduler,
        device=_device(config, model),
        notes=described.notes + _cache_notes(config),
        products=model.lm_head.arithmetic,
    )


def _device(config: WorkerConfig, model: Qwen2ForCausalLM) -> str:
    """The device, and what is out of the ordinary on it."""
    said = spoken(config.quantization, config.kv_cache_dtype, model.config.quantization)
    return str(model.device) + said + (", deterministic" if config.deterministic is Deterministic.ON else "")


def _cache_notes(config: WorkerConfig) -> tuple[str, ...]:
    """What this worker goes without, since it cannot be kept."""
    if not wants_cuda_runner(config):
        why = why_missing() if torch.device(config.device).type == "cpu" else None
        return () if why is None else (f"steps run on torch alone, which is slower: {why}",)
    try:
        require_writable(cache_folder("paths"), VARIABLE)
    except CacheUnusable as error:
        return (f"kernels are chosen by new measurements at each start: {error}",)
    return ()


def check_deterministic(config: WorkerConfig) -> None:
    """Raises InvarianceUnavailable for what deterministic mode cannot be had together with."""
    if config.deterministic is Deterministic.OFF:
        return
    if config.attention_backend is not None or config.check_numerics is CheckNumerics.ON:
        raise InvarianceUnavailable("deterministic mode goes with no --attention-backend and no --check-numerics")
    if torch.device(config.device).type == "cuda" and not wants_cuda_runner(config):
        raise InvarianceUnavailable("deterministic mode on a GPU needs triton")
    if torch.device(config.device).type == "cuda" and config.quantization is not None:
        raise InvarianceUnavailable("deterministic mode on a GPU is for plain weights: no --quantization")


def _resolve(config: WorkerConfig, on_progress: OnProgress) -> Path:
    on_progress("resolving_checkpoint", None, None)
    return resolve_checkpoint(
        config.model,
        revision=config.revision,
        on_progress=lambda done, total: on_progress("downloading", done, total),
    )


def _load_weights(config: WorkerConfig, folder: Path, on_progress: OnProgress) -> Qwen2ForCausalLM:
    dtype = parse_dtype(config.dtype)
    wanted, has_cuda_runner = weight_format(config.quantization), wants_cuda_runner(config)
    model_config = load_config(folder)
    is_packed = model_config.quantization is not None
    check_head_dim(model_config.head_dim, has_cuda_runner=has_cuda_runner)
    device, is_deterministic = torch.device(config.device), config.deterministic is Deterministic.ON
    check_format(wanted, device, is_packed=is_packed, has_cuda_runner=has_cuda_runner)
    check_cache_dtype(config.kv_cache_dtype, device, is_deterministic=is_deterministic)
    model = load_model(
        folder,
        dtype=dtype,
        device=config.device,
        on_progress=_staged("loading_weights", on_progress),
        # Deterministic steps multiply with plain weights only.
        packed=Packed.KEPT if has_cuda_runner and not is_deterministic else Packed.UNPACKED,
    )
    if config.kv_cache_dtype is not None:
        fold_cache_scales(model)
    on_progress("packing_weights", None, None)
    if is_deterministic and not has_cuda_runner:
        make_invariant(model, max_positions=_max_positions(config, folder), wanted=wanted)
    elif not has_cuda_runner:  # whose steps take the weights in a layout of their own
        model.pack_weights(wanted)
    return model


def _max_positions(config: WorkerConfig, folder: Path) -> int:
    """Of the longest request, with one token more: a step that runs ahead has it."""
    return (config.max_model_len or describe(folder).max_model_len) + 1


def _pool_size(config: WorkerConfig, model: Qwen2ForCausalLM, *, max_model_len: int) -> PoolSize:
    needs = memory_needs(
        model,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        memory_fraction=config.memory_fraction,
        kv_dtype=cache_dtype(config.kv_cache_dtype),
    )
    return size_pool(needs, num_blocks=config.num_blocks)


def wants_cuda_runner(config: WorkerConfig) -> bool:
    """Whether steps run by our own kernels: on a CUDA device with triton, unless an attention backend is named or
    activations are watched, which is the slow twin's business."""
    if torch.device(config.device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return config.attention_backend is None and config.check_numerics is CheckNumerics.OFF


def _make_cuda_runner(
    config: WorkerConfig, model: Qwen2ForCausalLM, described: Described, max_model_len: int, on_progress: OnProgress
) -> WarmRunner:
    from worker.cuda_loading import make_cuda_runner  # triton: only where it is wanted

    return make_cuda_runner(config, model, described, max_model_len=max_model_len, on_progress=on_progress)


def _make_torch_runner(
    config: WorkerConfig, model: Qwen2ForCausalLM, described: Described, max_model_len: int, on_progress: OnProgress
) -> WarmRunner:
    pool = _pool_size(config, model, max_model_len=max_model_len)
    log.info("kv_pool_sized", num_blocks=pool.num_blocks, num_tokens=pool.num_tokens, num_bytes=pool.num_bytes)
    runner_config = TorchRunnerConfig(
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        max_slots=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=described.vocab_size,
        eos_token_ids=described.eos_token_ids,
        backend=_backend(config),
        numerics_limit=_numerics_limit(config, model),
        kv_dtype=cache_dtype(config.kv_cache_dtype),
    )
    return TorchRunner(model, runner_config, on_numerics=_log_finding)


def _backend(config: WorkerConfig) -> str:
    if config.deterministic is Deterministic.ON:
        return InvariantAttention.name
    return config.attention_backend or DEFAULT_BACKEND


def _numerics_limit(config: WorkerConfig, model: Qwen2ForCausalLM) -> float | None:
    if config.check_numerics is CheckNumerics.OFF:
        return None
    return config.check_numerics_limit or default_limit(model.dtype)


def _fingerprint(config: WorkerConfig, model: Qwen2ForCausalLM) -> bytes:
    """Workers whose weights are rounded differently must not pass for the same model; nor deterministic ones, which
    promise the same tokens, where their sums are rounded differently."""
    is_deterministic = config.deterministic is Deterministic.ON
    order_of_sums = arithmetic(model.device).encode() if is_deterministic else b""
    roundings = rounding_of(config.quantization, model.device), rounding_of_cache(config.kv_cache_dtype)
    return with_rounding(model.fingerprint, *roundings, order_of_sums)


def _staged(stage: str, on_progress: OnProgress) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(stage, done, total)


def _log_finding(step: int, finding: NumericFinding) -> None:
    log.error("numerics", step=step, finding=str(finding))
