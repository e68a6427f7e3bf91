"""Notice within milliseconds that a worker's process ended, where it runs on this host.

By pidfd (Linux): no polling, no confusion by reused pids. Elsewhere nothing is watched and heartbeats must do.
"""

import asyncio
import os
import select
from collections.abc import Callable

from octavo.wire.host import pid_namespace


class ProcessWatch:
    """One pidfd per key of the caller's, on the event loop until it fires or is dropped."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        """on_exit(key): called on the loop, once."""
        self._on_exit = on_exit
        self._descriptors: dict[int, int] = {}
        self._namespace = pid_namespace()

    def add(self, key: int, pid: int, namespace: str) -> bool:
        """Watch a process. Returns whether that is possible (same host and pid namespace, process running)."""
        if not namespace or namespace != self._namespace or not hasattr(os, "pidfd_open") or pid <= 1:
            return False
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        self._descriptors[key] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._fire, key)
        return True

    def drop(self, key: int) -> None:
        """Stop watching. Unknown keys are ignored."""
        descriptor = self._descriptors.pop(key, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def check(self, key: int) -> None:
        """Report an exit that the loop has not noticed yet."""
        descriptor = self._descriptors.get(key)
        if descriptor is None:
            return
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if poller.poll(0):
            self._fire(key)

    def close(self) -> None:
        """Drop all. Idempotent."""
        for key in tuple(self._descriptors):
            self.drop(key)

    def _fire(self, key: int) -> None:
        self.drop(key)
        self._on_exit(key)
