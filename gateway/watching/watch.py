"""Snapshots of the whole service: this gateway's part, those of the others, and what the workers say.

However many watch, the others and the workers are asked once for all of them. Must not know how snapshots travel.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from octavo.gateway.errors import Draining, QueueFull
from octavo.gateway.observability.meters import LATENCY_BUCKETS_S, TOKEN_GAP_BUCKETS_S, GatewayMeters
from octavo.gateway.peers.control import Control, Outcome
from octavo.gateway.requests.tracker import RequestTracker
from octavo.gateway.watching.part import MAX_TENANTS, OwnLoad
from octavo.gateway.watching.window import LoadWindow, WorkerCounts, added, percentiles
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.queries import WorkerDetails
from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.v1 import load_pb2 as pb
from octavo.wire.peer_messages import GatewayPart, LoadPart, RequestPart

Snapshots = AsyncGenerator[pb.WatchLoadResponse, None]
MAX_WATCHERS = 32
DEFAULT_INTERVAL_S = 1.0
PEERS_TIMEOUT_S = 0.5  # a gateway that takes longer is named as unreachable
SHARE_S = 0.1  # younger snapshots are shared
LOST_S = 60.0  # how long a lost worker is shown
MAX_LOST = 64
_LAST_S = 1.0  # for watchers to get their last snapshot
_CONDITIONS = {
    WorkerState.REGISTERED: pb.WORKER_CONDITION_REGISTERED,
    WorkerState.READY: pb.WORKER_CONDITION_READY,
    WorkerState.DRAINING: pb.WORKER_CONDITION_DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """What was gathered for a snapshot. lost: workers that are gone, with the seconds since. worker_counts: by id and
    epoch, what each did in the window."""

    max_requests: int
    max_cells: int
    taken_s: float
    time_s: float
    outcome: Outcome
    workers: Sequence[WorkerView]
    lost: Sequence[tuple[WorkerView, float]]
    worker_details: dict[str, WorkerDetails] = field(default_factory=dict)
    window_s: float = 1.0
    worker_counts: dict[tuple[str, str], WorkerCounts] = field(default_factory=dict)

    def covers(self, request: pb.WatchLoadRequest) -> bool:
        """Whether it has at least what is asked for."""
        return self.max_requests >= request.max_requests and self.max_cells >= request.max_block_cells


class LoadWatch:
    """One per gateway, on its event loop. own: this gateway's part, which other gateways ask for too."""

    def __init__(self, tracker: RequestTracker, pool: WorkerPool, meters: GatewayMeters) -> None:
        self._meters = meters
        self._window = LoadWindow(meters, now_s=time.monotonic())
        self.own = OwnLoad(tracker, pool, self._window)
        self._tracker = tracker
        self._pool = pool
        self._watchers: list[pb.WatchLoadRequest] = []
        self._closing, self._is_unwatched = asyncio.Event(), asyncio.Event()
        self._is_unwatched.set()
        self._news = asyncio.Event()  # a new one each time
        self._gathering: asyncio.Task[_Taken] | None = None
        self._last: _Taken | None = None
        self._known: dict[str, WorkerView] = {}
        self._lost: dict[str, tuple[WorkerView, float]] = {}

    @property
    def num_watchers(self) -> int:
        """Number of watchers."""
        return len(self._watchers)

    def update_workers(self, workers: Sequence[WorkerView]) -> None:
        """The workers now. Called about once a second, watched or not."""
        now_s = time.monotonic()
        self._window.sample(workers, now_s)
        self._note_lost(workers, now_s)

    def drain(self) -> None:
        """End every watch with a last snapshot. Idempotent."""
        self._closing.set()
        self.changed()

    def changed(self) -> None:
        """Workers or models came or went: send a snapshot at once."""
        news, self._news, self._last = self._news, asyncio.Event(), None
        news.set()

    async def close(self) -> None:
        """End every watch. Idempotent."""
        self.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self._is_unwatched.wait()
        if self._gathering is not None:
            self._gathering.cancel()
            await asyncio.gather(self._gathering, return_exceptions=True)
        await self.own.worker_details.close()

    async def snapshots(self, control: Control, request: pb.WatchLoadRequest) -> Snapshots:
        """A snapshot at once, then one per interval and whenever workers come or go, each made when it is asked for.
        The last one comes when this gateway drains. request: validated. Raises QueueFull before the first if there are
        too many watchers, Draining after the last."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} watch the load already, which is all that this gateway takes")
        if self._closing.is_set():
            raise Draining("this gateway is shutting down")
        self._watchers.append(request)
        self._meters.num_watchers = len(self._watchers)
        self._is_unwatched.clear()
        interval_s = request.interval_s if request.HasField("interval_s") else DEFAULT_INTERVAL_S
        due_s = time.monotonic()
        try:
            while True:
                is_last = self._closing.is_set()
                news = self._news
                yield self._message(await self._take(control, request), request, control.name)
                if is_last:
                    raise Draining("this gateway is shutting down")
                due_s = max(due_s + interval_s, time.monotonic())  # a slow reader skips what it missed
                await self._sleep_until(due_s, news)
                due_s = min(due_s, time.monotonic())
        finally:
            self._watchers.remove(request)
            self._meters.num_watchers = len(self._watchers)
            if not self._watchers:
                self._is_unwatched.set()

    # ------------------------------------------------------------ what is gathered

    async def _sleep_until(self, due_s: float, news: asyncio.Event) -> None:
        """Returns early if workers came or went, or the watch is over."""
        await asyncio.sleep(min(SHARE_S, max(0.0, due_s - time.monotonic())))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await news.wait()

    async def _take(self, control: Control, request: pb.WatchLoadRequest) -> _Taken:
        """Shared by all that ask at the same moment; gathers as much as the most demanding one wants."""
        taken = self._last
        while taken is None or time.monotonic() - taken.taken_s >= SHARE_S or not taken.covers(request):
            if self._gathering is None:
                self._gathering = asyncio.create_task(self._gathered(control), name="gather the load")
            taken = await asyncio.shield(self._gathering)
        return taken

    async def _gathered(self, control: Control) -> _Taken:
        """Clears the shared task before it returns: awaiting a finished task does not yield to the event loop, so a
        caller that wants more would otherwise get this one again for ever."""
        try:
            self._last = taken = await self._gather(control)
            return taken
        finally:
            self._gathering = None

    async def _gather(self, control: Control) -> _Taken:
        max_requests = max((each.max_requests for each in self._watchers), default=0)
        max_cells = max((each.max_block_cells for each in self._watchers), default=0)
        refresh = self.own.worker_details.refresh(max_cells=max_cells, max_outputs=max_requests)
        outcome = await control.watch(max_requests, timeout_s=PEERS_TIMEOUT_S, meanwhile=refresh)
        now_s, workers = time.monotonic(), self._pool.workers()
        self._note_lost(workers, now_s)
        window_s, counts = self._window.read(workers, now_s)
        details = {each.worker_id: self.own.worker_details.of(each.worker_id, each.epoch) for each in workers}
        return _Taken(
            max_requests=max_requests,
            max_cells=max_cells,
            taken_s=now_s,
            time_s=time.time(),
            outcome=outcome,
            workers=sorted(workers, key=lambda each: each.worker_id),
            lost=[(view, now_s - since_s) for view, since_s in self._lost.values()],
            worker_details={key: each for key, each in details.items() if each is not None},
            window_s=window_s,
            worker_counts=dict(counts.workers),
        )

    def _note_lost(self, workers: Sequence[WorkerView], now_s: float) -> None:
        here = {each.worker_id: each for each in workers}
        for worker_id, view in self._known.items():
            if worker_id not in here:
                self._lost[worker_id] = (view, now_s)
        self._known = here
        old = [name for name, (_, since_s) in self._lost.items() if name in here or now_s - since_s > LOST_S]
        for worker_id in [*old, *list(self._lost)[:-MAX_LOST]]:
            self._lost.pop(worker_id, None)

    # ------------------------------------------------------------ as a message

    def _message(self, taken: _Taken, request: pb.WatchLoadRequest, gateway: str) -> pb.WatchLoadResponse:
        parts = {name: reply.part for name, reply in taken.outcome.replies.items() if reply.part is not None}
        own = parts[gateway]
        by_model = _by_name([part.models for part in parts.values()])
        names = sorted({*by_model, *(each.card.name for each in taken.workers)})
        response = pb.WatchLoadResponse(
            time_s=taken.time_s,
            window_s=own.window_s,
            gateway=gateway,
            is_draining=self._tracker.is_draining,
            models=[_model(name, by_model.get(name, []), taken.workers, parts) for name in names],
            workers=[_worker(each, taken, request.max_block_cells) for each in taken.workers],
            tenants=_tenants(parts),
            gateways=[
                pb.GatewayLoadSnapshot(
                    gateway=name,
                    num_in_flight=reply.num_in_flight,
                    generation_tokens_per_s=_rate(reply.part),
                    is_draining=reply.is_draining,
                )
                for name, reply in taken.outcome.replies.items()
            ],
            unreachable_gateways=taken.outcome.silent,
            requests=_requests(parts, request.max_requests),
        )
        counted = [_counts_of(each) for rows in by_model.values() for each in rows]
        response.total.CopyFrom(_figures([*(part.total for part in parts.values()), *counted], parts))
        here = {each.worker_id for each in taken.workers}
        response.workers.extend(_lost(view, age_s) for view, age_s in taken.lost if view.worker_id not in here)
        return response


def _by_name(rows: Sequence[Sequence[LoadPart]]) -> dict[str, list[LoadPart]]:
    found: dict[str, list[LoadPart]] = {}
    for parts in rows:
        for part in parts:
            found.setdefault(part.name, []).append(part)
    return found


def _counts_of(part: LoadPart) -> LoadPart:
    """What was counted in the window, without requests in flight."""
    return msgspec.structs.replace(part, num_in_flight=0, num_preparing=0, num_waiting=0, num_running=0, num_paused=0)


def _figures(rows: Sequence[LoadPart], parts: dict[str, GatewayPart]) -> pb.LoadFigures:
    """The figures of several gateways combined."""
    window_s = max((part.window_s for part in parts.values()), default=1.0)
    return pb.LoadFigures(
        num_in_flight=sum(row.num_in_flight for row in rows),
        num_preparing=sum(row.num_preparing for row in rows),
        num_waiting=sum(row.num_waiting for row in rows),
        num_running=sum(row.num_running for row in rows),
        num_paused=sum(row.num_paused for row in rows),
        prompt_tokens_per_s=sum(row.prompt_tokens for row in rows) / window_s,
        generation_tokens_per_s=sum(row.generation_tokens for row in rows) / window_s,
        finished_per_s=sum(row.num_finished for row in rows) / window_s,
        time_to_first_token_s=_percentiles(LATENCY_BUCKETS_S, [row.time_to_first_token for row in rows]),
        inter_token_s=_percentiles(TOKEN_GAP_BUCKETS_S, [row.inter_token for row in rows]),
        queue_s=_percentiles(LATENCY_BUCKETS_S, [row.queue for row in rows]),
    )


def _percentiles(bounds: Sequence[float], rows: Sequence[Sequence[int]]) -> pb.Percentiles | None:
    counts = added(rows)
    found = percentiles(bounds, counts)
    if found is None:
        return None
    p50, p95, p99 = found
    return pb.Percentiles(num_values=sum(counts), p50=p50, p95=p95, p99=p99)


def _rate(part: GatewayPart | None) -> float:
    return sum(model.generation_tokens for model in part.models) / part.window_s if part is not None else 0.0


def _model(
    name: str, rows: Sequence[LoadPart], workers: Sequence[WorkerView], parts: dict[str, GatewayPart]
) -> pb.ModelLoad:
    of_model = [each for each in workers if each.card.name == name]
    return pb.ModelLoad(
        model=name,
        num_workers=sum(each.state is WorkerState.READY for each in of_model),
        blocks=pb.KvBlocks(
            num_blocks=sum(each.capacity.num_blocks for each in of_model),
            num_free=sum(each.num_free_blocks for each in of_model),
            num_cached=sum(each.num_cached_blocks for each in of_model),
            num_active=sum(each.num_active_blocks for each in of_model),
        ),
        figures=_figures(rows, parts),
    )


def _tenants(parts: dict[str, GatewayPart]) -> list[pb.TenantLoad]:
    loads = [
        pb.TenantLoad(tenant=name, figures=_figures(rows, parts))
        for name, rows in _by_name([part.tenants for part in parts.values()]).items()
    ]
    busiest = sorted(loads, key=lambda each: (-each.figures.num_in_flight, each.tenant))[:MAX_TENANTS]
    return sorted(busiest, key=lambda each: each.tenant)


def _requests(parts: dict[str, GatewayPart], max_requests: int) -> list[pb.RequestSnapshot]:
    rows = [(part, name) for name, each in parts.items() for part in each.requests]
    rows.sort(key=lambda row: -row[0].age_s)
    return [_request(part, name) for part, name in rows[:max_requests]]


def _request(part: RequestPart, gateway: str) -> pb.RequestSnapshot:
    return pb.RequestSnapshot(
        request_id=part.request_id,
        model=part.model,
        tenant=part.tenant,
        phase=part.phase,  # type: ignore[arg-type]
        num_prompt_tokens=part.num_prompt_tokens,
        num_output_tokens=part.num_output_tokens,
        num_blocks=part.num_blocks,
        age_s=max(0.0, part.age_s),
        worker_id=part.worker_id,
        gateway=gateway,
        num_outputs=part.num_outputs,
    )


def _worker(view: WorkerView, taken: _Taken, max_cells: int) -> pb.WorkerSnapshot:
    counts = taken.worker_counts.get((view.worker_id, view.epoch), WorkerCounts())
    snapshot = _known(view)
    snapshot.condition = _CONDITIONS[view.state]
    snapshot.age_s = view.heartbeat_age_s
    snapshot.num_running, snapshot.num_waiting = view.num_running, view.num_waiting
    snapshot.num_paused = view.num_paused
    snapshot.prefill_tokens_per_s = counts.prefill_tokens / taken.window_s
    snapshot.generation_tokens_per_s = counts.generated_tokens / taken.window_s
    snapshot.steps_per_s = counts.num_steps / taken.window_s
    details = taken.worker_details.get(view.worker_id)
    if max_cells and details is not None and len(details.cells_C):
        snapshot.blocks.num_shared = details.num_shared_blocks
        snapshot.block_map.CopyFrom(pb.BlockMap(**_runs(details.cells_C, details.blocks_per_cell, max_cells)))
    if max_cells and details is not None and (host := details.host) is not None:
        snapshot.host_blocks.CopyFrom(
            pb.HostKvBlocks(
                num_blocks=host.num_blocks,
                num_free=host.num_free,
                num_cached=host.num_cached,
                num_swapped=host.num_swapped,
                num_copying=host.num_blocks - host.num_free - host.num_cached - host.num_swapped,
            )
        )
        cells_C = np.frombuffer(host.cells, np.uint8)
        snapshot.host_block_map.CopyFrom(pb.HostBlockMap(**_runs(cells_C, host.blocks_per_cell, max_cells)))
    return snapshot


def _lost(view: WorkerView, age_s: float) -> pb.WorkerSnapshot:
    snapshot = _known(view)
    snapshot.condition, snapshot.age_s = pb.WORKER_CONDITION_LOST, age_s
    return snapshot


def _known(view: WorkerView) -> pb.WorkerSnapshot:
    return pb.WorkerSnapshot(
        worker_id=view.worker_id,
        epoch=view.epoch,
        model=view.card.name,
        blocks=pb.KvBlocks(
            num_blocks=view.capacity.num_blocks,
            num_free=view.num_free_blocks,
            num_cached=view.num_cached_blocks,
            num_active=view.num_active_blocks,
        ),
        block_size=view.capacity.block_size,
        max_num_seqs=view.capacity.max_num_seqs,
        num_steps=view.num_steps,
        num_preemptions=view.num_preemptions,
        tensor_parallel_size=view.card.tensor_parallel_size,
        kv_cache_dtype=view.card.kv_cache_dtype,
        num_queried_tokens=view.num_queried_tokens,
        num_hit_tokens=view.num_hit_tokens,
    )


def _runs(cells_C: np.ndarray, blocks_per_cell: int, max_cells: int) -> dict[str, Any]:
    """The fields of a block map. Cells are merged if this watcher asked for fewer than another one."""
    factor = -(-len(cells_C) // max_cells)
    if factor > 1:
        cells_C = np.maximum.reduceat(cells_C, np.arange(0, len(cells_C), factor))
        blocks_per_cell *= factor
    starts = np.flatnonzero(np.diff(cells_C, prepend=0))
    lengths = np.diff(starts, append=len(cells_C))
    return {"blocks_per_cell": blocks_per_cell, "states": cells_C[starts].tolist(), "lengths": lengths.tolist()}
