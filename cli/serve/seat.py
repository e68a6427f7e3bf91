"""Where a worker runs on a cluster: an actor there, which starts `octavo worker` and tells what becomes of it.

It decides nothing: it runs one life of the process at a time, as its supervisor asks. The process dies with it. Must
not import Ray, which makes an actor of the class.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.cli.serve.children import Child
from octavo.cli.serve.launch import command_line, environment, write_settings
from octavo.wire.run_dir import temporary_folder

NEWS_S = 10.0  # a question without news is answered after that, so that a lost actor is noticed


def version_here() -> str:
    """Of this installation."""
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown"


class Seat:
    """One worker, one life after the other."""

    def __init__(self) -> None:
        self._life = 0
        self._lines: list[str] = []
        self._num_taken = 0
        self._code: int | None = None
        self._news = asyncio.Event()
        self._child: Child | None = None
        self._is_leaving = False
        self._running: asyncio.Task[None] | None = None

    async def start(
        self,
        life: int,
        name: str,
        settings: Mapping[str, Any],
        files: Mapping[str, str],
        passed_on: Mapping[str, str],
        version: str,
    ) -> str:
        """Start a life, once however often it is asked for; the host's name. files: settings whose value is a file,
        with its text. passed_on: of the supervisor's environment. Raises ValueError where this host has another
        version."""
        if version != version_here():
            what = f"host {socket.gethostname()} has octavo {version_here()}, and the supervisor {version}"
            raise ValueError(what)
        if life != self._life:
            self._life, self._lines, self._num_taken, self._code = life, [], 0, None
            self._running = asyncio.create_task(self._run(name, settings, files, passed_on))
        return socket.gethostname()

    async def follow(self, num_seen: int) -> tuple[list[str], int | None]:
        """Lines after so many of this life, and its exit code once it has ended and all lines are told. Waits for news,
        but not for ever."""
        del self._lines[: max(0, num_seen - self._num_taken)]
        self._num_taken = max(num_seen, self._num_taken)
        if not self._lines and self._code is None:
            self._news.clear()
            try:
                async with asyncio.timeout(NEWS_S):
                    await self._news.wait()
            except TimeoutError:
                pass
        return list(self._lines), self._code

    async def terminate(self) -> None:
        """SIGTERM to the process."""
        self._is_leaving = True
        if self._child is not None:
            self._child.terminate()

    async def _run(
        self, name: str, settings: Mapping[str, Any], files: Mapping[str, str], passed_on: Mapping[str, str]
    ) -> None:
        try:
            with temporary_folder("octavo-seat-") as folder:  # also removes those of actors that were killed
                own = dict(settings) | {"run_dir": str(folder)}
                for setting, text in files.items():
                    own[setting] = str(_write(text, folder / setting))
                command = command_line("worker", write_settings(own, folder / f"{name}.toml"))
                self._child = Child(name, command, environment() | dict(passed_on), self._take)
                self._code = 0 if self._is_leaving else await self._child.run()
        except OSError as error:
            self._take(name, f"the worker cannot be started: {error}")
            self._code = 1
        finally:
            self._news.set()

    def _take(self, name: str, line: str) -> None:
        self._lines.append(line)
        self._news.set()


def _write(text: str, path: Path) -> Path:
    """A file with a secret."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path
