"""Errors as clients of OpenAI's interface know them: {"error": {"message", "type", "param", "code"}} and a status.

One table from statuses of gRPC; whose fault it is decides.
"""

from dataclasses import dataclass
from typing import Any

import grpc

from octavo.client.errors import OctavoError


@dataclass(eq=False)
class ApiError(Exception):
    """What a caller gets. param: the field that is at fault."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


_BY_STATUS: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
    grpc.StatusCode.ABORTED: (503, "server_error"),
}
_CODES = {
    "EXCEEDS_CAPACITY": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "UNAUTHENTICATED": "invalid_api_key",
    "TENANT_LIMIT": "rate_limit_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
}
_FIELDS = {
    "stop.max_tokens": "max_tokens",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "stop.include_stop": "include_stop_str_in_output",
    "num_outputs": "n",
    "output.logprobs": "top_logprobs",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_name": "tool_choice",
    "constraint.json_schema": "response_format",
    "text": "prompt",
    "token_ids": "prompt",
    "inputs": "input",
}
"""Fields of octavo.v1 by what callers of this interface call them; others keep the last part of their names."""


def api_error(error: OctavoError) -> ApiError:
    """What a failed call becomes."""
    status, kind = _BY_STATUS.get(error.code, (500, "server_error"))
    violations = "; ".join(f"{param_of(each.field)}: {each.description}" for each in error.violations)
    return ApiError(
        status=status,
        message=violations or error.message,
        type=kind,
        param=param_of(error.violations[0].field) if error.violations else None,
        code=_CODES.get(error.reason, error.reason.lower() or None),
    )


def param_of(field: str) -> str:
    """The caller's name of a field of octavo.v1."""
    for ours, theirs in _FIELDS.items():
        if field == ours or field.startswith((ours + ".", ours + "[")):
            return theirs + field[len(ours) :]
    return field.rpartition(".")[2]
