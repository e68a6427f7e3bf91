"""Unreachable objects, collected when memory grows.

A call that ends before its message came leaves a reference cycle in grpc.aio that holds all of its metadata: some
objects, and as many bytes as its caller sent. Python's collector counts objects only, and ours counts to a high number,
so that hostile callers could leave gigabytes before it runs. Must not know what the objects are.
"""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 0.5
GROWTH_BYTES = 16 << 20  # a full collection of a busy gateway's objects takes some ten milliseconds
FOLLOW_UPS = (6, 6)  # looks until it collects once more: what was alive the first time may be garbage by then
_STATM = Path("/proc/self/statm")


class GarbageWatch:
    """num_collections: how often memory had grown enough."""

    def __init__(self, rss_bytes: Callable[[], int] | None = None, *, growth_bytes: int = GROWTH_BYTES) -> None:
        self._rss_bytes = rss_bytes or resident_bytes
        self._growth_bytes = growth_bytes
        self._base = self._rss_bytes()
        self._to_come: list[int] = []
        self.num_collections = 0

    def look(self) -> bool:
        """Collect if memory has grown since the last collection, or since it was least, and twice more some looks
        later; whether it was done."""
        now = self._rss_bytes()
        self._base = min(self._base, now)
        if now - self._base >= self._growth_bytes:
            self._to_come = list(FOLLOW_UPS)
        elif not self._is_due():
            return False
        gc.collect()
        give_back()
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
        """For ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look()


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say (then nothing is ever collected early)."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def give_back() -> None:
    """Freed memory to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
