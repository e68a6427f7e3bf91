"""The heartbeat thread and the watchdog that it feeds."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import zmq

from octavo.wire.codec import decode_to_gateway
from octavo.wire.messages import Heartbeat
from octavo.wire.options import new_router
from octavo.worker.engine.interfaces import EngineStats
from octavo.worker.transport.heartbeat import HeartbeatThread
from octavo.worker.transport.watchdog import EXIT_STALLED, Watchdog

EPOCH = "e" * 32


@pytest.fixture
def router(tmp_path: Path) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, new_router(context) as socket:
        socket.bind(f"ipc://{tmp_path}/gateway-0.sock")
        yield socket


def beats(router: "zmq.Socket[bytes]", count: int) -> list[object]:
    received: list[object] = []
    for _ in range(count):
        assert router.poll(5_000)
        received.append(decode_to_gateway(router.recv_multipart()[1]))
    return received


def test_it_tells_where_the_engine_stands(router: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    figures = {"num_running": 1, "num_free_blocks": 5, "num_queried_tokens": 9, "num_hit_tokens": 4}
    stats = [EngineStats(num_steps=1), EngineStats(num_steps=2, is_draining=True, **figures)]
    thread = HeartbeatThread(
        EPOCH,
        lambda: stats.pop(0) if len(stats) > 1 else stats[0],
        lambda: {f"ipc://{tmp_path}/gateway-0.sock": True},
        interval_s=0.02,
    )
    thread.start()
    second = Heartbeat(epoch=EPOCH, num_steps=2, has_work=True, is_draining=True, **figures)
    received = beats(router, 3)
    assert received[-1] == second
    assert all(beat in (second, Heartbeat(epoch=EPOCH, num_steps=1, has_work=False)) for beat in received)
    thread.close()
    thread.close()


def test_it_is_silent_towards_gateways_that_have_not_welcomed_us(router: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/gateway-0.sock"
    thread = HeartbeatThread(EPOCH, EngineStats, lambda: {address: False}, interval_s=0.01)
    thread.start()
    assert not router.poll(150)
    thread.close()


def test_a_beat_that_fails_is_tried_again(router: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    """Whatever it was: a worker that is silent for ever serves nobody, and is not started again."""
    failures = [OSError("no descriptors"), RuntimeError("no threads"), MemoryError()]

    def snapshot() -> EngineStats:
        if failures:
            raise failures.pop()
        return EngineStats(num_steps=7)

    address = f"ipc://{tmp_path}/gateway-0.sock"
    with structlog.testing.capture_logs() as logs:
        thread = HeartbeatThread(EPOCH, snapshot, lambda: {address: True}, interval_s=0.01)
        thread.start()
        assert beats(router, 2) == [Heartbeat(epoch=EPOCH, num_steps=7, has_work=False)] * 2
        thread.close()
    assert [each["event"] for each in logs] == ["heartbeat_failed"]  # once for the three


def test_a_host_without_threads_silences_no_worker(
    router: "zmq.Socket[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arming takes a thread at each beat; a container at its limit of processes has none."""

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    address = f"ipc://{tmp_path}/gateway-0.sock"
    watchdog = Watchdog(stall_timeout_s=30.0)
    monkeypatch.setattr("faulthandler.dump_traceback_later", refuse)
    with structlog.testing.capture_logs() as logs:
        thread = HeartbeatThread(EPOCH, EngineStats, lambda: {address: True}, interval_s=0.01, watchdog=watchdog)
        thread.start()
        assert len(beats(router, 3)) == 3
        thread.close()
    assert [each["event"] for each in logs] == ["watchdog_not_armed"]
    assert watchdog.is_stalled(EngineStats(num_running=1), time.monotonic() + 60)


def test_a_stall_is_work_without_steps_for_too_long() -> None:
    watchdog = Watchdog(stall_timeout_s=10.0)
    idle, busy, later = EngineStats(), EngineStats(num_running=1), EngineStats(num_running=1, num_steps=1)
    timeline = [(idle, 0.0), (idle, 50.0), (busy, 51.0), (busy, 59.0), (later, 60.0), (later, 70.0), (later, 70.1)]
    assert [watchdog.is_stalled(stats, now_s) for stats, now_s in timeline] == [False] * 6 + [True]


HANG = """
import ctypes, re, sys, time
from octavo.worker.transport.heartbeat import HeartbeatThread
from octavo.worker.engine.interfaces import EngineStats
from octavo.worker.transport.watchdog import Watchdog
stats = EngineStats(num_running=1)
watchdog = Watchdog(stall_timeout_s=0.5)
HeartbeatThread("e", lambda: stats, dict, interval_s=INTERVAL_S, watchdog=watchdog).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("hang", "interval_s", "code"),
    [
        ("time.sleep(600)", 0.05, EXIT_STALLED),
        ("ctypes.PyDLL(None).sleep(600)", 0.05, 1),  # native code that keeps the interpreter's lock
        ("ctypes.PyDLL(None).sleep(600)", 30, 1),  # the same, before the first beat
        ("stats = None; time.sleep(600)", 0.05, 1),  # every beat fails: nothing feeds the watchdog
    ],
)
def test_a_hung_process_ends_itself_and_says_where_it_was(
    hang: str, interval_s: float, code: int, repository: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG.replace("INTERVAL_S", str(interval_s)) + hang],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=300,  # half of what it would hang
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "most recent call first" in done.stderr
