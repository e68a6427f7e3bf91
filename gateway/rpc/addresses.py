"""Addresses to listen at, and who can reach them."""

import errno
import socket

from octavo.gateway.config import AccessConfig, Exposure
from octavo.wire.endpoints import is_loopback
from octavo.wire.listener import family_and_host


class AddressError(ValueError):
    """An address that is malformed, or exposed without permission."""


class BindError(OSError):
    """An address that cannot be bound. setting: the flags that it comes from."""

    def __init__(self, setting: str, address: str) -> None:
        super().__init__(f"{setting} {address} cannot be bound: {_why_not(address)}")


def _why_not(address: str) -> str:
    """The reason that binding fails: gRPC does not report it."""
    guess = "is another process listening there?"
    if address.startswith("unix:"):
        return guess
    try:
        host, port = split_host_port(address)
        family, host = family_and_host(host)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return "another process listens there"
        return str(getattr(error, "strerror", None) or error)
    return guess


def split_host_port(address: str) -> tuple[str, int]:
    """("127.0.0.1", 9090) for "127.0.0.1:9090"; brackets around IPv6 are removed. Raises AddressError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise AddressError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def join_host_port(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def num_addresses_of(address: str) -> int:
    """How many listeners gRPC opens for it: one for each address that the host name resolves to."""
    if address.startswith("unix:"):
        return 1
    host, port = split_host_port(address)
    try:
        return len({each[4] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}) or 1
    except OSError:
        return 1  # binding it will give the error


def is_local(address: str) -> bool:
    """Whether only this host can reach it: loopback, or a Unix socket."""
    if address.startswith("unix:"):
        return True
    host, _ = split_host_port(address)
    return is_loopback(host)


def check_exposure(address: str, exposure: Exposure, *, setting: str) -> None:
    """Raises AddressError if plain text would be reachable from other hosts without permission. setting: the flags that
    the address comes from, for the message."""
    _check_reach(
        address,
        exposure,
        setting,
        "there is no TLS: give --tls-cert-file and --tls-key-file, use a loopback address, or allow plain text with "
        "--exposure insecure",
    )


def check_plain(address: str, exposure: Exposure, *, setting: str) -> None:
    """`check_exposure` for plain HTTP, which certificates do not protect. Raises AddressError."""
    _check_reach(
        address,
        exposure,
        setting,
        "is plain HTTP, with TLS for callers too: use a loopback address, or allow plain text with --exposure insecure",
    )


def check_admin(address: str, access: AccessConfig, exposure: Exposure, *, setting: str) -> None:
    """Raises AddressError if other hosts could administer this gateway without an API key."""
    if not access.knows_callers:
        _check_reach(
            address,
            exposure,
            setting,
            "its callers are not identified: give --api-keys-file, use a loopback address, or allow it with "
            "--exposure insecure",
        )


def _check_reach(address: str, exposure: Exposure, setting: str, objection: str) -> None:
    """Raises AddressError if other hosts can reach the address and that is not allowed."""
    if exposure is Exposure.LOOPBACK_ONLY and not is_local(address):
        raise AddressError(f"{setting} {address} can be reached from other hosts, and {objection}")
