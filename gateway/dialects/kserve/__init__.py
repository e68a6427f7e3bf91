"""`inference.GRPCInferenceService`: the Open Inference Protocol (KServe v2), as Triton's text models speak it."""

from collections.abc import Callable

import grpc

from octavo.gateway.dialects.kserve.servicer import KserveServicer
from octavo.gateway.requests.tracker import Desk
from octavo.kserve import inference_pb2_grpc

SERVICE = "inference.GRPCInferenceService"


def attach(server: grpc.aio.Server, desk: Desk, is_ready: Callable[[], bool]) -> None:
    """Serve it there."""
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(KserveServicer(desk, is_ready), server)
