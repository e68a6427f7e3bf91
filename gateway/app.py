"""One gateway: owns every part and every task; starts, drains, stops them in order.

start: pool (workers may register) -> tasks -> listeners
drain: health NOT_SERVING -> new requests refused -> those in flight finish, or end with DRAINING after the grace
stop:  listeners (GOAWAY) -> tasks -> pool -> metrics
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_reflection.v1alpha import reflection

from octavo.gateway.auth.authenticator import Authenticator, PrefixSalt
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import Dialects, GatewayConfig, PageConfig
from octavo.gateway.dialects.services import add_dialects
from octavo.gateway.errors import Draining
from octavo.gateway.models import ServedModels
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector, MetricsEndpoint, registry_of
from octavo.gateway.observability.tracing import Tracing
from octavo.gateway.peers.control import Control
from octavo.gateway.peers.peer_link import name_of
from octavo.gateway.requests.embedding import Embedder
from octavo.gateway.requests.input_processor import InputProcessor
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.requests.tracker import RequestTracker
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
from octavo.gateway.servicers.admin import AdminServicer
from octavo.gateway.servicers.inference import InferenceServicer
from octavo.gateway.servicers.load import LoadServicer
from octavo.gateway.servicers.model import ModelServicer
from octavo.gateway.text.process_pool import Renderer, RenderPool
from octavo.gateway.text.service import TextService
from octavo.gateway.ticker import Ticker, garbage_watch, measure_loop_lag
from octavo.gateway.watching.watch import LoadWatch
from octavo.gateway.workers.pool import WorkerPool
from octavo.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc, load_pb2, load_pb2_grpc, model_pb2_grpc

if TYPE_CHECKING:
    from octavo.gateway.page.server import Page

log = structlog.get_logger(__name__)
_HEALTH = "grpc.health.v1.Health"
_LOAD = "octavo.v1.LoadService"
_PUBLIC = ("octavo.v1.InferenceService", "octavo.v1.ModelService", _LOAD, _HEALTH)
_END_S = 2.0  # for ended streams to write their status
_POLL_S = 0.02


class Gateway:
    """Everything that one gateway runs, on one event loop. The addresses, metrics_port, page_url: as bound by
    `start`."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        pool: WorkerPool | None = None,
        renderer: Renderer | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """pool, renderer: made from the configuration unless a test passes its own. tracing: closed by the caller."""
        self.config = config
        self._tracing = tracing
        self.meters = GatewayMeters()
        self.models = ServedModels(config.expected_models)
        self.pool = pool or WorkerPool(config.workers, on_model=self.models.on_model)
        self.text = TextService(
            num_threads=config.limits.tokenizer_threads,
            max_waiting=config.limits.max_tokenizing,
            max_bytes=config.limits.max_tokenizing_bytes,
        )
        self.renderer: Renderer = renderer or RenderPool(config.limits.render)
        self.tracker = RequestTracker(pool=self.pool, limits=config.limits, meters=self.meters)
        self._collaborators = Collaborators(
            tracker=self.tracker,
            pool=self.pool,
            models=self.models,
            text=self.text,
            input_processor=InputProcessor(self.models, self.text, self.renderer, config.limits),
            prefix_salt=PrefixSalt(config.access.prefix_salt_secret),
            limits=config.limits,
            meters=self.meters,
        )
        self.submitter = Submitter(self._collaborators, receipt_timeout_s=config.stop_receipt_timeout_s)
        self.embedder = Embedder(self._collaborators)
        self.reloader = AccessReloader(config.access)
        limits = connection_limits(config.connection, descriptor_limit())
        self._limiter = ConnectionLimiter(limits, self.tracker.connections)
        self.collector = GatewayCollector(
            self.meters,
            self.pool.stats,
            reloads=self.reloader.reloads,
            expiries=self.reloader.expiries,
            connections=self._limiter,
            spans=None if tracing is None else tracing.counts,
        )
        self.load_watch = LoadWatch(self.tracker, self.pool, self.meters)
        self.control = Control(
            self.tracker,
            config.peers,
            name=_name_of(config),
            num_generated=self.meters.num_generated,
            begin_drain=self._drain_for_operator,
            describe=self.load_watch.own.describe_to_peer,
            models=config.expected_models,
        )
        self.ticker = Ticker(
            self._collaborators,
            coalescer=self.submitter.coalescer,
            collector=self.collector,
            load_watch=self.load_watch,
            control=self.control,
        )
        self.readiness = Readiness(self.is_ready, self._ready_models)
        self.listen_address = ""
        self.model_addresses: dict[str, str] = {}
        self.admin_address = ""
        self.page_url = ""
        self._page: Page | None = None
        self.metrics_port: int | None = None
        self.drained = asyncio.Event()
        self.is_drained_by_operator = False
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._drain_task: asyncio.Task[None] | None = None
        self._metrics: MetricsEndpoint | None = None
        self._interceptor = self._new_interceptor(self.reloader.authenticator, tracing=tracing)
        self._unread_calls = UnreadCalls()

    def is_ready(self) -> bool:
        """Whether requests for every expected model (or, if none is expected, for any) could be answered now."""
        return not self.tracker.is_draining and self.models.are_ready(self.pool.cards())

    def _ready_models(self) -> dict[str, bool]:
        cards, is_open = self.pool.cards(), not self.tracker.is_draining
        return {name: is_open and self.models.is_ready(name, cards) for name in self.models.names(cards)}

    async def start(self) -> None:
        """Start everything. If that fails, everything is closed again. Raises AddressError, AccessFileError, OSError
        (BindError included), and whatever the pool's and the peers' start raises."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self.reloader.load()
        self.pool.on_change(self.readiness.changed)
        self.models.on_change(self.readiness.changed)
        self.pool.on_change(self.load_watch.changed)
        await self.pool.start()
        await self.control.start()
        self._tasks = [
            restarting_task(self.readiness.run, name="readiness"),
            restarting_task(self.reloader.run, name="reloader"),
            restarting_task(self.ticker.refresh, name="refresh"),
            restarting_task(self.ticker.report, name="report"),
            *self._watch_process(),
        ]
        await self._listen()
        await self.renderer.start()
        log.info(
            "listening",
            address=self.listen_address,
            admin=self.admin_address or None,
            metrics_port=self.metrics_port,
            page=self.page_url or None,
            max_connections=self._limiter.limits.total,
        )

    def _watch_process(self) -> list["asyncio.Task[None]"]:
        return [
            restarting_task(lambda: measure_loop_lag(self.meters), name="loop lag"),
            restarting_task(garbage_watch(self.tracker, self.pool).run, name="garbage"),
            restarting_task(self._unread_calls.run, name="unread calls"),
            restarting_task(self._limiter.run, name="connections"),
        ]

    async def _listen(self) -> None:
        config = self.config
        if config.metrics_address is not None:
            check_plain(config.metrics_address, config.exposure, setting="--metrics-port")
            self._metrics = MetricsEndpoint(config.metrics_address, registry_of(self.collector))
            self.metrics_port = self._metrics.port
        self.listen_address = self._listen_at(config.listen_address, setting="--port")
        for name, address in config.model_addresses:
            self.model_addresses[name] = self._listen_at(address, setting="--model-port", model=name)
        if config.front_address is not None:
            self._listen_at(config.front_address, setting="the front's socket")
        if config.admin_address is not None:
            self._servers.append(self._admin_server(config.admin_address))
        if config.status_address is not None:
            self._servers.append(self._status_server(config.status_address))
        for each in self._servers:
            await each.start()
        if config.page is not None:
            self._start_page(config.page)

    def _start_page(self, config: PageConfig) -> None:
        # Imported only if there is a page: its libraries would cost every other gateway memory and time.
        from octavo.gateway.page.calls import Method
        from octavo.gateway.page.server import Page

        check_plain(join_host_port(config.host, config.port or 0), self.config.exposure, setting="--page-host")
        watch, generate = self._load_servicer().WatchLoad, self._inference_servicer().Generate
        methods = (
            Method(f"/{_LOAD}/WatchLoad", load_pb2.WatchLoadRequest, watch, self._interceptor),
            Method(f"/{_PUBLIC[0]}/Generate", inference_pb2.GenerateRequest, generate, self._interceptor),
        )
        self._page = Page(config, methods)
        self._page.start()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        self.page_url = f"http://{join_host_port(host, self._page.port)}/"

    def _listen_at(self, address: str, *, setting: str, model: str = "") -> str:
        """Serve everything that callers may use at one more address; returns it as bound. model: for requests that name
        none."""
        config = self.config
        num_listeners = num_addresses_of(config.listen_address) * (1 + len(config.model_addresses))
        max_connections = max(1, self._limiter.limits.total // num_listeners)
        interceptor = self._new_interceptor(
            self.reloader.authenticator, model=model, tracing=self._tracing, open_calls=self._unread_calls.calls
        )
        callers = Callers.ALL if address == config.front_address else Callers.EACH
        server = new_server(config, interceptor, max_connections=max_connections, callers=callers)
        self._servers.append(server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference_servicer(), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self._model_servicer(), server)
        load_pb2_grpc.add_LoadServiceServicer_to_server(self._load_servicer(), server)
        self.readiness.attach(server)
        dialects = self._attach_dialects(server)
        reflection.enable_server_reflection((*_PUBLIC, *dialects, reflection.SERVICE_NAME), server)
        # The run directory keeps other users away from the front's socket, which has no name for a certificate to prove.
        tls = None if address == config.front_address else self.reloader.listener()
        bound = bind(server, config, address, tls, setting=setting)
        if not bound.startswith("unix:"):
            self._limiter.watch(split_host_port(bound)[1])
        return bound

    def _inference_servicer(self) -> InferenceServicer:
        return InferenceServicer(
            self._collaborators, submitter=self.submitter, embedder=self.embedder, control=self.control
        )

    def _model_servicer(self) -> ModelServicer:
        return ModelServicer(self.models, self.pool, max_message_bytes=self.config.limits.max_message_bytes)

    def _admin_servicer(self) -> AdminServicer:
        return AdminServicer(self.pool, self.control, self.config.supervisor_address)

    def _load_servicer(self) -> LoadServicer:
        return LoadServicer(self.load_watch, self.control, self.tracker)

    def _attach_dialects(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Returns the names of the services that were added."""
        if self.config.dialects is Dialects.NONE:
            return ()
        services = add_dialects(
            server,
            self._collaborators,
            submitter=self.submitter,
            embedder=self.embedder,
            control=self.control,
            is_ready=self.is_ready,
        )
        for service in services:
            self.readiness.add(service)
        return services

    def _admin_server(self, address: str) -> grpc.aio.Server:
        check_admin(address, self.config.access, self.config.exposure, setting="--admin-port")
        server = new_server(self.config, self._interceptor)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin_servicer(), server)
        load_pb2_grpc.add_LoadServiceServicer_to_server(self._load_servicer(), server)
        self.readiness.attach(server)
        reflection.enable_server_reflection(("octavo.v1.AdminService", _LOAD, _HEALTH, reflection.SERVICE_NAME), server)
        self.admin_address = bind(server, self.config, address, self.reloader.listener(), setting="--admin-port")
        return server

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
            self.meters,
            pushback_ms=limits.pushback_ms,
            authenticator=authenticator,
            max_metadata_bytes=limits.max_metadata_bytes,
            message_timeout_s=self.config.connection.message_timeout_s,
            model=model,
            tracing=tracing,
            open_calls=open_calls,
            on_call=self.submitter.coalescer.yield_to_call,
        )

    def _status_server(self, address: str) -> grpc.aio.Server:
        """Health, models and load for the supervisor, on a socket that only this user can open."""
        server = new_server(self.config, self._new_interceptor(Authenticator()))
        model_pb2_grpc.add_ModelServiceServicer_to_server(self._model_servicer(), server)
        load_pb2_grpc.add_LoadServiceServicer_to_server(self._load_servicer(), server)
        self.readiness.attach(server)
        bind(server, self.config, address, None, setting="the status socket")
        return server

    def _drain_for_operator(self, grace_s: float | None) -> None:
        self.is_drained_by_operator = True
        self.begin_drain(grace_s)

    def begin_drain(self, grace_s: float | None = None) -> None:
        """Start draining; `drained` is set once nothing is in flight. A second call has no effect."""
        if self._drain_task is None:
            grace_s = self.config.drain_grace_s if grace_s is None else grace_s
            self._drain_task = asyncio.create_task(self._drain(grace_s), name="drain")
            self._drain_task.add_done_callback(_log_defect)

    async def _drain(self, grace_s: float) -> None:
        log.info("draining", in_flight=self.tracker.admission.counts().num_entered, grace_s=grace_s)
        self.tracker.is_draining = True  # readiness is false from here on
        self.load_watch.drain()
        await self.readiness.publish()
        try:
            if not await self._empty_within(grace_s):
                ended = self.tracker.fail_all(Draining("this gateway shuts down and its grace is over"))
                log.warning("ended_by_drain", requests=ended)
                await self._empty_within(_END_S)
        finally:
            self.drained.set()

    async def _empty_within(self, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while self.tracker.admission.counts().num_entered:
            if loop.time() >= end_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def stop(self) -> None:
        """Stop at once; streams that are still open end with DRAINING. Idempotent."""
        self.tracker.is_draining = True
        if self.tracker.fail_all(Draining("this gateway shuts down")):
            await self._empty_within(_END_S)
        await self.readiness.close()
        await self.load_watch.close()
        if self._page is not None:
            await self._page.close()
            self._page = None
        self.pool.end_feeds()
        await asyncio.gather(*(server.stop(0.5) for server in self._servers))
        self._servers.clear()
        await self._cancel_tasks()
        await self.control.close()
        await self.pool.close()
        await self.models.close()
        self.text.close()
        await self._collaborators.input_processor.close()
        await self.renderer.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
            self._metrics = None
        self.drained.set()

    async def _cancel_tasks(self) -> None:
        tasks = [*self._tasks, *([self._drain_task] if self._drain_task else [])]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()


def _name_of(config: GatewayConfig) -> str:
    """The gateway's name for people and peers: the address at which they, or else its workers, reach it."""
    endpoints = (config.peers.endpoint, *config.workers.endpoints)
    return next((name_of(each) for each in endpoints if each), "gateway")


def _log_defect(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("defect", task=task.get_name(), exc_info=error)
