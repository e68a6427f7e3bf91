"""The engine's inputs and outputs: messages, and the protocols of transport, clock and observers.

The engine and its scheduler know no sockets; `worker.transport.link` implements these protocols over ZeroMQ, tests with
plain lists.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.wire.messages import (
    AdminQuery,
    AdminReply,
    Cancel,
    Drain,
    Finished,
    KvEvents,
    Leaving,
    Pause,
    Resume,
    Run,
    StepOutput,
)
from octavo.worker.scheduler.plan import GatewayIndex, GatewayOutput


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The gateway is lost (disconnected, or restarted with a new id): all its requests are cancelled silently."""


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway has welcomed this worker. It does not know yet what is cached here."""


InboxMessage = Run | Cancel | Pause | Resume | AdminQuery | Drain | GatewayJoined | GatewayLost
"""Messages that reach the engine. The link handles Welcome, Refused and NeedTokenizer itself."""

OutboxMessage = StepOutput | KvEvents | AdminReply | Leaving
"""Messages that the engine sends. The link sends Register, TokenizerBundle and Heartbeat itself."""


@dataclass(slots=True, kw_only=True)
class LinkStats:
    """Counters of the link since the start, summed over all gateways."""

    received_messages: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    sent_bytes: int = 0
    undecodable_frames: int = 0
    unexpected_messages: int = 0  # before the welcome, or of another epoch
    dropped_messages: int = 0  # for gateways that were not connected
    gateways_lost: int = 0


class Inbox(Protocol):
    """Messages from the gateways, in order of arrival per gateway."""

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        """All messages that have arrived, possibly none. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return as soon as ``drain`` may have something (or another thread woke it), at the latest after
        ``timeout_s``."""


class Outbox(Protocol):
    """Messages to the gateways. Neither method blocks; the link drops and counts what it cannot deliver, and then
    reports the gateway as lost."""

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """Send to one gateway. It is no error if that is unknown or lost."""

    def put_all(self, message: OutboxMessage) -> None:
        """Send to every registered gateway."""


class Clock(Protocol):
    """Monotonic seconds; only differences are meaningful."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step, for metrics. Durations in seconds.

    step_s: from launch to the end of collect, so with two steps in flight it includes waiting for the earlier one.
    host_s: from then on: applying the result, making the next step's masks, and sending (no device time).
    failed: "", or the name of the error that ended the step.
    """

    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled: int
    step_s: float
    host_s: float
    failed: str = ""


class EngineStats(NamedTuple):
    """A snapshot after a step; safe to read from any thread. Counters as in `SchedulerCounters`. A tuple because one is
    made at every step.

    waiting_since_s: by the engine's clock, of the request that has waited longest; None if none waits.
    awaits_grammars: see `Scheduler.awaits_grammars`.
    """

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_since_s: float | None = None
    num_paused: int = 0
    num_in_flight: int = 0
    awaits_grammars: bool = False
    is_draining: bool = False
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_active_blocks: int = 0  # without leaked ones
    num_leaked_blocks: int = 0  # at the last recount
    num_violations: int = 0  # of the last audit
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions in which blocks went to the host
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    num_copied_out_blocks: int = 0
    num_copied_in_blocks: int = 0
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def has_work(self) -> bool:
        """Whether steps should advance. There are none for paused requests, nor while all requests wait for grammars,
        whose compilation has its own time limit."""
        return bool(self.num_running or self.num_waiting or self.num_in_flight) and not self.awaits_grammars


class Observer(Protocol):
    """Called by the engine in its thread; must not block."""

    def on_step(self, report: StepReport) -> None:
        """A step ended."""

    def on_finished(self, finished: Finished) -> None:
        """An output ended (refusals included)."""


class NullObserver:
    """Does nothing."""

    def on_step(self, report: StepReport) -> None:
        """Ignore."""

    def on_finished(self, finished: Finished) -> None:
        """Ignore."""


def step_output(output: GatewayOutput, *, epoch: str, seq: int, step: int) -> StepOutput:
    """The message with one gateway's part of a step's result."""
    return StepOutput(
        epoch=epoch,
        seq=seq,
        step=step,
        handles=output.handles_N.astype("<i8", copy=False).tobytes(),
        tokens=output.tokens_N.astype("<i4", copy=False).tobytes(),
        logprobs=output.logprobs,
        started=output.started,
        finished=output.finished,
        prompt_logprobs=output.prompt_logprobs,
        embeddings={
            handle: embedding_D.astype("<f4", copy=False).tobytes() for handle, embedding_D in output.embeddings.items()
        },
    )
