"""The sockets between gateways: who is asked, who answers, and who is waited for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from octavo.gateway.config import PeerConfig
from octavo.gateway.peers import peer_link
from octavo.gateway.peers.peer_link import name_of
from octavo.gateway.peers.peers import Peers
from octavo.wire.endpoints import EndpointError
from octavo.wire.keys import generate_keys, save_keys
from octavo.wire.peer_messages import PeerAbort, PeerAskLoad, PeerReply, ToPeer


def socket_of(folder: Path, n: int) -> str:
    return f"ipc://{folder}/run/gateway-{n}.peers.sock"


def tell_seven(question: ToPeer) -> PeerReply:
    """A gateway's side: seven requests are in flight."""
    return PeerReply(call_id=0, gateway_id="", num_in_flight=7)


@asynccontextmanager
async def peers(*configs: PeerConfig) -> AsyncIterator[list[Peers]]:
    async with AsyncExitStack() as stack:
        made = []
        for config in configs:
            each = Peers(config, tell_seven)
            await each.start()
            stack.push_async_callback(each.close)
            made.append(each)
        yield made


async def ask(each: Peers, timeout_s: float = 30.0) -> tuple[dict[str, int], tuple[str, ...]]:
    """Names with their answers, and who was silent."""
    asked = await each.ask(PeerAskLoad(call_id=0), timeout_s=timeout_s)
    return {name: reply.num_in_flight for name, reply in asked.replies.items()}, asked.silent


async def asked_until(each: Peers, answers: tuple[dict[str, int], tuple[str, ...]]) -> None:
    async with asyncio.timeout(60):
        while (await ask(each)) != answers:  # noqa: ASYNC110  (no event tells when others are connected)
            await asyncio.sleep(0.01)


async def test_one_list_serves_all_gateways_and_nobody_counts_itself(tmp_path: Path) -> None:
    """Also where it does not know its own address in the list."""
    alias = tmp_path / "alias"
    (tmp_path / "run").mkdir(mode=0o700)
    alias.symlink_to(tmp_path / "run")
    both = (socket_of(tmp_path, 0), socket_of(tmp_path, 1), f"ipc://{alias}/gateway-0.peers.sock")
    configs = [PeerConfig(endpoint=each, others=both) for each in both[:2]]
    async with peers(*configs) as (first, second):
        assert await ask(first) == ({"gateway-1": 7}, ())
        assert await ask(second) == ({"gateway-0": 7}, ())


async def test_a_gateway_that_starts_late_or_again_is_reached(tmp_path: Path) -> None:
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    async with asyncio.timeout(60), peers(PeerConfig(endpoint=one, others=(two,))) as (first,):
        assert await ask(first, 0.1) == ({}, ("gateway-1",))
        waiting = asyncio.create_task(ask(first))
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            assert await waiting == ({"gateway-1": 7}, ())
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            await asked_until(first, ({"gateway-1": 7}, ()))


