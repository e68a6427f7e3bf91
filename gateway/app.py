"""One gateway: owns every part and every task; starts, drains, stops them in order.

start: pool (workers may register) -> tasks -> listeners
drain: health NOT_SERVING -> new requests refused -> those in flight finish, or end with DRAINING after the grace
stop:  listeners (GOAWAY) -> tasks -> pool -> metrics
"""

import asyncio
import contextlib

import structlog

from octavo.gateway.auth.authenticator import PrefixSalt
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import GatewayConfig
from octavo.gateway.errors import Draining
from octavo.gateway.listeners import Listeners
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
from octavo.gateway.rpc.addresses import check_plain
from octavo.gateway.rpc.readiness import Readiness
from octavo.gateway.services import Services
from octavo.gateway.text.process_pool import Renderer, RenderPool
from octavo.gateway.text.service import TextService
from octavo.gateway.ticker import Ticker, garbage_watch, measure_loop_lag
from octavo.gateway.watching.watch import LoadWatch
from octavo.gateway.workers.pool import WorkerPool

log = structlog.get_logger(__name__)
_END_S = 2.0  # for ended streams to write their status
_POLL_S = 0.02


class Gateway:
    """Everything that one gateway runs, on one event loop. metrics_port: as bound by `start`, like the
    addresses in `listeners`."""

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
        self._collaborators = self._new_collaborators()
        self.submitter = Submitter(self._collaborators, receipt_timeout_s=config.stop_receipt_timeout_s)
        self.embedder = Embedder(self._collaborators)
        self.reloader = AccessReloader(config.access)
        self.load_watch = LoadWatch(self.tracker, self.pool, self.meters)
        self.control = self._new_control()
        self.readiness = Readiness(self.is_ready, self._ready_models)
        self.services = Services(
            config=config,
            collaborators=self._collaborators,
            submitter=self.submitter,
            embedder=self.embedder,
            control=self.control,
            load_watch=self.load_watch,
            is_ready=self.is_ready,
        )
        self.listeners = Listeners(self.services, reloader=self.reloader, readiness=self.readiness, tracing=tracing)
        self.collector = self._new_collector(tracing)
        self.ticker = Ticker(
            self._collaborators,
            coalescer=self.submitter.coalescer,
            collector=self.collector,
            load_watch=self.load_watch,
            control=self.control,
        )
        self.metrics_port: int | None = None
        self.drained = asyncio.Event()
        self.is_drained_by_operator = False
        self._tasks: list[asyncio.Task[None]] = []
        self._drain_task: asyncio.Task[None] | None = None
        self._metrics: MetricsEndpoint | None = None

    def _new_collaborators(self) -> Collaborators:
        config = self.config
        return Collaborators(
            tracker=self.tracker,
            pool=self.pool,
            models=self.models,
            text=self.text,
            input_processor=InputProcessor(self.models, self.text, self.renderer, config.limits),
            prefix_salt=PrefixSalt(config.access.prefix_salt_secret),
            limits=config.limits,
            meters=self.meters,
        )

    def _new_control(self) -> Control:
        config = self.config
        return Control(
            self.tracker,
            config.peers,
            name=_name_of(config),
            num_generated=self.meters.num_generated,
            begin_drain=self._drain_for_operator,
            describe=self.load_watch.own.describe_to_peer,
            models=config.expected_models,
        )

    def _new_collector(self, tracing: Tracing | None) -> GatewayCollector:
        return GatewayCollector(
            self.meters,
            self.pool.stats,
            reloads=self.reloader.reloads,
            expiries=self.reloader.expiries,
            connections=self.listeners.limiter,
            spans=None if tracing is None else tracing.counts,
        )

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
            address=self.listeners.address,
            admin=self.listeners.admin_address or None,
            metrics_port=self.metrics_port,
            page=self.listeners.page_url or None,
            max_connections=self.listeners.limiter.limits.total,
        )

    def _watch_process(self) -> list["asyncio.Task[None]"]:
        return [
            restarting_task(lambda: measure_loop_lag(self.meters), name="loop lag"),
            restarting_task(garbage_watch(self.tracker, self.pool).run, name="garbage"),
            *self.listeners.tasks(),
        ]

    async def _listen(self) -> None:
        config = self.config
        if config.metrics_address is not None:
            check_plain(config.metrics_address, config.exposure, setting="--metrics-port")
            self._metrics = MetricsEndpoint(config.metrics_address, registry_of(self.collector))
            self.metrics_port = self._metrics.port
        await self.listeners.start()

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
        self.pool.take_leave()
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
        self.pool.take_leave()
        if self.tracker.fail_all(Draining("this gateway shuts down")):
            await self._empty_within(_END_S)
        await self.readiness.close()
        await self.load_watch.close()
        await self.listeners.close_page()
        self.pool.end_feeds()
        await self.listeners.close()
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
