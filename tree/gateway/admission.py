"""How much this gateway holds, and which ids. Limits count outputs: a request for eight counts eight times, until the
last of them has ended.

Pure: no clock, no sockets; a request enters before it costs anything (tokenizing included), is placed on a worker when
its prompt is known, and leaves exactly once however it ends.
"""

from collections import Counter
from dataclasses import dataclass

from gateway.access.caller import id_in
from gateway.errors import DuplicateRequest, ExceedsCapacity, QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCounts:
    """num_entered: requests in flight; num_outputs: of them; num_placed: outputs that a worker has."""

    num_entered: int
    num_outputs: int
    num_placed: int


class Admission:
    """All-or-nothing, idempotent where it says so. An id is whatever tells requests apart (`Caller.key_of`)."""

    def __init__(self, *, max_requests: int) -> None:
        """max_requests: outputs in flight."""
        self._max_requests = max_requests
        self._num_outputs = 0
        self._workers_of: dict[str, list[str | None]] = {}  # one place an output
        self._placed: Counter[str] = Counter()

    def enter(self, request_id: str, *, num_outputs: int = 1) -> None:
        """Raises DuplicateRequest, QueueFull, ExceedsCapacity; then nothing has changed."""
        if request_id in self._workers_of:
            raise DuplicateRequest(f"request id {id_in(request_id)!r} is in flight")
        if num_outputs > self._max_requests:
            raise ExceedsCapacity(f"{num_outputs} outputs; this gateway holds {self._max_requests} at most")
        if self._num_outputs + num_outputs > self._max_requests:
            raise QueueFull(f"{self._num_outputs} outputs are in flight, the limit of this gateway")
        self._workers_of[request_id] = [None] * num_outputs
        self._num_outputs += num_outputs

    def place(self, request_id: str, worker_id: str, *, max_on_worker: int) -> None:
        """Give all outputs of an entered request to a worker (again, after the first one left). Raises QueueFull; then
        nothing has changed; LookupError for an id that did not enter."""
        former = self._workers_of[request_id]
        on_worker = self._placed[worker_id] - former.count(worker_id)
        if on_worker + len(former) > max_on_worker:
            raise QueueFull(f"worker {worker_id} has {on_worker} outputs of this gateway, its limit")
        for index in range(len(former)):
            self._put(former, index, worker_id)

    def move(self, request_id: str, worker_id: str, output_index: int = 0) -> None:
        """Another worker has taken a placed output, whatever its limit: the pool has seen to that. Nothing for an id
        that is not in flight."""
        places = self._workers_of.get(request_id)
        if places is not None:
            self._put(places, output_index, worker_id)

    def leave(self, request_id: str) -> None:
        """The request ended. Idempotent."""
        places = self._workers_of.pop(request_id, [])
        self._num_outputs -= len(places)
        for index in range(len(places)):
            self._put(places, index, None)

    def _put(self, places: list[str | None], index: int, worker_id: str | None) -> None:
        former, places[index] = places[index], worker_id
        if worker_id is not None:
            self._placed[worker_id] += 1
        if former is not None:
            self._placed[former] -= 1
            if not self._placed[former]:
                del self._placed[former]

    def holds(self, request_id: str) -> bool:
        """Whether the request is in flight."""
        return request_id in self._workers_of

    def request_ids(self) -> tuple[str, ...]:
        """Of all requests in flight."""
        return tuple(self._workers_of)

    def counts(self) -> AdmissionCounts:
        """Now."""
        return AdmissionCounts(
            num_entered=len(self._workers_of), num_outputs=self._num_outputs, num_placed=self._placed.total()
        )

    def on_worker(self, worker_id: str) -> int:
        """Outputs that this worker has."""
        return self._placed.get(worker_id, 0)
