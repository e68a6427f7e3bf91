"""Plans the processes of a service: their commands, settings, environment, and run directory (0700, removed
afterwards). Pure, except that it writes those files.

Each process gets its settings as a TOML file in the run directory (0600): they are complete, whether they came from
flags, environment or file, and no secret appears on a command line.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from octavo.cli.errors import CliError
from octavo.cli.serve.parent import PARENT_VARIABLE
from octavo.cli.settings.addresses import join_address, reachable
from octavo.cli.settings.groups import FrontSettings, GatewaySettings, ServeSettings, WorkerSettings
from octavo.cli.settings.model_names import is_local, name_of_model, split_model
from octavo.cli.settings.setting import DEBUG_VARIABLE, ENV_PREFIX, Settings, flag_of
from octavo.wire.endpoints import parse_endpoint
from octavo.wire.host import usable_cores
from octavo.wire.regular_file import blaming
from octavo.wire.run_dir import (
    RunDirError,
    check_room_for_sockets,
    ensure_run_dir,
    folder_of_sockets,
    held_run_dir,
)

_PASSED_ON = {DEBUG_VARIABLE, ENV_PREFIX + "NATIVE", ENV_PREFIX + "SUMS"}  # that are read but are not settings
GATEWAY_PORT_STRIDE = 100
CORES_PER_GATEWAY = 2
MOST_GATEWAYS = 8
CORES_PER_WORKER = 2
THREADS_OF_PROCESS = 16
"""Of a gateway, and of any other process besides threads that compute; 8 to 18 have been seen."""
PEERS_FILE = "peer-endpoints"
READY_FILE = "ready"
"""A file in the run directory once everything serves: the address of the gRPC service, for scripts that wait for it."""


def choose_gateways(num_cores: int, *, num_workers: int, on_gpu: bool) -> int:
    """The best number of gateways if nothing else is known of a service. With the model on the CPU: one, since the
    model uses every core and another gateway would take time from it. With a GPU: one for every two cores. The kernel
    distributes few connections unevenly, and with more gateways the busiest has fewer of them (of eight connections
    four or five with three gateways, two or three with seven); they are not all busy (bench/RESULTS.md). Each worker
    beyond the first has a thread that plans and one that copies, which need cores."""
    if not on_gpu:
        return 1
    cores = num_cores - CORES_PER_WORKER * (num_workers - 1)
    return min(max(cores // CORES_PER_GATEWAY, 1), MOST_GATEWAYS)


def choose_threads(num_cores: int, *, num_workers: int, num_ranks: int) -> int | None:
    """Threads of each rank if several workers of a model share the cores; None: left to the worker, which uses all
    cores. Requests are spread evenly, so that all workers are busy at once, and threads in excess of the cores wait for
    each other at every product (bench/RESULTS.md). Workers of other models are not counted, since it is not known which
    of them are busy."""
    return None if num_workers == 1 else max(1, -(-num_cores // (num_workers * num_ranks)))


def with_threads(settings: ServeSettings, num_cores: int) -> ServeSettings:
    """The settings with num_threads set to each worker's share of this host's cores."""
    num_ranks = settings.tensor_parallel_size
    number = choose_threads(num_cores, num_workers=settings.workers, num_ranks=num_ranks)
    return settings.model_copy(update={"num_threads": number})


def threads_of_service(settings: ServeSettings, *, on_gpu: bool) -> int:
    """Approximate number of threads of all processes on this host."""
    others = 1 + settings.num_gateways + (settings.openai is not None)
    num_workers = 0 if settings.cluster else settings.workers * len(settings.model)
    return others * THREADS_OF_PROCESS + num_workers * threads_of_worker(settings, on_gpu=on_gpu)


def threads_of_worker(settings: ServeSettings | WorkerSettings, *, on_gpu: bool) -> int:
    """Approximate number of threads of a worker: those that compute, and those of libraries."""
    computing = 0 if on_gpu or settings.runner != "torch" else settings.num_threads or usable_cores()
    return settings.tensor_parallel_size * (THREADS_OF_PROCESS + computing)


@contextmanager
def run_folder(given: Path | None) -> Iterator[Path]:
    """The given folder, checked, or a new one. A folder that did not exist before is removed at the end.

    Raises CliError if the given folder cannot be trusted, or another service uses it.
    """
    if given is None:
        with folder_of_sockets("octavo-run-") as made:
            yield made
        return
    existed = given.exists()
    with ExitStack() as stack:
        try:
            check_room_for_sockets(given.absolute())
            folder = ensure_run_dir(given.absolute())
            stack.enter_context(held_run_dir(folder))
        except RunDirError as error:
            raise CliError(
                "the run directory cannot be used", str(error), f"mend it, or give another with {flag_of('run_dir')}"
            ) from None
        (folder / READY_FILE).unlink(missing_ok=True)  # left by a supervisor that was killed
        try:
            yield folder
        finally:
            (folder / READY_FILE).unlink(missing_ok=True)
            if not existed:
                shutil.rmtree(folder, ignore_errors=True)


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class Role(Enum):
    """What a process does."""

    GATEWAY = "gateway"
    WORKER = "worker"
    FRONT = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process. is_placed: the cluster chooses its host. metrics_port: None if unknown here, or if it has none.
    status_socket: where to ask a gateway for health and models without credentials. url: of a process that serves HTTP
    to callers. variables: what only its environment has."""

    name: str
    role: Role
    settings: dict[str, Any]
    is_placed: bool = False
    metrics_port: int | None
    status_socket: Path | None = None
    url: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Of a worker, as --model names it; else empty."""
        return str(self.settings["model"][0]) if self.role is Role.WORKER else ""

    @property
    def label(self) -> str:
        """For people: the name and, for a worker, its model."""
        return f"{self.name} ({self.model})" if self.model else self.name


def metrics_ports(settings: ServeSettings) -> list[tuple[str, int]]:
    """(setting, metrics port) of every process that has one, in the order of `plan_processes`; 0 stays 0."""
    gateway, worker = settings.metrics_port, settings.worker_metrics_port
    num_workers = settings.workers * len(settings.model)
    return [("metrics_port", gateway and gateway + GATEWAY_PORT_STRIDE * n) for n in range(settings.num_gateways)] + [
        ("worker_metrics_port", worker and worker + n) for n in range(num_workers)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLinks:
    """endpoints: where workers connect to the gateways of this host, one each. controls: where other gateways connect
    to them; None: sockets of this host. of_gateways, of_workers: further settings that each side needs for this."""

    endpoints: list[str]
    controls: list[str] | None = None
    of_gateways: Mapping[str, Any] = field(default_factory=dict)
    of_workers: Mapping[str, Any] = field(default_factory=dict)


def local_links(settings: ServeSettings, run_dir: Path) -> GatewayLinks:
    """Sockets in the run directory, which other users cannot enter."""
    return GatewayLinks(endpoints=[f"ipc://{run_dir}/gateway-{n}.sock" for n in range(settings.num_gateways)])


def plan_processes(
    settings: ServeSettings,
    *,
    run_dir: Path,
    port: int,
    ports: list[int],
    openai_port: int | None = None,
    links: GatewayLinks | None = None,
) -> tuple[ProcessPlan, ...]:
    """Gateways, here and elsewhere, then workers, then the OpenAI front end. port: of the gRPC service. ports: of the
    metrics. openai_port: None if there is no front end. links: None if all processes are on this host."""
    links = links or local_links(settings, run_dir)
    controls = links.controls or [f"ipc://{run_dir}/gateway-{n}.peers.sock" for n in range(settings.num_gateways)]
    gateways = [
        ProcessPlan(
            name=f"gateway-{n}",
            role=Role.GATEWAY,
            settings=_gateway_settings(
                settings, run_dir, port, ports[n], endpoint, admin=settings.admin_port if n == 0 else None
            )
            | dict(links.of_gateways)
            | {"status_socket": status_socket(settings, run_dir, n)}
            | {"front_socket": None if openai_port is None else front_socket(run_dir, n)}
            | (_peers(settings, controls, n) if links.controls is None else _listed_peers(controls[n], run_dir))
            | {"page": "off" if n or settings.page == "off" else "on"}
            | {"expected_model": list(settings.model)},
            metrics_port=ports[n],
            status_socket=status_socket(settings, run_dir, n),
        )
        for n, endpoint in enumerate(links.endpoints)
    ]
    gateways += [
        plan_placed_gateway(settings, settings.num_gateways + n, run_dir=run_dir, port=port)
        for n in range(settings.cluster_gateways)
    ]
    models = [model for model in settings.model for _ in range(settings.workers)]
    workers = [
        plan_worker(settings, n, model, run_dir=run_dir, metrics_port=metrics_port, links=links)
        for n, (model, metrics_port) in enumerate(zip(models, ports[settings.num_gateways :], strict=True))
    ]
    fronts = [] if openai_port is None else [_plan_front(settings, run_dir, openai_port)]
    return (*gateways, *workers, *fronts)


def plan_placed_gateway(settings: ServeSettings, n: int, *, run_dir: Path, port: int) -> ProcessPlan:
    """Gateway n, on a host that is chosen later, where the settings that depend on the host are added. Only callers,
    workers and other gateways reach it; operators call one on this host."""
    own: dict[str, Any] = {
        "status_socket": None,
        "front_socket": None,
        "supervisor_socket": None,
        "page": "off",
        "peer_endpoint": [],
        "port_sharing": "exclusive",
        "expected_model": list(map(name_of_model, settings.model)),  # a folder may have another path there
    }
    return ProcessPlan(
        name=f"gateway-{n}",
        role=Role.GATEWAY,
        settings=_gateway_settings(settings, run_dir, port, settings.metrics_port, "", admin=None) | own,
        is_placed=True,
        metrics_port=None,
    )


def devices_of_group(settings: ServeSettings, n: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that give worker n, if it has several ranks, GPUs of its own."""
    size = settings.tensor_parallel_size
    if size == 1 or settings.device == "cpu":
        return {}
    named = [entry.strip() for entry in environment.get(VISIBLE_DEVICES, "").split(",") if entry.strip()]
    entries = (named or [str(number) for number in range((n + 1) * size)])[n * size : (n + 1) * size]
    return {VISIBLE_DEVICES: ",".join(entries)}


