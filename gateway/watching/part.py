"""This gateway's part of a snapshot: how its requests stand, by model and tenant, and the oldest of them.

Must not know the other gateways, nor who watches.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

import structlog

from octavo.gateway.requests.tracker import PreparingRequest, RequestTracker, TrackedRequest
from octavo.gateway.watching.window import Counts, LoadWindow, ModelCounts
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.queries import WorkerDetails
from octavo.v1 import load_pb2 as pb
from octavo.wire.messages import OutputPhase
from octavo.wire.peer_messages import GatewayPart, LoadPart, RequestPart

log = structlog.get_logger(__name__)
DETAILS_TIMEOUT_S = 0.25  # a worker that takes longer is left out of this snapshot
REST_S = 0.15  # between two queries
FRESH_S = 2.5  # older reports are not used
MAX_TENANTS = 100  # reported by each gateway
_PHASES = {
    OutputPhase.QUEUED: pb.REQUEST_PHASE_QUEUED,
    OutputPhase.PREFILL: pb.REQUEST_PHASE_PREFILL,
    OutputPhase.DECODE: pb.REQUEST_PHASE_DECODE,
    OutputPhase.PAUSED: pb.REQUEST_PHASE_PAUSED,
}
Held = dict[int, tuple[OutputPhase, int]]  # by handle: what an output does, and its blocks
_FURTHEST_FIRST = (OutputPhase.DECODE, OutputPhase.PREFILL, OutputPhase.PAUSED, OutputPhase.QUEUED)


class WorkerDetailsCache:
    """The workers' last reports of their blocks and of our outputs. They are queried only while someone watches, once
    for all watchers."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._details: dict[str, WorkerDetails] = {}
        self._held: Held = {}
        self._told_s = self._asked_s = self._wanted_s = float("-inf")
        self._wanted = self._asked = (0, 0)  # cells and outputs: what is wanted of late, what was asked for last
        self._task: asyncio.Task[None] | None = None

    def of(self, worker_id: str, epoch: str) -> WorkerDetails | None:
        """The worker's report under this epoch; None if there is no recent one."""
        details = self._details.get(worker_id) if self._is_fresh() else None
        return details if details is not None and details.epoch == epoch else None

    def held(self) -> Held:
        """What each output does and how many blocks it holds, by handle, from recent reports."""
        return self._held if self._is_fresh() else {}

    async def refresh(self, *, max_cells: int, max_outputs: int) -> None:
        """Query the workers unless that was just done; returns when they have answered or run out of time. Gets at
        least as much as is asked for here."""
        wanted = max_cells or max_outputs
        task = self.begin(max_cells=max_cells, max_outputs=max_outputs) if wanted else None
        if task is not None:
            await asyncio.wait([task])

    def begin(self, *, max_cells: int, max_outputs: int) -> "asyncio.Task[None] | None":
        """Start a refresh without waiting for it."""
        now_s = time.monotonic()
        cells, outputs = self._wanted if now_s - self._wanted_s <= FRESH_S else (0, 0)
        self._wanted, self._wanted_s = (max(cells, max_cells), max(outputs, max_outputs)), now_s
        is_more = self._wanted[0] > self._asked[0] or self._wanted[1] > self._asked[1]
        if self._task is None and (is_more or now_s - self._asked_s >= REST_S):
            self._asked, self._asked_s = self._wanted, now_s
            self._task = asyncio.create_task(self._ask(*self._wanted), name="query workers")
            self._task.add_done_callback(self._answered)
        return self._task

    async def close(self) -> None:
        """Cancel a running query. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._told_s <= FRESH_S

    async def _ask(self, max_cells: int, max_outputs: int) -> None:
        details = await self._pool.query_details(
            max_cells=max_cells, max_outputs=max_outputs, timeout_s=DETAILS_TIMEOUT_S
        )
        self._details = {each.worker_id: each for each in details}
        self._held = {name: held for each in details for name, held in each.held.items()}
        self._told_s = time.monotonic()

    def _answered(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("look_failed", exc_info=error)


@dataclass(slots=True)
class _Tally:
    """Counts requests of one model or tenant."""

    num_in_flight: int = 0
    num_preparing: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_paused: int = 0

    def add(self, phase: "pb.RequestPhase.ValueType") -> None:
        """Count one more."""
        self.num_in_flight += 1
        if phase == pb.REQUEST_PHASE_PREPARING:
            self.num_preparing += 1
        elif phase == pb.REQUEST_PHASE_QUEUED:
            self.num_waiting += 1
        elif phase == pb.REQUEST_PHASE_PAUSED:
            self.num_paused += 1
        else:
            self.num_running += 1

    def part(self, name: str, counts: ModelCounts) -> LoadPart:
        """The message, with what was counted in the window."""
        return LoadPart(
            name=name,
            num_in_flight=self.num_in_flight,
            num_preparing=self.num_preparing,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_paused=self.num_paused,
            prompt_tokens=counts.prompt_tokens,
            generation_tokens=counts.generation_tokens,
            num_finished=counts.num_finished,
            time_to_first_token=counts.time_to_first_token,
            inter_token=counts.inter_token,
            queue=counts.queue,
        )


class OwnLoad:
    """One per gateway, on its event loop."""

    def __init__(self, tracker: RequestTracker, pool: WorkerPool, window: LoadWindow) -> None:
        self.worker_details = WorkerDetailsCache(pool)
        self._tracker = tracker
        self._pool = pool
        self._window = window

    def describe_to_peer(self, max_requests: int) -> GatewayPart:
        """For a gateway that is watched: it asks again soon, and by then the blocks of its requests are known."""
        if max_requests:
            self.worker_details.begin(max_cells=0, max_outputs=max_requests)
        return self.describe(max_requests)

    def describe(self, max_requests: int) -> GatewayPart:
        """This gateway's load now, with blocks as last reported. max_requests: how many to list, oldest first."""
        window_s, counts = self._window.read((), time.monotonic())
        total, models, tenants = _Tally(), defaultdict[str, _Tally](_Tally), defaultdict[str, _Tally](_Tally)
        held = self.worker_details.held()
        for tracked in self._tracker:
            phase = _phase(tracked, held)
            tallies = [total, models[tracked.card.name]]
            if (tenant := tracked.scope.caller.tenant) is not None:
                tallies.append(tenants[tenant])
            for tally in tallies:
                tally.add(phase)
        for preparing in self._tracker.preparing:
            phase = _phase_of_preparing(preparing)
            total.add(phase)
            if preparing.model:
                models[preparing.model].add(phase)
            if (tenant := preparing.scope.caller.tenant) is not None:
                tenants[tenant].add(phase)
        return GatewayPart(
            window_s=window_s,
            total=total.part("", ModelCounts()),
            models=tuple(
                models[name].part(name, counts.models.get(name, ModelCounts()))
                for name in sorted({*models, *counts.models})
            ),
            tenants=_tenant_parts(tenants, counts),
            requests=self._requests(max_requests),
        )

    def _requests(self, max_requests: int) -> tuple[RequestPart, ...]:
        now_s, held = time.monotonic(), self.worker_details.held()
        tracked = [_request(each, held, now_s) for each in islice(self._tracker, max_requests)]
        left = max_requests - len(tracked)
        return (*tracked, *(_preparing_part(each, now_s) for each in self._tracker.preparing[:left]))


