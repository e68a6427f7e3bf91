"""`octavo health`: one question to grpc.health.v1 of a gateway, or to /ready of a worker."""

import http.client
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.client_options import open_channel

from cli.addresses import join_address, reachable
from cli.connect import channel_options_of, credentials_of, metadata_of
from cli.settings import HealthSettings

TIMEOUT_S = 3.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a worker is never behind a proxy
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def gateway_health(settings: HealthSettings, *, service: str) -> int:
    """Print the state; 0 where it is SERVING. service: a gRPC service, or "" for the process as such."""
    state = _ask(settings, service)
    print(state)  # noqa: T201
    return 0 if state == "SERVING" else 1


def worker_health(settings: HealthSettings) -> int:
    """Print what the worker says of itself, or UNREACHABLE, as while it loads; 0 where it is ready."""
    address = join_address(reachable(settings.metrics_host), settings.worker_metrics_port)
    try:
        with _OPENER.open(f"http://{address}/ready", timeout=TIMEOUT_S) as answer:
            print(answer.read().decode().strip())  # noqa: T201
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace").strip())  # noqa: T201
    except (OSError, http.client.HTTPException):
        print("UNREACHABLE")  # noqa: T201
    return 1


def _ask(settings: HealthSettings, service: str) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN, REFUSED (no key, or not the right one) or UNREACHABLE."""
    options, metadata = channel_options_of(settings), metadata_of(settings)
    with open_channel(join_address(settings.host, settings.port), credentials_of(settings), options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = stub.Check(request, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            return "REFUSED" if error.code() in _REFUSALS else "UNREACHABLE"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
