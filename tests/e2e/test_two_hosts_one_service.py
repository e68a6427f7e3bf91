"""Two `octavo serve`, known to each other by 127.0.0.1 and 127.0.0.2: one service to its tenants and their requests."""

import asyncio
from pathlib import Path

import pytest

from octavo import AsyncClient, AsyncTextStream, Cancelled, OctavoError
from octavo.gateway.auth.authenticator import digest_of
from octavo.wire.keys import generate_keys, save_keys
from tests.support.services.service import Service, free_port, launch, stop_by_force

ORACLE = ("--runner=oracle", "--model=one=x", "--oracle-eos-every=1000000", "--oracle-step-delay-s=0.02", "--page=off")
KEY = "octavo-the-key-of-ann-0123456789"
MAX_REQUESTS = 3
PATIENCE_S = 60.0


def two_ports() -> int:
    """The first of two that are side by side."""
    first = free_port()
    while free_port() != first + 1:
        first = free_port()
    return first


class Ann:
    """A tenant's caller at one of the services, who does not try again by herself."""

    def __init__(self, service: Service) -> None:
        self.client = AsyncClient(service.target, api_key=KEY, options=(("grpc.enable_retries", 0),))

    async def begins(self, name: str) -> AsyncTextStream | None:
        """A long output; None where the tenant's limit is reached."""
        stream = self.client.stream(
            token_ids=[1, 2, 3], max_tokens=20_000, ignore_eos=True, output="token_ids", request_id=name
        )
        try:
            await anext(aiter(stream.deltas()))
        except OctavoError as error:
            if error.reason != "TENANT_LIMIT":
                raise
            return None
        return stream

    async def begins_soon(self, name: str) -> AsyncTextStream:
        """Once there is room and this service has been told so."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if (stream := await self.begins(name)) is not None:
                    return stream
                await asyncio.sleep(0.05)

    async def is_refused_soon(self) -> None:
        """Once this service has been told that there is no room."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.begins("probe") is not None:
                assert (await self.client.cancel("probe")).found
                await asyncio.sleep(0.05)


@pytest.mark.alone
async def test_a_tenant_has_one_limit_at_both_and_a_host_that_dies_gives_it_back(tmp_path: Path) -> None:
    pair = save_keys(generate_keys(), tmp_path / "keys", "gateway")[0]
    access = tmp_path / "api-keys.toml"
    access.write_text(f'[keys.ann]\nsha256 = "{digest_of(KEY).hex()}"\n[tenants.ann]\nmax_requests = {MAX_REQUESTS}\n')
    access.chmod(0o600)
    near, far = two_ports(), free_port()
    everybody = [f"tcp://127.0.0.1:{near}", f"tcp://127.0.0.1:{near + 1}", f"tcp://127.0.0.2:{far}"]
    shared = [*ORACLE, f"--gateway-key-file={pair}", f"--api-keys-file={access}"]
    shared += [f"--peer-endpoint={each}" for each in everybody]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        launch(tmp_path / "a", "--gateways=2", f"--control-endpoint={everybody[0]}", *shared) as one,
        launch(tmp_path / "b", f"--control-endpoint={everybody[2]}", *shared) as two,
    ):
        for service in (one, two):
            await asyncio.to_thread(service.wait_until_supervised)
        ann_at_one, ann_at_two = Ann(one), Ann(two)
        async with ann_at_one.client, ann_at_two.client:
            for n in range(MAX_REQUESTS):
                assert await ann_at_one.begins(f"r{n}") is not None
            await ann_at_two.is_refused_soon()
            assert (await ann_at_two.client.cancel("r0")).found  # whichever gateway of the other host has it
            held = await ann_at_two.begins_soon("r3")
            await ann_at_one.is_refused_soon()
            assert (await ann_at_one.client.cancel("r3")).found
            with pytest.raises(Cancelled):
                async for _ in held.deltas():
                    pass
            await ann_at_one.begins_soon("r4")
            await ann_at_two.is_refused_soon()
            stop_by_force(one.process)
            await ann_at_two.begins_soon("r5")
