"""Adds all dialects to a gRPC server."""

from collections.abc import Callable

import grpc

from octavo.gateway.dialects import kserve, openengine, vllm, vllm_native
from octavo.gateway.dialects.kserve.servicer import KserveServicer
from octavo.gateway.dialects.openengine.servicer import EndedRequests, OpenEngineControl, OpenEngineInference
from octavo.gateway.dialects.vllm_native.servicer import VllmControl, VllmInference
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.embedding import Embedder
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.kserve import inference_pb2_grpc as kserve_grpc
from octavo.openengine import openengine_pb2_grpc as openengine_grpc
from octavo.vllm import vllm_pb2_grpc as vllm_grpc


def add_dialects(
    server: grpc.aio.Server,
    collaborators: Collaborators,
    *,
    submitter: Submitter,
    embedder: Embedder,
    control: Control,
    is_ready: Callable[[], bool],
) -> tuple[str, ...]:
    """Add the dialects; VllmEngine only if its stubs are installed. Returns the names of the services. is_ready:
    whether a request could be answered now."""
    kserve_servicer = KserveServicer(collaborators, submitter=submitter, is_ready=is_ready)
    kserve_grpc.add_GRPCInferenceServiceServicer_to_server(kserve_servicer, server)
    ended = EndedRequests()
    openengine_inference = OpenEngineInference(collaborators, submitter=submitter, ended=ended)
    openengine_grpc.add_InferenceServicer_to_server(openengine_inference, server)
    openengine_control = OpenEngineControl(collaborators, submitter=submitter, control=control, ended=ended)
    openengine_grpc.add_ControlServicer_to_server(openengine_control, server)
    vllm_grpc.add_InferenceServicer_to_server(VllmInference(collaborators, submitter=submitter), server)
    vllm_grpc.add_ControlServicer_to_server(VllmControl(collaborators, control=control), server)
    services = (kserve.SERVICE, *openengine.SERVICES, *vllm_native.SERVICES)
    if not vllm.is_installed():
        return services
    from smg_grpc_proto import vllm_engine_pb2_grpc

    from octavo.gateway.dialects.vllm.servicer import VllmServicer

    servicer = VllmServicer(collaborators, submitter=submitter, embedder=embedder, control=control, is_ready=is_ready)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    return (*services, vllm.SERVICE)
