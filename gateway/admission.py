"""How many requests this gateway holds, and which ids.

Pure: no clock, no sockets; a request enters before it costs anything (tokenizing included), is placed on a worker when
its prompt is known, and leaves exactly once however it ends.
"""

from collections import Counter
from dataclasses import dataclass

from gateway.access.caller import id_in
from gateway.errors import DuplicateRequest, QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCounts:
    """num_entered: requests in flight; num_placed: those that a worker has."""

    num_entered: int
    num_placed: int


class Admission:
    """All-or-nothing, idempotent where it says so. An id is whatever tells requests apart (`Caller.key_of`)."""

    def __init__(self, *, max_requests: int) -> None:
        self._max_requests = max_requests
        self._worker_of: dict[str, str | None] = {}
        self._placed: Counter[str] = Counter()

    def enter(self, request_id: str) -> None:
        """Raises DuplicateRequest, QueueFull; then nothing has changed."""
        if request_id in self._worker_of:
            raise DuplicateRequest(f"request id {id_in(request_id)!r} is in flight")
        if len(self._worker_of) >= self._max_requests:
            raise QueueFull(f"{len(self._worker_of)} requests are in flight, the limit of this gateway")
        self._worker_of[request_id] = None

    def place(self, request_id: str, worker_id: str, *, max_on_worker: int) -> None:
        """Give an entered request to a worker (again, after the first one left). Raises QueueFull; then nothing has
        changed; LookupError for an id that did not enter."""
        former = self._worker_of[request_id]
        on_worker = self._placed[worker_id] - (former == worker_id)
        if on_worker >= max_on_worker:
            raise QueueFull(f"worker {worker_id} has {on_worker} requests of this gateway, its limit")
        self._unplace(former)
        self._worker_of[request_id] = worker_id
        self._placed[worker_id] += 1

    def move(self, request_id: str, worker_id: str) -> None:
        """Another worker has taken a placed request, whatever its limit: the pool has seen to that. Nothing for an id
        that is not in flight."""
        if request_id in self._worker_of:
            self._unplace(self._worker_of[request_id])
            self._worker_of[request_id] = worker_id
            self._placed[worker_id] += 1

    def leave(self, request_id: str) -> None:
        """The request ended. Idempotent."""
        self._unplace(self._worker_of.pop(request_id, None))

    def _unplace(self, worker_id: str | None) -> None:
        if worker_id is None:
            return
        self._placed[worker_id] -= 1
        if not self._placed[worker_id]:
            del self._placed[worker_id]

    def holds(self, request_id: str) -> bool:
        """Whether the request is in flight."""
        return request_id in self._worker_of

    def request_ids(self) -> tuple[str, ...]:
        """Of all requests in flight."""
        return tuple(self._worker_of)

    def counts(self) -> AdmissionCounts:
        """Now."""
        return AdmissionCounts(num_entered=len(self._worker_of), num_placed=self._placed.total())

    def on_worker(self, worker_id: str) -> int:
        """Requests that this worker has."""
        return self._placed.get(worker_id, 0)
