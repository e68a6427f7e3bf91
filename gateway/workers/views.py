"""Types between the pool and its callers, besides `wire.messages.Run`: sinks of outputs, states of workers."""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np

from octavo.wire.messages import Capacity, Finished, ModelCard, TokenLogprobs


class LostReason(StrEnum):
    """Why a stream lost its worker; the value is an octavo.v1.ErrorReason without its prefix."""

    WORKER_LOST = "WORKER_LOST"
    WORKER_STALLED = "WORKER_STALLED"
    DRAINING = "DRAINING"
    INTERNAL = "INTERNAL"  # the worker broke the protocol for this stream
    POISONED = "POISONED"  # three workers crashed with this output


class OutputSink(Protocol):
    """Receives one output. Called on the event loop; must not block. Exactly one terminal call, then none."""

    def on_started(self) -> None:
        """The worker scheduled the request for the first time."""

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """New tokens, each in [0, vocab_size); logprobs one per token where the request asked for them."""

    def on_finished(self, finished: Finished) -> None:
        """Terminal: the worker ended the output."""

    def on_lost(self, reason: str, detail: str) -> None:
        """Terminal; reason: a LostReason."""

    def on_moved(self, worker_id: str, lost_s: float, moved_s: float) -> None:
        """Another worker goes on with it, or its own after a restart. Monotonic: lost_s, since when it had none;
        moved_s, before it was sent there."""


class PromptSink(Protocol):
    """Receives the log-probabilities of a prompt from its second token on, before the output's first token."""

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """The next positions."""


class EmbeddingSink(OutputSink, Protocol):
    """Receives one embedding: `on_embedding` once before `on_finished`, no tokens."""

    def on_embedding(self, embedding_D: np.ndarray) -> None:
        """float32, every entry finite."""


class WorkerState(Enum):
    """The state of a worker, seen from this gateway."""

    REGISTERED = "registered"  # its tokenizer is not here yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, gets nothing new


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A snapshot of one worker. Load numbers are the worker's own (all gateways), in_flight is this gateway's."""

    worker_id: str
    epoch: str
    state: WorkerState
    card: ModelCard
    capacity: Capacity
    in_flight: int
    num_steps: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    heartbeat_age_s: float
    pid: int
    num_paused: int = 0
    num_prefill_tokens: int = 0  # since its start, as all below
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    cached_tokens: int = 0  # of the prompt for which it was chosen

    @property
    def num_active_blocks(self) -> int:
        """Blocks that requests hold."""
        return max(0, self.capacity.num_blocks - self.num_free_blocks - self.num_cached_blocks)
