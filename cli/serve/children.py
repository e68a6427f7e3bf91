"""One process of the service: starts it in its own process group, forwards its output, signals it and waits for it.

Decides nothing: `cli.serve.supervisor` does.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

LINE_LIMIT_BYTES = 2**20
EXIT_POLL_S = 0.02
PIPE_GRACE_S = 1.0
"""Time to read the last lines of a process that has ended."""
OnLine = Callable[[str, str], None]


class ManagedProcess(Protocol):
    """A process by name, wherever it runs."""

    name: str

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""

    async def run(self) -> int:
        """Start it and wait for its end; returns the exit code, negative for a signal. Raises OSError if it cannot be
        started."""

    def terminate(self) -> None:
        """Let it drain; a second call stops it. No-op if it has ended."""

    def kill(self) -> None:
        """End it at once. No-op if it has ended."""


class Child:
    """A named process on this host. `on_line(name, line)` gets every line that it writes."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], on_line: OnLine) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._is_starting = False
        self._asked: signal.Signals | None = None  # requested during the start: sent once the process exists

    @property
    def is_running(self) -> bool:
        """Whether it was started, or is being started, and has not ended."""
        return self._is_starting or (self._process is not None and self._process.returncode is None)

    @property
    def pid(self) -> int | None:
        """Of the current process; None before the first start."""
        return self._process.pid if self._process else None

    async def run(self) -> int:
        """Start it and wait for its end; returns the exit code, negative for a signal. Raises OSError if it cannot be
        started."""
        self._is_starting, self._asked = True, None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which then drains in order
                limit=LINE_LIMIT_BYTES,
            )
        finally:
            self._is_starting = False
        if self._asked is not None:
            self._process.send_signal(self._asked)
        assert self._process.stdout is not None
        pump = asyncio.create_task(self._pump(self._process.stdout))
        try:
            return await self._exit_code(self._process)
        finally:
            self._kill_group()
            # The last lines say why the process died; but a grandchild that keeps the pipe open must not block us.
            await asyncio.wait([pump], timeout=PIPE_GRACE_S)
            pump.cancel()
            with contextlib.suppress(TimeoutError):  # after a cancellation, its end may not have been noticed yet
                async with asyncio.timeout(PIPE_GRACE_S):
                    await self._exit_code(self._process)
            # Close our end of the pipe now rather than at garbage collection; asyncio has no public call for it.
            self._process._transport.close()  # type: ignore[attr-defined]

    def terminate(self) -> None:
        """Send SIGTERM: it drains; a second one stops it. No-op if it has ended."""
        if self._is_starting:
            self._asked = self._asked or signal.SIGTERM
        elif self.is_running and self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its whole process group. No-op if it has ended."""
        if self._is_starting:
            self._asked = signal.SIGKILL
        elif self.is_running:
            self._kill_group()

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)

    @staticmethod
    async def _exit_code(process: asyncio.subprocess.Process) -> int:
        """Polls, since asyncio's own wait() does not return while anyone, such as a grandchild, holds the pipe open."""
        while process.returncode is None:  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(EXIT_POLL_S)
        return process.returncode

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit: the reader has dropped it
                continue
            if not line:
                return
            self._on_line(self.name, line.decode("utf-8", "replace").rstrip("\n"))
