"""Which services run here: each `octavo serve` keeps a file in its user's run directory while it runs.

The file says where its processes are, and is rewritten when these change; `octavo ps` asks the processes themselves for
everything else. It is also restored if a cleanup of temporary files removes it.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import psutil

from octavo.cli.serve.launch import Role
from octavo.cli.serve.placement import GatewayDirectory
from octavo.cli.serve.service import Notice, SupervisedProcess
from octavo.cli.settings.addresses import join_address, reachable
from octavo.cli.settings.model_names import name_of_model, split_model
from octavo.cli.whole_file import write_whole
from octavo.wire.run_dir import RunDirError, check_run_dir, default_run_dir, ensure_run_dir

FOLDER = "services"
CLOCK_SLACK_S = 2.0  # a process whose start differs by more is another one with the same pid
LOOK_S = 5.0  # between two checks that the file is there
Fields = TypeVar("Fields")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process; an empty text means none. role: gateway, worker or openai. model: a worker's model, by the name that
    it is served by. checkpoint: as in --model. metrics: address of its /metrics. url: of a process that serves HTTP to
    callers. settings_file: as on its command line. address: where callers reach a gateway on another host.
    model_addresses: where requests to that gateway that name no model get a given one, by model. is_placed: the cluster
    chooses its host. is_leaving: it is to end, and not to be restarted."""

    name: str
    role: str
    model: str
    checkpoint: str = ""
    metrics: str
    url: str
    settings_file: str
    address: str = ""
    model_addresses: Mapping[str, str] = field(default_factory=dict)
    is_placed: bool = False
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """One service. pid, started_s (seconds since 1970) and began_s (seconds since boot, which setting the clock does
    not change; 0: unknown) are the supervisor's."""

    pid: int
    started_s: float
    began_s: float = 0.0
    address: str
    run_dir: str
    processes: tuple[ProcessRecord, ...]

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started."""
        if self.began_s:
            return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.began_s)
        return max(0.0, time.time() - self.started_s)

    def child_pids(self) -> dict[str, int]:
        """The pids of its processes that run on this host now, by name."""
        files = {each.settings_file: each.name for each in self.processes}
        found: dict[str, int] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    found |= {files[word]: child.pid for word in child.cmdline() if word in files}
        return found


def record_of(
    address: str,
    run_dir: Path,
    processes: Sequence[SupervisedProcess],
    *,
    metrics_host: str,
    directory: GatewayDirectory,
) -> ServiceRecord:
    """The record of the service that this process supervises, with its processes on this host and others. directory:
    where callers reach gateways on other hosts now."""
    elsewhere, of_models = directory.addresses(), directory.model_addresses()
    return ServiceRecord(
        pid=os.getpid(),
        started_s=_created_s(),
        began_s=_began_s(os.getpid()),
        address=address,
        run_dir=str(run_dir),
        processes=tuple(
            ProcessRecord(
                name=plan.name,
                role=plan.role.value,
                model=name_of_model(plan.model) if plan.model else "",
                checkpoint=split_model(plan.model)[1],
                metrics=join_address(reachable(metrics_host), plan.metrics_port) if plan.metrics_port else "",
                url=plan.url or "",
                settings_file=str(run_dir / f"{plan.name}.toml"),
                address=elsewhere.get(plan.name, ""),
                model_addresses=of_models.get(plan.name, {}),
                is_placed=plan.is_placed,
                is_leaving=each.is_leaving,
            )
            for each in processes
            if (plan := each.plan).metrics_port or plan.url or plan.is_placed or plan.role is Role.GATEWAY
        ),
    )


class Listing:
    """The file of a running service. If it cannot be written, the service goes on without it, reports that and tries
    again: only `octavo ps` and `octavo scale` read it."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._file = default_run_dir() / FOLDER / f"{os.getpid()}.json"
        self._text = ""
        self._told = ""

    def put(self, record: ServiceRecord) -> None:
        """Write the current record."""
        self._text = json.dumps(asdict(record))
        self._write()

    async def keep(self) -> None:
        """Rewrite the file whenever it is missing or differs, forever."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._is_there():
                self._write()

    def remove(self) -> None:
        """Remove the file: the service has ended."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._file.read_text() == self._text
        return False

    def _write(self) -> None:
        try:
            ensure_run_dir(ensure_run_dir(self._file.parent.parent) / FOLDER)
            write_whole(self._file, self._text)
        except (RunDirError, OSError) as error:
            self._tell(f"octavo ps and octavo scale do not know what runs here, and it is tried again: {error}")
        else:
            if self._told:
                self._tell("octavo ps and octavo scale know what runs here again")
                self._told = ""

    def _tell(self, text: str) -> None:
        """Report this once, however often it recurs."""
        if text != self._told:
            self._told = text
            self._notice(text)


def running_services() -> list[ServiceRecord]:
    """The services of this user, the oldest first. Removes files left by killed supervisors. Raises RunDirError if the
    folder is not accessible to this user alone."""
    folder = default_run_dir() / FOLDER
    if not folder.exists():
        return []
    check_run_dir(folder)
    found = []
    for file in folder.glob("*.json"):
        record = _read(file)
        if record is not None and _is_running(record):
            found.append(record)
        elif record is not None or not _may_run(file):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.started_s)


def _read(file: Path) -> ServiceRecord | None:
    """The record in a file; None if it holds none. Unknown fields, as of a later version, are ignored."""
    try:
        given = json.loads(file.read_text())
        processes = tuple(_known(ProcessRecord, each) for each in given.pop("processes"))
        return _known(ServiceRecord, given | {"processes": processes})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _known(kind: type[Fields], given: Mapping[str, Any]) -> Fields:
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def _may_run(file: Path) -> bool:
    """Whether the pid that names the file exists: a running service of another version may have written a file that
    this one cannot read."""
    return file.stem.isascii() and file.stem.isdigit() and psutil.pid_exists(int(file.stem))


def _created_s() -> float:
    try:
        return psutil.Process().create_time()
    except psutil.Error:  # without /proc
        return time.time()


def _began_s(pid: int) -> float:
    """Seconds from boot to the start of the process; 0 if the system does not tell."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]  # proc(5): starttime
    except OSError:
        return 0.0
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def _is_running(record: ServiceRecord) -> bool:
    if record.began_s:
        return abs(_began_s(record.pid) - record.began_s) < CLOCK_SLACK_S
    try:
        return abs(psutil.Process(record.pid).create_time() - record.started_s) < CLOCK_SLACK_S
    except psutil.Error:
        return False
