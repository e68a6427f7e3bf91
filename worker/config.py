"""Settings of a worker: frozen, keyword-only, read once at the edge.

What is learned later (number of blocks, the model's own limits) goes from `WorkerConfig` into `SchedulerConfig` and
the block manager's configuration when the model is loaded. This file knows no model, socket or environment variable.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from octavo.grammar.limits import GrammarLimits

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 8192
"""Default tokens of a step: as many as a device computes without delaying requests that decode for long."""
GPU_MAX_GAP_S, GPU_MAX_GAP_STEPS = 0.020, 16.0
"""Default limits of a GPU's steps that mix prompts with decodes (SchedulerConfig)."""


class RunnerKind(Enum):
    """What executes the steps."""

    TORCH = "torch"
    ORACLE = "oracle"  # no model: hashes of what the block tables hold; for tests of the system


class PrefixCacheMode(Enum):
    """Whether prompts may reuse blocks that others computed."""

    ON = "on"
    OFF = "off"


class CheckNumerics(Enum):
    """Whether every activation is checked and the first bad layer reported."""

    ON = "on"
    OFF = "off"


class Deterministic(Enum):
    """Whether a request's tokens have the same bits whatever else is in the batch
    (docs/decisions/0006-deterministic-mode.md)."""

    ON = "on"
    OFF = "off"