def _request(tracked: TrackedRequest, held: Held, now_s: float) -> RequestPart:
    rows = [held[handle] for handle, _ in tracked.outputs if handle in held]
    return RequestPart(
        request_id=tracked.request_id,
        phase=_phase(tracked, held),
        age_s=now_s - tracked.scope.started_s,
        model=tracked.card.name,
        tenant=tracked.scope.caller.tenant or "",
        num_prompt_tokens=tracked.num_prompt_tokens,
        num_output_tokens=tracked.num_tokens,
        num_blocks=sum(num_blocks for _, num_blocks in rows) if len(rows) == len(tracked.outputs) else None,
        worker_id=tracked.worker_id(),
        num_outputs=len(tracked.outputs),
    )


def _phase(tracked: TrackedRequest, held: Held) -> "pb.RequestPhase.ValueType":
    """As reported by its worker, which knows of preemptions; else as far as its streams show."""
    said = {held[handle][0] for handle, _ in tracked.outputs if handle in held} if held else set()
    for phase in _FURTHEST_FIRST if said else ():
        if phase in said:
            return _PHASES[phase]
    if any(stream.first_token_s and not stream.is_paused for stream in tracked.streams):
        return pb.REQUEST_PHASE_DECODE
    if any(stream.is_paused for stream in tracked.streams):
        return pb.REQUEST_PHASE_PAUSED
    return pb.REQUEST_PHASE_PREFILL if tracked.stream.scheduled_s else pb.REQUEST_PHASE_QUEUED


def _tenant_parts(tenants: dict[str, _Tally], counts: Counts) -> tuple[LoadPart, ...]:
    """The busiest tenants; one with nothing now and nothing in the window is left out."""
    names = {*tenants, *(name for name, tokens in counts.tenants.items() if any(tokens))}
    parts = []
    for name in names:
        prompt_tokens, generation_tokens = counts.tenants.get(name, (0, 0))
        tokens = ModelCounts(prompt_tokens=prompt_tokens, generation_tokens=generation_tokens)
        parts.append(tenants.get(name, _Tally()).part(name, tokens))
    return tuple(sorted(parts, key=lambda part: (-part.num_in_flight, part.name))[:MAX_TENANTS])


def _phase_of_preparing(preparing: PreparingRequest) -> "pb.RequestPhase.ValueType":
    """For an embedding, by its inputs at workers, once there are any."""
    if not preparing.model:
        return pb.REQUEST_PHASE_PREPARING
    return pb.REQUEST_PHASE_PREFILL if preparing.is_begun else pb.REQUEST_PHASE_QUEUED


def _preparing_part(preparing: PreparingRequest, now_s: float) -> RequestPart:
    scope = preparing.scope
    return RequestPart(
        request_id=scope.request_id,
        phase=_phase_of_preparing(preparing),
        age_s=now_s - scope.started_s,
        model=preparing.model or scope.model,
        tenant=scope.caller.tenant or "",
        num_outputs=preparing.num_outputs,
    )
