"""Text work off the event loop, in a bounded pool of threads, step by step: shortest first, tenants in turns."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from octavo.gateway.errors import as_exception
from octavo.gateway.text.errors import TextQueueFull

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work in steps: each `yield` gives the size of the next step's input in bytes; the return value is the result."""
STEP_BYTES = 16 * 1024  # of text: a few milliseconds of tokenizing, the time one text waits for another
_QUICK_BYTES = 32 * 1024  # smaller inputs take less time than a switch to a thread
_BYTES_OF_ANY = 1024  # fixed cost of a text, besides its bytes
_MAX_IDLE = 64  # idle tenants that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A tenant, and its weight where tenants share the threads."""

    tenant: str = ""
    weight: int = 1


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    item: T
    num_bytes: int
    tag: int
    order: int


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    weight: int
    due: float  # bytes served divided by weight; a newcomer starts without credit
    num_served: int = 0  # bytes
    waiting: dict[int, _Entry[T]] = field(default_factory=dict)  # by id of the item

    @property
    def load(self) -> float:
        """What waits, by weight."""
        return sum(entry.num_bytes + _BYTES_OF_ANY for entry in self.waiting.values()) / self.weight


class FairQueue(Generic[T]):
    """Decides which text is next: tenants share by bytes and weight, and within a tenant shorter texts go first. Items
    are their own identity. Pure: no threads, no clock.

    A text's tag is what its tenant had been served when it arrived, plus its own size; the smallest tag goes first. So
    a short text passes long ones, and a long one is passed by no more bytes than its own. An idle tenant gathers no
    credit.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._place: dict[int, tuple[Share, int, int]] = {}  # share, tag and order of items that wait or may come back
        self._due = 0.0  # `due` of the tenant served last
        self._num_pushed = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, item: T, *, num_bytes: int, share: Share) -> None:
        """A new item. num_bytes: all it will take."""
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[share.tenant] = _Tenant(share.weight, self._due)
        tenant.weight = share.weight
        if not tenant.waiting:
            tenant.due = max(tenant.due, self._due)
        self._num_pushed += 1
        tag = tenant.num_served + num_bytes
        self._place[id(item)] = (share, tag, self._num_pushed)
        self._wait(item, tenant, num_bytes, tag, self._num_pushed)

    def push_back(self, item: T, *, num_bytes: int) -> None:
        """Return a popped item that has more to do to its old place. num_bytes: what is left."""
        share, tag, order = self._place[id(item)]
        tenant = self._tenants.setdefault(share.tenant, _Tenant(share.weight, self._due))
        self._wait(item, tenant, num_bytes, tag, order)

    def _wait(self, item: T, tenant: _Tenant[T], num_bytes: int, tag: int, order: int) -> None:
        tenant.waiting[id(item)] = _Entry(item, num_bytes, tag, order)
        self._num_waiting += 1

    def pop(self, may_go: Callable[[T], bool], cost_of: Callable[[T], int]) -> T | None:
        """The next item that may go, or None; its tenant is charged cost_of(item) bytes."""
        for tenant in sorted((each for each in self._tenants.values() if each.waiting), key=lambda each: each.due):
            for entry in sorted(tenant.waiting.values(), key=lambda each: (each.tag, each.order)):
                if may_go(entry.item):
                    self._take(tenant, entry)
                    self._due = max(self._due, tenant.due)
                    cost = cost_of(entry.item)
                    tenant.num_served += cost
                    tenant.due += (cost + _BYTES_OF_ANY) / tenant.weight
                    return entry.item
        return None

    def pop_last(self) -> T:
        """The item that would be served last, of the tenant with the most waiting. The queue must not be empty."""
        tenant = max((each for each in self._tenants.values() if each.waiting), key=lambda each: each.load)
        entry = max(tenant.waiting.values(), key=lambda each: (each.tag, each.order))
        self._take(tenant, entry)
        self.forget(entry.item)
        return entry.item

    def remove(self, item: T) -> bool:
        """Remove an item wherever it stands. Returns whether it was waiting."""
        place = self._place.get(id(item))
        tenant = self._tenants.get(place[0].tenant) if place else None
        if tenant is None or id(item) not in tenant.waiting:
            return False
        self._take(tenant, tenant.waiting[id(item)])
        self.forget(item)
        return True

    def forget(self, item: T) -> None:
        """A popped item will not come back."""
        self._place.pop(id(item), None)

    def _take(self, tenant: _Tenant[T], entry: _Entry[T]) -> None:
        del tenant.waiting[id(entry.item)]
        self._num_waiting -= 1

    def _forget_idle(self) -> None:
        """Forget idle tenants, except those served most recently: once forgotten, a tenant is served first."""
        if len(self._tenants) <= _MAX_IDLE:
            return
        idle = sorted((each.due, name) for name, each in self._tenants.items() if not each.waiting)
        for _, name in idle[: -_MAX_IDLE or None]:
            del self._tenants[name]


_NO_TENANT = Share()


@dataclass(slots=True, eq=False)
class _Job:
    """num_left: bytes of all remaining steps, as far as known. next_bytes: size of the next one."""

    loop: asyncio.AbstractEventLoop
    steps: Steps[Any]
    future: "Future[Any]"
    num_bytes: int
    num_left: int
    next_bytes: int = 0


class TextService:
    """Owns the threads. At most `max_waiting` jobs, of `max_bytes` in total, are queued or running; beyond that, the
    tenant with the most waiting loses the job it would get last (`FairQueue.pop_last`).

    After each step the thread takes the next text (`FairQueue`). A step above `STEP_BYTES`, which could not be cut, may
    use any thread but the last one, so that short steps need not wait for it.
    """

    def __init__(self, *, num_threads: int, max_waiting: int, max_bytes: int = 1 << 40) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._max_long = max(1, num_threads - 1)
        self.num_waiting = 0  # changed on the event loop only, like the next
        self._num_bytes = 0
        self._lock = threading.Lock()  # guards the queue and the number of running long steps
        self._queue = FairQueue[_Job]()
        self._num_long = 0

    async def run(self, work: Callable[[], T], *, num_bytes: int = 0, share: Share = _NO_TENANT) -> T:
        """The result of work(), computed in a thread in one step. num_bytes: size of its input. Raises as
        `run_steps`."""
        return await self._run(_one_step(work), num_bytes=num_bytes, next_bytes=num_bytes, share=share)

    async def run_by_size(self, work: Callable[[], T], *, num_bytes: int, share: Share = _NO_TENANT) -> T:
        """work() right here if its input is small, else in a thread. Raises as `run`."""
        return work() if num_bytes <= _QUICK_BYTES else await self.run(work, num_bytes=num_bytes, share=share)

    async def run_steps(self, steps: Steps[T], *, num_bytes: int, share: Share = _NO_TENANT) -> T:
        """The result of the steps, each run in some thread. Raises TextQueueFull, and what they raise.

        A cancelled caller leaves at once; the step that has begun ends by itself, no other follows, and only then is
        the place free.
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
        """Run one step of the next text, if there is one that may begin."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed
                job.loop.call_soon_threadsafe(self._leave, job)
        try:
            for _ in range(num_tries):
                self._executor.submit(self._take_step)
        except RuntimeError:  # closed meanwhile
            self._cancel_waiting()

    def _may_go(self, job: _Job) -> bool:
        return job.next_bytes <= STEP_BYTES or self._num_long < self._max_long

    def _advance(self, job: _Job) -> bool:
        """Run one step. Returns whether the job is over: it has a result, or its caller is gone."""
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
                job.future.set_exception(as_exception(error))
        else:
            return job.future.cancelled()
        return True

    # ------------------------------------------------------------ on the event loop

    def _drop_if_waiting(self, job: _Job) -> None:
        """The job's caller was cancelled, or the job has ended and is not waiting."""
        if job.future.cancelled():
            with self._lock:
                is_waiting = self._queue.remove(job)
            if is_waiting:
                self._leave(job)

    def _leave(self, job: _Job) -> None:
        self.num_waiting -= 1
        self._num_bytes -= job.num_bytes

    def close(self) -> None:
        """Accept no more work; a running step ends by itself. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._cancel_waiting()

    def _cancel_waiting(self) -> None:
        with self._lock:
            jobs = [self._queue.pop_last() for _ in range(len(self._queue))]
        for job in jobs:
            job.future.cancel()


def _one_step(work: Callable[[], T]) -> Steps[T]:
    return work()
    yield 0  # unreachable: makes this a generator