async def test_questions_to_a_gateway_that_is_not_there_cost_nothing_while_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    send, tries = zmq.asyncio.Socket.send, list[bytes]()

    def counted(socket: zmq.asyncio.Socket, data: bytes, *args: object, **options: object) -> object:
        tries.append(data)
        return send(socket, data, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(zmq.asyncio.Socket, "send", counted)
    async with peers(PeerConfig(endpoint=one, others=(two,))) as (first,):
        assert await asyncio.gather(*(ask(first, 0.3) for _ in range(5))) == [({}, ("gateway-1",))] * 5
        assert tries == []
        waiting = asyncio.create_task(ask(first))
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            assert await waiting == ({"gateway-1": 7}, ())


async def test_nobody_waits_for_a_gateway_that_is_known_to_be_down(tmp_path: Path) -> None:
    """It answered, and then died without a farewell. What it was asked meanwhile it does if it is back in time."""
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    is_aborted = asyncio.Event()

    def answer(question: ToPeer) -> PeerReply:
        if question == PeerAbort(call_id=question.call_id, request_id="r"):
            is_aborted.set()
        return PeerReply(call_id=0, gateway_id="")

    async with asyncio.timeout(60), peers(PeerConfig(endpoint=one, others=(two,))) as (first,):
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            assert await ask(first) == ({"gateway-1": 7}, ())
        for _ in range(2):
            asked = await first.ask(PeerAbort(call_id=0, request_id="r"), timeout_s=600.0)
            assert (asked.replies, asked.silent) == ({}, ("gateway-1",))
        again = Peers(PeerConfig(endpoint=two, others=(one,)), answer)
        await again.start()
        await asked_until(first, ({"gateway-1": 0}, ()))
        await is_aborted.wait()
        await again.close()


@pytest.mark.usefixtures("frozen_gateway")
async def test_nobody_waits_longer_for_a_gateway_that_freezes_than_until_it_counts_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "SILENT_S", 0.5)
    configs = [PeerConfig(endpoint=socket_of(tmp_path, 0), others=(socket_of(tmp_path, 1), socket_of(tmp_path, 3)))]
    configs.append(PeerConfig(endpoint=socket_of(tmp_path, 1)))
    async with asyncio.timeout(60), peers(*configs) as (first, _):
        for _ in range(3):
            assert await ask(first, timeout_s=600.0) == ({"gateway-1": 7}, ("gateway-3",))


async def test_garbage_at_the_socket_changes_nothing(tmp_path: Path) -> None:
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    async with peers(PeerConfig(endpoint=one, others=(two,)), PeerConfig(endpoint=two, others=(one,))) as (first, _):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(two)
        for frames in ([b""], [b"\x01\x80"], [b"a", b"b"], [b"\x01" + b"\x91" * 1000], [b"x" * 2_000_000]):
            stranger.send_multipart(frames)
        assert await ask(first) == ({"gateway-1": 7}, ())
        context.destroy(linger=0)


async def test_over_tcp_gateways_know_each_other_by_the_pair_that_they_share(tmp_path: Path) -> None:
    pair, _ = save_keys(generate_keys(), tmp_path, "gateway")
    other, _ = save_keys(generate_keys(), tmp_path, "stranger")
    from tests.support.services.service import free_port

    one, two = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    ours = PeerConfig(endpoint=one, others=(two,), key_file=pair)
    async with peers(ours, PeerConfig(endpoint=two, others=(one,), key_file=pair)) as (first, second):
        assert await ask(first) == ({name_of(two): 7}, ())
        assert await ask(second) == ({name_of(one): 7}, ())
        third = PeerConfig(endpoint=socket_of(tmp_path, 3), others=(one,), key_file=other)
        async with peers(third) as (stranger,):
            assert await ask(stranger, 0.5) == ({}, (name_of(one),))


@pytest.mark.parametrize(
    ("endpoint", "others", "words"),
    [
        ("tcp://127.0.0.1:7000", (), "--gateway-key-file"),
        ("ipc:///run/o/a.sock", ("tcp://10.0.0.1:7000",), "tcp://10.0.0.1:7000.*--gateway-key-file"),
        ("nonsense", (), "nonsense"),
        ("", ("ipc:///run/o/b.sock",), "--peer-endpoint needs --control-endpoint"),
    ],
)
async def test_what_cannot_be_is_told_at_the_start(endpoint: str, others: tuple[str, ...], words: str) -> None:
    each = Peers(PeerConfig(endpoint=endpoint, others=others), tell_seven)
    with pytest.raises((EndpointError, ValueError), match=words):
        await each.start()
    await each.close()


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [("ipc:///run/octavo/gateway-12.peers.sock", "gateway-12"), ("tcp://10.0.0.1:7000", "10.0.0.1:7000")],
)
def test_a_gateway_is_named_after_where_it_is_reached(endpoint: str, name: str) -> None:
    assert name_of(endpoint) == name