def plan_worker(
    settings: ServeSettings, n: int, model: str, *, run_dir: Path, metrics_port: int, links: GatewayLinks
) -> ProcessPlan:
    """Worker n of the service. model: as --model names it."""
    name = f"worker-{n}"
    own = {
        "run_dir": str(run_dir),
        "model": [model],
        "revision": None if is_local(split_model(model)[1]) else settings.revision,
        "worker_id": name,
        "worker_metrics_port": metrics_port,
        "gateway_endpoint": links.endpoints,
    }
    return ProcessPlan(
        name=name,
        role=Role.WORKER,
        settings=_shared(settings, WorkerSettings) | own | dict(links.of_workers) | _logs(settings),
        is_placed=bool(settings.cluster),
        metrics_port=None if settings.cluster else metrics_port,  # on a cluster, its host is chosen later
        variables={} if settings.cluster else devices_of_group(settings, n),
    )


def supervisor_socket(run_dir: Path) -> Path:
    """Where the supervisor is told how many workers and gateways to run."""
    return run_dir / "supervisor.sock"


def _plan_front(settings: ServeSettings, run_dir: Path, port: int) -> ProcessPlan:
    scheme = "http" if settings.tls_cert_file is None else "https"
    own = {
        "run_dir": str(run_dir),
        "openai": port,
        "front_target": [f"unix:{front_socket(run_dir, n).absolute()}" for n in range(settings.num_gateways)],
    }
    return ProcessPlan(
        name="openai",
        role=Role.FRONT,
        settings=_shared(settings, FrontSettings) | own | _logs(settings),
        metrics_port=None,
        url=f"{scheme}://{join_address(reachable(settings.openai_host), port)}",
    )


