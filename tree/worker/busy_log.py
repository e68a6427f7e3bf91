"""One INFO line every ten seconds while there is work: rates since the line before, and where things stand."""

import time
from collections.abc import Callable

import structlog

from wire.messages import Finished
from worker.ports import Observer, StepReport
from worker.stats import EngineStats

log = structlog.get_logger(__name__)

INTERVAL_S = 10.0


class BusyLog:
    """An Observer in front of another one."""

    def __init__(
        self, inner: Observer, snapshot: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._snapshot = snapshot
        self._clock = clock
        self._since_s = clock()
        self._former = EngineStats()

    def on_step(self, report: StepReport) -> None:
        """Pass on, and speak where it is time."""
        self._inner.on_step(report)
        now_s = self._clock()
        if now_s - self._since_s >= INTERVAL_S:
            self._speak(now_s)

    def on_finished(self, finished: Finished) -> None:
        """Pass on."""
        self._inner.on_finished(finished)

    def _speak(self, now_s: float) -> None:
        stats, former, elapsed_s = self._snapshot(), self._former, now_s - self._since_s
        queried = stats.num_queried_tokens - former.num_queried_tokens
        hits = stats.num_hit_tokens - former.num_hit_tokens
        log.info(
            "busy",
            prompt_tokens_per_s=round((stats.num_prefill_tokens - former.num_prefill_tokens) / elapsed_s, 1),
            generation_tokens_per_s=round((stats.num_generated_tokens - former.num_generated_tokens) / elapsed_s, 1),
            running=stats.num_running,
            waiting=stats.num_waiting,
            paused=stats.num_paused,
            kv_percent=round(100 * stats.num_active_blocks / max(stats.num_blocks, 1), 1),
            hit_percent=round(100 * hits / max(queried, 1), 1),
        )
        self._since_s, self._former = now_s, stats
