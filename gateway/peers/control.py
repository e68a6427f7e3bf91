"""Abort, cancel, drain and the query of the load, for the requests of every gateway of the service.

Each is done here, and the other gateways are asked to do the same; what they ask is done here alone. Must not know
sockets, nor gRPC.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.gateway.auth.authenticator import Caller
from octavo.gateway.config import PeerConfig
from octavo.gateway.errors import RequestAborted
from octavo.gateway.peers.peers import Asked, Peers
from octavo.gateway.requests.tracker import RequestTracker
from octavo.wire.peer_messages import (
    GatewayPart,
    PeerAbort,
    PeerAskLoad,
    PeerCancel,
    PeerCancelAll,
    PeerDrain,
    PeerReply,
    PeerWatch,
    ToPeer,
)

TIMEOUT_S = 2.0  # for all other gateways together, as the contract says
MIN_WINDOW_S = 1.0  # callers that ask more often get the rate of the last window
_MAX_KEYS = 256  # in one message
_NO_ID = 0  # the transport numbers questions


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """replies: by the gateway's name, this gateway's first. silent: names of those that did not answer in time."""

    replies: dict[str, PeerReply]
    silent: tuple[str, ...]

    @property
    def num_ended(self) -> int:
        """Requests that were ended, at all gateways."""
        return sum(reply.num_ended for reply in self.replies.values())

    @property
    def num_in_flight(self) -> int:
        """Requests at all gateways."""
        return sum(reply.num_in_flight for reply in self.replies.values())

    @property
    def tokens_per_s(self) -> float:
        """Sent to the callers of all gateways."""
        return sum(reply.tokens_per_s for reply in self.replies.values())


class Control:
    """One per gateway; every method on its event loop. name: this gateway's, for people. num_generated: tokens
    that it has sent so far. begin_drain(grace_s or None): start the shutdown of this gateway alone, return at once.
    describe(max_requests): this gateway's part of a snapshot.
    peers: a simulation brings its own."""

    def __init__(
        self,
        tracker: RequestTracker,
        config: PeerConfig,
        *,
        name: str,
        num_generated: Callable[[], int],
        begin_drain: Callable[[float | None], None],
        describe: Callable[[int], GatewayPart],
    ) -> None:
        self.peers = Peers(config, self.answer)
        self._tracker = tracker
        self._num_generated = num_generated
        self.name = name
        self._describe = describe
        self._begin_drain = begin_drain
        self._throughput = Throughput(now_s=time.monotonic())

    async def abort(self, request_id: str) -> Outcome:
        """End the requests of this id, of any tenant, as an operator does."""
        return await self._everywhere(PeerAbort(call_id=_NO_ID, request_id=request_id))

    async def cancel(self, request_id: str, caller: Caller) -> Outcome:
        """End a caller's own request: it gets what came before and an end."""
        return await self._everywhere(PeerCancel(call_id=_NO_ID, keys=(caller.key_of(request_id),)))

    async def cancel_all(self, request_ids: Sequence[str], caller: Caller) -> None:
        """The same for any number of them."""
        keys = list(map(caller.key_of, request_ids))
        parts = [tuple(keys[begin : begin + _MAX_KEYS]) for begin in range(0, len(keys), _MAX_KEYS)]
        await asyncio.gather(*(self._everywhere(PeerCancel(call_id=_NO_ID, keys=part)) for part in parts))

    async def cancel_every(self, caller: Caller) -> Outcome:
        """The same for all requests of the caller's tenant that are in flight now."""
        return await self._everywhere(PeerCancelAll(call_id=_NO_ID, tenant=caller.tenant))

    async def drain(self, grace_s: float | None) -> Outcome:
        """Drain every gateway, this one last: it may be gone as soon as it has begun."""
        question, asked = PeerDrain(call_id=_NO_ID, grace_s=grace_s), Asked()
        try:
            asked = await self.peers.ask(question, timeout_s=TIMEOUT_S)
        finally:  # also where the operator leaves meanwhile
            own = self.answer(question)
        return Outcome(replies={self.name: own} | asked.replies, silent=asked.silent)

    async def load(self) -> Outcome:
        """What every gateway is doing."""
        return await self._everywhere(PeerAskLoad(call_id=_NO_ID))

    async def watch(self, max_requests: int, *, timeout_s: float, meanwhile: Awaitable[None]) -> Outcome:
        """What the requests of every gateway are doing, and the oldest of them. meanwhile: is awaited before this
        gateway tells its own."""
        question = PeerWatch(call_id=_NO_ID, max_requests=max_requests)
        asked, _ = await asyncio.gather(self.peers.ask(question, timeout_s=timeout_s), meanwhile)
        return Outcome(replies={self.name: self.answer(question)} | asked.replies, silent=asked.silent)

    def answer(self, question: ToPeer) -> PeerReply:
        """Do it at this gateway alone; the reply has the load just before."""
        load = self._load()
        match question:
            case PeerAbort():
                error = RequestAborted("the request was ended by an operator")
                return msgspec.structs.replace(load, num_ended=self._tracker.fail(question.request_id, error))
            case PeerCancel():
                return msgspec.structs.replace(load, num_ended=sum(map(self._tracker.abort, question.keys)))
            case PeerCancelAll():
                return msgspec.structs.replace(load, num_ended=self._tracker.abort_all(question.tenant))
            case PeerDrain():
                self._begin_drain(question.grace_s)
                return msgspec.structs.replace(load, is_draining=True)
            case PeerAskLoad():
                return load
            case PeerWatch():
                return msgspec.structs.replace(load, part=self._describe(question.max_requests))

    async def _everywhere(self, question: ToPeer) -> Outcome:
        own = self.answer(question)
        asked = await self.peers.ask(question, timeout_s=TIMEOUT_S)
        return Outcome(replies={self.name: own} | asked.replies, silent=asked.silent)

    def _load(self) -> PeerReply:
        num_in_flight = self._tracker.admission.counts().num_entered
        return PeerReply(
            call_id=_NO_ID,
            gateway_id="",
            num_in_flight=num_in_flight,
            num_preparing=num_in_flight - len(self._tracker),
            tokens_per_s=self._throughput.read(self._num_generated(), now_s=time.monotonic()),
            is_draining=self._tracker.is_draining,
        )


class Throughput:
    """Tokens per second from a counter that only grows: the rate between two readings; several readers share the
    windows."""

    def __init__(self, *, now_s: float) -> None:
        self._since_s = now_s
        self._total = 0
        self._rate = 0.0

    def read(self, total: int, *, now_s: float) -> float:
        """total: the counter now. 0.0 until the first window is over."""
        elapsed_s = now_s - self._since_s
        if elapsed_s >= MIN_WINDOW_S:
            self._rate = (total - self._total) / elapsed_s
            self._since_s, self._total = now_s, total
        return self._rate
