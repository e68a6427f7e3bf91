"""The errors that a call to Octavo can raise: one class for each way in which a caller can react.

Knows gRPC statuses and Octavo's trailers; must not know how calls are made.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

REASON_TRAILER = "x-error-reason"
REQUEST_ID_TRAILER = "x-request-id"
TOKENS_DELIVERED_TRAILER = "x-tokens-delivered"
RETRY_AFTER_TRAILER = "grpc-retry-pushback-ms"
STATUS_DETAILS_TRAILER = "grpc-status-details-bin"


class FailedCall(Protocol):
    """What the `grpc.RpcError` of a failed call and `grpc.aio.AioRpcError` have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...  # pairs of str and str | bytes, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """A field that the server refused: its path in the request, and the reason."""

    field: str
    description: str


class OctavoError(Exception):
    """A call failed.

    code: the gRPC status. reason: the name of an `octavo.v1.ErrorReason` without its prefix; "" if the status comes
    from the gRPC library or the network. request_id: the server's id of the request; "" if the server did not send one.
    tokens_delivered: how many tokens were sent before the failure; 0 means that a retry repeats none.
    violations: the fields that were refused. retry_after_s: seconds that the server asks to wait before a retry; None
    if it does not say.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        request_id: str = "",
        tokens_delivered: int = 0,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.request_id = request_id
        self.tokens_delivered = tokens_delivered
        self.violations = violations
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} ({self.reason or self.code.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        """How pickle and copy make it again. Exceptions alone would be made of their message, without the code; a pool
        of processes whose worker raised one would break."""
        return partial(type(self), self.message, code=self.code), (), vars(self)


class InvalidRequest(OctavoError):
    """The request must be changed; `violations` has the refused fields, if the server names any."""


class Unauthorized(OctavoError):
    """The key or certificate is missing, not valid here, or does not allow this call."""


class NotFound(OctavoError):
    """The server has no such model or method."""


class Overloaded(OctavoError):
    """The server is full: try again later."""


class Unavailable(OctavoError):
    """No server or worker is available, or the worker was lost. Try again; if `tokens_delivered` is 0, nothing is
    repeated."""


class DeadlineExceeded(OctavoError):
    """The caller's deadline has passed."""


class Cancelled(OctavoError):
    """The caller or an operator ended the request."""


class ClientUnusable(OctavoError):
    """The client cannot make calls: it is closed, or its event loop has ended or is not the running one. Create another
    client."""


class ServerFault(OctavoError):
    """The server failed."""


_CLASSES: dict[grpc.StatusCode, type[OctavoError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: Unauthorized,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNIMPLEMENTED: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.ABORTED: Cancelled,
}


_TOO_LARGE = "message larger than max"
"""What gRPC itself says of a message with more bytes than one side takes, with RESOURCE_EXHAUSTED."""


def error_from(call: FailedCall) -> OctavoError:
    """The error to raise for a failed call."""
    code = call.code()
    trailers = dict(call.trailing_metadata() or ())
    delivered, wait_ms = (_text(trailers.get(name)) for name in (TOKENS_DELIVERED_TRAILER, RETRY_AFTER_TRAILER))
    message, reason = call.details() or code.name, _text(trailers.get(REASON_TRAILER))
    is_too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason and _TOO_LARGE in message
    return (InvalidRequest if is_too_large else _CLASSES.get(code, ServerFault))(
        message,
        code=code,
        reason=reason,
        request_id=_text(trailers.get(REQUEST_ID_TRAILER)),
        tokens_delivered=int(delivered) if delivered.isdecimal() else 0,
        violations=_violations(trailers.get(STATUS_DETAILS_TRAILER)),
        retry_after_s=int(wait_ms) / 1000 if wait_ms.isdecimal() else None,
    )


def _text(value: str | bytes | None) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _violations(details: str | bytes | None) -> tuple[FieldViolation, ...]:
    if not isinstance(details, bytes):
        return ()
    bad_request = error_details_pb2.BadRequest()
    try:
        is_there = any(detail.Unpack(bad_request) for detail in status_pb2.Status.FromString(details).details)
    except DecodeError:  # not ours: whatever stands between may have written it
        return ()
    found = bad_request.field_violations if is_there else ()
    return tuple(FieldViolation(field=each.field, description=each.description) for each in found)
