"""What wakes the one task that reads an output, or the outputs of one request."""

import asyncio


class Bell:
    """Wakes the one task that waits for news of any of its streams."""

    __slots__ = ("_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until it rings; what rang before does not count."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for it, or was woken and has not had its turn."""
        return self._waiter is not None

    def ring(self) -> None:
        """There is news."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
