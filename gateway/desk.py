"""Who is in flight: requests enter, are failed or aborted whatever they are doing, and leave, however they end.

Keeps the parts that all of them share. Must not know what is sent to workers (`gateway.opening`, `gateway.embedding`),
how answers travel (`gateway.servicers`), nor text (`gateway.preparation`).
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.access.caller import id_in
from gateway.access.prefix_salt import PrefixSalt
from gateway.admission import Admission
from gateway.coalescing import Coalescer
from gateway.config import RequestLimits
from gateway.errors import Draining, RequestAborted, RequestError, TenantLimit
from gateway.live import LiveRequest, LiveRequests
from gateway.meters import GatewayMeters
from gateway.models import ServedModels
from gateway.preparation import Preparer
from gateway.prompts import Prompts
from gateway.quotas import TenantQuotas
from gateway.rpc.connections import PeerUse
from gateway.rpc.scope import RpcScope
from gateway.text.fair_queue import Share
from gateway.text.render_pool import Renderer
from gateway.text.service import TextService
from gateway.workers.pool import WorkerPool
from wire.messages import ModelCard


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
