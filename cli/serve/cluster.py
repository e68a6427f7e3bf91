"""Workers on the hosts of a Ray cluster: each in an actor of its own, in a placement group with its GPUs or CPUs.

Gateways stay on this host; workers dial them over tcp, with CURVE keys that are made here for each service and handed
out through Ray. When to start a worker again is decided where it is decided for processes of this host
(`cli.serve.supervisor`): a lost host ends its workers' lives, and their next ones are placed wherever there is room.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.cli.errors import CliError
from octavo.cli.serve.children import OnLine
from octavo.cli.serve.launch import Doors, ProcessPlan, passed_on
from octavo.cli.serve.parent import EXIT_NO_PLACE, EXIT_PLACE_LOST
from octavo.cli.serve.placement import Head, Host, Need, Way, head_of, need_of, why_no_room
from octavo.cli.serve.ports import free_port
from octavo.cli.serve.seat import Seat, version_here
from octavo.cli.serve.service import Notice
from octavo.cli.settings.gateway_config import join_address
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.model_names import split_model
from octavo.wire.keys import generate_keys, load_keys, save_keys
from octavo.wire.run_dir import temporary_folder

CONNECT_S = 5.0
LOOK_S = 30.0
PLACE_S = 30.0  # for the first place of a worker; later ones are waited for as long as it takes
PATIENCE_S = 10.0  # until people are told that one waits
AGAIN_S = 0.5
NEEDS_RAY = "install it with octavo: pip install '.[ray]'"

# Ray's library waits for minutes for a head that does not answer, and may end the process that waits: another process
# asks first.
_LOOK = """
import json, sys
import ray
ray.init(address=sys.argv[1], namespace="octavo", log_to_driver=False)
hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print(json.dumps({"hosts": hosts, "head": ray.get_runtime_context().gcs_address}))
"""


@contextmanager
def joined(settings: ServeSettings, run_dir: Path) -> Iterator["Cluster"]:
    """The cluster of --cluster, for as long as the service runs: what runs there ends with it. Raises CliError where it
    cannot be joined, or has no room for the workers."""
    head = head_of(settings.cluster)
    ray = _import_ray()
    if head.way is not Way.AUTO:
        _local_address(head.host, head.port)
    hosts, gcs = _look(head)
    need = need_of(settings, hosts)
    if (why := why_no_room(need, hosts, settings.workers * len(settings.model))) is not None:
        raise CliError("the cluster is too small", why, "give fewer --workers, or add hosts to the cluster")
    gcs_host, _, gcs_port = gcs.rpartition(":")
    reached = (head.host, head.port) if head.way is Way.CLIENT else (gcs_host.strip("[]"), int(gcs_port))
    address = settings.cluster_address or _local_address(*reached)
    with temporary_folder("keys-", within=run_dir) as folder:
        files, of_gateways = _keys(folder, settings.gateway_key_file)
        taken: set[int] = set()
        ports = [free_port(address, taken) for _ in range(settings.num_gateways)]
        doors = Doors(endpoints=[f"tcp://{join_address(address, port)}" for port in ports], of_gateways=of_gateways)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=head.address, namespace="octavo", log_to_driver=False, configure_logging=False)
        except Exception as error:  # of many kinds, such as ConnectionError where a client gets no server
            raise _not_joined(head, _first_line(error)) from None
        try:
            yield Cluster(ray, doors=doors, need=need, files=files)
        finally:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise CliError("--cluster needs Ray", f"the package ray cannot be imported: {error}", NEEDS_RAY) from None
    return ray


def _local_address(host: str, port: int) -> str:
    """Ours, towards a head that takes connections there. Raises CliError."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise CliError(
            "the cluster's head cannot be reached",
            f"{join_address(host, port)}: {error.strerror or error}",
            "look whether it runs (ray status), and at --cluster",
        ) from None


def _look(head: Head) -> tuple[list[Host], str]:
    """What each host has, and where the head is. Raises CliError."""
    command = [sys.executable, "-P", "-c", _LOOK, head.address]
    quiet = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=True, env=quiet)
        found = json.loads(done.stdout.splitlines()[-1])
        return found["hosts"], found["head"]
    except subprocess.TimeoutExpired:
        why = f"it did not answer as a head of Ray within {LOOK_S:g} s"
    except (OSError, ValueError, IndexError, KeyError, subprocess.CalledProcessError) as error:
        lines = [line.strip() for line in str(getattr(error, "stderr", "") or error).splitlines() if line.strip()]
        why = lines[-1][:300] if lines else type(error).__name__
    raise _not_joined(head, why)


def _not_joined(head: Head, why: str) -> CliError:
    advice = "start one with `ray start --head`; a HOST:PORT wants this host to be part of it, ray://HEAD does not"
    return CliError("the cluster cannot be joined", f"{head.address}: {why}", advice)


def _keys(folder: Path, given: Path | None) -> tuple[dict[str, str], dict[str, Any]]:
    """What each worker gets as files, and the settings of gateways; their pair is made here, unless one was given."""
    gateway_key, gateway_pub = save_keys(load_keys(given) if given else generate_keys(), folder, "gateway")
    worker_key, worker_pub = save_keys(generate_keys(), folder, "worker")
    files = {"worker_key_file": worker_key.read_text(), "gateway_public_key_file": gateway_pub.read_text()}
    return files, {"gateway_key_file": gateway_key, "allowed_worker_keys": [str(worker_pub)]}


