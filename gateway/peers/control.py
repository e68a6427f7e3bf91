"""Abort, cancel, drain and load queries for the requests of every gateway of the service, and the limits they share.

A command is carried out here, and the other gateways are asked to do the same; what another gateway asks is done here
alone. Use of shared limits is reported unasked. Must not know sockets, nor gRPC.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from octavo.gateway.auth.authenticator import Caller
from octavo.gateway.config import PeerConfig
from octavo.gateway.errors import RequestAborted
from octavo.gateway.peers.limits import FORGET_S, GAP_S, SNAPSHOT_S, SharedLimits
from octavo.gateway.peers.peers import PeerAnswers, Peers
from octavo.gateway.requests.tracker import RequestTracker
from octavo.gateway.version import VERSION
from octavo.wire.peer_messages import (
    GatewayPart,
    PeerAbort,
    PeerAskLoad,
    PeerCancel,
    PeerCancelAll,
    PeerDrain,
    PeerReply,
    PeerUse,
    PeerWatch,
    ToPeer,
)

log = structlog.get_logger(__name__)
TIMEOUT_S = 2.0  # for all other gateways together, as the contract says
MIN_WINDOW_S = 1.0  # callers that ask more often get the rate of the last window
_MAX_KEYS = 256  # in one message
_NO_ID = 0  # the transport numbers questions
_LEAVE_S = 0.3  # for the other gateways to take the farewell


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """num_known: other gateways. num_unreachable: those that have not answered for two seconds. news_age_s: age of the
    oldest report that still counts. losses: since the start, by `PEER_LOSSES`."""

    num_known: int = 0
    num_unreachable: int = 0
    news_age_s: float = 0.0
    losses: Mapping[str, int] = field(default_factory=dict)


class Control:
    """One per gateway; every method on its event loop.

    name: this gateway's, for people.
    num_generated(): tokens sent to callers so far.
    begin_drain(grace_s or None): starts the shutdown of this gateway alone and returns at once.
    describe(max_requests): this gateway's part of a snapshot.
    models: the models this gateway expects.
    peers: public so that a simulation can replace it.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        config: PeerConfig,
        *,
        name: str,
        num_generated: Callable[[], int],
        begin_drain: Callable[[float | None], None],
        describe: Callable[[int], GatewayPart],
        models: tuple[str, ...] = (),
    ) -> None:
        self._has_news = asyncio.Event()
        self._snapshot_s = 0.0  # when the next one is due
        self.peers = Peers(config, self.answer, self._snapshot_soon)
        self._introduction = PeerUse(
            call_id=_NO_ID, number=0, gateway_id=self.peers.gateway_id, name=name, release=VERSION, models=models
        )
        self._limits = SharedLimits(tracker, self._introduction)
        self._warned_of: set[str] = set()
        self._reporter: asyncio.Task[None] | None = None
        self._tracker = tracker
        self._num_generated = num_generated
        self.name = name
        self._describe = describe
        self._begin_drain = begin_drain
        self._throughput = Throughput(now_s=time.monotonic())

    async def start(self) -> None:
        """Raises what `Peers.start` does."""
        await self.peers.start()
        if self.peers.has_others:
            for counted in (self._tracker.quotas, self._tracker.admission):
                counted.on_change = self._has_news.set
            self._reporter = asyncio.create_task(self._report_forever(), name="report to the other gateways")

    async def close(self) -> None:
        """Say farewell to the other gateways and close the connections. Idempotent."""
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
            self._reporter = None
            await self.peers.leave(self._limits.farewell(), timeout_s=_LEAVE_S)
        await self.peers.close()

    def figures(self) -> PeerFigures:
        """The state of the connections to the other gateways, for metrics."""
        num_known, num_unreachable = self.peers.counts()
        age_s = self._limits.age_s(time.monotonic_ns())
        return PeerFigures(
            num_known=num_known, num_unreachable=num_unreachable, news_age_s=age_s, losses=self.peers.losses
        )

    async def abort(self, request_id: str) -> Outcome:
        """End the requests of this id, of any tenant, as an operator does."""
        return await self._everywhere(PeerAbort(call_id=_NO_ID, request_id=request_id))

    async def cancel(self, request_id: str, caller: Caller) -> Outcome:
        """End one of the caller's own requests: its stream ends after what was already generated."""
        return await self._everywhere(PeerCancel(call_id=_NO_ID, keys=(caller.key_of(request_id),)))

    async def cancel_all(self, request_ids: Sequence[str], caller: Caller) -> tuple[str, ...]:
        """Cancel these requests of the caller. Returns the names of gateways that did not answer."""
        keys = list(map(caller.key_of, request_ids))
        parts = [tuple(keys[begin : begin + _MAX_KEYS]) for begin in range(0, len(keys), _MAX_KEYS)]
        questions = [PeerCancel(call_id=_NO_ID, keys=part) for part in parts]
        outcomes = await asyncio.gather(*map(self._everywhere, questions))
        return tuple(dict.fromkeys(name for each in outcomes for name in each.silent))

    async def cancel_every(self, caller: Caller) -> Outcome:
        """Cancel every request of the caller's tenant that is in flight."""
        return await self._everywhere(PeerCancelAll(call_id=_NO_ID, tenant=caller.tenant))

    async def drain(self, grace_s: float | None) -> Outcome:
        """Drain every gateway, this one last, since it may exit as soon as it starts."""
        question, asked = PeerDrain(call_id=_NO_ID, grace_s=grace_s), PeerAnswers()
        try:
            asked = await self.peers.ask(question, timeout_s=TIMEOUT_S)
        finally:  # even if the operator hangs up meanwhile
            own = self.answer(question)
        return Outcome(replies={self.name: own} | asked.replies, silent=asked.silent)

    async def load(self) -> Outcome:
        """The load of every gateway."""
        return await self._everywhere(PeerAskLoad(call_id=_NO_ID))

    async def watch(self, max_requests: int, *, timeout_s: float, meanwhile: Awaitable[None]) -> Outcome:
        """What the requests of every gateway are doing, with details of the oldest max_requests. meanwhile: awaited
        before this gateway describes its own."""
        question = PeerWatch(call_id=_NO_ID, max_requests=max_requests)
        asked, _ = await asyncio.gather(self.peers.ask(question, timeout_s=timeout_s), meanwhile)
        return Outcome(replies={self.name: self.answer(question)} | asked.replies, silent=asked.silent)

    def answer(self, question: ToPeer) -> PeerReply:
        """Do what is asked, at this gateway alone. The reply has the load from just before."""
        if isinstance(question, PeerUse):
            self._on_report(question)
            return PeerReply(call_id=_NO_ID, gateway_id="")
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

    # ------------------------------------------------------------ limits that are shared

    async def _report_forever(self) -> None:
        """Send changes soon, and everything every SNAPSHOT_S; never more often than every GAP_S."""
        while True:
            try:
                async with asyncio.timeout(max(0.0, self._snapshot_s - time.monotonic())):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            self._has_news.clear()
            try:
                self._send_reports()
            except Exception:  # a defect, or a message that is too large: the next one may succeed
                log.exception("peers_not_told")
            await asyncio.sleep(GAP_S)

    def _send_reports(self) -> None:
        now_s, now_ns = time.monotonic(), time.monotonic_ns()
        if now_s < self._snapshot_s:
            messages = self._limits.take_changes(now_ns)
        else:
            self._snapshot_s = now_s + SNAPSHOT_S
            for name in self._limits.forget_silent(now_ns):
                log.warning("peer_forgotten", gateway=name, error=f"{name} told nothing for {FORGET_S:g} s")
            self._warn_of_unlisted_peers(now_ns)
            messages = self._limits.take_snapshot(now_ns)
        for message in messages:
            self.peers.send_to_all(message)

    def _snapshot_soon(self) -> None:
        """Report everything soon: a gateway that was just reached may have had no report yet."""
        self._snapshot_s = 0.0
        self._has_news.set()

    def _on_report(self, use: PeerUse) -> None:
        if use.is_leaving:
            self.peers.on_leaving(use.gateway_id)
        if not self._limits.on_report(use, time.monotonic_ns()):
            return
        own, told = self._introduction, f"gateway {use.name}"
        log.info("peer_met", gateway=use.name)
        if use.release != own.release:
            error = f"{told} is of release {use.release}, this one of {own.release}: let one replace the other soon"
            log.warning("peer_of_another_release", gateway=use.name, error=error)
        if use.models and own.models and set(use.models) != set(own.models):
            theirs, ours = ", ".join(use.models), ", ".join(own.models)
            error = f"{told} expects {theirs}, and this one {ours}: gateways of one service have the same models"
            log.warning("peer_of_other_models", gateway=use.name, error=error)

    def _warn_of_unlisted_peers(self, now_ns: int) -> None:
        """Warn of gateways that report to this one but get no reports from it: their limits ignore what is used
        here."""
        for gateway_id, (name, known_s) in self._limits.reporting_peers(now_ns).items():
            if known_s > FORGET_S and gateway_id not in self.peers.ids_sent_to() | self._warned_of:
                self._warned_of.add(gateway_id)
                error = f"gateway {name} knows this one and is not among its --peer-endpoint: it is told nothing here"
                log.warning("peer_not_told", gateway=name, error=error)

    def _load(self) -> PeerReply:
        num_in_flight = self._tracker.admission.counts().num_entered
        num_sent, _ = self._tracker.at_workers()
        return PeerReply(
            call_id=_NO_ID,
            gateway_id="",
            num_in_flight=num_in_flight,
            num_preparing=num_in_flight - num_sent,
            tokens_per_s=self._throughput.read(self._num_generated(), now_s=time.monotonic()),
            is_draining=self._tracker.is_draining,
        )


class Throughput:
    """Tokens per second from a counter that only grows, over windows of at least MIN_WINDOW_S that all readers
    share."""

    def __init__(self, *, now_s: float) -> None:
        self._since_s = now_s
        self._total = 0
        self._rate = 0.0

    def read(self, total: int, *, now_s: float) -> float:
        """Tokens per second over the last complete window; 0.0 until there is one. total: the counter now."""
        elapsed_s = now_s - self._since_s
        if elapsed_s >= MIN_WINDOW_S:
            self._rate = (total - self._total) / elapsed_s
            self._since_s, self._total = now_s, total
        return self._rate
