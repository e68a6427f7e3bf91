"""Where a gateway listens: one gRPC server for each address, the live page, and the limits on their connections.

Knows nothing of what the services do (`gateway.services`), nor of how a gateway starts and drains (`gateway.app`).
"""

import asyncio
from typing import TYPE_CHECKING

import grpc

from octavo.gateway.auth.authenticator import Authenticator
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import PageConfig
from octavo.gateway.observability.tracing import Tracing
from octavo.gateway.restarting import restarting_task
from octavo.gateway.rpc.addresses import check_admin, check_plain, join_host_port, num_addresses_of, split_host_port
from octavo.gateway.rpc.connections import (
    ConnectionLimiter,
    OpenCalls,
    UnreadCalls,
    connection_limits,
    descriptor_limit,
)
from octavo.gateway.rpc.interceptor import StatusInterceptor
from octavo.gateway.rpc.readiness import Readiness
from octavo.gateway.rpc.server import Callers, bind, new_server
from octavo.gateway.services import INFERENCE, LOAD, Services
from octavo.v1 import inference_pb2, load_pb2

if TYPE_CHECKING:
    from octavo.gateway.page.server import Page

_STOP_S = 0.5  # for calls that are still open


class Listeners:
    """One per gateway, on its event loop.

    address, model_addresses, admin_address, page_url: as bound by `start`; empty if not served.
    limiter: of the connections of all callers.
    interceptor: of calls that name their model themselves, the page's among them.
    """

    def __init__(
        self,
        services: Services,
        *,
        reloader: AccessReloader,
        readiness: Readiness,
        tracing: Tracing | None,
    ) -> None:
        self.config = services.config
        self.address = ""
        self.model_addresses: dict[str, str] = {}
        self.admin_address = ""
        self.page_url = ""
        limits = connection_limits(self.config.connection, descriptor_limit())
        self.limiter = ConnectionLimiter(limits, services.collaborators.tracker.connections)
        self._services = services
        self._reloader = reloader
        self._readiness = readiness
        self._tracing = tracing
        self._unread_calls = UnreadCalls()
        self._servers: list[grpc.aio.Server] = []
        self._page: Page | None = None
        self.interceptor = self._new_interceptor(reloader.authenticator, tracing=tracing)

    def tasks(self) -> list["asyncio.Task[None]"]:
        """Start what watches the connections; the caller owns the tasks."""
        return [
            restarting_task(self._unread_calls.run, name="unread calls"),
            restarting_task(self.limiter.run, name="connections"),
        ]

    async def start(self) -> None:
        """Bind every configured address and serve there. Raises AddressError, AccessFileError, BindError."""
        config = self.config
        self.address = self._listen_at(config.listen_address, setting="--port")
        for name, address in config.model_addresses:
            self.model_addresses[name] = self._listen_at(address, setting="--model-port", model=name)
        if config.front_address is not None:
            self._listen_at(config.front_address, setting="the front's socket")
        if config.admin_address is not None:
            self._listen_for_operators(config.admin_address)
        if config.status_address is not None:
            self._listen_for_supervisor(config.status_address)
        for each in self._servers:
            await each.start()
        if config.page is not None:
            self._start_page(config.page)

    async def close_page(self) -> None:
        """Idempotent."""
        if self._page is not None:
            await self._page.close()
            self._page = None

    async def close(self) -> None:
        """Stop every server; calls that are still open get a moment to end. Idempotent."""
        await asyncio.gather(*(server.stop(_STOP_S) for server in self._servers))
        self._servers.clear()

    def _listen_at(self, address: str, *, setting: str, model: str = "") -> str:
        """Serve callers at one more address; returns it as bound. model: for requests that name none."""
        config = self.config
        is_front = address == config.front_address
        num_listeners = num_addresses_of(config.listen_address) * (1 + len(config.model_addresses))
        interceptor = self._new_interceptor(
            self._reloader.authenticator, model=model, tracing=self._tracing, open_calls=self._unread_calls.calls
        )
        server = new_server(
            config,
            interceptor,
            max_connections=max(1, self.limiter.limits.total // num_listeners),
            callers=Callers.ALL if is_front else Callers.EACH,
        )
        self._servers.append(server)
        dialects = self._services.add_public(server)
        self._readiness.attach(server)
        for service in dialects:
            self._readiness.add(service)
        # The run directory keeps other users away from the front's socket, which has no name for a certificate.
        tls = None if is_front else self._reloader.listener()
        bound = bind(server, config, address, tls, setting=setting)
        if not bound.startswith("unix:"):
            self.limiter.watch(split_host_port(bound)[1])
        return bound

    def _listen_for_operators(self, address: str) -> None:
        check_admin(address, self.config.access, self.config.exposure, setting="--admin-port")
        server = new_server(self.config, self.interceptor)
        self._servers.append(server)
        self._services.add_admin(server)
        self._readiness.attach(server)
        self.admin_address = bind(server, self.config, address, self._reloader.listener(), setting="--admin-port")

    def _listen_for_supervisor(self, address: str) -> None:
        """Health, models and load, without keys, on a socket that only this user can open."""
        server = new_server(self.config, self._new_interceptor(Authenticator()))
        self._servers.append(server)
        self._services.add_status(server)
        self._readiness.attach(server)
        bind(server, self.config, address, None, setting="the status socket")

    def _start_page(self, config: PageConfig) -> None:
        # Imported only if there is a page: its libraries would cost every other gateway memory and time.
        from octavo.gateway.page.calls import Method
        from octavo.gateway.page.server import Page

        check_plain(join_host_port(config.host, config.port or 0), self.config.exposure, setting="--page-host")
        watch, generate = self._services.load_servicer().WatchLoad, self._services.inference_servicer().Generate
        methods = (
            Method(f"/{LOAD}/WatchLoad", load_pb2.WatchLoadRequest, watch, self.interceptor),
            Method(f"/{INFERENCE}/Generate", inference_pb2.GenerateRequest, generate, self.interceptor),
        )
        self._page = Page(config, methods)
        self._page.start()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        self.page_url = f"http://{join_host_port(host, self._page.port)}/"

    def _new_interceptor(
        self,
        authenticator: Authenticator,
        *,
        model: str = "",
        tracing: Tracing | None = None,
        open_calls: OpenCalls | None = None,
    ) -> StatusInterceptor:
        limits = self.config.limits
        return StatusInterceptor(
            self._services.collaborators.meters,
            pushback_ms=limits.pushback_ms,
            authenticator=authenticator,
            max_metadata_bytes=limits.max_metadata_bytes,
            message_timeout_s=self.config.connection.message_timeout_s,
            model=model,
            tracing=tracing,
            open_calls=open_calls,
            on_call=self._services.submitter.coalescer.yield_to_call,
        )
