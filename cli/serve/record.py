"""Which services run here: each `octavo serve` leaves a file in its user's run directory for as long as it lives.

The file says where its processes are, and is written anew when their number changes: what else changes `octavo ps` asks
the processes themselves.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from octavo.cli.serve.launch import ProcessPlan
from octavo.cli.settings.gateway_config import join_address, reachable
from octavo.wire.run_dir import RunDirError, check_run_dir, default_run_dir, ensure_run_dir

FOLDER = "services"
CLOCK_SLACK_S = 2.0  # a process that began at another time is another one with the same id


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process: its name, what it is (gateway, worker, openai), a worker's model, where its /metrics are, the
    address of one that speaks HTTP to callers, the file of its settings, which its command line names, and where
    callers reach a gateway of another host. Empty: none."""

    name: str
    role: str
    model: str
    metrics: str
    url: str
    settings_file: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """One service. pid and started_s (seconds since 1970) are of its supervisor."""

    pid: int
    started_s: float
    address: str
    run_dir: str
    processes: tuple[ProcessRecord, ...]

    def child_pids(self) -> dict[str, int]:
        """The processes that run now, by name."""
        files = {each.settings_file: each.name for each in self.processes}
        found: dict[str, int] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    found |= {files[word]: child.pid for word in child.cmdline() if word in files}
        return found


def record_of(
    address: str, run_dir: Path, plans: Sequence[ProcessPlan], *, metrics_host: str, elsewhere: Mapping[str, str]
) -> ServiceRecord:
    """Of the service that this process supervises; of its processes those that are on this host, and all gateways.
    elsewhere: where callers reach those of other hosts now."""
    return ServiceRecord(
        pid=os.getpid(),
        started_s=psutil.Process().create_time(),
        address=address,
        run_dir=str(run_dir),
        processes=tuple(
            ProcessRecord(
                name=plan.name,
                role=plan.role.value,
                model=plan.model,
                metrics=join_address(reachable(metrics_host), plan.metrics_port) if plan.metrics_port else "",
                url=plan.url or "",
                settings_file=str(run_dir / f"{plan.name}.toml"),
                address=elsewhere.get(plan.name, ""),
            )
            for plan in plans
            if plan.metrics_port or plan.url or plan.name in elsewhere
        ),
    )


@contextmanager
def recorded(record: ServiceRecord) -> Iterator[Callable[[ServiceRecord], None]]:
    """The file, while the service runs; what is given takes the record as it has changed. Where it cannot be written
    the service runs without it: only `octavo ps` and `octavo scale` look for it."""
    _write(record)
    try:
        yield _write
    finally:
        with contextlib.suppress(OSError):
            (default_run_dir() / FOLDER / f"{record.pid}.json").unlink(missing_ok=True)


def _write(record: ServiceRecord) -> None:
    with contextlib.suppress(RunDirError, OSError):
        file = ensure_run_dir(ensure_run_dir(default_run_dir()) / FOLDER) / f"{record.pid}.json"
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)))
        fresh.replace(file)  # whole or not at all, whoever reads it now


def running_services() -> list[ServiceRecord]:
    """Those of this user, the oldest first. What a killed supervisor left is taken away. Raises RunDirError where the
    folder is not this user's alone."""
    folder = default_run_dir() / FOLDER
    if not folder.exists():
        return []
    check_run_dir(folder)
    found = []
    for file in folder.glob("*.json"):
        record = _read(file)
        if record is None or not _is_running(record):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        else:
            found.append(record)
    return sorted(found, key=lambda record: record.started_s)


def _read(file: Path) -> ServiceRecord | None:
    """None for what is no such file."""
    try:
        fields = json.loads(file.read_text())
        processes = tuple(ProcessRecord(**each) for each in fields.pop("processes"))
        return ServiceRecord(**fields, processes=processes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_running(record: ServiceRecord) -> bool:
    try:
        return abs(psutil.Process(record.pid).create_time() - record.started_s) < CLOCK_SLACK_S
    except psutil.Error:
        return False
