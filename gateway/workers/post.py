"""Sending to workers: what each outcome means, and cancels in one message per turn of the loop."""

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
from wire.messages import Cancel, Message

log = structlog.get_logger(__name__)


class Post:
    """carry_out: what to do with the registry's decisions when a connection turns out to be gone."""

    def __init__(self, link: RouterLink, registry: Registry, carry_out: Callable[[list[Decision]], None]) -> None:
        self._link = link
        self._registry = registry
        self._carry_out = carry_out
        self._cancels: defaultdict[int, list[int]] = defaultdict(list)  # by incarnation, not yet sent

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
        if not self._cancels:
            asyncio.get_running_loop().call_soon(self.flush_cancels)
        self._cancels[incarnation].append(handle)

    def flush_cancels(self) -> None:
        """Send what waits; where a queue is full it stays for the next call."""
        for incarnation in tuple(self._cancels):
            record = self._registry.get(incarnation)
            handles = tuple(self._cancels.get(incarnation, ()))
            # A worker that is gone has nothing to cancel.
            if record is None or self.try_send(record, Cancel(handles=handles)):
                self._cancels.pop(incarnation, None)
