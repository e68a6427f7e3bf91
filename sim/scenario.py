"""What one simulation does, as plain data: the service, what callers ask of it, what goes wrong and when.

A scenario is complete: nothing else decides what happens but its seed, which every component's own generator is made
from. It travels as JSON, and requests and faults can be left out of it one by one (`sim.shrink`).
"""

import random
from enum import StrEnum
from pathlib import Path

import msgspec


class FaultKind(StrEnum):
    """What can go wrong. ``duration_s`` and ``detail`` mean what is said here. Those of `TRIGGERED` happen as soon as a
    worker has an output at the place `detail` (`sim.faults.triggered.PLACES`), once."""

    CRASH = "crash"  # the worker's process dies
    CRASH_AT = "crash_at"  # … at the fault point `detail`
    FREEZE = "freeze"  # SIGSTOP for duration_s
    SLOW = "slow"  # steps take ten times as long for duration_s
    HANG = "hang"  # the next step never ends
    OUT_OF_MEMORY = "out_of_memory"  # the next step
    ENGINE_ERROR = "engine_error"  # the next step
    LIE = "lie"  # the next message says something untrue: `detail`
    DISCONNECT = "disconnect"  # of one worker and one gateway
    PARTITION = "partition"  # … nothing gets through for duration_s
    LAG = "lag"  # … everything takes duration_s longer, once
    DRAIN_WORKER = "drain_worker"  # it finishes within duration_s and leaves; another process follows
    KILL_GATEWAY = "kill_gateway"  # its process dies; another one follows
    DRAIN_GATEWAY = "drain_gateway"  # it finishes within duration_s and stops; another one follows
    ABORT = "abort"  # an operator ends every request in flight at a gateway
    FLUSH = "flush"  # an operator audits the blocks and flushes the prefix caches
    HANG_UP = "hang_up"  # a caller goes away
    HANG_UP_AND_CRASH = "hang_up_and_crash"  # … and the worker that has the output dies at the same moment
    STALL = "stall"  # a caller stops reading for duration_s
    FAIL = "fail"  # the gateway ends a request
    CANCEL_OUTPUT = "cancel_output"  # one output of a request, alone
    CRASH_WHEN = "crash_when"  # the worker dies
    DISCONNECT_WHEN = "disconnect_when"  # its connection with the gateway of that output breaks
    FAIL_STEP = "fail_step"  # its next step
    DEFECT = "defect"  # our own code raises at the fault point `detail`
    RANK_DIES = "rank_dies"  # the process of one of a worker's ranks, the one of number `detail`
    RANK_STOPS = "rank_stops"  # … stands still from now on


TRIGGERED = frozenset(
    (
        FaultKind.HANG_UP,
        FaultKind.HANG_UP_AND_CRASH,
        FaultKind.STALL,
        FaultKind.FAIL,
        FaultKind.CANCEL_OUTPUT,
        FaultKind.CRASH_WHEN,
        FaultKind.DISCONNECT_WHEN,
        FaultKind.FAIL_STEP,
    )
)


OF_RANKS = frozenset((FaultKind.RANK_DIES, FaultKind.RANK_STOPS))
"""Only where workers have several ranks."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing going wrong, at_s seconds after the start."""

    kind: FaultKind
    at_s: float
    worker: int = 0
    gateway: int = 0
    duration_s: float = 0.0
    detail: str = ""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One caller. Seconds; cancel_after_s and timeout_s count from the call.

    output: text, ids or both. pace_s: between two messages read. stall_after: messages, after which the caller stops
    reading for stall_s. retries: how often it calls again where that is allowed.
    """

    index: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    gateway: int = 0
    tenant: str = ""
    request_id: str = ""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    output: str = "ids"
    logprobs: int | None = None
    num_outputs: int = 1
    priority: int = 0
    is_unary: bool = False
    timeout_s: float | None = None
    cancel_after_s: float | None = None
    pace_s: float = 0.0
    stall_after: int | None = None
    stall_s: float = 0.0
    retries: int = 0


class Tenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who has a key, with limits per gateway as `gateway.auth.authenticator.TenantLimits` has them."""

    name: str
    weight: int = 1
    max_requests: int | None = None
    max_queued: int | None = None
    tokens_per_minute: int | None = None
    burst_tokens: int | None = None


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The service. Step time: step_base_s + step_prefill_s per prompt token + step_seq_s per decode, all times
    1 ± jitter. is_watched: the gateways see a worker's process end at once. poisons: freed blocks are overwritten.
    num_host_blocks: of a second tier; copy_s: that a block takes to it or back. tenants: with keys; none: nobody is
    asked who they are, and tenants keep apart by salts that they choose. num_ranks: of each worker, tensor-parallel."""

    num_workers: int = 1
    num_gateways: int = 1
    num_blocks: int = 64
    block_size: int = 4
    has_prefix_cache: bool = True
    max_num_seqs: int = 8
    max_waiting: int = 32
    max_batch_tokens: int = 64
    max_chunk_tokens: int | None = None
    max_in_flight: int = 1
    max_model_len: int = 128
    aging_s: float = 10.0
    preempt_every_steps: int | None = None
    eos_every: int | None = 20
    step_base_s: float = 0.005
    step_prefill_s: float = 0.0001
    step_seq_s: float = 0.0002
    jitter: float = 0.2
    link_delay_s: float = 0.0005
    high_water: int = 2000
    window_bytes: int = 65_536
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    stall_timeout_s: float = 30.0
    stall_exit_s: float = 40.0
    write_stall_s: float = 30.0
    max_pending_tokens: int = 16_384
    pause_pending_tokens: int = 512
    max_requests: int = 4096
    restart_s: float = 0.5
    max_moves: int = 0
    move_timeout_s: float = 60.0
    is_watched: bool = True
    poisons: bool = True
    audit_every_steps: int = 10
    tenants: tuple[Tenant, ...] = ()
    num_host_blocks: int = 0
    max_copies_in: int = 64
    copy_s: float = 0.0001
    num_ranks: int = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    seed: int
    config: SimConfig
    requests: tuple[RequestSpec, ...] = ()
    faults: tuple[Fault, ...] = ()

    def rng(self, name: str) -> random.Random:
        """The generator of one component."""
        return random.Random(f"{self.seed}:{name}")


def save(scenario: Scenario, path: Path) -> None:
    """As a file that `load` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")


def load(path: Path) -> Scenario:
    """Raises msgspec.ValidationError naming the field."""
    return msgspec.json.decode(path.read_bytes(), type=Scenario)
