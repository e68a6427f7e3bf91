"""A worker that is asked to end does so, whatever its main thread waits in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.services.service import wait_for

PATIENCE_S = 60.0
SETTLE_S = 0.3  # until it is

STUCK = """import ctypes, sys
from octavo.worker import shutdown
from octavo.wire.logs import configure_logs

class Engine:
    def request_drain(self, grace_s): pass
    def request_stop(self): pass

configure_logs("json", "info")
shutdown.END_S = 0.2
own = shutdown.Shutdown(grace_s=float(sys.argv[2]))
own.exit_code = 7
own.install()
if sys.argv[1] == "serves":
    own.attach(Engine(), lambda: None)
mutex = ctypes.create_string_buffer(256)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
print("stuck", flush=True)
lock(mutex)  # for ever, whatever signals come
"""


@contextmanager
def stuck(phase: str, *, grace_s: float) -> Iterator["subprocess.Popen[str]"]:
    """A worker's process whose main thread never comes back."""
    command = [sys.executable, "-c", STUCK, phase, str(grace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        time.sleep(SETTLE_S)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["loads", "serves"])
def test_one_whose_main_thread_waits_in_a_library_ends_once_the_grace_is_over(
    phase: str, number: signal.Signals
) -> None:
    with stuck(phase, grace_s=0.5) as process:
        begin_s = time.monotonic()
        process.send_signal(number)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 7
        assert time.monotonic() - begin_s >= (0.7 if phase == "serves" else 0.2)
        line = json.loads(log)
        assert (line["event"], line["level"]) == ("not_ended_in_time", "warning")
        assert line["waits_in"].startswith("<module> (<string>:")


def test_a_second_signal_leaves_it_no_grace() -> None:
    with stuck("serves", grace_s=1e12) as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 7


def test_one_whose_log_nobody_reads_ends_too() -> None:
    with stuck("loads", grace_s=0.0) as process:
        assert process.stderr is not None
        own = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(own, b"x" * 4096)
        os.close(own)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 7


WORKER = """import sys
from octavo.worker.config import WorkerConfig
from octavo.worker.main import main
sys.exit(main(WorkerConfig(
    model=sys.argv[1], gateway_endpoints=(), device="cpu", tensor_parallel_size=2, num_threads=1, metrics_port=None,
)))
"""


def test_one_that_waits_for_a_rank_that_stands_still_ends_and_the_rank_with_it(tmp_path: Path) -> None:
    """gloo waits two minutes."""
    folder = str(write_tiny_checkpoint(tmp_path / "model"))
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, folder], stdout=log, stderr=log)
    ranks: list[psutil.Process] = []

    def are_there() -> bool:
        assert worker.poll() is None, (tmp_path / "log").read_text()
        ranks[:] = psutil.Process(worker.pid).children()
        return len(ranks) == 1

    try:
        wait_for(are_there)
        ranks[0].suspend()
        wait_for(lambda: is_idle(worker.pid))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_S) == 0
        assert "not_ended_in_time" in (tmp_path / "log").read_text()
    finally:
        worker.kill()
        worker.wait()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    assert alive == []


def is_idle(pid: int) -> bool:
    """Whether a process computes nothing for two seconds."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    return sum(after[:2]) - sum(before[:2]) < 0.05


LOGGING = """import sys
import structlog
from octavo.worker import shutdown
from octavo.wire.logs import configure_logs

class Engine:
    drains = False
    def request_drain(self, grace_s): self.drains = True
    def request_stop(self): pass

configure_logs("json", "info")
shutdown.END_S = 60.0
own, engine = shutdown.Shutdown(grace_s=60.0), Engine()
own.install()
own.attach(engine, lambda: None)
print("up", flush=True)
while not engine.drains:
    structlog.get_logger().info("line", text="x" * 1000)
sys.exit(7)
"""


def test_one_that_waits_for_the_reader_of_its_log_is_asked_all_the_same(tmp_path: Path) -> None:
    """The handler runs in the middle of a write, and has a line of its own to write."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", LOGGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        wait_for(lambda: is_idle(process.pid))  # the pipe is full
        process.send_signal(signal.SIGTERM)
        time.sleep(SETTLE_S)
        _, log = process.communicate(timeout=PATIENCE_S)  # reads on
    assert process.returncode == 7, log[-2000:]
    assert "Traceback" not in log
