"""What is known of the RPC that the current task answers, and when its request has to end.

The scope is a context variable, because the interceptor is around handlers of libraries too (health, reflection), whose
signatures have no room for it. Must not know requests, nor workers.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum

from octavo.gateway.auth.authenticator import ANYBODY, Caller
from octavo.gateway.errors import DeadlinePassed
from octavo.gateway.observability.tracing import CallTrace
from octavo.gateway.validation.fields import REQUEST_ID

PARTIAL_MARGIN_S = 0.05
"""A partial output is sent so long before the wire's deadline: for its way through the loop, the network and the
caller's library. Callers that are further away set `timeout_s` themselves."""
BACKSTOP_S = 0.03
"""So long after the worker should have ended the output, the gateway does: a step of the model may be long."""
FIGURES_S = 0.2
"""So long after that a partial answer waits for the worker's figures, where the wire's deadline is further away: its
text is with the caller by then."""


class AtDeadline(Enum):
    """What the caller gets at the deadline."""

    STATUS = "status"  # DEADLINE_EXCEEDED
    PARTIAL = "partial"  # what there is, as a complete answer with reason DEADLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """end_s: monotonic seconds at which the worker stops; None: never. needs_backstop: the gateway has to end the
    request where the worker is late (the gRPC library ends calls at the wire's deadline, with the status). figures_s:
    seconds that the end of a partial answer then waits for the worker's figures."""

    end_s: float | None = None
    at_end: AtDeadline = AtDeadline.STATUS
    needs_backstop: bool = False
    figures_s: float = 0.0


def deadline_of(
    *, arrived_s: float, wire_timeout_s: float | None, timeout_s: float | None, at_end: AtDeadline
) -> Deadline:
    """The earlier one of the wire's and the request's own. Both are seconds from arrival; None: not given."""
    is_partial = at_end is AtDeadline.PARTIAL
    ends = []
    if wire_timeout_s is not None:
        ends.append(arrived_s + wire_timeout_s - (min(PARTIAL_MARGIN_S, wire_timeout_s / 2) if is_partial else 0.0))
    wire_s = ends[0] if ends else math.inf
    if timeout_s is not None:
        ends.append(arrived_s + timeout_s)
    end_s = min(ends, default=None)
    return Deadline(
        end_s=end_s,
        at_end=at_end,
        needs_backstop=end_s is not None and (timeout_s is not None or is_partial),
        figures_s=max(0.0, min(FIGURES_S, wire_s - end_s - BACKSTOP_S)) if end_s is not None and is_partial else 0.0,
    )


@asynccontextmanager
async def until(end_s: float | None) -> AsyncIterator[None]:
    """end_s: monotonic; None: never. Raises DeadlinePassed where the time is over before the block."""
    try:
        async with asyncio.timeout(None if end_s is None else max(0.0, end_s - time.monotonic())):
            yield
    except TimeoutError:
        raise unsent() from None


def unsent() -> DeadlinePassed:
    """The time was over before a worker had the request."""
    return DeadlinePassed("the deadline passed before the request was sent to a worker")


@dataclass(slots=True, kw_only=True, eq=False)
class RpcScope:
    """One RPC. Filled in on the way; the interceptor reads it for trailers, metrics and the log line at the end.

    started_s: monotonic. wire_timeout_s: the call's own deadline, in seconds from its start; None: none.
    model: by its metadata or its listener, for requests that name none.
    tokens_delivered: generated tokens in messages that were sent. peer: what gRPC calls the connection's other end.
    """

    method: str
    caller: Caller = ANYBODY
    peer: str = ""
    model: str = ""
    wire_timeout_s: float | None = None
    # A lambda, so that `time.monotonic` is looked up at each call: a simulation replaces it.
    started_s: float = field(default_factory=lambda: time.monotonic())
    request_id: str = ""
    tokens_delivered: int = 0
    reason: str = ""  # why the request failed, of a call that its contract ends with OK all the same
    log_fields: dict[str, object] = field(default_factory=dict)
    trace: CallTrace | None = None  # where somebody asked for traces
    traceparent: str = ""  # of its span, for a worker

    def name_by(self, request_id: str) -> None:
        """Use the caller's request id before the request was checked. A malformed one stays out of trailers, which gRPC
        would refuse to send, and out of the log; the check of the request's fields refuses it by name."""
        if REQUEST_ID(request_id) is None:
            self.request_id = request_id

    @property
    def key(self) -> str:
        """The request's id as no other tenant can have it."""
        return self.caller.key_of(self.request_id)


current_rpc: ContextVar[RpcScope] = ContextVar("current_rpc")
