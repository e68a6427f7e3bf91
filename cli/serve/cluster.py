"""Workers, and gateways, on the hosts of a Ray cluster: each in its own actor, in a placement group with its GPUs or
CPUs.

At least one gateway stays on this host. Workers connect to all of them over tcp, with CURVE keys that are generated
here for each service and distributed through Ray; so are the lists of gateways, which change whenever one moves.
Restarts are decided where they are for processes on this host (`cli.serve.supervisor`): a lost host ends the processes
on it, and they are restarted wherever there is room.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from octavo.cli.errors import CliError
from octavo.cli.serve.children import OnLine
from octavo.cli.serve.launch import PEERS_FILE, GatewayLinks, ProcessPlan, Role
from octavo.cli.serve.placed import ClusterContext, Placed, PlacedGateway, first_line
from octavo.cli.serve.placement import (
    OF_GATEWAY,
    GatewayAddress,
    GatewayDirectory,
    Head,
    Host,
    JoinMode,
    Need,
    head_of,
    need_of,
    room_beside_gateways,
    why_no_room,
)
from octavo.cli.serve.ports import free_port
from octavo.cli.serve.service import Notice
from octavo.cli.settings.addresses import join_address
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.model_names import split_model
from octavo.cli.whole_file import write_whole
from octavo.gateway.rpc.addresses import is_local
from octavo.wire.keys import generate_keys, load_keys, save_keys
from octavo.wire.run_dir import temporary_folder

CONNECT_S = 5.0
AGAIN_S = 5.0  # between two attempts to write the file that gateways on this host read
LOOK_S = 30.0
ACCESS_FILES = ("api_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
NEEDS_RAY = "install it with octavo: pip install '.[ray]'"

# Ray's library waits minutes for a head that does not answer, and may end the calling process; so another process asks
# first. Ray's "auto" may be yesterday's cluster, whose address it keeps in a file.
_LOOK = """
import json, os, socket, sys
import ray
if sys.argv[1] == "auto" and "://" not in os.environ.get("RAY_ADDRESS", ""):
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:
        pass
    else:
        try:
            address = canonicalize_bootstrap_address("auto")
        except ConnectionError:
            sys.exit("Ray knows of no cluster that runs here")
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            why = error.strerror or error
            sys.exit(f"Ray takes {address} for the cluster that runs here, and nothing answers there: {why}")
ray.init(address=sys.argv[1], namespace="octavo", log_to_driver=False)
context = ray.get_runtime_context()
hosts = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
print(json.dumps({"hosts": hosts, "head": context.gcs_address, "own": context.get_node_id()}))
"""


@contextmanager
def joined(settings: ServeSettings, run_dir: Path) -> Iterator["Cluster"]:
    """The cluster of --cluster, while the service runs: what runs there ends with the service. Raises CliError if the
    cluster cannot be joined, or has no room for the workers; KeyFileError for --gateway-key-file."""
    head = head_of(settings.cluster)
    ray = _import_ray()
    if head.mode is not JoinMode.AUTO:
        _local_address(head.host, head.port)
    nodes, gcs, own = _look(head)
    own_node = "" if head.mode is JoinMode.CLIENT else own
    need = need_of(settings, list(nodes.values()))
    left = _left(nodes, own_node, need, settings.cluster_gateways)
    if (why := why_no_room(need, left, settings.workers * len(settings.model))) is not None:
        raise CliError("the cluster is too small", why, "give fewer --workers, or add hosts to the cluster")
    gcs_host, _, gcs_port = gcs.rpartition(":")
    reached = (head.host, head.port) if head.mode is JoinMode.CLIENT else (gcs_host.strip("[]"), int(gcs_port))
    address = settings.cluster_address or _local_address(*reached)
    if settings.cluster_gateways:
        check_reach(settings.host, address)
    with temporary_folder("keys-", within=run_dir) as folder:
        keys = _keys(folder, settings.gateway_key_file)
        here = _addresses_here(address, settings.num_gateways)
        directory = GatewayDirectory(here)
        controls = [f"tcp://{join_address(address, each.control)}" for each in here.values()]
        links = GatewayLinks(
            endpoints=[f"tcp://{join_address(address, each.worker_port)}" for each in here.values()],
            controls=controls if settings.cluster_gateways else None,
            of_gateways={"gateway_key_file": keys["gateway.key"], "allowed_worker_keys": [str(keys["worker.pub"])]},
        )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=head.address, namespace="octavo", log_to_driver=False, configure_logging=False)
        except Exception as error:  # many types, such as ConnectionError if a client gets no server
            raise _not_joined(head, first_line(error)) from None
        try:
            context = ClusterContext(
                ray=ray,
                label=f"octavo-{secrets.token_hex(4)}",  # services on one cluster share a namespace of group names
                directory=directory,
                own_node=own_node,
                towards=address,
                placing=asyncio.Lock(),
            )
            texts = {name: path.read_text() for name, path in keys.items()}
            yield Cluster(context, links=links, need=need, keys=texts, run_dir=run_dir)
        finally:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise CliError("--cluster needs Ray", f"the package ray cannot be imported: {error}", NEEDS_RAY) from None
    return ray


def _local_address(host: str, port: int) -> str:
    """This host's address on the route to a head that listens there. Raises CliError."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise CliError(
            "the cluster's head cannot be reached",
            f"{join_address(host, port)}: {error.strerror or error}",
            "look whether it runs (ray status), and at --cluster",
        ) from None


