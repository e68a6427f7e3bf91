"""Who is in flight: requests enter, are failed or aborted whatever they are doing, and leave, however they end.

Keeps the parts that all of them share. Must not know what is sent to workers (`gateway.requests.submit`,
`gateway.requests.embedding`), how answers travel (`gateway.servicers`), nor text (`gateway.requests.input_processor`).
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.gateway.auth.caller import PrefixSalt, id_in
from octavo.gateway.config import RequestLimits
from octavo.gateway.errors import Draining, RequestAborted, RequestError, SlowConsumer, TenantLimit
from octavo.gateway.models import ServedModels
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.requests.admission import Admission, TenantQuotas
from octavo.gateway.requests.input_processor import Preparer
from octavo.gateway.requests.prompts import Prompts
from octavo.gateway.rpc.connections import PeerUse
from octavo.gateway.rpc.scope import RpcScope
from octavo.gateway.streams.stream import Coalescer, OutputStream
from octavo.gateway.text.fair_queue import Share
from octavo.gateway.text.render_pool import Renderer
from octavo.gateway.text.service import TextService
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerView
from octavo.wire.messages import ModelCard, Sampling

# The requests that are in flight: each with its stream, its worker's handle and the task that answers it.


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request that a worker has. Times are monotonic seconds.

    key: its id as no other tenant can have it. worker: its first, as it was chosen. sent_s: when it was sent there.
    task: the one that answers the RPC. handle, stream, sampling: of output 0; further: of the outputs after it, which
    draw with the seeds after its. prompt_text, prompt_ids: where the caller asked for them.
    """

    request_id: str
    key: str
    card: ModelCard
    worker: WorkerView
    handle: int
    stream: OutputStream
    sampling: Sampling
    num_prompt_tokens: int
    arrived_s: float
    sent_s: float
    task: "asyncio.Task[object]"
    last_message_s: float = field(default=0.0)
    num_complete: int = 0  # outputs that are complete and were sent
    further: tuple[tuple[int, OutputStream], ...] = ()
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    backstop: asyncio.TimerHandle | None = None  # ends the output where the worker is late at the deadline

    @property
    def outputs(self) -> tuple[tuple[int, OutputStream], ...]:
        """Handle and stream of each output."""
        return ((self.handle, self.stream), *self.further)

    @property
    def streams(self) -> list[OutputStream]:
        """Of each output."""
        return [stream for _, stream in self.outputs]

    def worker_id(self, index: int = 0) -> str:
        """Who has the output, or had it last."""
        return self.streams[index].worker_id or self.worker.worker_id

    @property
    def num_tokens(self) -> int:
        """Generated, in all outputs."""
        return sum(stream.assembler.num_tokens for stream in self.streams)

    def end_at_deadline(self, figures_s: float) -> None:
        """The time is over and the worker has not said so: for so long its figures are waited for, where there is
        something to tell them with."""
        for stream in self.streams:
            stream.end_at_deadline()
        self.backstop = asyncio.get_running_loop().call_later(figures_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        for stream in self.streams:
            stream.stop_waiting_for_figures()

    def fail(self, error: RequestError) -> None:
        """End it from here. Where its task is in a write, the task is cancelled and finds the error in the stream: a
        caller that does not read would keep even a complete output open."""
        for stream in self.streams:
            stream.fail(error)
        if self.stream.write_since_s:
            self.interrupt(error)

    def interrupt(self, error: RequestError) -> None:
        """End it though its output may be complete: nobody reads it."""
        self.stream.error = self.stream.error or error
        self.task.cancel()


class LiveRequests:
    """By key. Owns nothing but the index."""

    def __init__(self) -> None:
        self._by_key: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._by_key.values()))

    def add(self, live: LiveRequest) -> None:
        """Keys are unique: admission has seen to that."""
        self._by_key[live.key] = live

    def remove(self, key: str) -> None:
        """Idempotent."""
        self._by_key.pop(key, None)

    def get(self, key: str) -> LiveRequest | None:
        """None where it is not in flight."""
        return self._by_key.get(key)

    def fail_stalled_writes(self, *, max_wait_s: float) -> int:
        """End streams whose reader has not taken a message for so long; how many."""
        limit_s = time.monotonic() - max_wait_s
        stalled = [live for live in self if 0.0 < live.stream.write_since_s < limit_s]
        for live in stalled:
            live.interrupt(SlowConsumer(f"a message waited for more than {max_wait_s:g} s to be read"))
        return len(stalled)

    def num_scheduled(self) -> int:
        """Requests that a worker has begun."""
        return sum(1 for live in self._by_key.values() if live.stream.scheduled_s or live.stream.first_token_s)


