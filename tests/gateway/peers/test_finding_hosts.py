"""How gateways of several hosts find each other: names that stand for several, lists that change, and what is said of
those that cannot be reached or should not be there."""

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from octavo.gateway import restarting
from octavo.gateway.config import PeerConfig
from octavo.gateway.peers import control, peer_link, peers
from octavo.gateway.peers.peers import PeerAnswers, Peers
from octavo.wire.endpoints import EndpointError
from octavo.wire.keys import generate_keys, save_keys
from octavo.wire.peer_messages import PeerAskLoad, PeerReply, PeerUse, ToPeer
from tests.support.gateway.hosts import Hosts, address
from tests.support.services.service import free_port

# ---------------------------------------------------------------- names


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, as the cluster's DNS has them now; a name without a row is not known."""
    names: dict[str, list[str]] = {}

    def getaddrinfo(host: str, port: Any, **_: Any) -> list[tuple[Any, ...]]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(peers, "LOOK_UP_S", 0.05)
    return names


def answering(num_in_flight: int) -> Callable[[ToPeer], PeerReply]:
    return lambda question: PeerReply(call_id=0, gateway_id="", num_in_flight=num_in_flight)


async def report_until(each: Peers, condition: Callable[[], object]) -> None:
    """Tell the others again and again, as a gateway does, until something is true."""
    async with asyncio.timeout(60):
        while not condition():
            each.send_to_all(PeerUse(call_id=0, gateway_id=each.gateway_id, number=1, is_snapshot=True))
            await asyncio.sleep(0.05)


