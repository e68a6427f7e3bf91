"""What the pool counts. Plain integers; the exporter of metrics reads them."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.gateway.workers.views import LostReason

# What the counters below have as keys, so that each has its series, at 0, before the first of its kind.
LOSSES = (LostReason.WORKER_LOST, LostReason.WORKER_STALLED, LostReason.DRAINING)
REFUSALS = ("token", "given_up", "invalid", "duplicate_id", "too_many", "card")
PROTOCOL_ERRORS = (
    "after_end",
    "bad_embedding",
    "bad_prompt_logprobs",
    "bundle",
    "foreign_handle",
    "internal",
    "missing_embedding",
    "missing_logprobs",
    "missing_prompt_logprobs",
    "token_out_of_range",
    "too_many_tokens",
    "unknown_handle",
    "wrong_count",
)


class RouteReason(StrEnum):
    """Why a worker was chosen; a closed label set."""

    ONLY = "only"
    PREFIX = "prefix"
    LOAD = "load"  # no worker had a prefix
    BALANCE = "balance"  # another one has a longer prefix, and costs more


@dataclass(slots=True, kw_only=True)
class PoolStats:
    """Counters since the start of the process; they only grow."""

    received_messages: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    sent_bytes: int = 0
    undecodable_frames: int = 0  # not ours, garbage, oversized, wrong version
    stale_messages: int = 0  # of an epoch that is unknown or given up
    late_outputs: int = 0  # rows for an output that had ended (cancelled a moment before)
    protocol_errors: Counter[str] = field(default_factory=Counter)  # by kind: what a correct worker never sends
    sequence_gaps: int = 0
    busy_sends: int = 0  # refused because a socket's queue was full
    registrations: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # registrations refused, by kind
    workers_lost: Counter[str] = field(default_factory=Counter)  # by LostReason
    sink_errors: int = 0  # exceptions of our own streams
    routed: Counter[str] = field(default_factory=Counter)  # by RouteReason
    kv_events: int = 0
    moved_outputs: int = 0  # went on at another worker, or at their own after its restart
    pauses: int = 0  # outputs whose readers fell behind
    rebinds: int = 0  # ipc sockets that had vanished from the run directory
