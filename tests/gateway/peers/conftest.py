"""Gateways of several hosts, and one that stands still."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from octavo.gateway.auth.authenticator import digest_of
from octavo.gateway.config import AccessConfig, PeerConfig
from octavo.wire.keys import generate_keys, save_keys
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.hosts import KEY, Hosts, address, met


@pytest.fixture
def frozen_gateway(tmp_path: Path) -> Iterator[None]:
    """What stands at gateway 3's socket takes every question and answers none."""
    (tmp_path / "run").mkdir(mode=0o700)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/run/gateway-3.peers.sock")
    yield
    context.destroy(linger=0)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The key file that all gateways of the service have."""
    return save_keys(generate_keys(), tmp_path, "gateway")[0]


@pytest.fixture
def hosts(serve: Any, tmp_path: Path, pair: Path) -> Hosts:
    """`async with hosts() as gateways`: two that have met, each at an address of its own. absent: addresses that all of
    them are told of and nobody has."""

    @asynccontextmanager
    async def serving(
        num: int = 2, *, absent: tuple[str, ...] = (), tenant: str = "", **changes: Any
    ) -> AsyncIterator[list[Any]]:
        if tenant:
            file = tmp_path / "keys.toml"
            file.write_text(f'[keys.ann]\nsha256 = "{digest_of(KEY).hex()}"\n[tenants.ann]\n{tenant}')
            file.chmod(0o600)
            changes["access"] = AccessConfig(api_keys_file=file)
        endpoints = [address(n) for n in range(num)]
        async with AsyncExitStack() as stack:
            gateways = [
                await stack.enter_async_context(
                    serve(
                        FakePool(),
                        listen_address=f"unix:{tmp_path}/grpc-{n}.sock",
                        admin_address=f"unix:{tmp_path}/admin-{n}.sock",
                        peers=PeerConfig(endpoint=endpoints[n], others=(*endpoints, *absent), key_file=pair),
                        **changes,
                    )
                )
                for n in range(num)
            ]
            for each in gateways:
                await each.until(lambda each=each: met(each) == num - 1)
            yield gateways

    return serving