def front_socket(run_dir: Path, n: int) -> Path:
    """Where gateway n takes calls from the OpenAI front end."""
    return run_dir / f"front-{n}.sock"


def status_socket(settings: ServeSettings, run_dir: Path, n: int) -> Path | None:
    """Of gateway n; None if its port answers without credentials, and there is no autoscaler to follow the load."""
    return run_dir / f"status-{n}.sock" if settings.authenticates_callers or settings.autoscale else None


def write_settings(values: Mapping[str, Any], path: Path) -> Path:
    """Write settings to a file that only this user can read, and return its path; those that are None are left out."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with blaming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(f"{key} = {_toml(value)}\n" for key, value in values.items() if value is not None)
    return path


def command_line(command: str, settings_file: Path) -> list[str]:
    """The command that starts `octavo COMMAND`: with this Python, and without the working directory on its path."""
    return [sys.executable, "-P", "-m", "octavo.cli.main", command, "--config", str(settings_file)]


def environment() -> dict[str, str]:
    """The environment of the processes: ours, without settings, which are in the file."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    return kept | passed_on() | {PARENT_VARIABLE: str(os.getpid())}


def passed_on() -> dict[str, str]:
    """Those of our variables that every process gets, wherever it runs."""
    return {key: os.environ[key] for key in _PASSED_ON if key in os.environ}


