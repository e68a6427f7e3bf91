"""Waiting for what has no event of its own."""

import asyncio
from collections.abc import Callable

WAIT_S = 60.0  # for what comes: a busy machine is no fault


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait until a callable gives something true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.005)