@dataclass(slots=True, eq=False)
class Place:
    """Of a request that its task alone has. error: why the task was cancelled, where we did it. num_used_tokens: what a
    tenant's quota is charged if it ends here."""

    task: "asyncio.Task[object]"
    error: RequestError | None = None
    num_used_tokens: int = 0


def current_task() -> "asyncio.Task[object]":
    """Whose request it is."""
    task = asyncio.current_task()
    assert task is not None, "requests are opened by tasks"
    return task


def now_ns() -> int:
    """Monotonic, as quotas count."""
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
        renderer: Renderer,
    ) -> None:
        self.pool = pool
        self.models = models
        self.text = text
        self.limits = limits
        self.meters = meters
        self.admission = Admission(max_requests=limits.max_requests)
        self.quotas = TenantQuotas()
        self.live = LiveRequests()
        self.is_draining = False
        self.prompts = Prompts(text, renderer)
        self.preparer = Preparer(models, text, self.prompts, limits)
        self.receipt_timeout_s = receipt_timeout_s
        self.coalescer = Coalescer()
        self._prefix_salt = prefix_salt or PrefixSalt()
        self._preparing: dict[str, Place] = {}
        self.peers = PeerUse()
        self._peer_of: dict[str, str] = {}

    def check_open(self) -> None:
        """Raises Draining once shutting down has begun."""
        if self.is_draining:
            raise Draining("this gateway is shutting down")

    def card_of(self, name: str, scope: RpcScope, *, path: str = "model") -> ModelCard:
        """The model that a request means: the one that it names, else the one that its metadata or its listener does,
        else the only one. path: of the field that names it. Raises NoWorker, ModelNotFound, InvalidRequest."""
        name, cards = name or scope.model, self.pool.cards()
        registered = () if name in cards else {worker.card.name for worker in self.pool.workers()}
        return self.models.resolve(name, cards, registered, path=path)

    # ------------------------------------------------------------ in

    @contextmanager
    def enter(self, scope: RpcScope, *, num_outputs: int = 1) -> Iterator[Place]:
        """A place for a request: kept until `close` where the block ends well, given back where it does not. While the
        block runs `fail` cancels its task, and the block raises the error then."""
        key, place = scope.key, Place(current_task())
        self.admission.enter(key, num_outputs=num_outputs)
        self._peer_of[key] = scope.peer
        self.peers.begin(scope.peer)
        self._preparing[key] = place
        try:
            self.quotas.enter(key, scope.caller, now_ns(), num_outputs=num_outputs)
            yield place
        except BaseException as error:
            self._leave(key, num_used=place.num_used_tokens)
            if isinstance(error, TenantLimit):
                self.meters.tenant_refusals += 1
            if isinstance(error, asyncio.CancelledError) and place.error is not None:
                place.task.uncancel()
                raise place.error from None
            raise
        finally:
            del self._preparing[key]

    @contextmanager
    def hold(self, scope: RpcScope) -> Iterator[Place]:
        """The same for a request that its task does alone to its end: the place is given back in any case."""
        with self.enter(scope) as place:
            yield place
        self._leave(scope.key, num_used=place.num_used_tokens)

    def salt_of(self, scope: RpcScope, cache_salt: str) -> str:
        """The salt that a caller's cached prefixes are kept under."""
        return self._prefix_salt.of(scope.caller, cache_salt)

    def share_of(self, scope: RpcScope) -> Share:
        """What a caller's texts wait by."""
        return Share(tenant=scope.caller.tenant or "", weight=scope.caller.weight)

    def label_of(self, scope: RpcScope) -> str:
        """What workers know a caller's tenant by."""
        return self._prefix_salt.label_of(scope.caller)

    # ------------------------------------------------------------ out

    def fail(self, request_id: str, error: RequestError) -> int:
        """End all requests of this id from here, whatever they are doing and whoever's they are; how many."""
        keys = [key for key in self.admission.request_ids() if id_in(key) == request_id]
        return sum(self._fail(key, error) for key in keys)

    def _fail(self, key: str, error: RequestError) -> bool:
        live, preparing = self.live.get(key), self._preparing.get(key)
        if live is not None:
            live.fail(error)
        elif preparing is not None:
            preparing.error = error
            preparing.task.cancel()
        return live is not None or preparing is not None

    def abort(self, key: str) -> bool:
        """End a request for its caller's sake: the worker is told at once, the caller gets what came before and an
        end; False where it is not in flight."""
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
        if (peer := self._peer_of.pop(key, None)) is not None:
            self.peers.end(peer)
        self.quotas.leave(key, num_used=num_used, now_ns=now_ns())
