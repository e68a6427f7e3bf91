"""Servers send clients away now and then (GOAWAY), and some of several are gone: nobody notices."""

import asyncio
import time
from contextlib import ExitStack

import pytest

from octavo import AsyncClient, Client
from tests.support.gateway.scripted_server import Script, running
from tests.support.services.service import free_port

AGE = ("grpc.max_connection_age_ms", 150)
GRACE = ("grpc.max_connection_age_grace_ms", 60_000)


def test_calls_go_on_over_new_connections() -> None:
    with running(script := Script(), AGE, GRACE) as target, Client(target) as client:
        until_s = time.monotonic() + 30
        while len(script.peers) < 6 and time.monotonic() < until_s:
            assert "".join(client.stream(text="hi")) == "Hello, wörld"
            time.sleep(0.02)
    assert len(script.peers) >= 6


def test_a_stream_outlives_its_connections_age() -> None:
    with running(Script(pause_s=0.2), AGE, GRACE) as target, Client(target) as client:
        assert "".join(client.stream(text="hi")) == "Hello, wörld"
        assert "".join(client.stream(text="hi")) == "Hello, wörld"


def test_several_servers_are_called_in_turns_while_they_are_there() -> None:
    scripts = [Script(), Script()]
    with ExitStack() as stack, ExitStack() as first:
        targets = [first.enter_context(running(scripts[0])), stack.enter_context(running(scripts[1]))]
        client = stack.enter_context(Client(",".join([*targets, f"127.0.0.1:{free_port()}"])))
        until_s = time.monotonic() + 60
        while not all(script.peers for script in scripts) and time.monotonic() < until_s:
            assert "".join(client.stream(text="hi")) == "Hello, wörld"
        assert all(script.peers for script in scripts)
        first.close()
        for _ in range(6):
            assert "".join(client.stream(text="hi")) == "Hello, wörld"


@pytest.mark.parametrize("target", ["a:1,b:2", "10.0.0.1:1,b:2", "10.0.0.1:1,[::1]:2", "10.0.0.1:1,"])
def test_a_list_of_servers_has_no_names(target: str) -> None:
    with pytest.raises(ValueError, match="a list of servers has addresses"):
        Client(target)


async def test_the_same_for_asyncio() -> None:
    script = Script(pause_s=0.05)
    with running(script, AGE, GRACE) as target:
        async with AsyncClient(target) as client:
            for _ in range(6):
                streams = [client.stream(text="hi") for _ in range(3)]
                texts = await asyncio.gather(*[_text(stream) for stream in streams])
                assert texts == ["Hello, wörld"] * 3
    assert len(script.peers) >= 3


async def _text(stream: object) -> str:
    return "".join([text async for text in stream])  # type: ignore[attr-defined]
