"""An exception as callers see it: status code, message, trailers, google.rpc details."""

import re
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from octavo.gateway.errors import INTERNAL, MAX_VIOLATIONS, ErrorRow, InvalidRequest, Retry, row_of

DOMAIN = "octavo"
REASON_TRAILER = "x-error-reason"
REQUEST_ID_TRAILER = "x-request-id"
TOKENS_TRAILER = "x-tokens-delivered"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
DETAILS_TRAILER = "grpc-status-details-bin"

# Bytes: trailers have to fit into 8 KiB of headers, where the message may be three times as long (percent-encoded) and
# details are a third longer (base64).
_MAX_MESSAGE = 400
_MAX_FIELD = 200
_MAX_VIOLATIONS_BYTES = 3500
_PATH = re.compile(r"(?:ipc|tcp)://[^\s,;)]+|(?<![\w.])/(?:[\w.@+-]+/)+[\w.@+-]*")

Metadata = tuple[tuple[str, str | bytes], ...]


class AnsweredRpc(Protocol):
    """The part of an RPC's scope that a status needs (`gateway.rpc.interceptor.RpcScope`)."""

    request_id: str
    tokens_delivered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatus:
    """The arguments of context.abort."""

    code: grpc.StatusCode
    reason: str
    message: str
    trailers: Metadata


def public_message(error: Exception, row: ErrorRow, request_id: str) -> str:
    """The error's own message if the error is ours, without file paths and socket names; otherwise a constant.
    request_id: empty if the caller has not been given one."""
    if row is INTERNAL:
        return "internal error; the server's log has it" + " under this request id" * bool(request_id)
    return _fitting(_PATH.sub("<path>", str(error)), _MAX_MESSAGE)


def _fitting(text: str, max_bytes: int) -> str:
    """The text, cut to fit and encodable: it may contain a caller's words, such as half a surrogate pair from a JSON
    escape."""
    return text[:max_bytes].encode(errors="backslashreplace")[:max_bytes].decode(errors="ignore")


def status_of(error: Exception, scope: AnsweredRpc, *, pushback_ms: int) -> RpcStatus:
    """The status of an RPC that ends with this exception."""
    row = row_of(error)
    pushback_ms = getattr(error, "retry_after_ms", None) or pushback_ms
    text = public_message(error, row, scope.request_id)
    trailers: list[tuple[str, str | bytes]] = [
        (REASON_TRAILER, row.reason),
        (REQUEST_ID_TRAILER, scope.request_id),
        (TOKENS_TRAILER, str(scope.tokens_delivered)),
    ]
    if row.retry is Retry.LATER:
        trailers.append((PUSHBACK_TRAILER, str(pushback_ms)))
    rich = status_pb2.Status(code=_code_number(row.code), message=text)
    rich.details.extend(_details(error, row, scope, pushback_ms))
    trailers.append((DETAILS_TRAILER, rich.SerializeToString()))
    return RpcStatus(code=row.code, reason=row.reason, message=text, trailers=tuple(trailers))


def _code_number(code: grpc.StatusCode) -> "code_pb2.Code.ValueType":
    return code_pb2.Code.Value(code.name)


def _details(error: Exception, row: ErrorRow, scope: AnsweredRpc, pushback_ms: int) -> list[any_pb2.Any]:
    info = error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN)
    if scope.request_id:
        info.metadata["request_id"] = scope.request_id
    details: list[message.Message] = [info]
    if isinstance(error, InvalidRequest):
        details.append(_bad_request(error))
    if row.retry is Retry.LATER:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(pushback_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return [_packed(detail) for detail in details]


def _bad_request(error: InvalidRequest) -> error_details_pb2.BadRequest:
    bad, num_bytes = error_details_pb2.BadRequest(), 0
    for violation in error.violations[:MAX_VIOLATIONS]:
        field, description = (_fitting(text, _MAX_FIELD) for text in (violation.field, violation.description))
        num_bytes += len(field.encode()) + len(description.encode())
        if num_bytes > _MAX_VIOLATIONS_BYTES:
            break
        bad.field_violations.add(field=field, description=description)
    return bad


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def is_expected(error: Exception) -> bool:
    """Whether the status says enough; other errors are logged with a traceback."""
    return row_of(error) is not INTERNAL
