"""Tasks that last as long as a gateway. One that raises met a defect, or a host that had no thread, descriptor or
memory for a moment; without it the gateway would go on and, say, never again take a changed certificate. So it begins
again."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)

AGAIN_S = 1.0


def restarting_task(run: Callable[[], Awaitable[None]], *, name: str) -> "asyncio.Task[None]":
    """A task that awaits run() until it returns or the task is cancelled; where it raises, that is logged, once for
    each error that differs from the one before, and run() is awaited anew AGAIN_S later."""
    return asyncio.create_task(_run_again_after_errors(run, name), name=name)


async def _run_again_after_errors(run: Callable[[], Awaitable[None]], name: str) -> None:
    told = ""
    while True:
        try:
            return await run()
        except Exception as error:
            if repr(error) != told:
                told = repr(error)
                log.error("defect", task=name, exc_info=error)
            await asyncio.sleep(AGAIN_S)
