"""`http_proxy` of the environment, which gRPC follows for every address that `no_proxy` leaves out."""

import pytest

from octavo import AsyncClient, Client
from octavo.client.options import NO_PROXY, channel_options, dialled
from tests.support.gateway.scripted_server import Script, running


@pytest.fixture(autouse=True)
def proxy_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_a_service_of_this_host_is_called_without_it() -> None:
    with running(Script()) as target, Client(target) as client:
        assert "".join(client.stream(text="hi", timeout_s=10.0)) == "Hello, wörld"


async def test_the_same_for_asyncio() -> None:
    with running(Script()) as target:
        async with AsyncClient(target) as client:
            assert "".join([text async for text in client.stream(text="hi", timeout_s=10.0)]) == "Hello, wörld"


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:1", "localhost:1", "[::1]:1", "dns:///localhost:1", "ipv4:127.0.0.2:1", "127.0.0.1:1,127.0.0.1:2"],
)
def test_all_names_of_loopback_are_this_host(target: str) -> None:
    assert NO_PROXY in dialled(target, ())[1]


@pytest.mark.parametrize("target", ["10.0.0.1:1", "a.example:1", "127.0.0.1:1,10.0.0.1:2", "dns:///a.example:1"])
def test_others_may_be_behind_it(target: str) -> None:
    assert NO_PROXY not in dialled(target, ())[1]


def test_who_asks_for_it_has_it() -> None:
    assert ("grpc.enable_http_proxy", 1) in dialled("127.0.0.1:1", [("grpc.enable_http_proxy", 1)])[1]
    assert channel_options() == dialled("a.example:1", ())[1]
