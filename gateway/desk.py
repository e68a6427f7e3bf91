"""Opens and closes requests: resolve, admit, prepare, choose a worker, send. And back out again, however it ends.

Must not know how answers travel (`gateway.servicers`), nor text (`gateway.preparation`).
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from octavo.v1 import inference_pb2 as pb

from gateway.access.caller import ANYBODY, Caller, id_in
from gateway.access.prefix_salt import PrefixSalt
from gateway.admission import Admission
from gateway.config import RequestLimits
from gateway.deadline import BACKSTOP_S, AtDeadline, Deadline, deadline_of
from gateway.errors import DeadlinePassed, Draining, RequestAborted, RequestError, TenantLimit
from gateway.live import LiveRequest, LiveRequests
from gateway.meters import GatewayMeters
from gateway.models import ServedModels
from gateway.output import OutputAssembler
from gateway.preparation import Prepared, Preparer
from gateway.quotas import TenantQuotas
from gateway.rpc.scope import RpcScope
from gateway.sampling import complete_sampling
from gateway.stream import Bell, OutputStream
from gateway.text.service import TextService
from gateway.validation.generate import check_capacity, check_outputs
from gateway.workers.errors import WorkerGone
from gateway.workers.pool import WorkerPool
from gateway.workers.views import RunRequest, WorkerView

_MAX_CHOICES = 3  # a worker may leave between the choice and the send


@dataclass(slots=True, eq=False)
class _Preparing:
    """A request between its admission and its worker. error: why its task was cancelled, where we did it."""

    task: "asyncio.Task[object]"
    error: RequestError | None = None


@dataclass(slots=True, eq=False)
class Held:
    """num_used_tokens: what a tenant's quota is charged in the end."""

    num_used_tokens: int = 0


_TOO_LATE = "the deadline passed before the request was sent to a worker"


@asynccontextmanager
async def until(end_s: float | None) -> AsyncIterator[None]:
    """end_s: monotonic. Raises DeadlinePassed where the time is over before the block."""
    try:
        async with asyncio.timeout(None if end_s is None else max(0.0, end_s - time.monotonic())):
            yield
    except TimeoutError:
        raise DeadlinePassed(_TOO_LATE) from None


def _deadline(request: pb.GenerateRequest, scope: RpcScope, wire_timeout_s: float | None) -> Deadline:
    return deadline_of(
        arrived_s=scope.started_s,
        wire_timeout_s=wire_timeout_s,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        at_end=AtDeadline.PARTIAL if request.return_partial_on_deadline else AtDeadline.STATUS,
    )


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task is not None, "requests are opened by tasks"
    return task


def _now_ns() -> int:
    return round(time.monotonic() * 1e9)


