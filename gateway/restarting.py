"""Background tasks that run for as long as the gateway and restart after an error.

Without the restart, one defect, or a host that was out of threads, descriptors or memory for a moment, would silently
end a task for good: the gateway would go on and, say, never load a renewed certificate again.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)

RESTART_DELAY_S = 1.0


def restarting_task(run: Callable[[], Awaitable[None]], *, name: str) -> "asyncio.Task[None]":
    """Start a task that awaits run() until it returns or the task is cancelled.

    Where run() raises, the error is logged and run() is called again RESTART_DELAY_S later. An error that repeats is
    logged once.
    """
    return asyncio.create_task(_run_again_after_errors(run, name), name=name)


async def _run_again_after_errors(run: Callable[[], Awaitable[None]], name: str) -> None:
    last_logged = ""
    while True:
        try:
            return await run()
        except Exception as error:
            if repr(error) != last_logged:
                last_logged = repr(error)
                log.error("defect", task=name, exc_info=error)
            await asyncio.sleep(RESTART_DELAY_S)
