"""An asyncio loop on a virtual clock: it never sleeps, and jumps to the next timer when nothing is ready.

`isolated` replaces every source of chance in the product for the length of a run: clocks, random numbers, log files.

Timers of one time fire in the order in which they were set. Knows nothing of what runs on it. Threads do not exist
here: what is given to an executor runs at once. A simulation is one long chain of turns, so the turn itself is made
here with nothing in it that a loop without descriptors can do without.
"""

import asyncio
import logging
import random
import secrets
import selectors
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any

import structlog

START_S = 1_000.0  # the product writes 0.0 for "not yet"
MAX_TURNS_AT_ONE_TIME = 200_000


class Deadlock(Exception):
    """A task waits, but no timer is set that could wake it."""


class Livelock(Exception):
    """Callbacks keep scheduling callbacks, and the clock does not advance."""


class _NoSelector(selectors.BaseSelector):
    """A selector without descriptors, because asyncio requires one."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)


class SimLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual seconds from START_S on."""

    _ready: Any  # asyncio's deque of handles, and its flag to stop
    _stopping: bool

    def __init__(self) -> None:
        self._now_s = START_S
        self._num_turns = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        super().__init__(_NoSelector())

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Run in the next turn."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Run in the first turn at that time."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run it at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """The loop never sleeps, so nothing needs to wake it."""

    def _run_once(self) -> None:
        """One turn: everything that is ready, including due timers. What becomes ready meanwhile waits for the next
        turn."""
        ready, timers = self._ready, self._timers
        if ready or self._stopping:
            self._stay()
        else:
            self._jump()
        while timers and timers[0][0] <= self._now_s:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _stay(self) -> None:
        self._num_turns += 1
        if self._num_turns > MAX_TURNS_AT_ONE_TIME:
            self._num_turns = 0  # who cleans up has turns again
            raise Livelock(f"{MAX_TURNS_AT_ONE_TIME} turns at {self._now_s}")

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not timers:
            raise Deadlock
        if timers[0][0] <= self._now_s:
            self._stay()
        else:
            self._now_s, self._num_turns = timers[0][0], 0


LogLine = MutableMapping[str, Any]


@contextmanager
def isolated(loop: SimLoop, seed: int) -> Iterator[list[LogLine]]:
    """During the block, time and randomness come from the run. Yields the lines logged as errors so far.

    In every other seed all threads count as always busy, in the rest as always idle: with busy threads, gateways send
    tokens in rounds.
    """
    rng = random.Random(f"{seed}:secrets")
    replaced = [
        (time, "monotonic", loop.time),
        (time, "time", loop.time),
        (time, "thread_time", loop.time if seed % 2 else lambda: 0.0),
        (secrets, "token_hex", lambda num_bytes=32: rng.randbytes(num_bytes).hex()),
        (secrets, "token_bytes", lambda num_bytes=32: rng.randbytes(num_bytes)),
        (secrets, "randbits", rng.getrandbits),
        (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))),
    ]
    former = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    config, lines = structlog.get_config(), list[LogLine]()
    for module, name, value in replaced:
        setattr(module, name, value)
    structlog.configure(
        processors=[_collect_into(lines)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    try:
        yield lines
    finally:
        structlog.configure(**config)
        for module, name, value in former:
            setattr(module, name, value)


def _collect_into(lines: list[LogLine]) -> Any:
    def collect(logger: Any, method: str, line: LogLine) -> LogLine:
        lines.append(line)
        raise structlog.DropEvent

    return collect
