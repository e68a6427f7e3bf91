"""What a process needs on a cluster's host, whether there is room for so many, and where the gateways are. Pure; knows
no cluster library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from octavo.cli.errors import CliError, usage
from octavo.cli.settings.addresses import join_address, split_address
from octavo.cli.settings.groups import ServeSettings

CLIENT_PORT = 10001  # default port on which a Ray head accepts drivers of other hosts
_ADDRESS_ADVICE = "write it as ray://HEAD, as HOST:PORT of the head, or as auto"


class JoinMode(Enum):
    """How a cluster is joined. AUTO: the one that runs here. MEMBER: by its head's address, with this host part of it.
    CLIENT: from outside."""

    AUTO = "auto"
    MEMBER = "member"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where a cluster's head is. address: in Ray's form. host, port: where it listens; empty and 0 for AUTO."""

    mode: JoinMode
    address: str
    host: str = ""
    port: int = 0


def head_of(text: str) -> Head:
    """--cluster, parsed. Raises CliError."""
    if text == "auto":
        return Head(mode=JoinMode.AUTO, address="auto")
    if text.startswith("ray://"):
        rest = text.removeprefix("ray://")
        bare = rest.removeprefix("[").removesuffix("]")
        has_port = ":" in (rest.rpartition("]")[2] if "]" in rest else rest)
        host, port = _split(text, rest) if has_port else (bare, CLIENT_PORT)
        if not host or any(sign in host for sign in "/?#@ "):
            raise usage("bad value for --cluster", f"{text!r} names no head", _ADDRESS_ADVICE)
        shown = f"[{host}]" if ":" in host else host
        return Head(mode=JoinMode.CLIENT, address=f"ray://{shown}:{port}", host=host, port=port)
    host, port = _split(text, text)
    if "/" in host:
        raise usage("bad value for --cluster", f"{text!r} is no address of a head", _ADDRESS_ADVICE)
    return Head(mode=JoinMode.MEMBER, address=text, host=host, port=port)


