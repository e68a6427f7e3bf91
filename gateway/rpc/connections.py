"""Callers' connections: how many there may be, and which are closed where there are too many.

A connection costs a descriptor, whatever its caller does with it. gRPC's core closes those that had no call for
`--max-connection-idle-s`, pings or none, and accepts and closes at once what comes beyond a listener's bound
(`grpc.max_allowed_incoming_connections`). By that bound alone the first callers would keep all others out; so below it
the least useful connections are closed here, by shutting their sockets down as if their callers had gone: first those
that never had a request, then those whose last request is longest ago. Requests in flight protect their connections.

A call that has its status is not over while its caller does not read what was sent before it: HTTP/2 sends a status
behind the messages of its stream, and these wait for the caller's window. Until then the library keeps the call, and
its place among those that the server lets in at once; it has no way to end one call from here, and pings do not help,
because the caller's library answers them. When there are too many such calls, the connections with the most of them
are closed too.

Must not know what requests are. A connection on a unix socket has no name by which it could be distinguished, and its
file has permissions: it is left alone.
"""

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote

import grpc
import structlog

from octavo.gateway.config import ConnectionConfig

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""Of a call, as every handler gets it."""
log = structlog.get_logger(__name__)

MIN_DESCRIPTORS = 128
MAX_RESERVED = 512  # descriptors for files, workers, scrapers, administration
MAX_BY_DEFAULT = 8192  # idle ones take some 20 KiB each
INTERVAL_S = 0.25
PRESSED_INTERVAL_S = 0.05
REST_PER_WORK = 19.0  # so that examining sockets takes a twentieth of one core at most
PRESSURE_OVER_S = 5.0  # without closing a connection
COUNT_MAX_AGE_S = 5.0
MAX_UNREAD = 512  # below the server's room besides requests in flight, so that they keep no others out
PATIENCE_S = 2.0  # how long a status may take before it counts as unread
UNREAD_INTERVAL_S = 0.5
_DESCRIPTORS = "/proc/self/fd"


class TooFewDescriptors(ValueError):
    """The process may not open as many files as it needs; the message names what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one listener. total: connections beyond it are closed on arrival. kept: beyond it, idle ones are closed
    to make room for new ones. per_peer: connections from one address, with or without requests."""

    total: int
    per_peer: int

    @property
    def kept(self) -> int:
        """Connections without requests beyond it are closed."""
        return self.total - max(1, self.total // 8)


def num_reserved(num_descriptors: int) -> int:
    """Descriptors that must stay free of callers' connections."""
    return min(MAX_RESERVED, num_descriptors // 2)


def connection_limits(config: ConnectionConfig, num_descriptors: int) -> ConnectionLimits:
    """The configured limits, reduced to what the process may open. Raises TooFewDescriptors."""
    if num_descriptors < MIN_DESCRIPTORS:
        raise TooFewDescriptors(
            f"ulimit -n is {num_descriptors}: a gateway needs at least {MIN_DESCRIPTORS} file descriptors"
        )
    room = num_descriptors - num_reserved(num_descriptors)
    if config.max_connections is not None and config.max_connections > room:
        raise TooFewDescriptors(
            f"--max-connections {config.max_connections} is more than the {room} that ulimit -n {num_descriptors} has "
            "room for: raise the one or lower the other"
        )
    total = config.max_connections or min(room, MAX_BY_DEFAULT)
    return ConnectionLimits(total=total, per_peer=config.max_connections_per_peer or max(1, total // 2))


def descriptor_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


# ---------------------------------------------------------------- peers and sockets


class Address(NamedTuple):
    """The other end of a TCP connection."""

    host: str
    port: int


class Connection(NamedTuple):
    """An accepted connection. inode: of its socket; later sockets mostly have greater ones."""

    address: Address
    inode: int


def address_of(peer: str) -> Address | None:
    """The address in gRPC's name for a peer (``ipv4:127.0.0.1:80``, ``ipv6:%5B::1%5D:80``); None for other kinds."""
    scheme, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return Address(_plain(host.strip("[]")), int(port))


def connections_at(*ports: int) -> list[Connection]:
    """This process's accepted connections at local ports."""
    found = []
    for connection in _own_connections():
        address, local_port = _ends(connection)
        if address is not None and local_port in ports:
            found.append(Connection(address, os.fstat(connection.fileno()).st_ino))
    return found


def hang_up(addresses: Collection[Address]) -> int:
    """Shut down this process's connections to these addresses. Returns how many."""
    num_hung_up = 0
    for connection in _own_connections():
        if _ends(connection)[0] in addresses:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected any more
            num_hung_up += 1
    return num_hung_up


def _own_connections() -> Iterator[socket.socket]:
    """Duplicates of this process's sockets, each held open while it is examined, so that its descriptor cannot be
    reused for another connection meanwhile."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        with connection:
            yield connection


def _ends(connection: socket.socket) -> tuple[Address | None, int]:
    """The remote address and the local port; (None, 0) if it is not a TCP connection, or no longer one."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None, 0
    try:
        host, port, *_ = connection.getpeername()
        return Address(_plain(host), port), int(connection.getsockname()[1])
    except OSError:
        return None, 0


def _plain(host: str) -> str:
    """One spelling for an address: IPv4 if it is an IPv4-mapped one."""
    if host.count(".") == 3 and ":" not in host:
        return host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


class ConnectionUse(Protocol):
    """Tells which connections are used. A connection is named by gRPC's name of its peer."""

    def busy(self) -> list[str]:
        """Connections with requests in flight."""

    def used(self) -> list[str]:
        """Connections that have had a request, most recent last."""


# ---------------------------------------------------------------- too many


class Reason(Enum):
    """Why a connection was closed."""

    PER_PEER = "per_peer"  # its address has too many
    TOTAL = "total"  # there are too many, and it had nothing in flight


def choose(
    connections: Iterable[Connection],
    limits: ConnectionLimits,
    *,
    busy: Set[Address],
    used: Mapping[Address, int],
    seen: Mapping[Address, int],
) -> dict[Address, Reason]:
    """The connections to close. used: ranks of those that have had a request, highest for the most recent. seen: when
    each was first seen. If one address has too many, its connections with requests in flight are closed too, but last,
    newest first. If there are too many in total, only those without requests are closed: requests are limited
    elsewhere."""

    def worth(connection: Connection) -> tuple[int, int, int]:
        address, inode = connection
        if address in busy:
            return 2, -seen.get(address, 0), -inode
        if address in used:
            return 1, used[address], inode
        return 0, seen.get(address, 0), inode

    by_worth = sorted(connections, key=worth)
    of_host = defaultdict[str, list[Address]](list)
    for address, _ in by_worth:
        of_host[address.host].append(address)
    chosen: dict[Address, Reason] = {}
    for addresses in of_host.values():
        chosen |= dict.fromkeys(addresses[: max(0, len(addresses) - limits.per_peer)], Reason.PER_PEER)
    rest = [address for address, _ in by_worth if address not in chosen]
    num_over = max(0, len(rest) - limits.kept)
    idle = [address for address in rest if address not in busy]
    return chosen | dict.fromkeys(idle[:num_over], Reason.TOTAL)


class ConnectionLimiter:
    """Keeps the listeners within their limits; run it as a task. closed: connections closed here, by reason (all
    reasons present from the start)."""

    def __init__(self, limits: ConnectionLimits, use: ConnectionUse) -> None:
        self.limits = limits
        self.closed: Counter[str] = Counter({reason.value: 0 for reason in Reason})
        self._use = use
        self._ports: tuple[int, ...] = ()
        self._seen: dict[Address, int] = {}
        self._num_passes = 0
        self._pressed_since: tuple[float, int] | None = None  # when it began, and how many had been closed by then
        self._last_closed_s = 0.0
        self._counted: tuple[float, int] = (-COUNT_MAX_AGE_S, 0)

    def watch(self, port: int) -> None:
        """Include connections accepted at this port; the limits apply to all ports together. If the system does not
        show a process its sockets, only gRPC's own limits hold."""
        if os.path.isdir(_DESCRIPTORS):
            self._ports = (*self._ports, port)

    def num_open(self) -> int:
        """Open connections, as of at most a few seconds ago. Any thread."""
        counted_s, num_open = self._counted
        if self._ports and time.monotonic() - counted_s >= COUNT_MAX_AGE_S:
            num_open = len(connections_at(*self._ports))
            self._counted = time.monotonic(), num_open
        return num_open

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            start_s, num_closed = time.monotonic(), 0
            with contextlib.suppress(OSError):  # no descriptor was free for a moment
                num_closed = await self.close_excess() if self._is_suspicious() else 0
            pause_s = PRESSED_INTERVAL_S if num_closed else INTERVAL_S
            await asyncio.sleep(max(pause_s, REST_PER_WORK * (time.monotonic() - start_s)))

    async def close_excess(self) -> int:
        """Close connections beyond the limits. Returns how many."""
        if not self._ports:
            return 0
        chosen = await asyncio.to_thread(self._hang_up, self._ports, self._use.busy(), self._use.used())
        self.closed.update(reason.value for reason in chosen.values())
        self._log_pressure(chosen)
        return len(chosen)

    def _is_suspicious(self) -> bool:
        """Whether there may be too many: counting descriptors, of which each connection has one, costs next to
        nothing."""
        if self._ports and num_descriptors() > min(self.limits.per_peer, self.limits.kept):
            return True
        self._seen.clear()
        self._log_pressure({})
        return False

    def _hang_up(self, ports: tuple[int, ...], busy: list[str], used: list[str]) -> dict[Address, Reason]:
        """In a thread: choose and close connections. Returns those that were closed."""
        connections = connections_at(*ports)
        self._num_passes += 1
        self._seen = {address: self._seen.get(address, self._num_passes) for address, _ in connections}
        chosen = choose(
            connections,
            self.limits,
            busy=frozenset(filter(None, map(address_of, busy))),
            used={address: rank for rank, address in enumerate(map(address_of, used)) if address is not None},
            seen=self._seen,
        )
        if chosen:
            hang_up(chosen)
        return chosen

    def _log_pressure(self, chosen: Mapping[Address, Reason]) -> None:
        """Log when closing begins and when it is over, not each connection."""
        now_s, num_closed = time.monotonic(), self.closed.total()
        if chosen:
            self._last_closed_s = now_s
            if self._pressed_since is None:
                self._pressed_since = now_s, num_closed - len(chosen)
                hosts = Counter(address.host for address in chosen)
                log.warning(
                    "too_many_connections",
                    hung_up=len(chosen),
                    addresses=len(hosts),
                    most_from=hosts.most_common(1)[0][0],
                    limit=self.limits.total,
                    limit_per_peer=self.limits.per_peer,
                )
        elif self._pressed_since is not None and now_s - self._last_closed_s >= PRESSURE_OVER_S:
            since_s, num_before = self._pressed_since
            self._pressed_since = None
            seconds = round(self._last_closed_s - since_s, 1)
            log.info("connections_eased", hung_up=num_closed - num_before, seconds=seconds)


def num_descriptors() -> int:
    """How many files this process has open."""
    # Linux 6.2 and later give it as the folder's size; before that it is 0.
    return os.stat(_DESCRIPTORS).st_size or len(os.listdir(_DESCRIPTORS))


# ---------------------------------------------------------------- ends that callers do not read


OpenCalls = dict[Context, None]


class UnreadCalls:
    """Closes connections of callers that leave too many finished calls unread. One per gateway, for all listeners that
    callers use. calls: begun and not over; kept by the interceptor. Times are monotonic seconds."""

    def __init__(self, *, max_unread: int = MAX_UNREAD, patience_s: float = PATIENCE_S) -> None:
        self.calls: OpenCalls = {}
        self.num_hung_up = 0  # connections
        self._max_unread = max_unread
        self._patience_s = patience_s
        self._unread_since_s: dict[Context, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(UNREAD_INTERVAL_S)
            await self.close_unread()

    async def close_unread(self) -> None:
        """Close connections if too many finished calls wait for their callers."""
        worst = self.choose(time.monotonic())
        if not worst:
            return
        num_hung_up = await asyncio.to_thread(hang_up, worst)
        self.num_hung_up += num_hung_up
        structlog.get_logger(__name__).warning(
            "unread_endings", unread=len(self._unread_since_s), connections=num_hung_up
        )

    def choose(self, now_s: float) -> set[Address]:
        """The connections to close: those with the most overdue calls, until few enough overdue calls are left."""
        self._unread_since_s = {each: since_s for each, since_s in self._unread_since_s.items() if each in self.calls}
        for context in self.calls:
            if context.done():  # the library has its status
                self._unread_since_s.setdefault(context, now_s)
        late = [context for context, since_s in self._unread_since_s.items() if now_s - since_s >= self._patience_s]
        num_left, worst = len(late), set[Address]()
        if num_left <= self._max_unread:
            return worst
        counts = Counter(address for context in late if (address := address_of(context.peer())) is not None)
        for address, count in counts.most_common():
            if num_left <= self._max_unread:
                break
            worst.add(address)
            num_left -= count
        return worst
