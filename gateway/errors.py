"""What can go wrong with a request, and the one table that maps it to gRPC statuses.

Exception classes here and in `gateway.text` and `gateway.workers` know no statuses. `gateway.rpc.status` makes statuses
of the table's rows, `gateway.dialects.openengine` errors within its streams. Reasons are the names of
octavo.v1.ErrorReason without their prefix.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

import grpc

from octavo.gateway.text.errors import PromptTooLong, TemplateError, TextQueueFull, TooManyTokens, UnsupportedTokenizer
from octavo.gateway.workers.errors import FeedCut, FeedEnded, FeedFull, NoWorker, WorkerBusy, WorkerGone
from octavo.wire.codec import MessageTooLarge
from octavo.wire.messages import Finished, WireFinishReason

MAX_VIOLATIONS = 16  # enough to see what is wrong; a hostile message gets no long answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A field of the request: its path (``sampling.temperature``, ``chat.messages[2].role``) and what is wrong."""

    field: str
    description: str


class RequestError(Exception):
    """Base; the message is for the caller."""


class NamesFields(Exception, ABC):
    """An error that names request fields, whose paths can be translated to another contract's."""

    @abstractmethod
    def with_paths(self, path_of: Callable[[str], str]) -> "NamesFields":
        """The same error with another contract's paths. path_of: maps an octavo.v1 path to theirs."""


class InvalidRequest(RequestError, NamesFields):
    """Fields are missing, unknown, out of range or not supported."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(f"{first.field}: {first.description}{more}")
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """One field is wrong."""
        return cls((Violation(field=field, description=description),))

    def with_paths(self, path_of: Callable[[str], str]) -> "InvalidRequest":
        """See NamesFields."""
        return InvalidRequest(tuple(replace(each, field=path_of(each.field)) for each in self.violations))


class MalformedMessage(RequestError):
    """The request's bytes are no message of its type."""


