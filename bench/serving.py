"""Waits until services that a bench starts on this machine are ready.

Must not know: what they serve, what is measured.
"""

import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def wait_until_serving(
    target: str, service: str, *, timeout_s: float, is_alive: Callable[[], bool] = lambda: True
) -> None:
    """Wait until the health check succeeds. Raises TimeoutError if it does not in time, or if the server has ended."""
    deadline_s = time.monotonic() + timeout_s
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s and is_alive():
            try:
                if stub.Check(request, timeout=1).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.1)
    raise TimeoutError(f"{service} at {target} is not ready")
