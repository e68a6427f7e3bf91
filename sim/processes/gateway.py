"""A gateway, one process after another: the real `gateway.app.Gateway` on simulated edges.

Replaced: listeners and sockets, the threads that tokenize (their work is done at once, and takes virtual time), the
watch over processes. Everything between is the product's.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from octavo.gateway.app import Gateway
from octavo.gateway.config import AccessConfig, Dialects, GatewayConfig, RequestLimits
from octavo.gateway.streams.stream import OutputStream
from octavo.gateway.text.process_pool import InProcessRenderer
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.decisions import Peer
from octavo.gateway.workers.link import OnFrame, PeerFull, PeerGone
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import OutputSink, WorkerView
from octavo.v1 import inference_pb2 as pb
from octavo.wire.codec import encode
from octavo.wire.messages import Message, Run
from sim.edges.fault_points import fault_point
from sim.edges.loop import SimLoop
from sim.edges.network import Hub, Listener
from sim.edges.rpc import SimCall
from sim.journal import Journal
from sim.processes.identities import WatchedQuotas, access_list_of, metadata_of
from sim.processes.watches import LOOK_EVERY_S, GatewayWatch
from sim.scenario import SimConfig

DEATH_NOTICE_S = 0.002


class SimRouterLink:
    """Replaces `gateway.workers.link.RouterLink`."""

    def __init__(self, hub: Hub, high_water: int, on_frame: OnFrame, stats: PoolStats, watch: GatewayWatch) -> None:
        self.bound: tuple[str, ...] = ()
        self.listener: Listener | None = None
        self._hub, self._high_water, self._on_frame, self._stats = hub, high_water, on_frame, stats
        self._watch = watch

    def open(self) -> None:
        self.listener = Listener(self._hub, self._take)

    def _take(self, routing_id: bytes, frame: bytes) -> None:
        self._stats.received_messages += 1
        self._stats.received_bytes += len(frame)
        self._watch.heard(frame)
        self._on_frame(Peer(0, routing_id), frame)

    def send(self, peer: Peer, message: Message) -> None:
        frame = encode(message)
        found = self.listener.connections.get(peer.routing_id) if self.listener else None
        if found is None:
            raise PeerGone
        if len(found[0].down) >= self._high_water:
            self._stats.busy_sends += 1
            self._watch.full()
            raise PeerFull
        found[0].down.send(frame)
        self._watch.sent(peer, message)
        self._stats.sent_messages += 1
        self._stats.sent_bytes += len(frame)

    def drain_all(self) -> None:
        """Nothing to do: messages are taken as they arrive."""

    def restore(self) -> int:
        return 0

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None


class Processes:
    """Which simulated processes are alive, and who is notified when one ends."""

    def __init__(self, loop: SimLoop, *, is_watched: bool) -> None:
        self.loop = loop
        self.is_watched = is_watched
        self.alive: set[int] = set()
        self.watchers: dict[SimWatch, None] = {}

    def ended(self, pid: int) -> None:
        self.alive.discard(pid)
        for watcher in tuple(self.watchers):
            self.loop.call_later(DEATH_NOTICE_S, watcher.look_for, pid)


class SimWatch:
    """Replaces `gateway.workers.watch.ProcessWatch`."""

    def __init__(self, processes: Processes, on_exit: Callable[[int], None]) -> None:
        self._processes, self._on_exit = processes, on_exit
        self._pids: dict[int, int] = {}
        processes.watchers[self] = None

    def add(self, key: int, pid: int, namespace: str) -> bool:
        if not self._processes.is_watched or pid not in self._processes.alive:
            return False
        self._pids[key] = pid
        return True

    def drop(self, key: int) -> None:
        self._pids.pop(key, None)

    def check(self, key: int) -> None:
        pid = self._pids.get(key)
        if pid is not None:
            self.look_for(pid)

    def look_for(self, pid: int) -> None:
        if pid not in self._processes.alive:
            for key in [key for key, watched in self._pids.items() if watched == pid]:
                self.drop(key)
                self._on_exit(key)

    def close(self) -> None:
        self._pids.clear()
        self._processes.watchers.pop(self, None)


class SimPool(WorkerPool):
    """The real pool, with a fault point for defects of our own."""

    def submit(self, worker: WorkerView, run: Run, sinks: Sequence[OutputSink]) -> None:
        fault_point("pool.opening")
        super().submit(worker, run, sinks)


class SimExecutor:
    """Replaces the text threads."""

    def __init__(self, loop: SimLoop, rng: Any) -> None:
        self._loop, self._rng = loop, rng

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._loop.call_later(self._rng.uniform(0.0001, 0.003), self._run, future, work)
        return future

    def _run(self, future: "Future[Any]", work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing to stop."""