def _look(head: Head) -> tuple[dict[str, Host], str, str]:
    """The resources of each host by node id, the head's address, and the id of the node by which we joined. Raises
    CliError."""
    command = [sys.executable, "-P", "-c", _LOOK, head.address]
    quiet = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=True, env=quiet)
        found = json.loads(done.stdout.splitlines()[-1])
        return dict(found["hosts"]), found["head"], found["own"]
    except subprocess.TimeoutExpired:
        why = f"it did not answer as a head of Ray within {LOOK_S:g} s"
    except (OSError, ValueError, IndexError, KeyError, subprocess.CalledProcessError) as error:
        lines = [line.strip() for line in str(getattr(error, "stderr", "") or error).splitlines() if line.strip()]
        why = lines[-1][:300] if lines else type(error).__name__
    raise _not_joined(head, why)


def _not_joined(head: Head, why: str) -> CliError:
    advice = "start one with `ray start --head`; a HOST:PORT wants this host to be part of it, ray://HEAD does not"
    return CliError("the cluster cannot be joined", f"{head.address}: {why}", advice)


def _left(nodes: Mapping[str, Host], own_node: str, need: Need, num_gateways: int) -> list[Host]:
    """What the gateways leave to workers on each host. Raises CliError if there is no room for the gateways."""
    hosts = list(nodes.values())
    return room_beside_gateways(hosts, [name != own_node for name in nodes], need, num_gateways)


def check_reach(host: str, address: str) -> None:
    """Raises CliError if --host is local, so that its callers could not reach gateways on other hosts. address: this
    host's, as the cluster reaches it; if that is local too, the cluster has no other hosts."""
    if is_local(join_address(host, 1)) and not is_local(join_address(address, 1)):
        numbers = f"--host is {host}, which only callers of this host reach, and the others are at their own addresses"
        advice = (
            "give --host 0.0.0.0 with --tls-cert-file and --tls-key-file, or --exposure insecure in a closed network"
        )
        raise CliError("callers could not reach --cluster-gateways", numbers, advice)


def _addresses_here(address: str, num_gateways: int) -> dict[str, GatewayAddress]:
    """The addresses of the gateways on this host, without callers' ports, which are chosen elsewhere."""
    taken: set[int] = set()
    return {
        f"gateway-{n}": GatewayAddress(
            host=address, port=0, worker_port=free_port(address, taken), control=free_port(address, taken)
        )
        for n in range(num_gateways)
    }


