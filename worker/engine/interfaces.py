"""The doors of the engine: what it needs of transport, clock and observers, as protocols.

The engine and its scheduler know no sockets; `worker.transport.link` implements these over ZeroMQ, tests by plain
lists.
"""

from dataclasses import dataclass
from typing import Protocol

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
from octavo.worker.scheduler.plan import GatewayIndex


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The gateway is gone (connection lost, or restarted under a new id): all its requests are cancelled silently."""


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway has welcomed us: it has heard nothing yet of what is cached here."""


InboxMessage = Run | Cancel | Pause | Resume | AdminQuery | Drain | GatewayJoined | GatewayLost
"""What reaches the engine. Welcome, Refused and NeedTokenizer are the link's own business."""

OutboxMessage = StepOutput | KvEvents | AdminReply | Leaving
"""What the engine sends. Register, TokenizerBundle and Heartbeat are the link's own business."""


class Inbox(Protocol):
    """Messages from the gateways, in order of arrival per gateway."""

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        """All messages that are here now, possibly none. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return as soon as ``drain`` may have something (or someone asked to wake up), at the latest after
        ``timeout_s``."""


class Outbox(Protocol):
    """Messages to the gateways. Neither method blocks; what cannot be delivered is dropped and counted by the link,
    which then reports the gateway as lost."""

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """To one gateway. Unknown or lost gateways are no error."""

    def put_all(self, message: OutboxMessage) -> None:
        """To every registered gateway."""


class Clock(Protocol):
    """Monotonic seconds; only differences mean anything."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step, for metrics. Durations in seconds.

    step_s: from launch to the end of collect, so with two steps in flight it includes waiting for the former.
    host_s: what the engine itself spent on plan, apply and sending (no device time).
    failed: "" or the name of the error that ended the step.
    """

    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled: int
    step_s: float
    host_s: float
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; safe to read from any thread. Counters as in `SchedulerCounters`."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_in_flight: int = 0
    is_draining: bool = False
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_active_blocks: int = 0  # less those that leaked
    num_leaked_blocks: int = 0  # at the last recount
    num_violations: int = 0  # of the last audit
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def has_work(self) -> bool:
        """Whether steps should advance: for paused requests there are none."""
        return bool(self.num_running or self.num_waiting or self.num_in_flight)


class Observer(Protocol):
    """Told by the engine, in its own thread; must not block."""

    def on_step(self, report: StepReport) -> None:
        """A step ended."""

    def on_finished(self, finished: Finished) -> None:
        """An output ended (refusals included)."""


class NullObserver:
    """Watches nothing."""

    def on_step(self, report: StepReport) -> None:
        """Ignore."""

    def on_finished(self, finished: Finished) -> None:
        """Ignore."""