class ExceedsCapacity(RequestError, NamesFields):
    """The request can never fit, even alone. field: the one that asks for too much; empty if it is not a single one."""

    def __init__(self, description: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {description}" if field else description)
        self.field, self.description = field, description

    def with_paths(self, path_of: Callable[[str], str]) -> "ExceedsCapacity":
        """See NamesFields."""
        return ExceedsCapacity(self.description, field=path_of(self.field)) if self.field else self


class ModelNotFound(RequestError):
    """No worker serves a model of that name."""


class DuplicateRequest(RequestError):
    """A request with this id is already in flight."""


class QueueFull(RequestError):
    """No room now."""


class Unauthenticated(RequestError):
    """The caller is not identified."""


class PermissionDenied(RequestError):
    """The caller is known and may not do this."""


class TenantLimit(RequestError):
    """The caller's tenant has reached its own limit. retry_after_ms: until there is room again; None if unknown."""

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class WorkerLost(RequestError):
    """The worker was lost."""


class WorkerStalled(RequestError):
    """The worker stopped making steps."""


class Draining(RequestError):
    """This gateway, or the worker, is shutting down."""


class DeadlinePassed(RequestError):
    """The caller's deadline is over."""


class RequestAborted(RequestError):
    """An operator ended the request."""


class NumericalFault(RequestError):
    """The logits of this request were not finite."""


class Poisoned(RequestError):
    """Three workers crashed with this request, the last of them with no other one on probation."""


class EngineFailed(RequestError):
    """The forward pass failed."""


class DeviceOutOfMemory(RequestError):
    """Device memory ran out for this request."""


class SlowConsumer(RequestError):
    """The caller does not read its stream."""


class ConstraintFailed(RequestError):
    """The worker could not follow the constraint on the output."""


class ScaleRefused(RequestError):
    """The number of a model's workers cannot be changed here, or not to the number asked for."""


class NotOffered(RequestError):
    """A method of another contract that is not implemented here."""


class NotEnabled(RequestError):
    """A method of another contract that its own servers offer only if started with the feature it needs."""


class RequestNotFound(RequestError):
    """No request of that id is in flight."""


class InternalDefect(RequestError):
    """A defect of ours; the log has its traceback."""


def as_exception(error: BaseException) -> Exception:
    """The error, or an InternalDefect for a BaseException that is not an Exception, so that handlers of Exception see
    it: libraries in Rust (pyo3) raise panics that way, for instance if a thread cannot be started."""
    if isinstance(error, Exception):
        return error
    defect = InternalDefect(f"{type(error).__name__}: {error}")
    defect.__cause__ = error
    return defect


class Retry(Enum):
    """Whether a refusal carries `grpc-retry-pushback-ms`."""

    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One class of errors, as callers see it."""

    code: grpc.StatusCode
    reason: str
    retry: Retry = Retry.NEVER


_C = grpc.StatusCode
INTERNAL = ErrorRow(code=_C.INTERNAL, reason="INTERNAL")
ERROR_TABLE: dict[type[Exception], ErrorRow] = {
    InvalidRequest: ErrorRow(code=_C.INVALID_ARGUMENT, reason="INVALID_FIELD"),
    # gRPC's own code for unparseable requests (its C core and other languages' servers answer so themselves).
    MalformedMessage: ErrorRow(code=_C.INTERNAL, reason="INVALID_FIELD"),
    PromptTooLong: ErrorRow(code=_C.INVALID_ARGUMENT, reason="EXCEEDS_CAPACITY"),
    TooManyTokens: ErrorRow(code=_C.INVALID_ARGUMENT, reason="EXCEEDS_CAPACITY"),
    ExceedsCapacity: ErrorRow(code=_C.INVALID_ARGUMENT, reason="EXCEEDS_CAPACITY"),
    MessageTooLarge: ErrorRow(code=_C.INVALID_ARGUMENT, reason="EXCEEDS_CAPACITY"),  # of the wire
    TemplateError: ErrorRow(code=_C.INVALID_ARGUMENT, reason="TEMPLATE"),
    ModelNotFound: ErrorRow(code=_C.NOT_FOUND, reason="MODEL_NOT_FOUND"),
    Unauthenticated: ErrorRow(code=_C.UNAUTHENTICATED, reason="UNAUTHENTICATED"),
    PermissionDenied: ErrorRow(code=_C.PERMISSION_DENIED, reason="PERMISSION_DENIED"),
    TenantLimit: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="TENANT_LIMIT", retry=Retry.LATER),
    DuplicateRequest: ErrorRow(code=_C.ALREADY_EXISTS, reason="DUPLICATE_REQUEST"),
    UnsupportedTokenizer: ErrorRow(code=_C.FAILED_PRECONDITION, reason="TOKENIZER"),
    QueueFull: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry=Retry.LATER),
    TextQueueFull: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry=Retry.LATER),
    WorkerBusy: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry=Retry.LATER),
    FeedFull: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry=Retry.LATER),
    FeedCut: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="SLOW_CONSUMER", retry=Retry.LATER),
    FeedEnded: ErrorRow(code=_C.UNAVAILABLE, reason="DRAINING", retry=Retry.LATER),
    SlowConsumer: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="SLOW_CONSUMER", retry=Retry.LATER),
    DeviceOutOfMemory: ErrorRow(code=_C.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", retry=Retry.LATER),
    NoWorker: ErrorRow(code=_C.UNAVAILABLE, reason="NO_WORKER", retry=Retry.LATER),
    WorkerLost: ErrorRow(code=_C.UNAVAILABLE, reason="WORKER_LOST", retry=Retry.LATER),
    WorkerGone: ErrorRow(code=_C.UNAVAILABLE, reason="WORKER_LOST", retry=Retry.LATER),
    WorkerStalled: ErrorRow(code=_C.UNAVAILABLE, reason="WORKER_STALLED", retry=Retry.LATER),
    Draining: ErrorRow(code=_C.UNAVAILABLE, reason="DRAINING", retry=Retry.LATER),
    DeadlinePassed: ErrorRow(code=_C.DEADLINE_EXCEEDED, reason="DEADLINE"),
    RequestAborted: ErrorRow(code=_C.ABORTED, reason="ABORTED"),
    NumericalFault: ErrorRow(code=_C.INTERNAL, reason="NUMERICAL"),
    Poisoned: ErrorRow(code=_C.INTERNAL, reason="POISONED"),
    EngineFailed: ErrorRow(code=_C.INTERNAL, reason="ENGINE_ERROR"),
    ConstraintFailed: ErrorRow(code=_C.INVALID_ARGUMENT, reason="CONSTRAINT"),
    ScaleRefused: ErrorRow(code=_C.FAILED_PRECONDITION, reason="SCALE_REFUSED"),
    NotOffered: ErrorRow(code=_C.UNIMPLEMENTED, reason="NOT_OFFERED"),
    NotEnabled: ErrorRow(code=_C.FAILED_PRECONDITION, reason="NOT_OFFERED"),
    RequestNotFound: ErrorRow(code=_C.NOT_FOUND, reason="REQUEST_NOT_FOUND"),
    InternalDefect: INTERNAL,
}

# What a worker may name in Finished.error, and the pool in on_lost.
_BY_REASON: dict[str, type[RequestError]] = {
    ERROR_TABLE[kind].reason: kind
    for kind in (
        ExceedsCapacity,
        QueueFull,
        WorkerLost,
        WorkerStalled,
        Draining,
        DeadlinePassed,
        RequestAborted,
        NumericalFault,
        Poisoned,
        EngineFailed,
        DeviceOutOfMemory,
        ConstraintFailed,
    )
}


def row_of(error: Exception) -> ErrorRow:
    """The table's row of the nearest class; INTERNAL for everything else."""
    for kind in type(error).__mro__:
        if kind in ERROR_TABLE:
            return ERROR_TABLE[kind]
    return INTERNAL


def from_reason(reason: str, detail: str) -> RequestError:
    """The error that a worker, or the pool, reported by name. An unlisted name is a defect of ours."""
    kind = _BY_REASON.get(reason, InternalDefect)
    return kind(detail or f"the worker reported {reason}")


def error_of(finished: Finished) -> RequestError | None:
    """The error of an output that a worker ended; None if the output is complete."""
    if finished.reason in (WireFinishReason.STOP, WireFinishReason.LENGTH):
        return None
    known = {WireFinishReason.DEADLINE: "DEADLINE", WireFinishReason.CANCELLED: "ABORTED"}
    reason = known.get(finished.reason, finished.error)
    return from_reason(reason, finished.detail)
