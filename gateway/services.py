"""The services that a gateway's servers offer: makes their servicers from the gateway's parts, and registers them.

Knows nothing of addresses, certificates or connections (`gateway.listeners`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_reflection.v1alpha import reflection

from octavo.gateway.config import Dialects, GatewayConfig
from octavo.gateway.dialects.services import add_dialects
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.embedding import Embedder
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.servicers.admin import AdminServicer
from octavo.gateway.servicers.inference import InferenceServicer
from octavo.gateway.servicers.load import LoadServicer
from octavo.gateway.servicers.model import ModelServicer
from octavo.gateway.watching.watch import LoadWatch
from octavo.v1 import admin_pb2_grpc, inference_pb2_grpc, load_pb2_grpc, model_pb2_grpc

HEALTH = "grpc.health.v1.Health"
INFERENCE = "octavo.v1.InferenceService"
LOAD = "octavo.v1.LoadService"
_PUBLIC = (INFERENCE, "octavo.v1.ModelService", LOAD, HEALTH)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Services:
    """One per gateway. is_ready: whether a request could be answered now. Health is registered by `Readiness`."""

    config: GatewayConfig
    collaborators: Collaborators
    submitter: Submitter
    embedder: Embedder
    control: Control
    load_watch: LoadWatch
    is_ready: Callable[[], bool]

    def inference_servicer(self) -> InferenceServicer:
        """Generate and what belongs to it."""
        return InferenceServicer(
            self.collaborators, submitter=self.submitter, embedder=self.embedder, control=self.control
        )

    def load_servicer(self) -> LoadServicer:
        """WatchLoad."""
        return LoadServicer(self.load_watch, self.control, self.collaborators.tracker)

    def add_public(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Everything that callers may use. Returns the names of the dialects' services."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference_servicer(), server)
        self.add_status(server)
        dialects: tuple[str, ...] = ()
        if self.config.dialects is not Dialects.NONE:
            dialects = add_dialects(
                server,
                self.collaborators,
                submitter=self.submitter,
                embedder=self.embedder,
                control=self.control,
                is_ready=self.is_ready,
            )
        reflection.enable_server_reflection((*_PUBLIC, *dialects, reflection.SERVICE_NAME), server)
        return dialects

    def add_admin(self, server: grpc.aio.Server) -> None:
        """What operators use."""
        servicer = AdminServicer(self.collaborators.pool, self.control, self.config.supervisor_address)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
        load_pb2_grpc.add_LoadServiceServicer_to_server(self.load_servicer(), server)
        reflection.enable_server_reflection(("octavo.v1.AdminService", LOAD, HEALTH, reflection.SERVICE_NAME), server)

    def add_status(self, server: grpc.aio.Server) -> None:
        """Models and load: all that the supervisor asks for besides health."""
        models, pool = self.collaborators.models, self.collaborators.pool
        servicer = ModelServicer(models, pool, max_message_bytes=self.config.limits.max_message_bytes)
        model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
        load_pb2_grpc.add_LoadServiceServicer_to_server(self.load_servicer(), server)
