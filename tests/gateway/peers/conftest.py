"""A gateway that stands still."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq


@pytest.fixture
def frozen_gateway(tmp_path: Path) -> Iterator[None]:
    """What stands at gateway 3's socket takes every question and answers none."""
    (tmp_path / "run").mkdir(mode=0o700)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/run/gateway-3.peers.sock")
    yield
    context.destroy(linger=0)
