import asyncio
import inspect

import pytest

from octavo import AsyncClient, AsyncTextStream, Client, TextStream
from octavo.client.errors import Cancelled, InvalidRequest, Overloaded, Unavailable
from tests.support.gateway.scripted_server import Script, finished


async def test_a_stream_gives_its_text_then_knows_how_it_ended(target: str) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream(text="hi")
        assert "".join([text async for text in stream]) == "Hello, wörld"
    assert stream.started is not None
    assert (stream.started.request_id, stream.token_ids, stream.finished) == ("r", [0, 1, 2], finished())


async def test_every_call_carries_the_key(target: str, script: Script) -> None:
    async with AsyncClient(target, api_key="the-key") as client:
        await client.complete(text="hi")
        assert [text async for text in client.stream(text="hi")]
        await client.models()
        await client.detokenize(await client.tokenize("hi"))
    assert script.authorizations == ["Bearer the-key"] * 5


async def test_errors_are_the_same_as_the_blocking_clients(
    target: str, script: Script, refusal: tuple, overload: tuple
) -> None:
    async with AsyncClient(target) as client:
        script.failures.append(refusal)
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(text="hi")
        assert caught.value.violations[0].field == "sampling.top_p"
        script.failures += [overload] * 10
        with pytest.raises(Overloaded):
            await client.complete(text="hi")
        script.failures.clear()
        assert (await client.complete(text="hi")).text == "Hello, wörld"


async def test_leaving_a_stream_ends_the_request_on_the_server(target: str, script: Script) -> None:
    script.hold_s = 120.0
    async with AsyncClient(target) as client:
        async with client.stream(text="hi") as stream:
            async for _ in stream:
                break
        assert script.ended.wait(30.0)


@pytest.mark.parametrize("closes", [False, True])
async def test_a_stream_that_is_ended_here_does_not_end_the_task_that_reads_it(
    target: str, script: Script, closes: bool
) -> None:
    script.hold_s = 120.0
    client, was_read = AsyncClient(target), asyncio.Event()
    stream = client.stream(text="hi")

    async def read() -> None:
        async for _ in stream:
            was_read.set()

    reader = asyncio.create_task(read())
    await was_read.wait()
    if closes:
        await client.close()
    else:
        stream.cancel()
    with pytest.raises(Cancelled):
        await reader
    assert not reader.cancelled()
    await client.close()


async def test_a_task_that_is_cancelled_ends_as_tasks_do(target: str, script: Script) -> None:
    script.hold_s = 120.0

    async def read() -> None:
        async for _ in client.stream(text="hi"):
            was_read.set()

    async with AsyncClient(target) as client:
        was_read = asyncio.Event()
        reader = asyncio.create_task(read())
        await was_read.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert reader.cancelled()


async def test_models_and_tokens(target: str) -> None:
    async with AsyncClient(target) as client:
        assert [model.name for model in await client.models()] == ["m"]
        assert await client.tokenize("hé") == [104, 195, 169]
        assert await client.detokenize([104, 195, 169]) == "hé"


async def test_a_request_is_cancelled_by_its_id(target: str) -> None:
    async with AsyncClient(target) as client:
        assert [(await client.cancel(each)).found for each in ("r", "other")] == [True, False]


async def test_what_a_small_call_cannot_send_is_named(target: str) -> None:
    async with AsyncClient(target) as client:
        with pytest.raises(ValueError, match=r"^model: is not UTF-8 text"):
            await client.tokenize("x", model="\ud800")
        with pytest.raises(ValueError, match=r"^max_block_cells: Value out of range: -1$"):
            await anext(client.watch_load(max_block_cells=-1))


async def test_nobody_there_is_told_as_such() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models(timeout_s=30.0)


@pytest.mark.parametrize(("blocking", "aio"), [(Client, AsyncClient), (TextStream, AsyncTextStream)])
def test_both_clients_have_the_same_methods_and_parameters(blocking: type, aio: type) -> None:
    def shape(kind: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(each).parameters) for name, each in functions if name[0] != "_"}

    assert shape(blocking) == shape(aio)


async def test_several_outputs_are_told_apart(target: str) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream(text="hi", num_outputs=2)
        assert [piece async for piece in stream.pieces()][:2] == [(0, "Hello"), (1, "Hello")]
        assert [each.text for each in stream.outputs] == ["Hello, wörld"] * 2
        with pytest.raises(ValueError, match="2 outputs"):
            aiter(client.stream(text="hi", num_outputs=2))
