"""A client that makes no calls any more says so by an error of its own; calls that run end when it is closed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from octavo import AsyncClient, Cancelled, Client, ClientUnusable, OctavoError
from tests.support.gateway.scripted_server import Script

T = TypeVar("T")
CALLS: dict[str, Callable[[Client], Any]] = {
    "stream": lambda client: list(client.stream(text="hi")),
    "complete": lambda client: client.complete(text="hi"),
    "embed": lambda client: client.embed(["hi"]),
    "cancel": lambda client: client.cancel("r"),
    "models": lambda client: client.models(),
    "watch_load": lambda client: list(client.watch_load()),
    "tokenize": lambda client: client.tokenize("hi"),
    "detokenize": lambda client: client.detokenize([1]),
}


async def listed(items: AsyncIterator[T]) -> list[T]:
    return [each async for each in items]


AIO_CALLS: dict[str, Callable[[AsyncClient], Awaitable[Any]]] = {
    "stream": lambda client: listed(aiter(client.stream(text="hi"))),
    "complete": lambda client: client.complete(text="hi"),
    "embed": lambda client: client.embed(["hi"]),
    "cancel": lambda client: client.cancel("r"),
    "models": lambda client: client.models(),
    "watch_load": lambda client: listed(client.watch_load()),
    "tokenize": lambda client: client.tokenize("hi"),
    "detokenize": lambda client: client.detokenize([1]),
}


def test_every_call_is_here() -> None:
    public = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert public == set(CALLS) == set(AIO_CALLS)


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_client_that_is_closed_says_so(target: str, name: str, was_used: bool) -> None:
    client = Client(target)
    if was_used:
        client.models()
    client.close()
    client.close()
    with pytest.raises(ClientUnusable, match="the client is closed"):
        CALLS[name](client)


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize("name", AIO_CALLS)
async def test_an_asyncio_client_that_is_closed_says_so(target: str, name: str, was_used: bool) -> None:
    client = AsyncClient(target)
    if was_used:
        await client.models()
    await asyncio.gather(client.close(), client.close())
    await client.close()
    with pytest.raises(ClientUnusable, match="the client is closed"):
        await AIO_CALLS[name](client)


def test_a_stream_that_runs_ends_with_its_client(target: str, script: Script) -> None:
    script.hold_s = 120.0
    client, was_read = Client(target), threading.Event()
    stream = client.stream(text="hi")

    def read() -> None:
        for _ in stream:
            was_read.set()

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read)
        assert was_read.wait(30.0)
        client.close()
        for again in (lambda: reading.result(30.0), lambda: list(stream)):
            with pytest.raises(Cancelled, match="the client was closed before the call had ended"):
                again()
    assert script.ended.wait(30.0)


async def test_a_stream_of_an_asyncio_client_that_runs_ends_with_it(target: str, script: Script) -> None:
    script.hold_s = 120.0
    client, was_read = AsyncClient(target), asyncio.Event()
    stream = client.stream(text="hi")

    async def read() -> None:
        async for _ in stream:
            was_read.set()

    reading = asyncio.create_task(read())
    await was_read.wait()
    await client.close()
    for again in (reading, listed(aiter(stream))):
        with pytest.raises(Cancelled, match="the client was closed before the call had ended"):
            async with asyncio.timeout(30):
                await again


def test_closing_beside_threads_that_call_ends_each_call_with_an_answer_or_an_error_of_the_clients_own(
    target: str,
) -> None:
    def call_until_it_is_closed(client: Client) -> OctavoError:
        while True:
            try:
                client.tokenize("hi")
                assert "".join(client.stream(text="hi")) == "Hello, wörld"
            except OctavoError as error:
                return error

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            client = Client(target)
            calling = [threads.submit(call_until_it_is_closed, client) for _ in range(8)]
            client.models()
            client.close()
            for each in calling:
                assert isinstance(each.result(30.0), Cancelled | ClientUnusable)


def test_an_asyncio_client_belongs_to_its_event_loop(target: str) -> None:
    async def begin() -> tuple[AsyncClient, Any]:
        client = AsyncClient(target)
        await client.models()
        return client, client.stream(text="hi")

    with pytest.raises(ClientUnusable, match="made inside the event loop that uses it"):
        AsyncClient(target)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        client, _ = first.run(begin())
        with pytest.raises(ClientUnusable, match="belongs to another event loop"):
            second.run(client.models())
        first.run(client.close())
    client, stream = asyncio.run(begin())
    for call in (*AIO_CALLS.values(), lambda _: listed(aiter(stream))):
        with pytest.raises(ClientUnusable, match="the event loop that the client was made in has ended"):
            asyncio.run(_awaited(call, client))


async def _awaited(call: Callable[[AsyncClient], Awaitable[Any]], client: AsyncClient) -> Any:
    return await call(client)