def _split(text: str, address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except CliError:
        raise usage("bad value for --cluster", f"{text!r} is no address of a head", _ADDRESS_ADVICE) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The resources of one worker, whose processes are all on one host, or of one gateway."""

    gpus: int
    cpus: int

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)} and " if self.gpus else ""
        return f"{gpus}{self.cpus} CPU{'s' * (self.cpus != 1)}"

    @property
    def resources(self) -> dict[str, float]:
        """By Ray's names."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


OF_GATEWAY = Need(gpus=0, cpus=1)
Host = Mapping[str, float]
"""The resources of a host of the cluster, by Ray's names."""


def need_of(settings: ServeSettings, hosts: Sequence[Host]) -> Need:
    """For each rank of a worker, a GPU and a CPU; without GPUs, a CPU for each of its threads. Raises CliError if GPUs
    are asked for and the cluster has none."""
    has_gpus = any(host.get("GPU", 0) >= 1 for host in hosts)
    if settings.device == "cuda" and not has_gpus:
        numbers = f"--device is cuda, and none of its {_hosts(len(hosts))} has a GPU that Ray knows of"
        raise CliError(
            "the cluster has no GPUs", numbers, "give --device cpu, or tell Ray of them (ray start --num-gpus)"
        )
    size = settings.tensor_parallel_size
    if settings.device == "cuda" or (settings.device == "auto" and settings.runner == "torch" and has_gpus):
        return Need(gpus=size, cpus=size)
    return Need(gpus=0, cpus=size * (settings.num_threads or 1))


def room_for(need: Need, hosts: Sequence[Host]) -> int:
    """How many such workers the hosts can hold in total, each entirely on one host."""
    wanted = need.resources
    return sum(min(int(host.get(name, 0) // amount) for name, amount in wanted.items()) for host in hosts)


def why_no_room(need: Need, hosts: Sequence[Host], num_workers: int) -> str | None:
    """A sentence if the hosts cannot hold that many workers, else None."""
    room = room_for(need, hosts)
    if room >= num_workers:
        return None
    where = f"the cluster's {_hosts(len(hosts))}"
    if room == 0:
        return f"a worker needs {need} on one host, and none of {where} has that"
    return f"{num_workers} workers need {need} each, and {where} hold{'s' * (len(hosts) == 1)} {room} of them"


def room_beside_gateways(hosts: Sequence[Host], is_away: Sequence[bool], need: Need, num_gateways: int) -> list[Host]:
    """What hosts have left for workers, at best, once that many gateways are placed: none on the supervisor's host, as
    few as possible on one host, and where they cost workers least. is_away: for each host, whether it is not the
    supervisor's. Raises CliError if there is no room for them."""
    left, held = list(hosts), {n: 0 for n, is_other in enumerate(is_away) if is_other}
    for number in range(num_gateways):
        able = [n for n in held if left[n].get("CPU", 0) >= OF_GATEWAY.cpus]
        if not able:
            where = f"the cluster's {_hosts(len(held))} beside this one" if len(held) < len(hosts) else "the cluster"
            numbers = f"--cluster-gateways {num_gateways} needs {OF_GATEWAY} for each, and {where} can hold {number}"
            raise CliError("the cluster is too small", numbers, "give fewer of them, or add hosts to the cluster")

        def cost(n: int) -> tuple[int, int, float]:
            lost = room_for(need, [left[n]]) - room_for(need, [_less(left[n])])
            return held[n], lost, left[n].get("GPU", 0)

        chosen = min(able, key=cost)
        held[chosen] += 1
        left[chosen] = _less(left[chosen])
    return left


def _less(host: Host) -> Host:
    """What a gateway leaves of the host's resources."""
    return dict(host) | {"CPU": host.get("CPU", 0) - OF_GATEWAY.cpus}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddress:
    """Where a gateway is reached. host: its address. port, worker_port, control, metrics: ports for callers, workers,
    other gateways and Prometheus. models: (model, port): further ports for callers, where a request that names no model
    gets this one. node: of the cluster; empty for the supervisor's host."""

    host: str
    port: int
    worker_port: int
    control: int
    metrics: int = 0
    models: tuple[tuple[str, int], ...] = ()
    node: str = ""

    @property
    def ports(self) -> tuple[int, ...]:
        """All of them; no other process on its host can use these."""
        return self.port, self.worker_port, self.control, self.metrics, *(port for _, port in self.models)


class GatewayDirectory:
    """Where the gateways of a service are now. listeners: called when that changes."""

    def __init__(self, here: Mapping[str, GatewayAddress]) -> None:
        """here: gateways on the supervisor's host, by name; they never move."""
        self._here = dict(here)
        self._placed: dict[str, GatewayAddress] = {}
        self.listeners: set[Callable[[], None]] = set()

    def put(self, name: str, address: GatewayAddress) -> None:
        """Record a gateway's place, which may be new or have changed."""
        if self._placed.get(name) != address:
            self._placed[name] = address
            self._tell()

    def drop(self, name: str) -> None:
        """A gateway no longer has a place."""
        if self._placed.pop(name, None) is not None:
            self._tell()

    def addresses(self) -> dict[str, str]:
        """Where callers reach the gateways on other hosts, by gateway."""
        return {name: join_address(each.host, each.port) for name, each in sorted(self._placed.items())}

    def model_addresses(self) -> dict[str, dict[str, str]]:
        """Where requests to them that name no model get a given one, by gateway and model."""
        return {
            name: {model: join_address(each.host, port) for model, port in each.models}
            for name, each in sorted(self._placed.items())
        }

    def rows(self) -> list[tuple[str, str]]:
        """For people: (name, address) of each of them, and of its ports for single models."""
        of_models = self.model_addresses()
        return [
            row
            for name, address in self.addresses().items()
            for row in ((name, address), *((f"{name}, {model}", each) for model, each in of_models[name].items()))
        ]

    def endpoints(self) -> str:
        """Where workers connect to all gateways, as the content of an endpoints file."""
        return "".join(f"tcp://{join_address(each.host, each.worker_port)}\n" for each in self._all().values())

    def controls(self) -> str:
        """Where gateways connect to each other, as the content of an endpoints file."""
        return "".join(f"tcp://{join_address(each.host, each.control)}\n" for each in self._all().values())

    def nodes(self, besides: str) -> set[str]:
        """Nodes that have a gateway other than `besides`."""
        return {each.node for name, each in self._placed.items() if name != besides}

    def ports(self, besides: str) -> list[int]:
        """The ports of all gateways other than `besides`."""
        return [port for name, each in self._all().items() if name != besides for port in each.ports if port]

    def _all(self) -> dict[str, GatewayAddress]:
        return self._here | dict(sorted(self._placed.items()))

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()


def _hosts(number: int) -> str:
    return f"{number} host{'s' * (number != 1)}"