class Cluster:
    """Where the workers of a service run. ray: the library, connected."""

    def __init__(self, ray: Any, *, doors: Doors, need: Need, files: dict[str, str]) -> None:
        self.doors = doors
        self._ray = ray
        self._need = need
        self._files = files
        self._service = secrets.token_hex(4)  # groups of several services have names of one cluster

    def child(self, plan: ProcessPlan, on_line: OnLine, notice: Notice) -> "PlacedWorker":
        """A worker, without a place yet."""
        name, checkpoint = split_model(plan.model)
        folder = Path(checkpoint).expanduser()
        if folder.is_dir():  # on its host it has another working directory
            checkpoint = str(folder.resolve())
        own = plan.settings | {
            "model": [f"{name}={checkpoint}" if name else checkpoint],
            "device": "cuda" if self._need.gpus else "cpu",
            "num_threads": plan.settings["num_threads"] or (None if self._need.gpus else 1),
        }
        label = f"octavo-{self._service}-{plan.name}"
        return PlacedWorker(self._ray, plan.name, label, own, self._files, self._need, on_line, notice)

    def room(self, num_workers: int) -> str | None:
        """By what hosts have in all: what others hold of it may be given back."""
        try:
            hosts = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        except self._ray.exceptions.RayError as error:
            return f"the cluster does not tell what it has: {_first_line(error)}"
        return why_no_room(self._need, hosts, num_workers)


class PlacedWorker:
    """A worker on some host of the cluster. Keeps its place from one life to the next, while the host is there.

    label: its name among all services of the cluster. files: settings whose value is a file, with its text.
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        label: str,
        settings: dict[str, Any],
        files: dict[str, str],
        need: Need,
        on_line: OnLine,
        notice: Notice,
    ) -> None:
        self.name = name
        self._ray = ray
        self._label = label
        self._settings = settings
        self._files = files
        self._need = need
        self._on_line = on_line
        self._notice = notice
        self._group: Any = None
        self._seat: Any = None
        self._life = 0
        self._was_placed = False
        self._is_leaving = False
        self._living: asyncio.Task[int] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has, or waits for, a place."""
        return self._living is not None and not self._living.done()

    async def run(self) -> int:
        """One life. The exit code of the process; EXIT_PLACE_LOST, EXIT_NO_PLACE."""
        self._living = asyncio.create_task(self._live(), name=self.name)
        try:
            return await self._living
        except asyncio.CancelledError:
            if self._living.cancelled() and self._is_leaving:
                return 0  # by `kill`, or by `terminate` while it had no place
            raise
        finally:
            self._living.cancel()
            if self._is_leaving:
                self._leave()

    def terminate(self) -> None:
        """SIGTERM to the process; without a place it ends at once."""
        self._is_leaving = True
        if self._seat is not None and self.is_running:
            self._seat.terminate.remote()
        elif self.is_running and self._living is not None:
            self._living.cancel()
        else:
            self._leave()

    def kill(self) -> None:
        """The process dies with its actor."""
        self._is_leaving = True
        if self._living is not None:
            self._living.cancel()
        self._leave()

    async def _live(self) -> int:
        errors = self._ray.exceptions
        self._life += 1
        try:
            if self._seat is None and not await self._place():
                return EXIT_NO_PLACE
            given = (self._life, self.name, self._settings, self._files, passed_on(), version_here())
            host = await self._ask("start", *given)
            if not self._was_placed:
                self._notice(f"{self.name} is placed on {host}")
            self._was_placed = True
            num_seen, code = 0, None
            while code is None:
                lines, code = await self._ask("follow", num_seen)
                num_seen += len(lines)
                for line in lines:
                    self._on_line(self.name, line)
            return int(code)
        except errors.RayActorError as error:
            self._leave()
            if getattr(error, "actor_init_failed", False):
                self._notice(f"{self.name}: its host cannot run octavo: {_first_line(error)}")
                return 1
            self._was_placed = False
            return EXIT_PLACE_LOST
        except errors.RayTaskError as error:
            self._leave()
            self._notice(f"{self.name}: {_first_line(error.cause or error)}")
            return 1

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """An answer of the actor; asked again while it cannot be reached and nobody knows that it is gone."""
        while True:
            try:
                reference = getattr(self._seat, method).remote(*arguments)
                return await asyncio.wrap_future(reference.future())
            except self._ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)

    async def _place(self) -> bool:
        """Whether there is room, at the first time; later it waits until there is."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._need.resources
        self._group = placement_group([resources], strategy="STRICT_PACK", name=f"{self._label}-{self._life}")
        ready = asyncio.wrap_future(self._group.ready().future())
        limits = (PATIENCE_S, PLACE_S - PATIENCE_S)
        for limit_s in limits if self._life == 1 else (PATIENCE_S, None):
            await asyncio.wait([ready], timeout=limit_s)
            if ready.done():
                break
            self._notice(f"{self.name} waits for a host of the cluster with {self._need} free")
        if not ready.done():
            self._leave()
            return False
        ready.result()
        self._seat = (
            self._ray.remote(Seat)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
                max_restarts=0,
            )
            .remote()
        )
        return True

    def _leave(self) -> None:
        """Give the place back. What cannot be told to a cluster that is gone needs not be."""
        from ray.util.placement_group import remove_placement_group

        seat, self._seat = self._seat, None
        group, self._group = self._group, None
        with contextlib.suppress(Exception):
            if seat is not None:
                self._ray.kill(seat)
        with contextlib.suppress(Exception):
            if group is not None:
                remove_placement_group(group)


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
