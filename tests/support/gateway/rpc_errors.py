"""What a failed call said, as one value."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Code, our trailers, and the fields of google.rpc.BadRequest."""

    code: grpc.StatusCode
    reason: str
    request_id: str
    tokens_delivered: int
    pushback_ms: int | None
    fields: tuple[str, ...]
    message: str
    info: tuple[str, str]


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Everything that a caller can read."""
    trailers = dict(error.trailing_metadata() or ())
    rich = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    for detail in rich.details:
        if detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return Refusal(
        code=error.code(),
        reason=trailers.get("x-error-reason", ""),
        request_id=trailers.get("x-request-id", ""),
        tokens_delivered=int(trailers.get("x-tokens-delivered", -1)),
        pushback_ms=int(trailers["grpc-retry-pushback-ms"]) if "grpc-retry-pushback-ms" in trailers else None,
        fields=tuple(violation.field for violation in bad.field_violations),
        message=error.details() or "",
        info=(info.reason, info.domain),
    )


async def refused(call: Any) -> Refusal:
    """Await a call, or read a stream to its end; it must fail."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("the call did not fail")
