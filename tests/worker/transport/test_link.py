"""The worker's link against a scripted ROUTER: registration, losses on either side, and limits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import zmq

from octavo.wire.codec import decode_to_gateway, encode
from octavo.wire.messages import (
    AdminReply,
    Cancel,
    Drain,
    GatewayLeaving,
    Leaving,
    Message,
    NeedTokenizer,
    Refused,
    Register,
    StepOutput,
    ToGateway,
    TokenizerBundle,
    Welcome,
)
from octavo.wire.options import new_router
from octavo.worker.engine.interfaces import GatewayJoined, GatewayLost
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.transport import link as link_module
from octavo.worker.transport.link import BacklogFull, GatewaySocket, WorkerLink
from octavo.worker.transport.registration import REGISTER_INTERVAL_S, LinkState
from tests.support.gateway.workers import FILES, finished, register, step_output

EPOCH = "e" * 32
G0, G1 = GatewayIndex(0), GatewayIndex(1)
WAIT_S = 30.0  # for what comes: the machine may pause


class FakeGateway:
    """One life of a gateway."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_router(self._context)
        self.socket.bind(address)
        self.peer = b""

    def receive(self, timeout_s: float = WAIT_S) -> ToGateway:
        assert self.socket.poll(int(timeout_s * 1000)), "nothing came"
        self.peer, frame = self.socket.recv_multipart()
        return decode_to_gateway(frame)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.socket.send_multipart((self.peer, encode(message)), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Bench:
    """A link with its gateways, driven as the engine would. Its clock stands still, so that it registers no second
    time because the machine paused between a Register and its Welcome."""

    def __init__(self, folder: Path, stack: ExitStack, num_gateways: int = 1) -> None:
        self.now_s = 0.0
        self.addresses = [f"ipc://{folder}/gateway-{index}.sock" for index in range(num_gateways)]
        self._stack = stack
        self.gateways = [self.start(index) for index in range(num_gateways)]
        self.link = WorkerLink(self.addresses, register("w0", EPOCH), FILES, clock=lambda: self.now_s)
        stack.callback(self.link.close)

    def start(self, index: int = 0) -> FakeGateway:
        gateway = FakeGateway(self.addresses[index])
        self._stack.callback(gateway.close)
        return gateway

    def pump_until(self, condition: Callable[[], object], timeout_s: float = WAIT_S) -> list[object]:
        """Drain and wait as the engine does; what came meanwhile."""
        received: list[object] = []
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, received
            self.link.wait(0.01)
            received += self.link.drain()
        return received

    def take(self, count: int) -> list[object]:
        """The next so many messages; more would be returned too."""
        received: list[object] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(received) < count:
            assert time.monotonic() < deadline_s, received
            received += self.link.drain()
            self.link.wait(0.01)
        return received + self.link.drain()

    def until_lost(self) -> None:
        """The socket knows that its gateway is gone; the link does not, before it drains."""
        assert self.link._gateways[G0].socket.monitor.poll(int(WAIT_S * 1000))

    def register_at(self, gateway: FakeGateway, gateway_id: str = "g1") -> None:
        index = self.gateways.index(gateway) if gateway in self.gateways else 0
        self.pump_until(lambda: gateway.socket.poll(0))
        assert isinstance(gateway.receive(), Register)
        gateway.send(Welcome(gateway_id=gateway_id, epoch=EPOCH))
        self.pump_until(lambda: tuple(self.link.welcomed.values())[index])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def bench(tmp_path: Path, stack: ExitStack) -> Bench:
    return Bench(tmp_path, stack)


@pytest.fixture
def joined(bench: Bench) -> Bench:
    bench.register_at(bench.gateways[0])
    return bench


def test_it_registers_again_and_again_until_it_is_welcome(bench: Bench) -> None:
    (gateway,) = bench.gateways
    for _ in range(2):
        bench.pump_until(lambda: gateway.socket.poll(0))
        assert gateway.receive() == register("w0", EPOCH)
        bench.now_s += REGISTER_INTERVAL_S
    assert tuple(bench.link.welcomed.values()) == (False,)
    gateway.send(Welcome(gateway_id="g1", epoch=EPOCH))
    bench.pump_until(lambda: tuple(bench.link.welcomed.values()) == (True,))


def test_a_gateway_that_never_takes_a_registration_does_not_end_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.pump_until(lambda: bench.link._gateways[G0].registration.state is LinkState.PRESENTING)
    monkeypatch.setattr(link_module, "MAX_BACKLOG_MESSAGES", 2)
    with monkeypatch.context() as stuck:
        stuck.setattr(GatewaySocket, "_try_send", lambda self, frame: False)
        for _ in range(5):
            bench.now_s += REGISTER_INTERVAL_S
            assert bench.link.drain() == []
    bench.register_at(bench.gateways[0])


def test_it_hands_out_its_tokenizer(joined: Bench) -> None:
    (gateway,) = joined.gateways
    gateway.send(NeedTokenizer(epoch=EPOCH, digest="d"))
    joined.pump_until(lambda: gateway.socket.poll(0))
    assert gateway.receive() == TokenizerBundle(epoch=EPOCH, digest="d", files=FILES)


def test_messages_of_the_gateway_come_in_order(joined: Bench) -> None:
    messages = [Cancel(handles=(number,)) for number in range(5)]
    joined.gateways[0].send(*messages)
    assert joined.take(5) == [(G0, message) for message in messages]


def test_a_gateway_that_says_nothing_is_not_read(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, stack, num_gateways=3)
    for gateway in bench.gateways:
        bench.register_at(gateway)
    looks: list[tuple[str, str]] = []
    for name in ("receive", "transitions"):
        method = getattr(link_module.GatewaySocket, name)

        def counted(socket: link_module.GatewaySocket, *given: int, name: str = name, method: Any = method) -> Any:
            looks.append((name, socket.address))
            return method(socket, *given)

        monkeypatch.setattr(link_module.GatewaySocket, name, counted)
    bench.gateways[1].send(Cancel(handles=(1,)))
    assert bench.take(1) == [(G1, Cancel(handles=(1,)))]
    assert looks == [("transitions", bench.addresses[1]), ("receive", bench.addresses[1])]


def test_messages_to_the_gateway_arrive_in_order(joined: Bench) -> None:
    (gateway,) = joined.gateways
    sent = [step_output(EPOCH, seq, [(seq, seq)]) for seq in range(1, 6)]
    for message in sent:
        joined.link.put(G0, message)
    assert [gateway.receive() for _ in sent] == sent


def test_nothing_is_sent_to_a_gateway_that_has_not_welcomed_us(bench: Bench) -> None:
    bench.link.put(G0, step_output(EPOCH, 1))
    bench.link.put_all(Leaving(epoch=EPOCH))
    bench.register_at(bench.gateways[0])
    assert not bench.gateways[0].socket.poll(50)
    assert bench.link.stats.dropped_messages == 1


def test_a_message_to_all_reaches_each_that_is_there(tmp_path: Path, stack: ExitStack) -> None:
    bench = Bench(tmp_path, stack, num_gateways=2)
    for gateway in bench.gateways:
        bench.register_at(gateway)
    bench.link.put_all(Leaving(epoch=EPOCH))
    assert [gateway.receive() for gateway in bench.gateways] == [Leaving(epoch=EPOCH)] * 2


def test_the_death_of_one_gateway_does_not_touch_the_other(tmp_path: Path, stack: ExitStack) -> None:
    bench = Bench(tmp_path, stack, num_gateways=2)
    for gateway in bench.gateways:
        bench.register_at(gateway)
    bench.gateways[0].close()
    assert bench.take(1) == [(G0, GatewayLost())]
    assert tuple(bench.link.welcomed.values()) == (False, True)
    bench.link.put(G1, step_output(EPOCH, 1))
    assert bench.gateways[1].receive() == step_output(EPOCH, 1)


def test_a_restarted_gateway_is_joined_again_and_gets_nothing_that_was_meant_for_its_former_life(
    joined: Bench,
) -> None:
    joined.gateways[0].close()
    joined.link.put(G0, step_output(EPOCH, 1))  # before the loss is noticed
    joined.until_lost()
    joined.link.put(G0, step_output(EPOCH, 2))  # the socket knows already, we do not: it waits in the backlog
    assert joined.take(1) == [(G0, GatewayLost())]
    joined.link.put(G0, step_output(EPOCH, 2))  # after it
    gateway = joined.start()
    joined.register_at(gateway, "g2")
    joined.link.put(G0, step_output(EPOCH, 1, [(9, 9)]))
    assert gateway.receive() == step_output(EPOCH, 1, [(9, 9)])


def test_what_a_gateway_said_before_it_died_is_forgotten(joined: Bench) -> None:
    joined.gateways[0].send(Cancel(handles=(1,)))
    assert joined.link._gateways[G0].socket.socket.poll(int(WAIT_S * 1000))
    joined.gateways[0].close()
    joined.until_lost()
    assert joined.take(1) == [(G0, GatewayLost())]
    assert joined.link.drain() == []


def ends_told(bench: Bench) -> list[tuple[str, str]]:
    """(level, event) of what is logged until the first gateway's end is noticed."""
    with structlog.testing.capture_logs() as lines:
        assert bench.take(1) == [(G0, GatewayLost())]
    return [(line["log_level"], line["event"]) for line in lines]


def test_a_gateway_that_takes_its_leave_is_no_loss_worth_a_warning(joined: Bench) -> None:
    joined.gateways[0].send(GatewayLeaving())
    assert joined.link._gateways[G0].socket.socket.poll(int(WAIT_S * 1000))
    joined.link.drain()
    joined.gateways[0].close()
    assert ends_told(joined) == [("info", "gateway_left")]


def test_a_gateway_that_says_nothing_is_lost_also_where_its_former_life_took_its_leave(joined: Bench) -> None:
    joined.gateways[0].send(GatewayLeaving())
    assert joined.link._gateways[G0].socket.socket.poll(int(WAIT_S * 1000))
    joined.link.drain()
    joined.gateways[0].close()
    joined.take(1)
    gateway = joined.start()
    joined.register_at(gateway, "g2")
    gateway.close()
    joined.until_lost()
    assert ends_told(joined) == [("warning", "gateway_lost")]


def test_a_welcome_of_another_life_loses_the_former(joined: Bench) -> None:
    joined.gateways[0].send(Welcome(gateway_id="g1", epoch=EPOCH), Welcome(gateway_id="g2", epoch=EPOCH))
    joined.gateways[0].send(Cancel(handles=(1,)))
    assert joined.take(3) == [(G0, GatewayLost()), (G0, GatewayJoined()), (G0, Cancel(handles=(1,)))]


def test_orders_before_the_welcome_and_words_to_another_epoch_are_ignored(bench: Bench) -> None:
    (gateway,) = bench.gateways
    bench.pump_until(lambda: gateway.socket.poll(0))
    gateway.receive()
    gateway.send(
        Drain(grace_s=0.0),
        Welcome(gateway_id="g1", epoch="another"),
        Refused(epoch="another", reason="not you"),
        NeedTokenizer(epoch="another", digest="d"),
    )
    assert bench.pump_until(lambda: bench.link.stats.unexpected_messages == 4) == []
    assert tuple(bench.link.welcomed.values()) == (False,)


def test_a_refusal_is_reported_with_its_reason(joined: Bench) -> None:
    refusals: list[str] = []
    joined.link.on_refused = refusals.append
    joined.gateways[0].send(Refused(epoch=EPOCH, reason="start anew"))
    assert joined.take(1) == [(G0, GatewayLost())]
    assert refusals == ["start anew"]


def test_garbage_is_counted_and_dropped(joined: Bench) -> None:
    (gateway,) = joined.gateways
    for frame in (b"", b"garbage", b"\x01\xff", bytes(1_000)):
        gateway.socket.send_multipart((gateway.peer, frame))
    gateway.send(Cancel(handles=(1,)))
    assert joined.take(1) == [(G0, Cancel(handles=(1,)))]
    assert joined.link.stats.undecodable_frames == 4


def test_a_gateway_that_takes_nothing_any_more_is_given_up(joined: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_BACKLOG_MESSAGES", 100)
    (gateway,) = joined.gateways
    large = AdminReply(epoch=EPOCH, query_id=1, violations=("x" * 10_000,))
    num_sent = 0
    while not joined.link.stats.gateways_lost and num_sent < 20_000:
        joined.link.put(G0, large)
        num_sent += 1
    assert num_sent > 2_000  # the socket's own queue, and ours
    assert joined.link.drain()[0] == (G0, GatewayLost())
    joined.link.put(G0, large)
    assert joined.link.stats.dropped_messages == 1
    while not isinstance(message := gateway.receive(), Register):
        joined.link.drain()
        assert message == large
    gateway.send(Welcome(gateway_id="g1", epoch=EPOCH))
    joined.pump_until(lambda: tuple(joined.link.welcomed.values()) == (True,))


def test_a_backlog_is_delivered_in_order_when_the_gateway_reads_again(joined: Bench) -> None:
    (gateway,) = joined.gateways
    sent = [step_output(EPOCH, seq, finished=(finished(seq, detail="x" * 5_000),)) for seq in range(1, 5_001)]
    for message in sent:
        joined.link.put(G0, message)
    received: list[StepOutput] = []
    while len(received) < len(sent):
        joined.link.drain()
        if gateway.socket.poll(10):
            output = gateway.receive()
            assert isinstance(output, StepOutput)
            received.append(output)
    assert [output.seq for output in received] == list(range(1, 5_001))
    assert joined.link.stats.gateways_lost == 0


def test_a_backlog_has_a_bound_of_bytes_and_counts_none_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open: list[bool] = []
    monkeypatch.setattr(GatewaySocket, "_try_send", lambda self, frame: bool(is_open))
    monkeypatch.setattr(link_module, "MAX_BACKLOG_BYTES", 250)
    with zmq.Context() as context, closing(GatewaySocket(context, f"ipc://{tmp_path}/none.sock", None)) as socket:
        for is_taken in (True, False, True):
            socket.send(bytes(100))
            socket.send(bytes(100))
            with pytest.raises(BacklogFull):
                socket.send(bytes(100))
            if is_taken:
                is_open.append(True)
                socket.flush()
                is_open.clear()
            else:
                socket.forget()
            assert not socket.has_backlog


def test_a_wait_ends_when_something_comes_or_it_is_woken(joined: Bench) -> None:
    def timed_wait() -> float:
        started_s = time.monotonic()
        joined.link.wait(WAIT_S)
        return time.monotonic() - started_s

    threading.Timer(0.05, joined.link.wake).start()
    assert timed_wait() < WAIT_S / 2
    threading.Timer(0.05, joined.gateways[0].send, [Cancel(handles=(1,))]).start()
    assert timed_wait() < WAIT_S / 2
    assert joined.take(1) == [(G0, Cancel(handles=(1,)))]
    started_s = time.monotonic()
    joined.link.wait(0.05)
    assert 0.04 < time.monotonic() - started_s < WAIT_S / 2


def test_the_last_word_goes_out_before_the_sockets_close(joined: Bench) -> None:
    """Behind others that are still with the socket."""
    large = AdminReply(epoch=EPOCH, query_id=1, violations=("x" * 10_000,))
    for _ in range(1_000):
        joined.link.put(G0, large)
    joined.link.put_all(Leaving(epoch=EPOCH, reason="DRAINED"))
    joined.link.linger(WAIT_S)
    joined.link.close()
    joined.link.close()
    assert [joined.gateways[0].receive() for _ in range(1_000)] == [large] * 1_000
    assert joined.gateways[0].receive() == Leaving(epoch=EPOCH, reason="DRAINED")


def test_a_signal_that_comes_when_all_is_closed_wakes_nobody_and_is_no_error(joined: Bench) -> None:
    """The second of two by which a supervisor ends a worker: its handler runs until the process has gone."""
    joined.link.close()
    joined.link.wake()


def test_gateways_come_and_go_while_it_serves(bench: Bench) -> None:
    """By the list that another thread tells; a place in the list is used again, and nothing is told to a former one."""
    bench.register_at(bench.gateways[0])
    folder = Path(bench.addresses[0].removeprefix("ipc://")).parent
    bench.addresses.append(f"ipc://{folder}/gateway-1.sock")
    bench.gateways.append(bench.start(1))
    threading.Timer(0.05, bench.link.dial, [bench.addresses]).start()
    bench.pump_until(lambda: len(bench.link.welcomed) == 2)
    bench.register_at(bench.gateways[1], "g2")
    assert bench.link.welcomed == dict.fromkeys(bench.addresses, True)
    bench.link.dial(bench.addresses[1:])
    assert bench.take(1)[-1] == (G0, GatewayLost())
    assert bench.link.welcomed == {bench.addresses[1]: True}
    dropped = bench.link.stats.dropped_messages
    bench.link.put(G0, AdminReply(epoch=EPOCH, query_id=1))
    assert bench.link.stats.dropped_messages == dropped + 1
    bench.gateways[1].send(Cancel(handles=(1,)))
    assert bench.take(1) == [(G1, Cancel(handles=(1,)))]  # the one that stayed noticed nothing
    bench.link.dial(bench.addresses)
    bench.register_at(bench.gateways[0], "g3")
    bench.gateways[0].send(Cancel(handles=(2,)))
    assert (G0, Cancel(handles=(2,))) in bench.take(1)
