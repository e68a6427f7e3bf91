"""What a worker needs of a cluster's host, and whether there is room for so many. Pure; knows no cluster library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from octavo.cli.errors import CliError, usage
from octavo.cli.settings.gateway_config import split_address
from octavo.cli.settings.groups import ServeSettings

CLIENT_PORT = 10001  # where a Ray head takes drivers of other hosts
_ADDRESS_ADVICE = "write it as ray://HEAD, as HOST:PORT of the head, or as auto"


class Way(Enum):
    """How a cluster is joined: the one that runs here, through this host's part of it, or from outside."""

    AUTO = "auto"
    MEMBER = "member"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where a cluster's head is. address: as Ray takes it. host, port: what listens there; empty and 0 for AUTO."""

    way: Way
    address: str
    host: str = ""
    port: int = 0


def head_of(text: str) -> Head:
    """--cluster, understood. Raises CliError."""
    if text == "auto":
        return Head(way=Way.AUTO, address="auto")
    if text.startswith("ray://"):
        rest = text.removeprefix("ray://")
        bare = rest.removeprefix("[").removesuffix("]")
        has_port = ":" in (rest.rpartition("]")[2] if "]" in rest else rest)
        host, port = _split(text, rest) if has_port else (bare, CLIENT_PORT)
        if not host or any(sign in host for sign in "/?#@ "):
            raise usage("bad value for --cluster", f"{text!r} names no head", _ADDRESS_ADVICE)
        shown = f"[{host}]" if ":" in host else host
        return Head(way=Way.CLIENT, address=f"ray://{shown}:{port}", host=host, port=port)
    host, port = _split(text, text)
    if "/" in host:
        raise usage("bad value for --cluster", f"{text!r} is no address of a head", _ADDRESS_ADVICE)
    return Head(way=Way.MEMBER, address=text, host=host, port=port)


def _split(text: str, address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except CliError:
        raise usage("bad value for --cluster", f"{text!r} is no address of a head", _ADDRESS_ADVICE) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Of one worker, whose processes are all on one host."""

    gpus: int
    cpus: int

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)} and " if self.gpus else ""
        return f"{gpus}{self.cpus} CPU{'s' * (self.cpus != 1)}"

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


Host = Mapping[str, float]
"""What a host of the cluster has, by Ray's names."""


def need_of(settings: ServeSettings, hosts: Sequence[Host]) -> Need:
    """A GPU for each process of a worker, and a CPU beside it; without GPUs the CPUs of its threads. Raises CliError
    where GPUs are asked for and the cluster has none."""
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
    """How many such workers the hosts hold in all, each whole on one of them."""
    wanted = need.resources
    return sum(min(int(host.get(name, 0) // amount) for name, amount in wanted.items()) for host in hosts)


def why_no_room(need: Need, hosts: Sequence[Host], num_workers: int) -> str | None:
    """A sentence where the hosts do not hold so many workers; None where they do."""
    room = room_for(need, hosts)
    if room >= num_workers:
        return None
    where = f"the cluster's {_hosts(len(hosts))}"
    if room == 0:
        return f"a worker needs {need} on one host, and none of {where} has that"
    return f"{num_workers} workers need {need} each, and {where} hold {room} of them"


def _hosts(number: int) -> str:
    return f"{number} host{'s' * (number != 1)}"
