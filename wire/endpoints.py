"""Addresses of ZeroMQ sockets: which forms are allowed, what each requires, files that list them. Opens no socket."""

import ipaddress
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from octavo.wire.regular_file import read_regular
from octavo.wire.run_dir import MAX_SOCKET_PATH_BYTES


class EndpointError(ValueError):
    """An address that cannot or must not be used; the message says why and what to write instead."""


class Transport(Enum):
    IPC = "ipc"
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A parsed address. ``path`` for ipc; ``host`` and ``port`` for tcp (port 0: any free one)."""

    address: str
    transport: Transport
    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can reach it."""
        return self.transport is Transport.IPC or is_loopback(self.host)


def parse_endpoint(address: str) -> Endpoint:
    """Read ``ipc:///folder/name.sock`` or ``tcp://host:port``. Raises EndpointError."""
    if address.startswith("ipc://"):
        return _parse_ipc(address)
    if address.startswith("tcp://"):
        return _parse_tcp(address)
    raise EndpointError(f"{address!r} is neither ipc:///path nor tcp://host:port")


def require_proof(endpoint: Endpoint, *, has_key: bool, has_token: bool) -> None:
    """Raises EndpointError for a tcp address where any process could pass for a worker or a gateway.

    ipc needs no proof: the file's permissions keep other users out. On loopback every process of the host can connect,
    so that a registration token or CURVE is required; beyond it, where others can listen too, CURVE is.
    """
    if endpoint.transport is Transport.IPC or has_key:
        return
    if not endpoint.is_local:
        raise EndpointError(f"{endpoint.address} is reachable from other hosts: it needs CURVE keys (octavo keys new)")
    if not has_token:
        raise EndpointError(
            f"{endpoint.address} is open to every process of this host: give gateway and worker CURVE keys "
            "(octavo keys new) or the same --registration-token, or use an ipc:// address"
        )


class EndpointsFile:
    """A file with one address per line, which may change at any time; empty lines and lines that begin with # are
    ignored. An unusable file changes nothing: if empty, it may just be being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] = ()  # of the last one that could be read
        self._told: tuple[tuple[int, ...], str] | None = None

    def changed(self) -> tuple[str, ...] | None:
        """All addresses, once after each change of the file (and the first time); otherwise None. Raises EndpointError,
        once after each change, if the file is unusable. An unreadable file is tried every time: a change of its
        permissions does not show as a change of the file."""
        stamp: tuple[int, ...] = ()
        try:
            info = os.stat(self.path)
            stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
            if stamp == self._stamp:
                return None
            lines = read_regular(self.path)[0].decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = str((isinstance(error, OSError) and error.strerror) or error)
            self._stamp = ()
            if self._told == (stamp, why):
                return None
            self._told = (stamp, why)
            raise EndpointError(f"{self.path} with endpoints cannot be read: {why}") from None
        self._stamp, self._told = stamp, None
        found = dict.fromkeys(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
        if not found:
            raise EndpointError(f"{self.path} has no endpoint: write one on each line")
        for each in found:
            try:
                parse_endpoint(each)
            except EndpointError as error:
                raise EndpointError(f"{self.path}: {error}") from None
        return tuple(found)


def _parse_ipc(address: str) -> Endpoint:
    path = address.removeprefix("ipc://")
    if not path.startswith("/"):
        # "@name" is the abstract namespace: it has no file permissions, every local user could connect.
        raise EndpointError(f"{address!r}: an ipc address needs an absolute path, ipc:///folder/name.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(f"{address!r}: the path exceeds {MAX_SOCKET_PATH_BYTES} bytes; use a shorter run directory")
    return Endpoint(address=address, transport=Transport.IPC, path=Path(path))


def _parse_tcp(address: str) -> Endpoint:
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise EndpointError(f"{address!r}: expected tcp://host:port with a host and a port from 0 to 65535")
    return Endpoint(address=address, transport=Transport.TCP, host=match[1].strip("[]"), port=int(match[2]))


def is_address(host: str) -> bool:
    """Whether it is an IPv4 or IPv6 address rather than a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a host: good for binding, never for dialling."""
    return is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything
