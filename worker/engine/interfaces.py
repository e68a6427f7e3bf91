"""The doors of the engine: what it needs of transport, clock and observers, as protocols.

The engine and its scheduler know no sockets; `worker.transport.link` implements these over ZeroMQ, tests by plain
lists.

A **gateway index** names one life of one gateway process: after a GatewayLost the index may be given to a new
gateway, whose StepOutput sequence then starts again at 1.
"""

from dataclasses import dataclass
from typing import NewType, Protocol

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

GatewayIndex = NewType("GatewayIndex", int)


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
