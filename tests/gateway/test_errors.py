"""The table of errors: complete, and what callers rely on."""

import grpc
import pytest

from octavo.gateway import errors
from octavo.gateway.errors import ERROR_TABLE, INTERNAL, RequestError, Retry, from_reason, row_of
from octavo.gateway.text import errors as text_errors
from octavo.gateway.workers import errors as pool_errors
from octavo.v1 import common_pb2


def subclasses(module: object, base: type) -> set[type]:
    return {k for k in vars(module).values() if isinstance(k, type) and issubclass(k, base) and k is not base}


def test_every_class_of_ours_has_a_row() -> None:
    ours = (
        subclasses(errors, RequestError)
        | subclasses(text_errors, text_errors.TextError)
        | subclasses(pool_errors, pool_errors.PoolError)
    )
    assert ours <= set(ERROR_TABLE)


def test_every_reason_is_one_of_the_contract_and_every_one_is_used() -> None:
    names = common_pb2.ErrorReason.DESCRIPTOR.values_by_name
    contract = {name.removeprefix("ERROR_REASON_") for name in names} - {"UNSPECIFIED"}
    assert {row.reason for row in ERROR_TABLE.values()} == contract


def test_no_row_is_unknown_and_exactly_the_retryable_codes_push_back() -> None:
    retryable = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    for kind, row in ERROR_TABLE.items():
        assert row.code is not grpc.StatusCode.UNKNOWN
        assert (row.retry is Retry.LATER) == (row.code in retryable), kind


def test_strangers_are_internal_and_subclasses_find_their_parents_row() -> None:
    class Fuller(errors.QueueFull):
        pass

    assert row_of(ZeroDivisionError()) is INTERNAL
    assert row_of(Fuller("x")).reason == "QUEUE_FULL"


@pytest.mark.parametrize("reason", ["MODEL_NOT_FOUND", "INVALID_FIELD", "", "nonsense", "INTERNAL"])
def test_a_worker_cannot_make_up_other_peoples_errors(reason: str) -> None:
    assert row_of(from_reason(reason, "x")) is INTERNAL
