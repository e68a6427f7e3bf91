"""Errors as clients of OpenAI's interface know them: {"error": {"message", "type", "param", "code"}} and a status.

One table maps gRPC statuses, by whose fault it is.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import grpc

from octavo.client.errors import InvalidRequest, OctavoError


@dataclass(eq=False)
class ApiError(Exception):
    """The error that a caller gets. status: the HTTP status. param: the field at fault."""

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
# Fields of octavo.v1 and their names in `octavo.client.requests`; others keep the last part of their path.
_NAMES = {
    "stop.max_tokens": "max_tokens",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "output.prompt_logprobs": "logprobs",
    "token_ids.ids": "token_ids",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_name": "tool_choice",
    "constraint.choice.options": "choice",
}
# The names of these fields in this interface; if there are several, the one that the caller used.
_FORMS = ("response_format", "guided_json")
_WORDS = {
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "include_stop": ("include_stop_str_in_output",),
    "num_outputs": ("n",),
    "logprobs": ("top_logprobs", "logprobs"),
    "prompt_logprobs": ("logprobs",),
    **dict.fromkeys(("text", "token_ids"), ("prompt", "input")),
    **dict.fromkeys(("input", "inputs"), ("messages", "prompt", "input")),
    "json_schema": _FORMS,
    "json_object": _FORMS,
    "regex": ("regex", "guided_regex"),
    "ebnf": ("ebnf", "grammar", "guided_grammar"),
    "choice": ("choice", "guided_choice"),
}
_WORDS["constraint"] = tuple(
    dict.fromkeys(word for name in ("json_schema", "regex", "ebnf", "choice") for word in _WORDS[name])
)
_INNER = (
    (re.compile(r"(tools\[\d+\])\.(?=name|description|parameters)"), r"\1.function."),
    (re.compile(r"(tool_calls\[\d+\])\.(?=name|arguments)"), r"\1.function."),
    (re.compile(r"(?<=\.)(parameters|arguments)_json$"), r"\1"),
    (re.compile(r"^(input\[\d+\])\.(?:text|token_ids(?:\.ids)?)"), r"\1"),
)
_NAMED = re.compile(r"(num_outputs|constraint|inputs)(\[\d+\])?: ")  # a message that begins with a field

_UNANSWERED = "the service does not answer"  # gRPC's own messages contain internal addresses
_OUTPUTS = re.compile(r"\d+ outputs")  # too many outputs, not too many tokens


def api_error(error: OctavoError, given: Collection[str] = (), number: int | None = None) -> ApiError:
    """The ApiError for a failed call. given: names of the fields that the caller set. number: index of the call's
    prompt, if there are several."""
    status, kind = _BY_STATUS.get(error.code, (500, "server_error"))
    if isinstance(error, InvalidRequest) and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # for gRPC's messages
        return ApiError(413, "the request has too many bytes")
    params = [_placed(param_of(each.field, given), number) for each in error.violations]
    said = (f"{param}: {each.description}" for param, each in zip(params, error.violations, strict=True))
    message = "; ".join(dict.fromkeys(said))  # two of our fields may be one of the caller's
    if not params and (named := _NAMED.match(error.message)) is not None:
        params = [word_of(named[1], given) + (named[2] or "")]
        message = f"{params[0]}: {error.message[named.end() :]}"
    if not params and error.reason == "MODEL_NOT_FOUND":
        params, message = ["model"], f"model: {error.message}"
    if not params and error.reason == "EXCEEDS_CAPACITY":
        is_of_outputs = "n" in given and _OUTPUTS.match(error.message)
        params = ["n" if is_of_outputs else _placed(word_of("input", given), number)]
        message = "" if number is None or is_of_outputs else f"{params[0]}: {error.message}"
    return ApiError(
        status=status,
        message=message or (error.message if error.reason else _UNANSWERED),
        type=kind,
        param=params[0] if params else None,
        code=_CODES.get(error.reason, error.reason.lower() or None),
    )


def _placed(param: str, number: int | None) -> str:
    word, bracket, index = param.partition("[")
    return param if number is None or word != "prompt" else f"{word}[{number}]{bracket}{index}"


def param_of(field: str, given: Collection[str] = ()) -> str:
    """The caller's name for a field path of octavo.v1."""
    for path, name in _NAMES.items():
        if field == path or field.startswith((path + ".", path + "[")):
            param = word_of(name, given) + field[len(path) :]
            break
    else:
        name, bracket, index = field.partition("[")
        param = word_of(name.rpartition(".")[2], given) + bracket + index
    for pattern, inner in _INNER:
        param = pattern.sub(inner, param)
    return param


def word_of(name: str, given: Collection[str] = ()) -> str:
    """The caller's name for a field of `octavo.client.requests`."""
    words = _WORDS.get(name, (name,))
    return next((word for word in words if word in given), words[0])
