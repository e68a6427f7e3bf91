"""Text work off the event loop, in a bounded pool of threads."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.text.errors import TextQueueFull

T = TypeVar("T")
_QUICK_BYTES = 32 * 1024  # what is made of so little takes less than a turn through a thread


class TextService:
    """Owns the threads. At most `max_waiting` pieces of work are queued or running; more are refused."""

    def __init__(self, *, num_threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._max_waiting = max_waiting
        self.num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of work(), made in a thread. Raises TextQueueFull, and what work raises.

        A cancelled caller leaves at once; work that has begun ends by itself and keeps its place until then.
        """
        if self.num_waiting >= self._max_waiting:
            raise TextQueueFull(f"{self.num_waiting} texts wait to be tokenized")
        self.num_waiting += 1
        loop = asyncio.get_running_loop()
        future = self._executor.submit(work)
        future.add_done_callback(lambda _: self._done_from_thread(loop))
        return await asyncio.wrap_future(future)

    async def run_by_size(self, work: Callable[[], T], *, num_bytes: int) -> T:
        """work() here and now where its input is small, in a thread else. Raises as `run`."""
        return work() if num_bytes <= _QUICK_BYTES else await self.run(work)

    def _done_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
            loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        self.num_waiting -= 1

    def close(self) -> None:
        """Take no more work; what runs ends by itself. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
