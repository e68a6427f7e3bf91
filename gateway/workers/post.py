"""Sending to workers: what each outcome means; cancels, pauses and resumes in one message each per turn of the loop."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import structlog

from gateway.workers.decisions import Decision, Peer
from gateway.workers.errors import WorkerBusy, WorkerGone
from gateway.workers.link import PeerFull, PeerGone, RouterLink
from gateway.workers.records import WorkerRecord
from gateway.workers.registry import Registry
from wire.codec import MessageTooLarge
from wire.messages import Cancel, Message, Pause, Resume

log = structlog.get_logger(__name__)


class Post:
    """carry_out: what to do with the registry's decisions when a connection turns out to be gone."""

    def __init__(self, link: RouterLink, registry: Registry, carry_out: Callable[[list[Decision]], None]) -> None:
        self._link = link
        self._registry = registry
        self._carry_out = carry_out
        # By incarnation, not yet sent. Of an output's paces only the last one matters.
        self._cancels: defaultdict[int, list[int]] = defaultdict(list)
        self._paces: defaultdict[int, dict[int, type[Pause] | type[Resume]]] = defaultdict(dict)
        self._is_due = False

    def send(self, record: WorkerRecord, message: Message) -> None:
        """Raises WorkerBusy, WorkerGone (then its outputs have ended), MessageTooLarge; nothing was sent then."""
        try:
            self._link.send(record.peer, message)
        except PeerFull:
            raise WorkerBusy(record.worker_id, "the queue towards it is full") from None
        except PeerGone:
            self._carry_out(self._registry.on_unreachable(record))
            raise WorkerGone(record.worker_id) from None

    def try_send(self, record: WorkerRecord, message: Message) -> bool:
        """Whether it was sent."""
        try:
            self.send(record, message)
        except (WorkerBusy, WorkerGone):
            return False
        return True

    def tell(self, peer: Peer, message: Message) -> None:
        """Say something that the peer asks for again if it gets lost."""
        try:
            self._link.send(peer, message)
        except (PeerFull, PeerGone, MessageTooLarge):
            log.debug("not_told", message=type(message).__name__)

    def cancel(self, incarnation: int, handle: int) -> None:
        """Send a Cancel soon, together with those of the same turn of the loop."""
        self._flush_soon()
        self._cancels[incarnation].append(handle)

    def pace(self, incarnation: int, handle: int, pace: type[Pause] | type[Resume]) -> None:
        """Send a Pause or a Resume soon, likewise."""
        self._flush_soon()
        self._paces[incarnation][handle] = pace

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what waits; where a queue is full it stays for the next call."""
        self._is_due = False
        self._flush_cancels()
        for incarnation in tuple(self._paces):
            record = self._registry.get(incarnation)
            if record is None or self._sent_paces(record, self._paces.get(incarnation, {})):
                self._paces.pop(incarnation, None)

    def _sent_paces(self, record: WorkerRecord, paces: dict[int, type[Pause] | type[Resume]]) -> bool:
        for kind in (Pause, Resume):
            handles = tuple(handle for handle, pace in paces.items() if pace is kind)
            if handles and not self.try_send(record, kind(handles=handles)):
                return False
        return True

    def _flush_cancels(self) -> None:
        for incarnation in tuple(self._cancels):
            record = self._registry.get(incarnation)
            handles = tuple(self._cancels.get(incarnation, ()))
            # A worker that is gone has nothing to cancel.
            if record is None or self.try_send(record, Cancel(handles=handles)):
                self._cancels.pop(incarnation, None)