class LoadFormat(Enum):
    """Where the weights come from."""

    CHECKPOINT = "checkpoint"
    RANDOM = "random"  # random numbers of their scale: to measure shapes without a checkpoint on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler. Raises ValueError naming the field that does not fit.

    max_num_seqs: requests running at once, also the number of slots.
    max_waiting: requests queued besides; more are refused with QUEUE_FULL.
    max_batch_tokens: token budget of a step; at least max_num_seqs, so that prefill always makes progress.
    max_chunk_tokens: of one request in one step; None: the whole budget.
    max_chunks: prompts that one step may continue; None: any number. A GPU's recorded steps have room for this many;
      a step with more is launched kernel by kernel.
    max_model_len: prompt and output together.
    vocab_size: ids are below this.
    max_gap_s, max_gap_steps: bound on steps that mix prompts with decodes (scheduler/costs.py, `StepPace`); None: none.
    attended_share: cost of attending to one earlier token, relative to a prompt token; from the model's shape.
    max_in_flight: plans outstanding at once (as many as the runner supports).
    aging_s: a request that has waited this long in total goes first and is never preempted for younger ones.
    preempt_every_steps: for tests: preempt a request without need every so many steps; None: never.
    copy_s_per_block: measured time to copy one block to the host or back; None: unknown.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 256
    max_waiting: int = 1024
    max_batch_tokens: int = 2048
    max_chunk_tokens: int | None = None
    max_chunks: int | None = None
    max_gap_s: float | None = None
    max_gap_steps: float = 0.0
    attended_share: float = 0.0
    max_in_flight: int = 1
    aging_s: float = 10.0
    preempt_every_steps: int | None = None
    copy_s_per_block: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "vocab_size", "max_num_seqs", "max_batch_tokens", "max_in_flight"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        _require(self.max_waiting >= 0, f"max_waiting must not be negative, not {self.max_waiting}")
        _require(self.aging_s >= 0, f"aging_s must not be negative, not {self.aging_s}")
        _require(
            self.max_batch_tokens >= self.max_num_seqs,
            f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs ({self.max_num_seqs})",
        )
        for name in ("max_chunk_tokens", "max_chunks"):
            most = getattr(self, name)
            _require(most is None or most >= 1, f"{name} must be at least 1, not {most}")
        gap = self.max_gap_s
        _require(gap is None or gap > 0, f"max_gap_s must be above 0, not {gap}")
        every = self.preempt_every_steps
        _require(every is None or every >= 2, f"preempt_every_steps must be at least 2, not {every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveConfig:
    """CURVE keys for tcp:// links: files with the worker's own key pair and the gateways' public key."""

    secret_key_file: Path
    gateway_public_key_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """How constraints on outputs are compiled. timeout_s: from a request's arrival, queueing for a thread included.
    cache_bytes: estimated size."""

    limits: GrammarLimits = field(default_factory=GrammarLimits)
    timeout_s: float = 10.0
    num_threads: int = 2
    cache_entries: int = 256
    cache_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything that `worker.main.main` needs to start one worker process.

    model: folder, "folio-chat" or hub id. dtype None: the checkpoint's own. served_name None: derived from ``model``.
    gateway_endpoints: what to dial, e.g. ("ipc:///run/octavo/gateway-0.sock",). gateway_endpoints_file: lists more, and
      is read again when it changes.
    num_blocks None: what ``memory_fraction`` of the memory that was free before loading has room for.
    host_kv_gib: host memory for blocks; None: on a GPU, a share of what is free. max_model_len None: the model's own.
    load_format: whether weights are read from files. attention_backend None: the best one for the device.
    quantization: "int8" rounds weights to integers with a scale per output and, on a CPU, the inputs of products too;
      "int8-weights" only the weights; "fp8" to e4m3 (GPUs only); None: as in the checkpoint.
    kv_cache_dtype: "fp8" keeps keys and values as e4m3; None: in the model's dtype.
    deterministic: the same bits for a request in any batch, at a price; worker/loading/combinations.py has what it
      excludes.
    tensor_parallel_size: processes that each have a part of the model and compute every step together; 1: no cut.
    cpu_isa: the best CPU instructions to use (model/cpu/isa.py); None: as OCTAVO_CPU_ISA says, else all there are.
    check_numerics: whether activations are checked; check_numerics_limit None: the default for the dtype.
    audit_every_steps 0: never; 1: every step (debugging).
    worker_id "": host name and pid. metrics_port None: no endpoint; 0: any free port (the log names it).
    drain_grace_s: time that a first SIGTERM or SIGINT leaves to running requests; a second signal ends at once.
    stall_exit_s: the process ends itself after this long without a step while there is work; longer than the gateways'
      stall timeout, so that they answer their callers first.
    """

    model: str
    gateway_endpoints: tuple[str, ...]
    gateway_endpoints_file: Path | None = None
    worker_id: str = ""
    served_name: str | None = None
    revision: str | None = None
    runner: RunnerKind = RunnerKind.TORCH
    device: str = "cpu"
    dtype: str | None = None
    load_format: LoadFormat = LoadFormat.CHECKPOINT
    attention_backend: str | None = None
    deterministic: Deterministic = Deterministic.OFF
    check_numerics: CheckNumerics = CheckNumerics.OFF
    check_numerics_limit: float | None = None
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    cpu_isa: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    # memory
    memory_fraction: float = 0.9
    num_blocks: int | None = None
    host_kv_gib: float | None = None
    block_size: int = 16
    prefix_cache: PrefixCacheMode = PrefixCacheMode.ON
    # scheduling
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_waiting: int = 1024
    max_batch_tokens: int = CPU_BATCH_TOKENS
    max_chunk_tokens: int | None = None
    max_gap_s: float | None = None
    max_gap_steps: float = 0.0
    aging_s: float = 10.0
    grammars: GrammarConfig = field(default_factory=GrammarConfig)
    # link
    heartbeat_interval_s: float = 0.5
    drain_grace_s: float = 30.0
    stall_exit_s: float = 40.0
    registration_token: str = ""
    curve: CurveConfig | None = None
    # watching
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 9091
    audit_every_steps: int = 1000
    log_format: str = "auto"
    log_level: str = "info"
    # the oracle runner's model
    oracle_vocab_size: int = 1000
    oracle_step_delay_s: float = 0.0
    oracle_eos_every: int | None = None
    # tests of preemption
    preempt_every_steps: int | None = None


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)
