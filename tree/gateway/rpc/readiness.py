"""grpc.health.v1: "" says that the process lives, a service's name that it can be used now."""

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READY_SERVICES = ("octavo.v1.InferenceService", "octavo.v1.ModelService")


class Readiness:
    """Owns the health servicer and the task that keeps it true. is_ready: asked on every `changed`."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._servicer = health_aio.HealthServicer()
        self._is_ready = is_ready
        self._services = list(READY_SERVICES)
        self._changed = asyncio.Event()
        self._changed.set()

    def attach(self, server: grpc.aio.Server) -> None:
        """Serve it there."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def add(self, service: str) -> None:
        """One more service that is ready when the others are."""
        self._services.append(service)
        self.changed()

    def changed(self) -> None:
        """Ask again, soon."""
        self._changed.set()

    async def publish(self) -> None:
        """Tell what is true now."""
        status = _SERVING if self._is_ready() else _NOT_SERVING
        for service in self._services:
            await self._servicer.set(service, status)

    async def run(self) -> None:
        """Publish after every change, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.publish()

    async def close(self) -> None:
        """Everything NOT_SERVING for good; watchers are told."""
        await self._servicer.enter_graceful_shutdown()
