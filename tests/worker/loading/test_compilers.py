"""Processes that compile are there while a start needs them, do no harm where they die, and never outlive it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from octavo.worker.loading import compilers
from octavo.worker.loading.compilers import CompilerProcesses
from tests.support.worker.forked import SIZE

PATIENCE_S = 60.0
SETTLE_S = 0.5

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # beside threads of the tests' own
]


def soon(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has threads of the tests' own, which compile nothing and hold no lock."""
    monkeypatch.setattr(compilers, "_has_threads", lambda: False)


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], list[str]]:
    return lambda: [path.read_text() for path in sorted(tmp_path.glob("told-*"))]


@pytest.fixture
def helpers(alone: None, tmp_path: Path) -> Iterator[CompilerProcesses]:
    def answer(request: bytes) -> None:
        if request == b"die":
            os._exit(3)
        if request == b"fail":
            raise ValueError(request)
        (tmp_path / f"told-{os.getpid()}-{request.decode()}").write_text(request.decode())

    made = CompilerProcesses.fork(SIZE, wake=(tmp_path / "woken").touch, answer=answer)
    assert made is not None
    yield made
    made.close()


def test_each_request_is_answered_by_one_of_them(
    helpers: CompilerProcesses, told: Callable[[], list[str]], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(SIZE) as threads:
        assert all(threads.map(helpers.ask, [f"{n}".encode() for n in range(20)]))
    assert sorted(told()) == sorted(f"{n}" for n in range(20))
    assert helpers.size == SIZE
    assert (tmp_path / "woken").exists()


def test_one_that_fails_goes_on_and_one_that_dies_is_not_asked_again(helpers: CompilerProcesses) -> None:
    assert [helpers.ask(b"fail") for _ in range(2 * SIZE)] == [False] * 2 * SIZE
    assert [helpers.ask(b"die") for _ in range(SIZE - 1)] == [False] * (SIZE - 1)
    assert [helpers.ask(f"{n}".encode()) for n in range(SIZE)] == [True] * SIZE
    assert not helpers.ask(b"die")
    assert not helpers.ask(b"none is left")


def test_who_waits_for_an_answer_is_let_go_at_the_end_and_none_is_left(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_answer(request: bytes) -> None:
        (tmp_path / request.decode()).touch()
        while True:
            signal.pause()

    others = children()  # of what this process tried before
    helpers = CompilerProcesses.fork(1, wake=lambda: None, answer=never_answer)
    assert helpers is not None
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(helpers.ask, b"asked")
        assert soon((tmp_path / "asked").exists)
        family = children() - others
        helpers.close()
        helpers.close()
        assert waiting.result(PATIENCE_S) is False
    assert len(family) >= 2
    assert soon(lambda: all(map(is_gone, family)))


def test_one_that_stands_still_is_given_up(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "ANSWER_TIMEOUT_S", 0.05)
    helpers = CompilerProcesses.fork(1, wake=lambda: None, answer=lambda request: signal.pause())
    assert helpers is not None
    try:
        assert not helpers.ask(b"1")
        assert not helpers.ask(b"2")
    finally:
        helpers.close()


def test_they_die_with_the_process_that_forked_them() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.worker.forked"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with worker:
        assert worker.stdout is not None
        pids = json.loads(worker.stdout.readline())
        assert len(pids) == SIZE + 1
        assert not any(map(is_gone, pids))
        worker.kill()
    assert soon(lambda: all(map(is_gone, pids)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_of_a_terminal_to_them_are_none_to_the_worker(number: signal.Signals) -> None:
    """They have its handlers, and both ends of where it hears of signals."""
    command = [sys.executable, "-m", "tests.support.worker.forked"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        pids = json.loads(worker.stdout.readline())
        for pid in pids:
            os.kill(pid, number)
        time.sleep(SETTLE_S)
        assert not any(map(is_gone, pids))
        worker.communicate(timeout=PATIENCE_S)  # which lets it go on to its end
        assert worker.returncode == 0


def test_a_process_that_has_threads_or_a_cuda_context_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    never = {"wake": lambda: None, "answer": lambda request: None}
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert CompilerProcesses.fork(1, **never) is None
    finally:
        over.set()
        thread.join()
    monkeypatch.setattr(compilers, "_has_threads", lambda: False)
    monkeypatch.setattr(compilers.torch.cuda, "is_initialized", lambda: True)
    assert CompilerProcesses.fork(1, **never) is None
