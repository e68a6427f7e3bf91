"""Admin queries under way: which worker was asked, and the future of its answer. Must not know sockets."""

import asyncio
from collections.abc import Callable, Iterable

from octavo.gateway.workers.registry import WorkerRecord
from octavo.wire.messages import AdminQuery, AdminReply, Message

Answer = asyncio.Future[AdminReply]


class Queries:
    """Ids are drawn here. A future without an answer is cancelled after its time, or when its worker is lost."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, Answer]] = {}
        self._next_id = 1

    async def ask(
        self,
        records: Iterable[WorkerRecord],
        try_send: Callable[[WorkerRecord, Message], bool],
        *,
        audit: bool,
        flush: bool,
        timeout_s: float,
    ) -> list[tuple[str, AdminReply]]:
        """The answers that come in time, in order of the workers' ids."""
        asked: dict[Answer, str] = {}
        for record in records:
            query_id, future = self._new(record.incarnation)
            if try_send(record, AdminQuery(query_id=query_id, audit=audit, flush_prefix_cache=flush)):
                asked[future] = record.worker_id
        if asked:
            await asyncio.wait(asked, timeout=timeout_s)
        answered = [
            (name, future.result()) for future, name in asked.items() if future.done() and not future.cancelled()
        ]
        for future in asked:
            future.cancel()
        return sorted(answered, key=lambda row: row[0])

    def _new(self, incarnation: int) -> tuple[int, Answer]:
        query_id, self._next_id = self._next_id, self._next_id + 1
        future: Answer = asyncio.get_running_loop().create_future()
        self._open[query_id] = (incarnation, future)
        future.add_done_callback(lambda _: self._open.pop(query_id, None))
        return query_id, future

    def take(self, incarnation: int, reply: AdminReply) -> bool:
        """Take an answer; whether this worker was sent that query."""
        asked, future = self._open.get(reply.query_id, (None, None))
        if future is None or asked != incarnation:
            return False
        if not future.done():
            future.set_result(reply)
        return True

    def lose(self, incarnation: int) -> None:
        """The worker is gone: cancel what waits for it."""
        for asked, future in tuple(self._open.values()):
            if asked == incarnation:
                future.cancel()
