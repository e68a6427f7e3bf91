"""The actor that runs a process of the service on a cluster's host: it starts `octavo worker` or `octavo gateway` and
reports its output and end.

It decides nothing: it starts the process each time its supervisor asks. The process dies with it. Must not import Ray,
which makes an actor of the class.
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.cli.serve.children import Child
from octavo.cli.serve.launch import command_line, environment, write_settings
from octavo.cli.serve.ports import free_port, is_free
from octavo.cli.whole_file import write_whole
from octavo.wire.run_dir import temporary_folder

NEWS_S = 10.0  # `follow` returns after that even without news, so that a lost actor is noticed


def version_here() -> str:
    """The version of Octavo installed here."""
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown"


class ProcessActor:
    """One process of the service, run again and again. Runs are numbered; each lasts from start to exit."""

    def __init__(self) -> None:
        self._run_number = 0
        self._lines: list[str] = []
        self._num_taken = 0
        self._code: int | None = None
        self._news = asyncio.Event()
        self._child: Child | None = None
        self._is_leaving = False
        self._running: asyncio.Task[None] | None = None
        self._files: dict[str, str] = {}
        self._files_number = 0
        self._folder: Path | None = None

    async def choose_ports(
        self, towards: str, wanted: Sequence[tuple[str, int]], taken: Sequence[int], version: str
    ) -> tuple[str, list[int]]:
        """This host's address on the route to `towards`, and a port for each pair in `wanted`. wanted: (address to
        listen on, or empty for this host's; port to use if it is free, else any). taken: ports not to use. Raises
        ValueError if this host has another version."""
        _check(version)
        address = _address_towards(towards)
        drawn: list[int] = []
        for host, port in wanted:
            host = host or address
            not_again = {*taken, *drawn}
            is_had = port and port not in not_again and is_free(host, port)
            drawn.append(port if is_had else free_port(host, not_again))
        return address, drawn

    async def start(
        self,
        run_number: int,
        role: str,
        name: str,
        settings: Mapping[str, Any],
        files: tuple[int, Mapping[str, str]],
        passed_on: Mapping[str, str],
        version: str,
    ) -> str:
        """Start a run; a repeated call for the same one does nothing. Returns the host's name. role: the command.
        files: the arguments of `write`. passed_on: variables of the supervisor's environment. Raises ValueError if this
        host has another version."""
        _check(version)
        if run_number != self._run_number:
            self._run_number, self._lines, self._num_taken, self._code = run_number, [], 0, None
            await self.write(*files)
            self._running = asyncio.create_task(self._run(role, name, settings, passed_on))
        return socket.gethostname()

    async def write(self, number: int, files: Mapping[str, str]) -> None:
        """Replace the files that settings name. files: content by setting; the running process sees the change. number:
        grows with each change, so that a late call undoes nothing. Raises OSError; the call may be repeated then."""
        if number <= self._files_number:
            return
        changed = {setting: text for setting, text in files.items() if self._files.get(setting) != text}
        if self._folder is not None:
            for setting, text in changed.items():
                write_whole(self._folder / setting, text)
        self._files |= changed
        self._files_number = number

    async def follow(self, num_seen: int) -> tuple[list[str], int | None]:
        """The lines of this run after the first num_seen, and its exit code once it has ended, else None. Waits for
        news for up to NEWS_S."""
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
        """Send SIGTERM to the process."""
        self._is_leaving = True
        if self._child is not None:
            self._child.terminate()

    async def _run(self, role: str, name: str, settings: Mapping[str, Any], passed_on: Mapping[str, str]) -> None:
        try:
            with temporary_folder("octavo-actor-") as folder:  # also removes folders left by killed actors
                own = dict(settings) | {"run_dir": str(folder)}
                self._folder = folder
                for setting, text in self._files.items():
                    path = folder / setting
                    write_whole(path, text)
                    own[setting] = [str(path)] if isinstance(own.get(setting), list) else str(path)
                command = command_line(role, write_settings(own, folder / f"{name}.toml"))
                self._child = Child(name, command, environment() | dict(passed_on), self._take)
                self._code = 0 if self._is_leaving else await self._child.run()
        except OSError as error:
            self._take(name, f"the {role} cannot be started: {error}")
            self._code = 1
        finally:
            self._folder = None
            self._news.set()

    def _take(self, name: str, line: str) -> None:
        self._lines.append(line)
        self._news.set()


def _check(version: str) -> None:
    if version != version_here():
        what = f"host {socket.gethostname()} has octavo {version_here()}, and the supervisor {version}"
        raise ValueError(what)


def _address_towards(host: str) -> str:
    """This host's address on the route to `host`; sends no packets."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
