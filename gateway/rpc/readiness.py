"""grpc.health.v1: "" says that the process runs, a service's name that it can be used now with all expected models,
`octavo.v1.InferenceService/MODEL` that this one can be asked."""

import asyncio
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from octavo.gateway.rpc.connections import Context

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READY_SERVICES = ("octavo.v1.InferenceService", "octavo.v1.ModelService")


def service_of_model(name: str) -> str:
    """The service name under which health checks ask for one model."""
    return f"octavo.v1.InferenceService/{name}"


class _Servicer(health_aio.HealthServicer):  # type: ignore[misc]
    """Adds List, which the library's lacks, and refuses unknown names with a message."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The status of one service."""
        if request.service not in self._server_status:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: no service of that name is known here")
        return health_pb2.HealthCheckResponse(status=self._server_status[request.service])

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """The status of every service, by name."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


class Readiness:
    """Owns the health servicer and the task that updates it. is_ready, models: asked after every `changed`; models
    gives, for every model that is, was or should be served, whether it is ready."""

    def __init__(self, is_ready: Callable[[], bool], models: Callable[[], Mapping[str, bool]]) -> None:
        self._servicer = _Servicer()
        self._is_ready = is_ready
        self._models = models
        self._services = list(READY_SERVICES)
        self._changed = asyncio.Event()
        self._changed.set()

    def attach(self, server: grpc.aio.Server) -> None:
        """Add the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def add(self, service: str) -> None:
        """Register another service that is ready whenever the others are."""
        if service not in self._services:
            self._services.append(service)
            self.changed()

    def changed(self) -> None:
        """Publish again soon."""
        self._changed.set()

    async def publish(self) -> None:
        """Set the statuses as they are now."""
        is_ready = self._is_ready()
        states = dict.fromkeys(self._services, is_ready)
        states |= {service_of_model(name): is_it for name, is_it in self._models().items()}
        for service, is_it in states.items():
            await self._servicer.set(service, _SERVING if is_it else _NOT_SERVING)

    async def run(self) -> None:
        """Publish after every change, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.publish()

    async def close(self) -> None:
        """Set everything to NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()