def _keys(folder: Path, given: Path | None) -> dict[str, Path]:
    """The files of both key pairs by name; the gateways' pair is generated unless one was given."""
    pair = load_keys(given) if given else generate_keys()
    paths = (*save_keys(pair, folder, "gateway"), *save_keys(generate_keys(), folder, "worker"))
    return {path.name: path for path in paths}


class Cluster:
    """Implements `Site`: workers, and gateways, on a cluster. keys: contents of the key files, by name."""

    def __init__(
        self, context: ClusterContext, *, links: GatewayLinks, need: Need, keys: Mapping[str, str], run_dir: Path
    ) -> None:
        self.links = links
        self._context = context
        self._need = need
        self._keys = keys
        self._peers_file = run_dir / PEERS_FILE
        self._notice: Notice | None = None
        self.directory.listeners.add(self._tell_gateways_here)
        try:
            self._write_peers()
        except OSError as error:
            advice = "give another with --run-dir"
            raise CliError("the run directory cannot be written", f"{self._peers_file}: {error}", advice) from None

    @property
    def directory(self) -> GatewayDirectory:
        """Where the gateways are now."""
        return self._context.directory

    def child(self, plan: ProcessPlan, on_line: OnLine, notice: Notice) -> Placed:
        """A process that has no place yet."""
        self._notice = notice
        if plan.role is Role.GATEWAY:
            files = self._files_of_gateway(plan.settings)
            return PlacedGateway(self._context, plan, plan.settings, files, OF_GATEWAY, on_line, notice)
        settings = self._settings_of_worker(plan)
        return Placed(self._context, plan, settings, self._files_of_worker, self._need, on_line, notice)

    def _settings_of_worker(self, plan: ProcessPlan) -> dict[str, Any]:
        name, checkpoint = split_model(plan.model)
        folder = Path(checkpoint).expanduser()
        if folder.is_dir():  # the worker will have another working directory
            checkpoint = str(folder.resolve())
        return plan.settings | {
            "model": [f"{name}={checkpoint}" if name else checkpoint],
            "device": "cuda" if self._need.gpus else "cpu",
            "num_threads": plan.settings["num_threads"] or (None if self._need.gpus else 1),
            "gateway_endpoint": [],
        }

    def _files_of_worker(self) -> dict[str, str]:
        return {
            "worker_key_file": self._keys["worker.key"],
            "gateway_public_key_file": self._keys["gateway.pub"],
            "gateway_endpoints_file": self.directory.endpoints(),
        }

    def _files_of_gateway(self, settings: Mapping[str, Any]) -> Callable[[], dict[str, str]]:
        """Reads the files at each call; one that can no longer be read keeps its last content."""
        last: dict[str, str] = {}

        def files() -> dict[str, str]:
            for name in ACCESS_FILES:
                if settings.get(name) is not None:
                    with suppress(OSError, UnicodeDecodeError):
                        last[name] = Path(settings[name]).read_text()
            return last | {
                "gateway_key_file": self._keys["gateway.key"],
                "allowed_worker_keys": self._keys["worker.pub"],
                "peer_endpoints_file": self.directory.controls(),
            }

        return files

    def _write_peers(self) -> None:
        write_whole(self._peers_file, self.directory.controls())

    def _tell_gateways_here(self) -> None:
        try:
            self._write_peers()
        except OSError as error:  # a full disk
            if self._notice is not None:
                why = f"{self._peers_file}: {error.strerror or error}"
                self._notice(f"gateways of this host do not learn where others are, and it is tried again: {why}")
            asyncio.get_running_loop().call_later(AGAIN_S, self._tell_gateways_here)

    def room(self, num_workers: int, num_gateways: int) -> str | None:
        """See Site.room. Counts what hosts have in total, since what others use of it may become free."""
        ray = self._context.ray
        try:
            nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
            left = _left(nodes, self._context.own_node, self._need, num_gateways)
        except ray.exceptions.RayError as error:
            return f"the cluster does not tell what it has: {first_line(error)}"
        except CliError as error:
            return error.numbers
        why = why_no_room(self._need, left, num_workers)
        return f"beside {num_gateways} of --cluster-gateways {why}" if why and num_gateways else why