class _CallContext:
    """The gateway's end of a call: the request's bytes can be read once."""

    def __init__(self, call: SimCall, request: Any) -> None:
        self._call = call
        self._data: bytes = request.SerializeToString()

    async def read(self) -> bytes:
        """The request."""
        return self._data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _sending(behaviour: Any) -> Any:
    async def handle(request: Any, call: SimCall) -> Any:
        return await behaviour(None, _CallContext(call, request))

    return handle


class SimGateway(Gateway):
    """One run of a gateway's process. ``call`` replaces its listeners."""

    def __init__(self, config: SimConfig, loop: SimLoop, journal: Journal, hub: Hub, processes: Processes) -> None:
        self._sim, self._loop, self._journal = config, loop, journal
        gateway_config = GatewayConfig(
            workers=WorkerPoolConfig(
                endpoints=(),
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                stall_timeout_s=config.stall_timeout_s,
                max_migrations=config.max_moves,
                migration_timeout_s=config.move_timeout_s,
            ),
            metrics_address=None,
            dialects=Dialects.NONE,
            access=AccessConfig(prefix_salt_secret="of all gateways"),
            limits=RequestLimits(
                max_requests=config.max_requests,
                pause_pending_tokens=config.pause_pending_tokens,
                max_pending_tokens=config.max_pending_tokens,
                write_stall_s=config.write_stall_s,
            ),
        )
        self.watch = GatewayWatch(self, loop, journal)
        pool = SimPool(
            gateway_config.workers,
            on_model=lambda card, files: self.models.on_model(card, files),
            make_link=lambda _, on_frame, stats: SimRouterLink(hub, config.high_water, on_frame, stats, self.watch),  # type: ignore[arg-type,return-value]
            make_watch=lambda on_exit: SimWatch(processes, on_exit),  # type: ignore[arg-type,return-value]
        )
        super().__init__(gateway_config, pool=pool, renderer=InProcessRenderer())
        self._watch_pace(pool)
        self.text._executor = SimExecutor(loop, hub.rng)  # type: ignore[assignment]
        self.reloader.authenticator.access = access_list_of(config)
        self.quotas = self.tracker.quotas = WatchedQuotas(self.tracker, journal)
        self.calls: list[SimCall] = []
        self.num_calls = 0
        self.is_dead = False
        self._behaviours: dict[str, Any] = {}

    def _watch_pace(self, pool: WorkerPool) -> None:
        for name in ("pause", "resume"):
            ask = getattr(pool, name)

            def asked(handle: int, ask: Callable[[int], None] = ask) -> None:
                self.watch.asked(handle)
                ask(handle)

            setattr(pool, name, asked)

    def _watch_process(self) -> list[Any]:
        """Without watches of real memory and real lag, which a seed does not determine."""
        return [asyncio.create_task(self._look(), name="watch")]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.watch.look()

    async def _listen(self) -> None:
        servicer = self.services.inference_servicer()
        generate: Any = grpc.unary_stream_rpc_method_handler(servicer.Generate, pb.GenerateRequest.FromString)
        complete: Any = grpc.unary_unary_rpc_method_handler(servicer.Complete, pb.CompleteRequest.FromString)
        self._behaviours["Generate"] = _sending((await self._intercepted("Generate", generate)).stream_stream)
        self._behaviours["Complete"] = _sending((await self._intercepted("Complete", complete)).stream_unary)

    async def _intercepted(self, method: str, handler: Any) -> Any:
        async def continuation(details: Any) -> Any:
            return handler

        names = {"method": f"/octavo.v1.InferenceService/{method}", "invocation_metadata": ()}
        details = type("Details", (), names)()
        return await self.listeners.interceptor.intercept_service(continuation, details)

    def salt_for(self, tenant: str) -> str:
        """What separates a tenant's prefixes from others': nothing if it has a key."""
        return "" if self._sim.tenants else tenant

    def call(
        self, request: pb.GenerateRequest, *, name: str, is_unary: bool, timeout_s: float | None, tenant: str
    ) -> SimCall:
        """A call by a tenant. request: serialized and parsed again."""
        self.num_calls += 1
        method: str = "Generate"
        message: Any = request
        if is_unary:
            method, message = "Complete", pb.CompleteRequest(generate=message)
        self.calls = [call for call in self.calls if not call.is_closed]
        self.watch.called(request.request_id)
        call = SimCall(
            self._loop,
            self._journal,
            self._behaviours[method],
            message,
            name=name,
            request_id=request.request_id,
            timeout_s=timeout_s,
            window_bytes=self._sim.window_bytes,
            metadata=metadata_of(self._sim, tenant),
            on_closed=self.watch.closed,
        )
        self.calls.append(call)
        return call

    def call_by_name(self, name: int) -> SimCall | None:
        """The call that waits for an output."""
        tasks = [tracked.task for tracked in self.tracker for own, _ in tracked.outputs if own == name]
        return next((call for call in self.calls if call._task in tasks and call.status is None), None)

    def stream_of(self, name: int) -> OutputStream:
        """The stream of an output, while its call is open."""
        return next(stream for tracked in self.tracker for own, stream in tracked.outputs if own == name)

    def kill(self) -> None:
        """SIGKILL: all connections of callers and workers break."""
        self.is_dead = True
        self.drained.set()
        self.pool._link.close()
        for call in self.calls:
            call.lose()
        self.pool._executor.watch.close()
        for task in (*self._tasks, self.pool._ticker, self._drain_task):
            if task is not None:
                task.cancel()

    def check_stopped(self, name: str) -> None:
        """After drain and stop, every caller must have its status."""
        unfinished = [call.name for call in self.calls if call.status is None]
        self._journal.check(not unfinished, f"{name} stopped and left {unfinished}")
        for call in self.calls:
            call.lose()

    def check_quiet(self, name: str) -> None:
        """Without calls, it must hold nothing, and its counters must account for every ending."""
        journal, tracker = self._journal, self.tracker
        counts = tracker.admission.counts()
        journal.check(counts.num_entered == counts.num_placed == 0, f"{name}: admission still has {counts}")
        self.quotas.check_quiet(name)
        journal.check(len(tracker) == 0, f"{name}: {len(tracker)} tracked requests")
        journal.check(self.pool.num_outputs == 0, f"{name}: {self.pool.num_outputs} open outputs")
        in_flight = {worker.worker_id: worker.in_flight for worker in self.pool.workers()}
        journal.check(not any(in_flight.values()), f"{name}: in flight {in_flight}")
        ended = sum(self.meters.rpcs.values())
        journal.check(ended == self.num_calls, f"{name}: {self.num_calls} calls, {ended} ends")
        journal.check(not any(code == "UNKNOWN" for _, code, _ in self.meters.rpcs), f"{name}: {self.meters.rpcs}")
        journal.check(self.pool.stats.sink_errors == 0, f"{name}: a stream failed to take its tokens")
