"""What a gateway does at intervals: measure loop lag, collect garbage, set gauges, end calls that stopped reading, drop
unused tokenizers, log a line every ten seconds."""

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.submit import Collaborators
from octavo.gateway.requests.tracker import RequestTracker
from octavo.gateway.streams.stream import Coalescer
from octavo.gateway.watching.watch import LoadWatch
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerView

log = structlog.get_logger(__name__)
LAG_INTERVAL_S = 0.1
REFRESH_INTERVAL_S = 1.0
REPORT_INTERVAL_S = 10.0
INTERVAL_S = 0.5
GROWTH_BYTES = 16 << 20  # a full collection of a busy gateway's objects takes some ten milliseconds
BUSY_GROWTH = 4
FOLLOW_UPS = (6, 6)  # calls of `collect_if_grown` until it collects once more: by then more is garbage
_STATM = Path("/proc/self/statm")


class GarbageWatch:
    """Collects unreachable objects when memory grows. num_collections: how often growth triggered one.

    A call that ends before its message arrived leaves a reference cycle in grpc.aio that holds all of its metadata: a
    few objects, but as many bytes as its caller sent. Python's collector only counts objects, and this process sets its
    threshold high, so that hostile callers could pile up gigabytes before it runs.
    """

    def __init__(
        self,
        rss_bytes: Callable[[], int] | None = None,
        *,
        growth_bytes: int = GROWTH_BYTES,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """rss_bytes: resident memory, less what is known to be in use. is_busy: while true, a collection would delay
        callers, and waits until memory has grown BUSY_GROWTH times as much."""
        self._rss_bytes = rss_bytes or resident_bytes
        self._growth_bytes = growth_bytes
        self._is_busy = is_busy
        self._base = self._rss_bytes()
        self._to_come: list[int] = []
        self.num_collections = 0

    def collect_if_grown(self) -> bool:
        """Collect if memory has grown since the last collection, or since its minimum, and twice more a few calls
        later. Returns whether it collected."""
        now = self._rss_bytes()
        self._base = min(self._base, now)
        if self._is_busy() and now - self._base < BUSY_GROWTH * self._growth_bytes:
            return False
        if now - self._base >= self._growth_bytes:
            self._to_come = list(FOLLOW_UPS)
        elif not self._is_due():
            return False
        gc.collect()
        release_freed_memory()
        self._base = self._rss_bytes()
        self.num_collections += 1
        return True

    def _is_due(self) -> bool:
        if not self._to_come:
            return False
        self._to_come[0] -= 1
        if self._to_come[0]:
            return False
        self._to_come.pop(0)
        return True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.collect_if_grown()


def garbage_watch(tracker: RequestTracker, pool: WorkerPool) -> GarbageWatch:
    """The GarbageWatch of a gateway. The prefix index grows to many times GROWTH_BYTES while streams run, and is not
    garbage."""
    return GarbageWatch(lambda: resident_bytes() - pool.index_bytes, is_busy=lambda: len(tracker) > 0)


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not say (then nothing is ever collected early)."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def release_freed_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def measure_loop_lag(meters: GatewayMeters) -> None:
    """Record how much later than asked timers fire, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        meters.loop_lag.observe(max(0.0, loop.time() - due_s))


class Ticker:
    """Sets gauges, ends stalled writers, refreshes tokenizers, logs the load. One per gateway."""

    def __init__(
        self,
        collaborators: Collaborators,
        *,
        coalescer: Coalescer,
        collector: GatewayCollector,
        load_watch: LoadWatch,
        control: Control,
    ) -> None:
        self._tracker, self._pool, self._models = collaborators.tracker, collaborators.pool, collaborators.models
        self._text, self._meters = collaborators.text, collaborators.meters
        self._coalescer = coalescer
        self._collector = collector
        self._load_watch = load_watch
        self._control = control

    async def refresh(self) -> None:
        """Every second, until cancelled."""
        while True:
            self.set_gauges()
            self._tracker.fail_stalled_writes(max_wait_s=self._tracker.write_stall_s)
            self.refresh_tokenizers(time.monotonic())
            await asyncio.sleep(REFRESH_INTERVAL_S)

    def set_gauges(self) -> None:
        """Set the meters that are sampled rather than counted, and pass on the workers as they are now."""
        meters, num_entered = self._meters, self._tracker.admission.counts().num_entered
        num_sent, meters.num_running = self._tracker.at_workers()
        meters.num_waiting, meters.num_preparing = num_sent - meters.num_running, num_entered - num_sent
        meters.num_tokenizing = self._text.num_waiting
        meters.is_draining = self._tracker.is_draining
        meters.token_interval_s = self._coalescer.interval_s
        peers = self._control.figures()
        meters.num_peers, meters.num_unreachable_peers = peers.num_known, peers.num_unreachable
        meters.peer_news_age_s, meters.peer_losses = peers.news_age_s, peers.losses
        workers = self._pool.workers()
        self._collector.update_workers(workers)
        self._load_watch.update_workers(workers)

    def refresh_tokenizers(self, now_s: float) -> None:
        """Drop the tokenizers of models unused for a while, and retry those that failed to load."""
        cards = [worker.card for worker in self._pool.workers()]
        self._models.retry_failed(cards, now_s)
        self._models.drop_unused(cards + [tracked.card for tracked in self._tracker], now_s)

    async def report(self) -> None:
        """Log a line every ten seconds while there is something to report."""
        last_s, last_prompt, last_generation = time.monotonic(), 0, 0
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            now_s = time.monotonic()
            prompt = sum(meters.prompt_tokens for meters in self._meters.models.values())
            generation, (num_sent, num_running) = self._meters.num_generated(), self._tracker.at_workers()
            if prompt != last_prompt or generation != last_generation or num_sent:
                log.info(
                    "load",
                    prompt_tokens_per_s=round((prompt - last_prompt) / (now_s - last_s), 1),
                    generation_tokens_per_s=round((generation - last_generation) / (now_s - last_s), 1),
                    running=num_running,
                    waiting=num_sent - num_running,
                    kv_usage=_kv_usage(self._pool.workers()),
                )
            last_s, last_prompt, last_generation = now_s, prompt, generation


def _kv_usage(workers: Sequence[WorkerView]) -> float:
    """Share of the workers' KV blocks that requests hold, by their last heartbeats."""
    total = sum(worker.capacity.num_blocks for worker in workers)
    idle = sum(worker.num_free_blocks + worker.num_cached_blocks for worker in workers)
    return round(1 - idle / total, 3) if total else 0.0
