"""Progress of the start: one call for each stage and each step in it, for a listener to show."""

import time
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

OnProgress = Callable[[str, int | None, int | None], None]
"""Called with (stage, done, total); done and total are None if there is nothing to count."""

MIN_INTERVAL_S = 0.2
IN_BYTES = frozenset({"downloading", "loading_weights"})
"""The stages that count bytes; others count kernels or steps."""


class LoggedProgress:
    """Writes progress as log lines (event: the stage; done, total, unit), for one stage at most one each
    MIN_INTERVAL_S, besides the last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._last_s = 0.0

    def __call__(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        now_s = self._clock()
        is_end = done is not None and done == total
        if stage == self._stage and not is_end and now_s - self._last_s < MIN_INTERVAL_S:
            return
        self._stage, self._last_s = stage, now_s
        unit = {"unit": "bytes"} if stage in IN_BYTES else {}
        if done is None:
            log.info(stage)
        else:
            log.info(stage, done=done, total=total, **unit)


def staged(stage: str, on_progress: OnProgress) -> Callable[[int, int | None], None]:
    """For code that knows no stages: a function that reports (done, total) for this stage."""
    return lambda done, total: on_progress(stage, done, total)
