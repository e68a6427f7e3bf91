"""A scripted server, and the ways in which it fails."""

from collections.abc import Iterator

import grpc
import pytest

from tests.support.gateway.scripted_server import Script, running, violation_trailers

Failure = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


@pytest.fixture
def script() -> Script:
    """The script of this test's server."""
    return Script()


@pytest.fixture
def target(script: Script) -> Iterator[str]:
    """The address of a running server."""
    with running(script) as address:
        yield address


@pytest.fixture
def refusal() -> Failure:
    """A refused field."""
    trailers = violation_trailers("sampling.top_p", "must be in (0, 1]")
    return (grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: must be in (0, 1]", trailers)


@pytest.fixture
def overload() -> Failure:
    """A full queue that asks for a short wait."""
    trailers = (("x-error-reason", "QUEUE_FULL"), ("x-tokens-delivered", "0"), ("grpc-retry-pushback-ms", "20"))
    return (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers)


@pytest.fixture
def loss() -> Failure:
    """A worker that was lost after tokens had been sent."""
    trailers = (("x-error-reason", "WORKER_LOST"), ("x-request-id", "r"), ("x-tokens-delivered", "3"))
    return (grpc.StatusCode.UNAVAILABLE, "the worker is gone", trailers)
