"""Admin questions under way: which worker was asked, and who waits for the answer."""

import asyncio

from wire.messages import AdminReply

Answer = asyncio.Future[AdminReply]


class Queries:
    """Ids are drawn here. Futures that nobody answers are cancelled by the one who waits, or with the worker."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, Answer]] = {}
        self._next_id = 1

    def open(self, incarnation: int) -> tuple[int, Answer]:
        """A new question to one worker: its id, and the future of the answer."""
        query_id, self._next_id = self._next_id, self._next_id + 1
        future: Answer = asyncio.get_running_loop().create_future()
        self._open[query_id] = (incarnation, future)
        future.add_done_callback(lambda _: self._open.pop(query_id, None))
        return query_id, future

    def take(self, incarnation: int, reply: AdminReply) -> bool:
        """An answer; whether this worker was asked that."""
        asked, future = self._open.get(reply.query_id, (None, None))
        if future is None or asked != incarnation:
            return False
        if not future.done():
            future.set_result(reply)
        return True

    def lose(self, incarnation: int) -> None:
        """The worker is gone: nobody need wait for it."""
        for asked, future in tuple(self._open.values()):
            if asked == incarnation:
                future.cancel()
