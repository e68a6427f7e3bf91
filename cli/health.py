"""`octavo health`: one question to grpc.health.v1."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.addresses import join_address
from cli.settings import ClientSettings

TIMEOUT_S = 3.0


def health(settings: ClientSettings, *, service: str) -> int:
    """Print the state; 0 where it is SERVING. service: a gRPC service, or "" for the process as such."""
    state = ask_health(join_address(settings.host, settings.port), service)
    print(state)  # noqa: T201
    return 0 if state == "SERVING" else 1


def ask_health(address: str, service: str) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN, or UNREACHABLE."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return "UNREACHABLE"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
