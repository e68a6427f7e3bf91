"""Waiting for conditions that have no event of their own."""

import asyncio
from collections.abc import Callable

WAIT_S = 60.0  # generous: a busy machine is not an error


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait until the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.005)
