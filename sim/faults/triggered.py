"""Faults that an output triggers by being where few ever are: a time drawn at random would hardly meet it.

Looks at workers and gateways after each turn of an engine. Knows what strikes and where, not what must come of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from octavo.gateway.errors import RequestAborted
from octavo.worker.runners.interface import RunnerError
from octavo.worker.scheduler.request import Phase, Request
from sim.edges.rpc import SimCall
from sim.processes.gateway import SimGateway
from sim.scenario import Fault, FaultKind

if TYPE_CHECKING:
    from sim.world import World

FIRST_TOKENS = 3  # a long output that has just begun has fewer
LONG = 16
PLACES: dict[str, Callable[[Request], bool]] = {  # where a worker can have an output
    "running": lambda request: request.is_running,
    "begun": lambda request: (
        request.phase is Phase.DECODING
        and request.sampling.max_tokens >= LONG
        and len(request.token_ids_T) - request.num_prompt_tokens < FIRST_TOKENS
    ),
    "waiting": lambda request: request.phase is Phase.WAITING and not request.num_preemptions,
    "preempted": lambda request: request.phase is Phase.WAITING and request.num_preemptions > 0,
    "following": lambda request: request.phase is Phase.FOLLOWING,
    "leading": lambda request: bool(request.followers),
    "paused": lambda request: request.phase is Phase.PAUSED,
    "parked": lambda request: request.phase is Phase.PARKED,
}
MOVING = "moving"  # no worker has it
ON_THE_WAY_S = 0.02  # between two looks for those


class _Victim(NamedTuple):
    """name: of the output, as its gateway knows it."""

    gateway: SimGateway
    call: SimCall
    name: int


class TriggeredFaults:
    """Faults of one world, each triggered once by an output at some place."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Wait for the fault's place from now on."""
        self._faults.append(fault)
        if fault.detail == MOVING:
            self._look_on_the_way()

    def _look_on_the_way(self) -> None:
        """For outputs without a worker, which no worker's turns would find."""
        moving = [fault for fault in self._faults if fault.detail == MOVING]
        for fault in moving:
            if self._strikes(fault, 0):
                self._faults.remove(fault)
        if moving:
            self._world.loop.call_later(ON_THE_WAY_S, self._look_on_the_way)

    def clear(self) -> None:
        """Drop all waiting faults."""
        self._faults.clear()

    def look(self, worker: int) -> None:
        """A worker's engine has made a turn."""
        self._faults = [fault for fault in self._faults if fault.detail == MOVING or not self._strikes(fault, worker)]

    def _strikes(self, fault: Fault, worker: int) -> bool:
        victim = self._on_the_move() if fault.detail == MOVING else self._at(worker, fault)
        if victim is None:
            return False
        self._world.journal.note(f"{fault.kind} strikes {victim.call.name}, {fault.detail}")
        self._world.journal.faults[f"{fault.kind.value}:{fault.detail}"] += 1
        gateway, call, name = victim
        match fault.kind:
            case FaultKind.HANG_UP | FaultKind.HANG_UP_AND_CRASH:
                call.cancel()
            case FaultKind.STALL:
                call.stall(fault.duration_s)
            case FaultKind.FAIL:
                gateway.tracker.fail(call.request_id, RequestAborted("the gateway ended it"))
            case FaultKind.CANCEL_OUTPUT:
                gateway.pool.cancel(name)  # on its way alone, before those of the outputs beside it
                gateway.stream_of(name).fail(RequestAborted("the gateway ended an output"))
            case FaultKind.DISCONNECT_WHEN:
                self._disconnect(worker, gateway)
            case FaultKind.FAIL_STEP:
                self._fail_step(worker)
        if fault.kind in (FaultKind.HANG_UP_AND_CRASH, FaultKind.CRASH_WHEN):
            self._world.loop.call_soon(self._world.workers[worker].crash)  # what was begun at this moment comes first
        return True

    def _disconnect(self, worker: int, gateway: SimGateway) -> None:
        process = self._world.workers[worker].process
        if process is not None:
            process.dealers[self._world.gateways.index(gateway)].cut()

    def _fail_step(self, worker: int) -> None:
        process = self._world.workers[worker].process
        if process is not None:
            process.runner.next_error = RunnerError("planted")

    def _at(self, worker: int, fault: Fault) -> _Victim | None:
        process = self._world.workers[worker].process
        for request in process.scheduler.requests if process is not None else ():
            if PLACES[fault.detail](request):
                gateway = self._world.gateways[request.key.gateway]
                output = None if gateway is None else gateway.pool._outputs._live.get(request.key.handle)
                call = None if gateway is None or output is None else gateway.call_by_name(output.name)
                if call is not None and call.is_stalled and fault.kind is FaultKind.STALL:
                    continue
                if gateway is not None and output is not None and call is not None:
                    return _Victim(gateway, call, output.name)
        return None

    def _on_the_move(self) -> _Victim | None:
        for gateway in filter(None, self._world.gateways):
            for output in gateway.pool._migration._lost:
                if (call := gateway.call_by_name(output.name)) is not None:
                    return _Victim(gateway, call, output.name)
        return None
