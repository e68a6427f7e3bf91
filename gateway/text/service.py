"""Text work off the event loop, in a bounded pool of threads, step by step: shortest first, tenants in turns."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from octavo.gateway.text.errors import TextQueueFull
from octavo.gateway.text.fair_queue import FairQueue, Share

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work in steps: each `yield` tells how many bytes the next one is about; what it returns is the result."""
STEP_BYTES = 16 * 1024  # of text, some milliseconds of tokenizing: so long one text waits for another
_QUICK_BYTES = 32 * 1024  # what is made of so little takes less than a turn through a thread
_ANYBODY = Share()


@dataclass(slots=True, eq=False)
class _Job:
    """num_left: bytes of all steps that are left, as far as known. next_bytes: what the next one is about."""

    loop: asyncio.AbstractEventLoop
    steps: Steps[Any]
    future: "Future[Any]"
    num_bytes: int
    num_left: int
    next_bytes: int = 0


class TextService:
    """Owns the threads. At most `max_waiting` pieces of work, of `max_bytes` together, are queued or running; when
    there is one more, the tenant with the most waiting is refused what it would get last (`FairQueue.pop_last`).

    After each step the next text goes on (`gateway.text.fair_queue`). A step above `STEP_BYTES`, which has no place to
    be cut, takes any thread but the last one: short ones need not wait for it.
    """

    def __init__(self, *, num_threads: int, max_waiting: int, max_bytes: int = 1 << 40) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._max_long = max(1, num_threads - 1)
        self.num_waiting = 0  # on the event loop, and
        self._num_bytes = 0
        self._lock = threading.Lock()  # of the queue, and
        self._queue = FairQueue[_Job]()
        self._num_long = 0  # long steps that run

    async def run(self, work: Callable[[], T], *, num_bytes: int = 0, share: Share = _ANYBODY) -> T:
        """The result of work(), made in a thread in one step. num_bytes: what it is about. Raises as `run_steps`."""
        return await self._run(_one_step(work), num_bytes=num_bytes, next_bytes=num_bytes, share=share)

    async def run_by_size(self, work: Callable[[], T], *, num_bytes: int, share: Share = _ANYBODY) -> T:
        """work() here and now where its input is small, in a thread else. Raises as `run`."""
        return work() if num_bytes <= _QUICK_BYTES else await self.run(work, num_bytes=num_bytes, share=share)

    async def run_steps(self, steps: Steps[T], *, num_bytes: int, share: Share = _ANYBODY) -> T:
        """The result of the steps, each made in some thread. Raises TextQueueFull, and what they raise.

        A cancelled caller leaves at once; a step that has begun ends by itself, no other one follows, and the place is
        given back then.
        """
        return await self._run(steps, num_bytes=num_bytes, next_bytes=0, share=share)

    async def _run(self, steps: Steps[T], *, num_bytes: int, next_bytes: int, share: Share) -> T:
        job = _Job(asyncio.get_running_loop(), steps, Future(), num_bytes, num_left=num_bytes, next_bytes=next_bytes)
        self.num_waiting += 1
        self._num_bytes += num_bytes
        refused = None
        with self._lock:
            self._queue.push(job, num_bytes=num_bytes, share=share)
            if self.num_waiting > self._max_waiting or self._num_bytes > max(self._max_bytes, num_bytes):
                refused = self._queue.pop_last()
        if refused is not None:
            self._leave(refused)
            refused.future.set_exception(TextQueueFull(f"{self.num_waiting} texts wait to be tokenized"))
        if refused is not job:
            job.future.add_done_callback(lambda _: self._drop_if_waiting(job))
            self._executor.submit(self._take_step)
        return cast(T, await asyncio.wrap_future(job.future))

    # ------------------------------------------------------------ in the threads

    def _take_step(self) -> None:
        """Of whichever text is next; none where another thread had it, or only long steps wait and may not go."""
        with self._lock:
            job = self._queue.pop(self._may_go, lambda each: max(each.next_bytes, 1))
            if job is None:
                return
            is_long = job.next_bytes > STEP_BYTES
            self._num_long += is_long
        is_over = self._advance(job)
        with self._lock:
            self._num_long -= is_long
            if is_over:
                self._queue.forget(job)
            else:
                self._queue.push_back(job, num_bytes=job.num_left)
            num_tries = (not is_over) + (is_long and len(self._queue) > 0)
        if is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
                job.loop.call_soon_threadsafe(self._leave, job)
        try:
            for _ in range(num_tries):
                self._executor.submit(self._take_step)
        except RuntimeError:  # closed meanwhile
            self._cancel_waiting()

    def _may_go(self, job: _Job) -> bool:
        return job.next_bytes <= STEP_BYTES or self._num_long < self._max_long

    def _advance(self, job: _Job) -> bool:
        """Whether it is over: its result is there, or nobody wants it any more."""
        if job.future.cancelled():
            return True
        job.num_left = max(0, job.num_left - job.next_bytes)
        try:
            job.next_bytes = next(job.steps)
        except StopIteration as end:
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(end.value)
        except BaseException as error:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        else:
            return job.future.cancelled()
        return True

    # ------------------------------------------------------------ on the event loop

    def _drop_if_waiting(self, job: _Job) -> None:
        """Its caller was cancelled (or it has ended, and waits no more)."""
        if job.future.cancelled():
            with self._lock:
                is_waiting = self._queue.remove(job)
            if is_waiting:
                self._leave(job)

    def _leave(self, job: _Job) -> None:
        self.num_waiting -= 1
        self._num_bytes -= job.num_bytes

    def close(self) -> None:
        """Take no more work; a step that runs ends by itself. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._cancel_waiting()

    def _cancel_waiting(self) -> None:
        with self._lock:
            jobs = [self._queue.pop_last() for _ in range(len(self._queue))]
        for job in jobs:
            job.future.cancel()


def _one_step(work: Callable[[], T]) -> Steps[T]:
    return work()
    yield 0  # never: this makes it a generator
