"""Addresses to listen at, `::` among them."""

import http.client
import socket

import pytest

from octavo.wire.listener import family_and_host
from octavo.wire.scrape_server import ScrapeServer


def test_every_address_is_one_of_both_families() -> None:
    """In a cluster of IPv6 a pod has no other, and in one of IPv4 none of that."""
    server = ScrapeServer("::", 0, lambda page_format: b"page")
    try:
        for host in ("127.0.0.1", "::1"):
            connection = http.client.HTTPConnection(host, server.port, timeout=30)
            connection.request("GET", "/metrics")
            assert connection.getresponse().read() == b"page"
            connection.close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "has_ipv6", "bound"),
    [
        ("::", True, (socket.AF_INET6, "::")),
        ("::", False, (socket.AF_INET, "0.0.0.0")),
        ("::1", False, (socket.AF_INET6, "::1")),  # that it cannot be had is told
        ("127.0.0.1", True, (socket.AF_INET, "127.0.0.1")),
    ],
)
def test_every_address_can_be_had_where_there_is_no_ipv6(
    host: str, has_ipv6: bool, bound: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: has_ipv6)
    assert family_and_host(host) == bound