class Desk:
    """One per gateway process; every method on its event loop. Requests are known by their keys (`RpcScope.key`): the
    same id may be in flight for several tenants, who learn nothing of each other."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        models: ServedModels,
        text: TextService,
        limits: RequestLimits,
        meters: GatewayMeters,
        receipt_timeout_s: float,
        prefix_salt: PrefixSalt | None = None,
    ) -> None:
        self.pool = pool
        self.models = models
        self.text = text
        self.limits = limits
        self.meters = meters
        self.admission = Admission(max_requests=limits.max_requests)
        self.quotas = TenantQuotas()
        self._prefix_salt = prefix_salt or PrefixSalt()
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
        deadline = _deadline(request, scope, timeout_s)
        card = self.models.resolve(request.model, self.pool.cards(), path=f"{prefix}model")
        scope.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        key, num_outputs = scope.key, request.num_outputs or 1
        self.admission.enter(key, num_outputs=num_outputs)
        preparing = self._preparing[key] = _Preparing(_current_task())
        try:
            self.quotas.enter(key, scope.caller, _now_ns(), num_outputs=num_outputs)
            async with until(deadline.end_s):
                prepared = await self._preparer.prepare(request, card, prefix=prefix, deadline=deadline)
            return self._send_to_somebody(prepared, scope)
        except BaseException as error:
            self._leave(key, num_used=0)
            if isinstance(error, TenantLimit):
                self.meters.tenant_refusals += 1
            if isinstance(error, asyncio.CancelledError) and preparing.error is not None:
                preparing.task.uncancel()
                raise preparing.error from None
            raise
        finally:
            del self._preparing[key]

    @contextmanager
    def hold(self, scope: RpcScope) -> Iterator["Held"]:
        """The place of a request that its task does alone, from admission to its end; `fail` cancels the task."""
        key, held = scope.key, Held()
        self.admission.enter(key)
        preparing = self._preparing[key] = _Preparing(_current_task())
        try:
            self.quotas.enter(key, scope.caller, _now_ns())
            yield held
        except TenantLimit:
            self.meters.tenant_refusals += 1
            raise
        except asyncio.CancelledError:
            if preparing.error is None:
                raise
            preparing.task.uncancel()
            raise preparing.error from None
        finally:
            self._leave(key, num_used=held.num_used_tokens)
            del self._preparing[key]

    def salt_of(self, scope: RpcScope, cache_salt: str) -> str:
        """The salt that a caller's cached prefixes are kept under."""
        return self._prefix_salt.of(scope.caller, cache_salt)

    def label_of(self, scope: RpcScope) -> str:
        """What workers know a caller's tenant by."""
        return self._prefix_salt.label_of(scope.caller)

    # No await from here to `close`: nothing can be lost between the send and the caller's hands.

    def _send_to_somebody(self, prepared: Prepared, scope: RpcScope) -> LiveRequest:
        salt = self._prefix_salt.of(scope.caller, prepared.request.cache_salt)
        for _ in range(_MAX_CHOICES - 1):
            try:
                return self._send(prepared, self._choose(prepared, salt), scope, salt)
            except WorkerGone:
                continue
        return self._send(prepared, self._choose(prepared, salt), scope, salt)

    def _choose(self, prepared: Prepared, salt: str) -> WorkerView:
        if prepared.deadline.end_s is not None and prepared.deadline.end_s <= time.monotonic():
            raise DeadlinePassed(_TOO_LATE)
        worker = self.pool.choose(prepared.card.name, prepared.prompt_ids_T, salt)
        check_capacity(
            num_prompt_tokens=len(prepared.prompt_ids_T),
            min_tokens=prepared.request.stop.min_tokens,
            card=worker.card,
            capacity=worker.capacity,
        )
        check_outputs(len(prepared.outputs), worker.capacity)
        return worker

    def _send(self, prepared: Prepared, worker: WorkerView, scope: RpcScope, salt: str) -> LiveRequest:
        max_on_worker = worker.capacity.max_num_seqs + worker.capacity.max_waiting
        self.admission.place(scope.key, worker.worker_id, max_on_worker=max_on_worker)
        run, bell = self._run_request(prepared, worker, scope, salt), Bell()
        streams = [self._stream(index, prepared, scope, bell) for index in range(len(prepared.outputs))]
        num_tokens = len(prepared.prompt_ids_T) + len(streams) * run.sampling.max_tokens
        self.quotas.reserve(scope.key, num_tokens, _now_ns())
        handles = self.pool.open_all(worker, run, streams)
        tells_prompt = prepared.request.output.return_prompt
        live = LiveRequest(
            request_id=scope.request_id,
            key=scope.key,
            card=worker.card,
            worker=worker,
            handle=handles[0],
            stream=streams[0],
            further=tuple(zip(handles[1:], streams[1:], strict=True)),
            prompt_text=prepared.prompt_text if tells_prompt else "",
            prompt_ids=prepared.prompt_ids_T.tolist() if tells_prompt else (),
            sampling=run.sampling,
            num_prompt_tokens=len(prepared.prompt_ids_T),
            arrived_s=scope.started_s,
            sent_s=time.monotonic(),
            task=_current_task(),
        )
        self.live.add(live)
        self._set_backstop(live, prepared.deadline)
        meters = self.meters.of_model(worker.card.name)
        meters.started += 1
        meters.prompt_tokens += live.num_prompt_tokens
        return live

    def _run_request(self, prepared: Prepared, worker: WorkerView, scope: RpcScope, salt: str) -> RunRequest:
        request, deadline_s = prepared.request, prepared.deadline.end_s
        return RunRequest(
            request_id=scope.request_id,
            prompt_ids=prepared.prompt_ids_T,
            sampling=complete_sampling(
                request,
                worker.card,
                num_prompt_tokens=len(prepared.prompt_ids_T),
                grammar=prepared.grammar,
                bad_words=prepared.bad_words,
            ),
            priority=request.priority,
            cache_salt=salt,
            timeout_s=None if deadline_s is None else max(0.001, deadline_s - time.monotonic()),
            tenant=self.label_of(scope),
            weight=scope.caller.weight,
        )

    def _stream(self, index: int, prepared: Prepared, scope: RpcScope, bell: Bell) -> OutputStream:
        return OutputStream(
            OutputAssembler(prepared.outputs[index]),
            max_pending_tokens=self.limits.max_pending_tokens,
            pause_pending_tokens=self.limits.pause_pending_tokens,
            on_match=self._matched(scope.key),
            on_started=self._started(scope, index),
            on_moved=lambda worker_id: self.admission.move(scope.key, worker_id, index),
            on_flow=self._flowed(scope.key),
            at_deadline=prepared.deadline.at_end,
            bell=bell,
        )

    def _set_backstop(self, live: LiveRequest, deadline: Deadline) -> None:
        if deadline.end_s is not None and deadline.needs_backstop:
            delay_s = deadline.end_s - time.monotonic() + BACKSTOP_S
            live.backstop = asyncio.get_running_loop().call_later(delay_s, live.end_at_deadline, deadline.figures_s)

    def _started(self, scope: RpcScope, index: int) -> Callable[[], None] | None:
        """For tenants, whose outputs are no longer queued then."""
        key = scope.key
        return None if scope.caller.tenant is None else lambda: self.quotas.started(key, index)

    def _matched(self, key: str) -> Callable[[OutputStream], None]:
        """When a stop string ends the output the worker is told, and its figures are waited for, not for ever."""

        def cancel(stream: OutputStream) -> None:
            for handle in self._handles_of(stream, key):
                self.pool.cancel(handle)
                asyncio.get_running_loop().call_later(self._receipt_timeout_s, stream.stop_waiting_for_figures)

        return cancel

    def _flowed(self, key: str) -> Callable[[OutputStream], None]:
        """When a reader falls behind, or has caught up, the worker is told."""

        def tell(stream: OutputStream) -> None:
            for handle in self._handles_of(stream, key):
                (self.pool.pause if stream.is_paused else self.pool.resume)(handle)

        return tell

    def _handles_of(self, stream: OutputStream, key: str) -> list[int]:
        live = self.live.get(key)
        return [handle for handle, other in live.outputs if other is stream] if live is not None else []

    def fail(self, request_id: str, error: RequestError) -> bool:
        """End a request from here, whatever it is doing and whoever's it is; False where it is not in flight."""
        keys = [key for key in self.admission.request_ids() if id_in(key) == request_id]
        return sum(self._fail(key, error) for key in keys) > 0

    def _fail(self, key: str, error: RequestError) -> bool:
        live, preparing = self.live.get(key), self._preparing.get(key)
        if live is not None:
            live.fail(error)
        elif preparing is not None:
            preparing.error = error
            preparing.task.cancel()
        return live is not None or preparing is not None

    def abort(self, request_id: str, caller: Caller = ANYBODY) -> bool:
        """End a request for its caller's sake: the worker is told at once, the caller gets what came before and an
        end; False where no request of the caller's tenant with this id is in flight."""
        key = caller.key_of(request_id)
        error, live = RequestAborted("the request was aborted"), self.live.get(key)
        if live is None:
            return self._fail(key, error)
        for handle, stream in live.outputs:
            stream.fail(error)  # a message that is being written is left to reach its reader
            self.pool.cancel(handle)
        return True

    def fail_all(self, error: RequestError) -> int:
        """End every request; how many."""
        return sum(self._fail(key, error) for key in self.admission.request_ids())

    def close(self, live: LiveRequest) -> None:
        """The RPC is over, however: free the worker at once where it still runs, forget the request. Idempotent."""
        if live.backstop is not None:
            live.backstop.cancel()
        for handle, stream in live.outputs:
            if stream.finished is None:
                self.pool.cancel(handle)
            stream.fail(Draining("closed"))  # a no-op on a stream that has ended
        self.live.remove(live.key)
        self._leave(live.key, num_used=live.num_prompt_tokens + live.num_tokens)

    def _leave(self, key: str, *, num_used: int) -> None:
        self.admission.leave(key)
        self.quotas.leave(key, num_used=num_used, now_ns=_now_ns())
