"""`octavo health`: one question to grpc.health.v1."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.client_options import open_channel

from cli.addresses import join_address
from cli.connect import channel_options_of, credentials_of, metadata_of
from cli.settings import ClientSettings

TIMEOUT_S = 3.0
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def health(settings: ClientSettings, *, service: str) -> int:
    """Print the state; 0 where it is SERVING. service: a gRPC service, or "" for the process as such."""
    state = _ask(settings, service)
    print(state)  # noqa: T201
    return 0 if state == "SERVING" else 1


def _ask(settings: ClientSettings, service: str) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN, REFUSED (no key, or not the right one) or UNREACHABLE."""
    options, metadata = channel_options_of(settings), metadata_of(settings)
    with open_channel(join_address(settings.host, settings.port), credentials_of(settings), options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = stub.Check(request, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return "REFUSED" if error.code() in _REFUSALS else "UNREACHABLE"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
