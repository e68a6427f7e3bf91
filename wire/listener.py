"""Where a TCP server listens, and that `::` means every address of this host, whatever the cluster's family is."""

import socket


def family_and_host(host: str) -> tuple[socket.AddressFamily, str]:
    """What to bind for `host`, an address. `::` is 0.0.0.0 where the system has no IPv6."""
    if host == "::" and not socket.has_dualstack_ipv6():
        return socket.AF_INET, "0.0.0.0"
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), host


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """A listening socket; `::` takes IPv4 as well, as gRPC does. Raises OSError if the address cannot be had."""
    family, host = family_and_host(host)
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::")
