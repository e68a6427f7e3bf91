"""Opens and closes requests: resolve, admit, prepare, choose a worker, send. And back out again, however it ends.

Must not know how answers travel (`gateway.servicers`), nor text (`gateway.preparation`).
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from octavo.v1 import inference_pb2 as pb

from gateway.admission import Admission
from gateway.config import RequestLimits
from gateway.errors import DeadlinePassed, Draining, RequestAborted, RequestError
from gateway.live import LiveRequest, LiveRequests
from gateway.meters import GatewayMeters
from gateway.models import ServedModels
from gateway.output import OutputAssembler
from gateway.preparation import Prepared, Preparer
from gateway.rpc.scope import RpcScope
from gateway.sampling import complete_sampling
from gateway.stream import OutputStream
from gateway.text.service import TextService
from gateway.validation.generate import check_capacity
from gateway.workers.errors import WorkerGone
from gateway.workers.pool import WorkerPool
from gateway.workers.views import RunRequest, WorkerView

_MAX_CHOICES = 3  # a worker may leave between the choice and the send


@dataclass(slots=True, eq=False)
class _Preparing:
    """A request between its admission and its worker. error: why its task was cancelled, where we did it."""

    task: "asyncio.Task[object]"
    error: RequestError | None = None


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task is not None, "requests are opened by tasks"
    return task


class Desk:
    """One per gateway process; every method on its event loop."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        models: ServedModels,
        text: TextService,
        limits: RequestLimits,
        meters: GatewayMeters,
        receipt_timeout_s: float,
    ) -> None:
        self.pool = pool
        self.models = models
        self.text = text
        self.limits = limits
        self.meters = meters
        self.admission = Admission(max_requests=limits.max_requests)
        self.live = LiveRequests()
        self.is_draining = False
        self._preparer = Preparer(models, text, limits)
        self._preparing: dict[str, _Preparing] = {}
        self._receipt_timeout_s = receipt_timeout_s

    def check_open(self) -> None:
        """Raises Draining once shutting down has begun."""
        if self.is_draining:
            raise Draining("this gateway is shutting down")

    async def open(
        self, request: pb.GenerateRequest, scope: RpcScope, *, prefix: str, timeout_s: float | None
    ) -> LiveRequest:
        """Start a validated request. prefix: its path in the message. timeout_s: what remains of the caller's time.

        The caller of this has to `close` what it gets. Raises RequestError, TextError, PoolError; then nothing is held.
        """
        self.check_open()
        deadline_s = None if timeout_s is None else scope.started_s + timeout_s
        card = self.models.resolve(request.model, self.pool.cards(), path=f"{prefix}model")
        scope.model = card.name
        scope.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        self.admission.enter(scope.request_id)
        preparing = self._preparing[scope.request_id] = _Preparing(_current_task())
        try:
            prepared = await self._preparer.prepare(request, card, prefix=prefix, deadline_s=deadline_s)
            return self._send_to_somebody(prepared, scope)
        except BaseException as error:
            self.admission.leave(scope.request_id)
            if isinstance(error, asyncio.CancelledError) and preparing.error is not None:
                preparing.task.uncancel()
                raise preparing.error from None
            raise
        finally:
            del self._preparing[scope.request_id]

    # No await from here to `close`: nothing can be lost between the send and the caller's hands.

    def _send_to_somebody(self, prepared: Prepared, scope: RpcScope) -> LiveRequest:
        for _ in range(_MAX_CHOICES - 1):
            try:
                return self._send(prepared, self._choose(prepared), scope)
            except WorkerGone:
                continue
        return self._send(prepared, self._choose(prepared), scope)

    def _choose(self, prepared: Prepared) -> WorkerView:
        if prepared.deadline_s is not None and prepared.deadline_s <= time.monotonic():
            raise DeadlinePassed("the deadline passed before the request was sent to a worker")
        worker = self.pool.choose(prepared.card.name, prepared.prompt_ids_T, prepared.request.cache_salt)
        check_capacity(
            num_prompt_tokens=len(prepared.prompt_ids_T),
            min_tokens=prepared.request.stop.min_tokens,
            card=worker.card,
            capacity=worker.capacity,
        )
        return worker

    def _send(self, prepared: Prepared, worker: WorkerView, scope: RpcScope) -> LiveRequest:
        max_on_worker = worker.capacity.max_num_seqs + worker.capacity.max_waiting
        self.admission.place(scope.request_id, worker.worker_id, max_on_worker=max_on_worker)
        run, stream = self._run_request(prepared, worker, scope), self._stream(prepared, scope)
        handle = self.pool.open(worker, run, stream)
        live = LiveRequest(
            request_id=scope.request_id,
            card=worker.card,
            worker=worker,
            handle=handle,
            stream=stream,
            sampling=run.sampling,
            num_prompt_tokens=len(prepared.prompt_ids_T),
            arrived_s=scope.started_s,
            sent_s=time.monotonic(),
            task=_current_task(),
        )
        self.live.add(live)
        scope.worker_id = worker.worker_id
        meters = self.meters.of_model(worker.card.name)
        meters.started += 1
        meters.prompt_tokens += live.num_prompt_tokens
        return live

    def _run_request(self, prepared: Prepared, worker: WorkerView, scope: RpcScope) -> RunRequest:
        request, deadline_s = prepared.request, prepared.deadline_s
        return RunRequest(
            request_id=scope.request_id,
            prompt_ids=prepared.prompt_ids_T,
            sampling=complete_sampling(request, worker.card, num_prompt_tokens=len(prepared.prompt_ids_T)),
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_s=None if deadline_s is None else max(0.001, deadline_s - time.monotonic()),
        )

    def _stream(self, prepared: Prepared, scope: RpcScope) -> OutputStream:
        return OutputStream(
            OutputAssembler(prepared.output),
            max_pending_tokens=self.limits.max_pending_tokens,
            on_match=self._matched(scope),
        )

    def _matched(self, scope: RpcScope) -> Callable[[OutputStream], None]:
        """When a stop string ends the output the worker is told, and its figures are waited for, not for ever."""

        def cancel(stream: OutputStream) -> None:
            live = self.live.get(scope.request_id)
            if live is not None and live.stream is stream:
                self.pool.cancel(live.handle)
                asyncio.get_running_loop().call_later(self._receipt_timeout_s, stream.stop_waiting_for_figures)

        return cancel

    def fail(self, request_id: str, error: RequestError) -> bool:
        """End a request from here, whatever it is doing; False where it is not in flight."""
        live, preparing = self.live.get(request_id), self._preparing.get(request_id)
        if live is not None:
            live.fail(error)
        elif preparing is not None:
            preparing.error = error
            preparing.task.cancel()
        return live is not None or preparing is not None

    def abort(self, request_id: str) -> bool:
        """End a request for its caller's sake: the worker is told at once, the caller gets what came before and an
        end; False where it is not in flight."""
        error, live = RequestAborted("the request was aborted"), self.live.get(request_id)
        if live is None:
            return self.fail(request_id, error)
        live.stream.fail(error)  # a message that is being written is left to reach its reader
        self.pool.cancel(live.handle)
        return True

    def fail_all(self, error: RequestError) -> int:
        """End every request; how many."""
        return sum(self.fail(request_id, error) for request_id in self.admission.request_ids())

    def close(self, live: LiveRequest) -> None:
        """The RPC is over, however: free the worker at once where it still runs, forget the request. Idempotent."""
        if live.stream.finished is None:
            self.pool.cancel(live.handle)
        live.stream.fail(Draining("closed"))  # a no-op on a stream that has ended
        self.live.remove(live.request_id)
        self.admission.leave(live.request_id)