async def test_a_name_stands_for_all_gateways_that_have_it_as_they_come_and_go(
    dns: dict[str, list[str]], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A headless Service: one list for all, this gateway itself among them."""
    monkeypatch.setattr(peer_link, "SILENT_S", 1.0)
    port = free_port()
    configs = [
        PeerConfig(endpoint=f"tcp://127.0.0.{n}:{port}", others=(f"tcp://octavo-gateways:{port}",), key_file=pair)
        for n in (1, 2, 3)
    ]
    with structlog.testing.capture_logs() as lines:
        one, two, three = (Peers(each, answering(n)) for n, each in enumerate(configs))
        await one.start()
        await report_until(one, lambda: any(line["event"] == "peer_not_found" for line in lines))
        asked = await one.ask(PeerUse(call_id=0, gateway_id="", number=1, is_snapshot=True), timeout_s=0.1)
        assert asked.silent == (f"tcp://octavo-gateways:{port}",)
        assert one.counts() == (1, 1)
        dns["octavo-gateways"] = ["127.0.0.1", "127.0.0.2"]
        await two.start()
        await report_until(one, lambda: one.counts() == (1, 0))
        dns["octavo-gateways"].append("127.0.0.3")
        await three.start()
        await report_until(one, lambda: one.counts() == (2, 0))
        await two.close()
        await report_until(one, lambda: one.counts() == (2, 1))  # as long as the name says that there is one
        dns["octavo-gateways"].remove("127.0.0.2")
        await report_until(one, lambda: one.counts() == (1, 0))
        del dns["octavo-gateways"]  # a resolver that is down ends nobody
        await report_until(one, lambda: sum(line["event"] == "peer_not_found" for line in lines) >= 2)
        assert one.counts() == (1, 0)
        await asyncio.gather(one.close(), three.close())
    told = [line["detail"] for line in lines if line["event"] == "peer_is_this_gateway"]
    assert f"tcp://127.0.0.1:{port} is this gateway itself: it is left out" in told
    first, *_ = [line["error"] for line in lines if line["event"] == "peer_not_found"]
    assert first.startswith(f"--peer-endpoint tcp://octavo-gateways:{port} cannot be looked up: ")


async def test_a_host_without_threads_or_descriptors_for_a_moment_costs_no_gateway_the_others(
    dns: dict[str, list[str]], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up takes a thread, a connection descriptors: who failed for want of one tries again."""
    troubles: list[Exception] = [zmq.ZMQError(errno.EMFILE), RuntimeError("can't start new thread")]
    look_up = peer_link.addresses_of

    async def sometimes(host: str) -> tuple[str, ...]:
        if len(troubles) == 2:
            raise troubles.pop()
        return await look_up(host)

    def dial(*args: Any, **options: Any) -> peer_link.PeerLink:
        if troubles:
            raise troubles.pop()
        return peer_link.PeerLink(*args, **options)

    monkeypatch.setattr(restarting, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(peers, "addresses_of", sometimes)
    monkeypatch.setattr(peers, "PeerLink", dial)
    port = free_port()
    dns["octavo-gateways"] = ["127.0.0.2"]
    one = Peers(
        PeerConfig(endpoint=f"tcp://127.0.0.1:{port}", others=(f"tcp://octavo-gateways:{port}",), key_file=pair),
        answering(0),
    )
    two = Peers(PeerConfig(endpoint=f"tcp://127.0.0.2:{port}", key_file=pair), answering(0))
    with structlog.testing.capture_logs() as lines:
        await asyncio.gather(one.start(), two.start())
        await report_until(one, lambda: one.ids_sent_to() == {two.gateway_id})
        await asyncio.gather(one.close(), two.close())
    assert [str(line["exc_info"]) for line in lines if line["event"] == "defect"] == [
        "can't start new thread",
        "Too many open files",
    ]
    assert not troubles


async def test_a_resolver_that_hangs_keeps_nobody_from_stopping(
    dns: dict[str, list[str]], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(60) and [])
    each = Peers(PeerConfig(endpoint=address(0), others=("tcp://slow:5556",), key_file=pair), answering(0))
    await each.start()
    await asyncio.sleep(0)
    await each.close()
    assert not release.is_set()
    release.set()


async def test_a_gateway_that_comes_back_after_its_leave_is_asked_again(pair: Path) -> None:
    one, two = address(0), address(1)
    first = Peers(PeerConfig(endpoint=one, others=(two,), key_file=pair), answering(0))
    configs = PeerConfig(endpoint=two, others=(one,), key_file=pair)
    second = Peers(configs, answering(7))
    question = PeerAskLoad(call_id=0)
    await first.start()
    await second.start()
    assert (await first.ask(question, timeout_s=30.0)).replies
    first.on_leaving(second.gateway_id)
    assert await first.ask(question, timeout_s=30.0) == PeerAnswers()
    await second.close()
    third = Peers(configs, answering(8))
    await third.start()
    await report_until(first, lambda: first.counts() == (1, 0))
    assert [each.num_in_flight for each in (await first.ask(question, timeout_s=30.0)).replies.values()] == [8]
    await asyncio.gather(first.close(), third.close())


# ---------------------------------------------------------------- what is wrong


async def errors_of(config: PeerConfig, *, event: str, other: Peers | None = None) -> list[str]:
    """What a gateway with these others says, once it has said something."""
    each = Peers(config, answering(0))
    with structlog.testing.capture_logs() as lines:
        await each.start()
        if other is not None:
            await other.start()
        await report_until(each, lambda: any(line["event"] == event for line in lines))
        await each.close()
        if other is not None:
            await other.close()
    return [line["error"] for line in lines if line["event"] == event]


async def test_a_gateway_that_cannot_be_reached_is_named_with_the_reason_once(pair: Path, tmp_path: Path) -> None:
    nobody, stranger = address(1), address(2)
    other_pair = save_keys(generate_keys(), tmp_path, "stranger")[0]
    other = Peers(PeerConfig(endpoint=stranger, key_file=other_pair), answering(0))
    for place, reason in (
        (nobody, "nobody listens there, or the network lets nothing through"),
        (
            stranger,
            "it refuses this gateway's key or has another: all gateways of a service have one --gateway-key-file",
        ),
    ):
        config = PeerConfig(endpoint=address(0), others=(place,), key_file=pair)
        (error,) = await errors_of(config, event="gateway_unreachable", other=other if place == stranger else None)
        assert error.startswith(f"{place} has not answered for ")
        assert error.endswith(reason)


async def test_a_gateway_that_takes_questions_and_answers_none_is_told_apart(pair: Path) -> None:
    def dumb(question: ToPeer) -> PeerReply:
        raise RuntimeError("of another release")

    place = address(1)
    config = PeerConfig(endpoint=address(0), others=(place,), key_file=pair)
    other = Peers(PeerConfig(endpoint=place, key_file=pair), dumb)
    (error,) = await errors_of(config, event="gateway_unreachable", other=other)
    assert error.endswith("it is connected and does not answer: it is frozen, or no gateway of this release")


@pytest.mark.parametrize("place", ["tcp://0.0.0.0:5556", "tcp://[::]:5556", "tcp://10.0.0.1:0"])
async def test_an_address_that_nobody_can_dial_is_refused_at_the_start(place: str, pair: Path) -> None:
    each = Peers(PeerConfig(endpoint=address(0), others=(place,), key_file=pair), answering(0))
    with pytest.raises(EndpointError, match=f"--peer-endpoint .*{place[-6:]}: nobody can be reached"):
        await each.start()


async def test_gateways_of_other_releases_and_models_and_those_that_are_told_nothing_are_named(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FORGET_S", 0.0)
    async with hosts(1, expected_models=("tiny",)) as (served,):
        own = served.gateway.control
        use = PeerUse(
            call_id=0, gateway_id="x", number=1, name="g1", release="9.9", models=("big", "tiny"), is_snapshot=True
        )
        with structlog.testing.capture_logs() as lines:
            assert own.answer(use) == PeerReply(call_id=0, gateway_id="")
            own.answer(PeerUse(call_id=0, gateway_id="x", number=2, name="g1", release="9.9", is_snapshot=True))
            own._warn_of_unlisted_peers(10**19)
            own._warn_of_unlisted_peers(10**19)
        errors = {line["event"]: line["error"] for line in lines if "error" in line}
        assert [line["event"] for line in lines] == [
            "peer_met", "peer_of_another_release", "peer_of_other_models", "peer_not_told",
        ]  # fmt: skip
    assert errors["peer_of_another_release"].startswith("gateway g1 is of release 9.9, this one of ")
    assert errors["peer_of_other_models"] == (
        "gateway g1 expects big, tiny, and this one tiny: gateways of one service have the same models"
    )
    assert errors["peer_not_told"] == (
        "gateway g1 knows this one and is not among its --peer-endpoint: it is told nothing here"
    )


async def test_what_a_gateway_of_another_wire_sends_is_told_once(pair: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/run/gateway-0.peers.sock"
    each = Peers(PeerConfig(endpoint=endpoint), answering(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with structlog.testing.capture_logs() as lines:
        await each.start()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(endpoint)
        for frame in (b"\x02old", b"\x02old", b"\x02new", b"\x01\x80"):
            stranger.send(frame)
        await report_until(each, lambda: len(lines) >= 2)
        await each.close()
    context.destroy(linger=0)
    first, second = [line["error"] for line in lines if line["event"] == "peer_message_dropped"]
    told = "a gateway of another release, or no gateway, sends what this one does not know: "
    assert first == f"{told}wire version 2, this side speaks 1"
    assert second.startswith(f"{told}malformed message")


async def test_the_list_of_others_is_a_file_that_changes_while_they_serve(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is placed anew has another address; the former one is given up once nobody answers there."""
    monkeypatch.setattr(peer_link, "SILENT_S", 1.0)
    one, two, three = address(0), address(1), address(2)
    file = tmp_path / "peers"
    file.write_text(f"{one}\n{two}\n")
    first = Peers(PeerConfig(endpoint=one, others_file=file, key_file=pair), answering(0))
    second = Peers(PeerConfig(endpoint=two, others=(one,), key_file=pair), answering(7))
    third = Peers(PeerConfig(endpoint=three, others=(one,), key_file=pair), answering(8))
    await first.start()
    await second.start()
    await report_until(first, lambda: first.ids_sent_to() == {second.gateway_id})
    await second.close()
    await third.start()
    file.write_text("not an address\n")  # changes nothing
    await report_until(first, lambda: first.counts() == (1, 1))
    file.write_text(f"{one}\n{three}\n")
    await report_until(first, lambda: first.ids_sent_to() == {third.gateway_id})
    assert first.counts() == (1, 0)
    answers = (await first.ask(PeerAskLoad(call_id=0), timeout_s=30.0)).replies
    assert [each.num_in_flight for each in answers.values()] == [8]
    await asyncio.gather(first.close(), third.close())
