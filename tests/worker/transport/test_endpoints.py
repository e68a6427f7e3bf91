"""Which gateways a worker dials: those of its settings, and those of a file that may change."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.wire.endpoints import Endpoint, EndpointError
from octavo.worker.transport.endpoints import GatewayEndpoints

WAIT_S = 30.0  # for what comes: the machine may pause


def test_the_list_is_a_file_that_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "gateways"
    file.write_text("tcp://10.0.0.2:5555\n")

    def check(endpoint: Endpoint) -> None:
        if endpoint.port == 1:
            raise EndpointError(f"{endpoint.address} must not be dialled")

    gateways = GatewayEndpoints(["tcp://10.0.0.1:5555"], file, check=check)
    assert gateways.endpoints == ("tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555")
    assert not gateways.look()
    told: list[Sequence[str]] = []
    gateways.follow(told.append)
    file.write_text("# moved\ntcp://10.0.0.3:5555\n\ntcp://10.0.0.1:5555\n")
    deadline_s = time.monotonic() + WAIT_S
    while not told:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    gateways.close()
    gateways.close()
    assert told == [("tcp://10.0.0.1:5555", "tcp://10.0.0.3:5555")]
    for wrong, why in (
        ("tcp://10.0.0.4:1\n", "must not be dialled"),
        ("nonsense\n", "neither ipc"),
        ("\n# nobody at all\n", "has no endpoint"),
    ):
        file.write_text(wrong)
        with pytest.raises(EndpointError, match=why):
            gateways.look()
        assert not gateways.look()  # told once
    file.unlink()
    with pytest.raises(EndpointError, match="cannot be read: No such file"):
        gateways.look()
    assert not gateways.look()
    assert gateways.endpoints == ("tcp://10.0.0.1:5555", "tcp://10.0.0.3:5555")
