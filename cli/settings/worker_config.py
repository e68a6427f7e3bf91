"""Turns settings into the worker's frozen configuration. Pure, except that device `auto` looks for a GPU."""

from octavo.cli.errors import usage
from octavo.cli.settings.addresses import default_endpoint, require_proofs
from octavo.cli.settings.groups import WorkerSettings
from octavo.cli.settings.model_names import split_model
from octavo.worker.config import (
    CPU_BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    GPU_MAX_GAP_S,
    GPU_MAX_GAP_STEPS,
    CheckNumerics,
    CurveConfig,
    Deterministic,
    GrammarConfig,
    LoadFormat,
    PrefixCacheMode,
    RunnerKind,
    WorkerConfig,
)


def worker_config(settings: WorkerSettings) -> WorkerConfig:
    """The worker's configuration. Raises CliError if there is not exactly one model, only one CURVE key, or a gateway's
    endpoint that cannot be dialled."""
    name, checkpoint = split_model(only_model(settings))
    curve, has_token = _curve(settings), bool(settings.registration_token)
    require_proofs("--gateway-endpoint", settings.gateway_endpoint, has_key=curve is not None, has_token=has_token)
    device = pick_device(settings.device) if settings.runner == "torch" else "cpu"
    max_gap_s, max_gap_steps = longest_gap(device, settings.max_gap_ms)
    return WorkerConfig(
        model=checkpoint,
        served_name=name,
        gateway_endpoints=settings.gateway_endpoint
        or (() if settings.gateway_endpoints_file else (default_endpoint(settings.run_dir),)),
        gateway_endpoints_file=settings.gateway_endpoints_file,
        worker_id=settings.worker_id,
        revision=settings.revision,
        runner=RunnerKind(settings.runner),
        device=device,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        load_format=LoadFormat(settings.load_format),
        attention_backend=None if settings.attention_backend == "auto" else settings.attention_backend,
        quantization=None if settings.quantization == "none" else settings.quantization,
        deterministic=Deterministic.ON if settings.deterministic else Deterministic.OFF,
        kv_cache_dtype=None if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
        cpu_isa=None if settings.cpu_isa == "auto" else settings.cpu_isa,
        check_numerics=CheckNumerics(settings.check_numerics),
        check_numerics_limit=settings.check_numerics_limit,
        num_threads=settings.num_threads,
        tensor_parallel_size=settings.tensor_parallel_size,
        memory_fraction=settings.memory_fraction,
        num_blocks=settings.num_blocks,
        host_kv_gib=settings.host_kv_gib,
        block_size=settings.block_size,
        prefix_cache=PrefixCacheMode(settings.prefix_cache),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        max_batch_tokens=settings.max_batch_tokens or default_batch_tokens(device, settings.max_num_seqs),
        max_chunk_tokens=settings.max_chunk_tokens,
        max_gap_s=max_gap_s,
        max_gap_steps=max_gap_steps,
        aging_s=settings.aging_s,
        grammars=GrammarConfig(
            limits=settings.grammar_limits,
            timeout_s=settings.grammar_timeout_s,
            num_threads=settings.grammar_threads,
            cache_entries=settings.grammar_cache_entries,
            cache_bytes=settings.grammar_cache_bytes,
        ),
        heartbeat_interval_s=settings.heartbeat_interval_s,
        drain_grace_s=settings.drain_grace_s,
        stall_exit_s=settings.stall_exit_s,
        registration_token=settings.registration_token,
        curve=curve,
        metrics_host=settings.metrics_host,
        metrics_port=settings.worker_metrics_port,
        audit_every_steps=settings.audit_every_steps,
        log_format=settings.log_format,
        log_level=settings.log_level,
        oracle_vocab_size=settings.oracle_vocab_size,
        oracle_step_delay_s=settings.oracle_step_delay_s,
        oracle_eos_every=settings.oracle_eos_every,
        preempt_every_steps=settings.preempt_every_steps,
    )


def only_model(settings: WorkerSettings) -> str:
    """The one model of a worker, as --model names it. Raises CliError if there is not exactly one."""
    if len(settings.model) != 1:
        raise usage(
            "a worker serves one model",
            f"--model was given {len(settings.model)} times: {', '.join(settings.model)}",
            "start one `octavo worker` per model, or `octavo serve` with all of them",
        )
    return settings.model[0]


def pick_device(device: str) -> str:
    """The device; "auto" becomes "cuda" if there is a GPU, else "cpu"."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_batch_tokens(device: str, max_num_seqs: int) -> int:
    """Tokens of a step: as many as a device computes without delaying requests that decode for long
    (bench/RESULTS.md)."""
    return max(CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS, max_num_seqs)


def longest_gap(device: str, max_gap_ms: float | None) -> tuple[float | None, float]:
    """`SchedulerConfig`'s max_gap_s and max_gap_steps: how long a step may take prompt tokens while outputs decode in
    it, in seconds (None: no limit), and in steps without prompts. max_gap_ms: as set; None: the device's default; 0:
    no limit."""
    if max_gap_ms is not None:
        return max_gap_ms / 1e3 or None, 0.0
    return (None, 0.0) if device == "cpu" else (GPU_MAX_GAP_S, GPU_MAX_GAP_STEPS)


def _curve(settings: WorkerSettings) -> CurveConfig | None:
    secret, public = settings.worker_key_file, settings.gateway_public_key_file
    if secret is None and public is None:
        return None
    if secret is None or public is None:
        raise usage(
            "CURVE needs two keys",
            f"--worker-key-file is {secret}, --gateway-public-key-file is {public}",
            "give both; `octavo keys new` makes them",
        )
    return CurveConfig(secret_key_file=secret, gateway_public_key_file=public)
