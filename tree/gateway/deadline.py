"""When a request has to end, and what its caller gets then. Pure."""

from dataclasses import dataclass
from enum import Enum

PARTIAL_MARGIN_S = 0.05
"""A partial output leaves so long before the wire's deadline: its way through the loop, the network, the caller's
library. Callers who are further away than that set `timeout_s` themselves."""
BACKSTOP_S = 0.03
"""So long after the worker should have ended the output, the gateway does: a step of the model may be long."""


class AtDeadline(Enum):
    """What the caller gets."""

    STATUS = "status"  # DEADLINE_EXCEEDED
    PARTIAL = "partial"  # what there is, as a complete answer with reason DEADLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """end_s: monotonic seconds at which the worker stops; None: never. needs_backstop: nobody but the gateway ends the
    request where the worker is late (the gRPC library ends calls at the wire's deadline, with the status)."""

    end_s: float | None = None
    at_end: AtDeadline = AtDeadline.STATUS
    needs_backstop: bool = False


def deadline_of(
    *, arrived_s: float, wire_timeout_s: float | None, timeout_s: float | None, at_end: AtDeadline
) -> Deadline:
    """The earlier one of the wire's and the request's own. Both are seconds from arrival; None: not given."""
    ends = []
    if wire_timeout_s is not None:
        margin_s = min(PARTIAL_MARGIN_S, wire_timeout_s / 2) if at_end is AtDeadline.PARTIAL else 0.0
        ends.append(arrived_s + wire_timeout_s - margin_s)
    if timeout_s is not None:
        ends.append(arrived_s + timeout_s)
    needs_backstop = bool(ends) and (timeout_s is not None or at_end is AtDeadline.PARTIAL)
    return Deadline(end_s=min(ends, default=None), at_end=at_end, needs_backstop=needs_backstop)
