"""Who is hung up where callers have too many connections, and how many those are."""

import asyncio
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.config import ConnectionConfig
from octavo.gateway.requests.admission import ConnectionsInUse
from octavo.gateway.rpc.connections import (
    MAX_BY_DEFAULT,
    Address,
    Connection,
    ConnectionLimiter,
    ConnectionLimits,
    Reason,
    TooFewDescriptors,
    choose,
    connection_limits,
    connections_at,
    num_descriptors,
    num_reserved,
)
from octavo.wire.host import raise_descriptor_limit
from tests.support.http2.crowd import Crowd, Manner
from tests.support.http2.raw import RawHttp2

LIMITS = ConnectionLimits(total=16, per_peer=16)  # 14 are kept
TOTAL, PER_PEER = Reason.TOTAL, Reason.PER_PEER


def connections(count: int, host: str = "10.0.0.1") -> list[Connection]:
    """In the order in which they came."""
    return [Connection(Address(host, port), inode=port) for port in range(count)]


def ports(chosen: dict[Address, Reason]) -> list[int]:
    return [address.port for address in chosen]


def chosen_of(
    found: list[Connection],
    limits: ConnectionLimits = LIMITS,
    *,
    busy: Sequence[int] = (),
    used: Sequence[int] = (),
    seen: dict[Address, int] | None = None,
) -> dict[Address, Reason]:
    """busy, used: ports."""
    by_port = {each.address.port: each.address for each in found}
    return choose(
        found,
        limits,
        busy={by_port[port] for port in busy},
        used={by_port[port]: rank for rank, port in enumerate(used)},
        seen=seen or {},
    )


# ---------------------------------------------------------------- who goes


def test_within_the_limits_nobody_goes() -> None:
    assert chosen_of(connections(14)) == {}


def test_who_never_asked_goes_first_and_of_these_who_came_first() -> None:
    assert chosen_of(connections(16), used=[0, 1]) == {Address("10.0.0.1", 2): TOTAL, Address("10.0.0.1", 3): TOTAL}


def test_who_was_met_later_goes_later_whatever_its_socket_is_called() -> None:
    found = connections(16)
    seen = {each.address: 16 - each.inode for each in found}
    assert ports(chosen_of(found, seen=seen)) == [15, 14]


def test_then_those_whose_last_request_is_longest_ago() -> None:
    assert ports(chosen_of(connections(16), used=[7, 9, *range(7), 8, *range(10, 16)])) == [7, 9]


def test_requests_in_flight_protect_their_connection() -> None:
    assert ports(chosen_of(connections(16), busy=range(15))) == [15]
    assert chosen_of(connections(16), busy=range(16)) == {}


def test_of_one_address_too_many_go_though_they_have_requests_the_latest_of_these() -> None:
    limits = ConnectionLimits(total=100, per_peer=4)
    found = [*connections(7), *connections(4, "10.0.0.2")]
    assert chosen_of(found[:7], limits, busy=range(6)) == {
        Address("10.0.0.1", 6): PER_PEER,
        Address("10.0.0.1", 5): PER_PEER,
        Address("10.0.0.1", 4): PER_PEER,
    }
    assert {each.host for each in chosen_of(found, limits)} == {"10.0.0.1"}


def test_a_peer_above_its_own_limit_makes_room_for_the_others() -> None:
    limits = ConnectionLimits(total=16, per_peer=8)
    chosen = choose([*connections(14), *connections(2, "10.0.0.2")], limits, busy=set(), used={}, seen={})
    assert chosen == {Address("10.0.0.1", port): PER_PEER for port in range(6)}


@given(
    hosts=st.lists(st.sampled_from("abc"), max_size=40),
    busy=st.sets(st.integers(0, 39)),
    used=st.lists(st.integers(0, 39), unique=True),
    total=st.integers(1, 30),
    per_peer=st.integers(1, 30),
)
def test_what_is_left_is_within_the_limits_and_no_request_is_lost_to_the_total(
    hosts: list[str], busy: set[int], used: list[int], total: int, per_peer: int
) -> None:
    limits = ConnectionLimits(total=total, per_peer=per_peer)
    found = [Connection(Address(host, index), index) for index, host in enumerate(hosts)]
    all_of = {each.address for each in found}
    working = {each for each in all_of if each.port in busy}
    rank = {each: used.index(each.port) for each in all_of if each.port in used}
    chosen = choose(found, limits, busy=working, used=rank, seen={})
    left = all_of - set(chosen)
    assert not [each for each, reason in chosen.items() if reason is TOTAL and each in working]

    def within(addresses: set[Address]) -> int:
        return sum(min(per_peer, sum(each.host == host for each in addresses)) for host in "abc")

    assert within(left) == len(left)
    assert len(left) == max(min(limits.kept, within(all_of)), within(working))  # and not one less