def _shared(settings: ServeSettings, group: type[Settings]) -> dict[str, Any]:
    values = settings.model_dump()
    return {name: values[name] for name in group.model_fields if name in values}


def _gateway_settings(
    settings: ServeSettings, run_dir: Path, port: int, metrics_port: int, endpoint: str, *, admin: int | None
) -> dict[str, Any]:
    return (
        _shared(settings, GatewaySettings)
        | {
            "run_dir": str(run_dir),
            "supervisor_socket": supervisor_socket(run_dir),
            "port": port,
            "admin_port": admin,
            "metrics_port": metrics_port,
            "worker_endpoint": [endpoint],
            "port_sharing": "shared" if shares_port(settings) else "exclusive",
        }
        | _logs(settings)
    )


def shares_port(settings: ServeSettings) -> bool:
    """Whether the gRPC port is reserved for all gateways of this host before they start. Also with gateways on a
    cluster, one of which may run on this machine under another name and would take the port."""
    return settings.num_gateways > 1 or settings.cluster_gateways > 0


def _listed_peers(control: str, run_dir: Path) -> dict[str, Any]:
    """Peer settings of a gateway if other gateways may change their address: they are listed in a file."""
    return {"control_endpoint": control, "peer_endpoint": [], "peer_endpoints_file": run_dir / PEERS_FILE}


def _peers(settings: ServeSettings, sockets: list[str], n: int) -> dict[str, Any]:
    """How gateway n and the others reach each other; all None if it is the only one. sockets: of the gateways of this
    host, used without --control-endpoint."""
    if settings.control_endpoint:
        first = parse_endpoint(settings.control_endpoint)
        own = f"tcp://{join_address(first.host, first.port + n)}"
        near = [
            f"tcp://{join_address(reachable(first.host), first.port + other)}"
            for other in range(settings.num_gateways)
            if other != n
        ]
        return {"control_endpoint": own, "peer_endpoint": [*near, *settings.peer_endpoint]}
    if len(sockets) == 1:
        return {"control_endpoint": None, "peer_endpoint": None, "peer_endpoints_file": None}
    others = [each for each in sockets if each != sockets[n]]
    return {"control_endpoint": sockets[n], "peer_endpoint": others, "peer_endpoints_file": None}


def _logs(settings: ServeSettings) -> dict[str, Any]:
    """JSON, at level info or debug: the supervisor reads startup progress from the lines, and filters by --log-level
    what it shows."""
    return {"log_format": "json", "log_level": "debug" if settings.log_level == "debug" else "info"}


def _toml(value: object) -> str:
    # JSON's strings, numbers, booleans and lists of strings are valid TOML, with two exceptions: TOML has no surrogate
    # pairs, with which JSON escapes characters beyond U+FFFF, and allows no literal DEL.
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
