"""Addresses: what is allowed, and what reaches beyond this host."""

import os
from pathlib import Path

import pytest

from octavo.wire.endpoints import (
    Endpoint,
    EndpointError,
    EndpointsFile,
    Transport,
    is_address,
    is_wildcard,
    parse_endpoint,
    require_proof,
)


def test_an_ipc_address_has_a_path() -> None:
    assert parse_endpoint("ipc:///run/octavo/gateway-0.sock") == Endpoint(
        address="ipc:///run/octavo/gateway-0.sock", transport=Transport.IPC, path=Path("/run/octavo/gateway-0.sock")
    )


@pytest.mark.parametrize(
    ("address", "host", "port", "is_local"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555, True),
        ("tcp://127.8.9.1:0", "127.8.9.1", 0, True),
        ("tcp://localhost:1", "localhost", 1, True),
        ("tcp://[::1]:5555", "::1", 5555, True),
        ("tcp://0.0.0.0:5555", "0.0.0.0", 5555, False),
        ("tcp://10.0.0.7:65535", "10.0.0.7", 65535, False),
        ("tcp://gateway:5555", "gateway", 5555, False),
        ("tcp://localhost.example.org:5555", "localhost.example.org", 5555, False),
        ("tcp://[2001:db8::1]:80", "2001:db8::1", 80, False),
    ],
)
def test_a_tcp_address_has_host_and_port(address: str, host: str, port: int, is_local: bool) -> None:
    endpoint = parse_endpoint(address)
    assert endpoint == Endpoint(address=address, transport=Transport.TCP, host=host, port=port)
    assert endpoint.is_local is is_local


@pytest.mark.parametrize(
    "address",
    [
        "",
        "gateway:5555",
        "inproc://x",
        "udp://127.0.0.1:1",
        "ipc://",
        "ipc://relative.sock",
        "ipc://@abstract",
        "ipc:///" + "x" * 107,
        "tcp://*:5555",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://:5555",
        "tcp://eth0;lo:5555",
        "tcp://127.0.0.1:5555\n",
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(EndpointError):
        parse_endpoint(address)


LOOPBACK = ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:0")


def test_every_tcp_address_asks_for_a_proof_and_ipc_for_none() -> None:
    require_proof(parse_endpoint("ipc:///a/b"), has_key=False, has_token=False)
    for address in LOOPBACK:
        require_proof(parse_endpoint(address), has_key=True, has_token=False)
        require_proof(parse_endpoint(address), has_key=False, has_token=True)
        with pytest.raises(EndpointError, match=r"octavo keys new.*--registration-token.*ipc://"):
            require_proof(parse_endpoint(address), has_key=False, has_token=False)


def test_beyond_loopback_keys_are_a_must() -> None:
    far = parse_endpoint("tcp://0.0.0.0:1")
    require_proof(far, has_key=True, has_token=False)
    for has_token in (True, False):
        with pytest.raises(EndpointError, match="octavo keys new"):
            require_proof(far, has_key=False, has_token=has_token)


@pytest.mark.parametrize(
    ("host", "of_address", "of_all"),
    [
        ("10.0.0.1", True, False),
        ("0.0.0.0", True, True),
        ("::", True, True),
        ("fe80::1%eth0", True, False),
        ("octavo-gateways", False, False),
        ("localhost", False, False),
        ("10.0.0", False, False),
    ],
)
def test_names_addresses_and_those_that_nobody_can_dial_are_told_apart(
    host: str, of_address: bool, of_all: bool
) -> None:
    assert (is_address(host), is_wildcard(host)) == (of_address, of_all)


def test_a_list_that_is_none_is_told_once_and_taken_once_it_is_one(tmp_path: Path) -> None:
    """It is looked at twice a second: a line each time would fill the log, and a pipe would stop who looks."""
    path = tmp_path / "gateways"
    file = EndpointsFile(path)
    for make, words in (
        (lambda: os.mkfifo(path), "Not a regular file"),
        (path.mkdir, "Is a directory"),
        (lambda: path.write_bytes(b"\xff"), "can't decode byte 0xff"),
    ):
        make()
        with pytest.raises(EndpointError, match=f"cannot be read: .*{words}"):
            file.changed()
        assert [file.changed(), file.changed()] == [None, None]
        path.rmdir() if path.is_dir() else path.unlink()
        with pytest.raises(EndpointError, match="No such file"):
            file.changed()
        assert file.changed() is None
    path.write_text("tcp://10.0.0.1:5555\n")
    assert [file.changed(), file.changed()] == [("tcp://10.0.0.1:5555",), None]