def test_use_is_known_by_its_order_and_for_a_bounded_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.gateway.requests.admission.MAX_KNOWN_CONNECTIONS", 3)
    use = ConnectionsInUse()
    for peer in "abca":
        use.begin(peer)
    use.end("b")
    use.end("a")
    assert (sorted(use.busy()), use.used()) == (["a", "c"], ["c", "b", "a"])
    use.begin("d")
    assert use.used() == ["b", "a", "d"]
    for peer in "acd":
        use.end(peer)
    assert use.busy() == []


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("descriptors", "total", "per_peer"),
    [(128, 64, 32), (256, 128, 64), (1024, 512, 256), (4096, 3584, 1792), (1 << 20, MAX_BY_DEFAULT, 4096)],
)
def test_callers_get_what_the_descriptors_have_room_for(descriptors: int, total: int, per_peer: int) -> None:
    limits = connection_limits(ConnectionConfig(), descriptors)
    assert limits == ConnectionLimits(total=total, per_peer=per_peer)
    assert limits.kept < limits.total <= descriptors - num_reserved(descriptors)


def test_settings_win_within_the_descriptors_and_are_refused_beyond_them() -> None:
    asked = ConnectionConfig(max_connections=20, max_connections_per_peer=15)
    assert connection_limits(asked, 256) == ConnectionLimits(total=20, per_peer=15)
    with pytest.raises(TooFewDescriptors, match=r"^--max-connections 129 .* the 128 that ulimit -n 256 has room for"):
        connection_limits(ConnectionConfig(max_connections=129), 256)
    with pytest.raises(TooFewDescriptors, match=r"ulimit -n is 127: a gateway needs at least 128"):
        connection_limits(ConnectionConfig(), 127)


def test_a_process_may_open_as_many_files_as_its_hard_limit_says() -> None:
    code = (
        "import resource; from octavo.wire.host import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); "
        "print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE), raise_descriptor_limit())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[0] == "300 (300, 300) 300"
    assert raise_descriptor_limit() >= min(65_536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_a_gateway_that_may_open_too_few_files_says_so() -> None:
    command = 'ulimit -n 100 && exec "$@"'
    arguments = [sys.executable, "-m", "octavo.cli.main", "gateway", "--port=0", "--metrics-port=0"]
    told = subprocess.run(
        ["sh", "-c", command, "sh", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 1
    assert "ulimit -n is 100: a gateway needs at least 128 file descriptors" in told.stderr + told.stdout
    assert "Traceback" not in told.stderr


# ---------------------------------------------------------------- real sockets


def test_only_connections_that_were_accepted_at_the_port_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as others:
        before = num_descriptors()
        callers = [socket.create_connection(each.getsockname()) for each in (ours, ours, others)]
        accepted = [each.accept()[0] for each in (ours, ours, others)]
        try:
            assert num_descriptors() == before + 6
            found = connections_at(ours.getsockname()[1])
            assert {each.address for each in found} == {Address(*each.getsockname()) for each in callers[:2]}
        finally:
            for each in (*callers, *accepted):
                each.close()


async def test_a_connection_without_a_call_is_closed_though_it_answers_pings(serve: Any) -> None:
    config = ConnectionConfig(keepalive_time_s=0.2, keepalive_timeout_s=60.0, max_idle_s=1.0)
    async with serve(listen_address="127.0.0.1:0", connection=config) as served:
        port = int(served.gateway.listeners.address.rpartition(":")[2])

        def idle() -> tuple[bool, int]:
            with RawHttp2(port) as connection:
                return connection.until_closed(60.0), connection.frames.get("PingFrame", 0)

        is_closed, num_pings = await asyncio.to_thread(idle)
        assert is_closed
        assert num_pings >= 1


async def test_a_crowd_is_thinned_out_told_once_and_counted(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.gateway.rpc.connections.PRESSURE_OVER_S", 0.2)
    config = ConnectionConfig(max_connections=32, max_connections_per_peer=20)
    async with serve(listen_address="127.0.0.1:0", connection=config) as served:
        limiter: ConnectionLimiter = served.gateway.listeners.limiter
        port = int(served.gateway.listeners.address.rpartition(":")[2])
        with Crowd(port, 100, Manner.PINGS) as crowd:
            await asyncio.to_thread(crowd.until, lambda crowd: crowd.num_opened == 100 and crowd.num_open <= 20)
            assert crowd.most_open >= 20
        await served.until(lambda: not connections_at(port))
        assert limiter.closed["per_peer"] > 0
        page = {metric.name: metric for metric in served.gateway.collector.collect()}
        assert page["octavo_gateway_max_connections"].samples[0].value == 32
        closed = {each.labels["reason"]: each.value for each in page["octavo_gateway_connections_closed"].samples}
        assert closed == limiter.closed
        assert set(closed) == {"per_peer", "total"}
        await served.until(lambda: limiter._pressed_since is None)
