"""What is asked of a worker about a request under way (end, pause, go on) is done, and is asked when it has to be.

One watch at each end of the wire, from what passes there and not from what either side believes: who gave which order
to whom, and what became of it. Pure of time but for "two looks in a row".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.gateway.workers.decisions import Peer
from octavo.wire.codec import ProtocolError, decode_to_gateway
from octavo.wire.messages import Cancel, Message, Pause, Resume, Run, StepOutput
from octavo.worker.engine.interfaces import GatewayLost, InboxMessage
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey, StepPlan
from octavo.worker.scheduler.request import Phase, Request
from octavo.worker.scheduler.request_table import RequestTable
from octavo.worker.scheduler.scheduler import Scheduler
from sim.edges.loop import SimLoop
from sim.edges.rpc import SimCall
from sim.journal import Journal

if TYPE_CHECKING:
    from sim.processes.gateway import SimGateway

LOOK_EVERY_S = 0.25
FLUSH_S = 0.0001  # in which a gateway sends what it has to say of this moment


class WorkerWatch:
    """At a worker: orders that arrived must be carried out before its next step."""

    def __init__(self, scheduler: Scheduler, journal: Journal, name: str) -> None:
        self._scheduler, self._journal, self._name = scheduler, journal, name
        self._is_paused: dict[RequestKey, bool] = {}  # what was said last of requests that are there
        self._ended: list[RequestKey] = []  # since the last step
        self._has_heard = False
        self._lost: list[GatewayIndex] = []

    def heard(self, messages: list[tuple[GatewayIndex, InboxMessage]]) -> None:
        """The engine takes these messages now."""
        self._has_heard = bool(messages)
        for gateway, message in messages:
            match message:
                case Cancel():
                    self._ended += [RequestKey(gateway, handle) for handle in message.handles]
                case Pause() | Resume():
                    is_paused = isinstance(message, Pause)
                    self._is_paused |= dict.fromkeys((RequestKey(gateway, h) for h in message.handles), is_paused)
                case GatewayLost():
                    self._lost.append(gateway)

    def look_at(self, plan: StepPlan) -> None:
        """A plan is launched."""
        table = self._scheduler.requests
        for slot in (*plan.decode_slots_S.tolist(), *(chunk.slot for chunk in plan.prefill)):
            key = table.in_slot(slot).key
            self._check(not self._is_paused.get(key), f"{key} is in step {plan.step} though it is paused")
            self._check(key not in self._ended, f"{key} is in step {plan.step} though it was cancelled")

    def look(self) -> None:
        """Check after a step."""
        table = self._scheduler.requests
        for key in self._ended:
            self._check(key not in table, f"{key} was cancelled and is still there")
        if self._lost:
            left = [request.key for request in table if request.key.gateway in self._lost]
            self._check(not left, f"{left} are still there, their gateway is gone")
        for key, is_paused in list(self._is_paused.items()):
            request = table.find(key)
            if request is None:
                del self._is_paused[key]
            else:
                self._check(request.is_paused is is_paused, f"{key} was told {is_paused=} and is {request.phase}")
        self._ended, self._lost = [], []
        if self._has_heard:
            self.recount()

    def recount(self) -> None:
        """Every request must be in exactly one place, and every place must only hold requests."""
        table = self._scheduler.requests
        for problem in _misplaced(table):
            self._check(False, problem)
        unasked = [r.key for r in table if r.is_paused and not self._is_paused.get(r.key)]
        self._check(not unasked, f"{unasked} are paused and nobody asked for it")

    def _check(self, is_true: bool, what: str) -> None:
        self._journal.counts["checks"] += 1
        if not is_true:
            self._journal.violate(f"{self._name}: {what}")


def _misplaced(table: RequestTable) -> Iterator[str]:
    requests = list(table)
    of_phase: dict[Phase, list[Request]] = {phase: [r for r in requests if r.phase is phase] for phase in Phase}
    decoding = {slot for slot, is_on in enumerate(table.slots.is_decoding_S.tolist()) if is_on}
    for name, found, said in (
        ("prefilling", table.prefilling, of_phase[Phase.PREFILLING]),
        ("loading", table.loading.values(), of_phase[Phase.LOADING]),
        ("paused", table.paused.values(), of_phase[Phase.PAUSED]),
        ("parked", table.parked.values(), of_phase[Phase.PARKED]),
    ):
        if {r.order for r in found} != {r.order for r in said} or len(found) != len(said):
            yield f"{name} are {sorted(r.order for r in found)}, by phase {sorted(r.order for r in said)}"
    if len(table.waiting) != len(of_phase[Phase.WAITING]):
        yield f"{len(table.waiting)} wait in the queue, by phase {len(of_phase[Phase.WAITING])}"
    if decoding != {r.slot for r in of_phase[Phase.DECODING]}:
        yield f"slots {sorted(decoding)} decode, by phase {sorted(int(r.held_slot) for r in of_phase[Phase.DECODING])}"
    in_slots = [r for r in requests if r.slot is not None]
    if {r.order for r in in_slots} != {r.order for r in table.running}:
        yield f"slots are held by {[r.order for r in table.running]}, their requests are {[r.order for r in in_slots]}"
    following = {follower.order for r in requests for follower in r.followers}
    if following != {r.order for r in of_phase[Phase.FOLLOWING]}:
        yield f"{sorted(following)} follow, by phase {sorted(r.order for r in of_phase[Phase.FOLLOWING])}"
    for follower in of_phase[Phase.FOLLOWING]:
        leader = follower.leader
        if leader is None or leader.key not in table or leader.is_paused:
            yield f"{follower.order} follows nobody who will lead"


@dataclass(slots=True)
class _Sent:
    """An output that was sent to a worker, under one handle."""

    incarnation: int
    request_id: str
    seed: int
    is_cancelled: bool = False
    is_paused: bool = False


class GatewayWatch:
    """At a gateway: an output that no caller waits for must be cancelled and never sent again; one whose caller does
    not read must be paused, wherever it is, and resumed when its caller reads again."""

    def __init__(self, gateway: "SimGateway", loop: SimLoop, journal: Journal) -> None:
        self._gateway, self._loop, self._journal = gateway, loop, journal
        self._sent: dict[int, _Sent] = {}  # by handle: what its worker has not ended
        self._cancelled: set[tuple[str, int]] = set()  # (request id, seed)
        self._suspects: set[tuple[str, int]] = set()  # at the last look
        self._was_full = False

    def called(self, request_id: str) -> None:
        """A call begins, perhaps a retry of its request."""
        self._cancelled = {each for each in self._cancelled if each[0] != request_id}

    def closed(self, call: SimCall) -> None:
        """The call's handler is done: what workers still have of it must be cancelled at once."""
        self._loop.call_later(FLUSH_S, self._look_behind, call.request_id)

    def asked(self, name: int) -> None:
        """An output is to be paused or resumed: its worker must be told at once."""
        self._loop.call_later(FLUSH_S, self._look_at_pace, name)

    def _look_at_pace(self, name: int) -> None:
        if not self._was_full and not self._gateway.is_dead:
            for what, other in self._out_of_step():
                if other == name:
                    self._check(False, f"output {name} {what}")

    def _look_twice(self) -> None:
        suspects = set() if self._was_full or self._gateway.is_dead else set(self._out_of_step())
        if suspects:
            self._loop.call_later(FLUSH_S, self._look_again, suspects)

    def _look_again(self, suspects: set[tuple[str, int]]) -> None:
        if not self._was_full and not self._gateway.is_dead:
            for what, name in suspects & set(self._out_of_step()):
                self._check(False, f"output {name} {what}")

    def _look_behind(self, request_id: str) -> None:
        if not self._was_full and not self._gateway.is_dead:
            for what, handle in self._left_behind():
                if self._sent[handle].request_id == request_id:
                    self._check(False, f"output {handle} {what}")

    def full(self) -> None:
        """A worker's queue is full: messages to it come later."""
        self._was_full = True

    def sent(self, peer: Peer, message: Message) -> None:
        """A message was sent to a worker."""
        match message:
            case Run():
                self._check(
                    self._is_wanted(message.request_id), f"{message.request_id} was sent, and nobody waits for it"
                )
                incarnation = self._gateway.pool._registry._by_peer[peer].incarnation
                for index, handle in enumerate((message.handle, *message.fork_handles)):
                    seed = (message.sampling.seed + index) % (1 << 64)
                    was_cancelled = (message.request_id, seed) in self._cancelled
                    self._check(not was_cancelled, f"{message.request_id} was cancelled and then sent again")
                    self._sent[handle] = _Sent(incarnation, message.request_id, seed)
            case Cancel():
                for handle in message.handles:
                    if (sent := self._sent.get(handle)) is not None:
                        sent.is_cancelled = True
                        self._cancelled.add((sent.request_id, sent.seed))
            case Pause() | Resume():
                for handle in message.handles:
                    if (sent := self._sent.get(handle)) is not None:
                        sent.is_paused = isinstance(message, Pause)

    def heard(self, frame: bytes) -> None:
        """A frame came from a worker."""
        try:
            message = decode_to_gateway(frame)
        except ProtocolError:
            return
        if isinstance(message, StepOutput):
            for finished in message.finished:
                self._sent.pop(finished.handle, None)
            if self._gateway.pool.stats.pauses:
                self._loop.call_later(FLUSH_S, self._look_twice)

    def look(self) -> None:
        """Check now and then. What is wrong at two checks in a row is a violation."""
        self._sent = {handle: sent for handle, sent in self._sent.items() if self._is_here(sent)}
        suspects = set() if self._was_full else {*self._left_behind(), *self._out_of_step()}
        self._was_full = False
        for what, handle in suspects & self._suspects:
            self._check(False, f"output {handle} {what}")
        self._suspects = suspects

    def _left_behind(self) -> Iterator[tuple[str, int]]:
        for handle, sent in self._sent.items():
            if self._is_here(sent) and not sent.is_cancelled and not self._is_wanted(sent.request_id):
                yield f"of {sent.request_id} is still at its worker, and nobody waits for it", handle

    def _out_of_step(self) -> Iterator[tuple[str, int]]:
        pool = self._gateway.pool
        for tracked in self._gateway.tracker:
            for name, stream in tracked.outputs:
                output = pool._outputs.get(name)
                sent = None if output is None else self._sent.get(output.handle)
                if output is None or sent is None or sent.is_cancelled or output.is_on_probation:
                    continue
                if not pool._migration.is_waiting(output) and sent.is_paused is not stream.is_paused:
                    yield f"of {sent.request_id}: paused={stream.is_paused}, its worker heard {sent.is_paused}", name

    def _is_here(self, sent: _Sent) -> bool:
        """Whether the output's worker has not been given up."""
        return self._gateway.pool._registry.get(sent.incarnation) is not None

    def _is_wanted(self, request_id: str) -> bool:
        return any(not call.is_closed and call.request_id == request_id for call in self._gateway.calls)

    def _check(self, is_true: bool, what: str) -> None:
        self._journal.counts["checks"] += 1
        if not is_true:
            self._journal.violate(f"a gateway: {what}")
