"""Checks, before anything starts, that ports and threads are available; chooses the port for 0. `octavo serve` and
`octavo doctor` go by the same lists of what listens on this host."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.cli.errors import CliError, usage
from octavo.cli.serve.launch import metrics_ports
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.model_names import model_ports
from octavo.cli.settings.setting import flag_of
from octavo.wire.host import threads_to_be_had
from octavo.wire.listener import family_and_host

MAX_PORT = 65535


def listening_hosts(settings: ServeSettings) -> list[tuple[str, str]]:
    """(address, setting) of all that a service listens on here."""
    hosts = [(settings.host, "host"), (settings.metrics_host, "metrics_host")]
    hosts += [(settings.page_host, "page_host")] if settings.page != "off" else []
    return hosts + ([(settings.openai_host, "openai_host")] if settings.openai is not None else [])


def asked_ports(settings: ServeSettings) -> list[tuple[str, int, str]]:
    """(address, port, setting) of each port that is asked for; those that the system chooses are left out. Raises
    CliError, naming the flags, if two listeners want one port."""
    asked = [(settings.host, settings.port, "port"), (settings.host, settings.admin_port, "admin_port")]
    asked += [(settings.openai_host, settings.openai, "openai")]
    asked += [(settings.page_host, settings.page_port, "page_port")] if settings.page != "off" else []
    asked += [(settings.host, port, "model_port") for _, port in model_ports(settings.model_port)]
    asked += [(settings.metrics_host, port, name) for name, port in _metrics_here(settings)]
    flags = dict[int, str]()
    found = [(host, port, name) for host, port, name in asked if port]
    for _, port, name in found:
        if port in flags:
            numbers = f"{flags[port]} and {flag_of(name)} come to {port}"
            raise usage("two listeners want one port", numbers, "change one of them")
        flags[port] = flag_of(name)
    return found


def choose_ports(settings: ServeSettings) -> list[int]:
    """A metrics port for each process that has one. A worker on a cluster keeps its configured port, or 0. Raises
    CliError if two listeners want one port, a port is busy, or an address is not this host's; it names the flags.

    Ports that the system chooses differ from all ports that were asked for.
    """
    for host, name in listening_hosts(settings):
        require_address(host, name)
    asked = asked_ports(settings)
    for host, port, name in asked:
        require_free(host, port, name)
    taken, here = {port for _, port, _ in asked}, _metrics_here(settings)
    return [port or free_port(settings.metrics_host, taken) for _, port in here] + [
        port for _, port in metrics_ports(settings)[len(here) :]
    ]


def _metrics_here(settings: ServeSettings) -> list[tuple[str, int]]:
    return [(name, port) for name, port in metrics_ports(settings) if name == "metrics_port" or not settings.cluster]


def require_free(host: str, port: int, setting: str) -> None:
    """Raises CliError naming the flag if something listens there, the address is not this host's, or a port that was
    counted up from the given one is above MAX_PORT."""
    if port > MAX_PORT:
        raise usage(
            f"bad value for {flag_of(setting)}",
            f"the processes of this service would listen at ports up to {port:,}, and the last one is {MAX_PORT:,}",
            f"give a smaller {flag_of(setting)} (0 takes free ones)",
        )
    try:
        with _bound(host, port, socket.SO_REUSEADDR):
            pass
    except OSError as error:
        raise busy_port(host, port, setting, error) from None


def require_address(host: str, setting: str) -> None:
    """Raises CliError naming the flag if `host` is not an address of this host."""
    try:
        with _bound(host, 0):
            pass
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise usage(
            f"bad value for {flag_of(setting)}",
            f"{host!r} is no address of this host: {why}",
            "give one of its addresses, as 127.0.0.1 or ::1",
        ) from None


def require_threads(wanted: int) -> None:
    """Raises CliError if this process and its children cannot start that many more."""
    had = threads_to_be_had(wanted)
    if had < wanted:
        numbers = f"{had} more can be started here, and this takes {wanted}"
        advice = "raise ulimit -u, or the container's limit of processes (pids); or give fewer --num-threads"
        raise CliError("too few threads and processes are allowed", numbers, advice)


def busy_port(host: str, port: int, setting: str, error: OSError) -> CliError:
    """The error for an address that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return CliError(
            f"port {port} is busy",
            f"another process listens on {host}:{port}",
            f"stop it, or choose another port with {flag_of(setting)} (0 takes a free one)",
        )
    advice = (
        f"choose another port with {flag_of(setting)}"
        if error.errno == errno.EACCES
        else "give an address of this host"
    )
    return CliError(f"cannot listen on {host}:{port}", error.strerror or str(error), advice)


def is_free(host: str, port: int) -> bool:
    """Whether a process could listen there now."""
    try:
        require_free(host, port, "port")
    except CliError:
        return False
    return True


def free_port(host: str, taken: set[int]) -> int:
    """A port that is free now and not in `taken`, to which it is added."""
    while True:
        with _bound(host, 0) as probe:
            port = int(probe.getsockname()[1])
        if port not in taken:
            taken.add(port)
            return port


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """Reserves a port, without listening, for processes that will share it (SO_REUSEPORT). Yields its number, which the
    system chooses for 0."""
    with _bound(host, port, socket.SO_REUSEPORT) as holder:
        yield int(holder.getsockname()[1])


@contextmanager
def _bound(host: str, port: int, *options: int) -> Iterator[socket.socket]:
    """A socket that has the address and does not listen. Raises OSError; UnicodeError if the host is no name."""
    family, host = family_and_host(host)
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
        yield bound
