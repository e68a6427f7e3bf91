"""Processes that compile a GPU's kernels while this one loads weights and finds out which kernels are needed.

They are forks of this process, which has already imported all that they need; importing takes seconds. It forks one
process before it has threads or a CUDA context, neither of which survives a fork; that one does the common preparation
and forks the others. Each answers on its own socket. They end at once when the process that forked them ends, for
whatever reason.

Must not know: kernels.
"""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from octavo.wire.host import die_with
from octavo.worker import shutdown

MAX_PROCESSES = 16
ANSWER_TIMEOUT_S = 120.0
"""Time to compile one kernel on the slowest host."""
IDLE_END_S = 0.5
"""Time for idle processes to end by themselves and be reaped by the one that forked them."""
END_TIMEOUT_S = 5.0
_POLL_S = 0.01
_DONE, _FAILED = b"1", b"0"

Wake = Callable[[], None]
Answer = Callable[[bytes], None]


class CompilerProcesses:
    """Implements `model.kernels.precompile.Helpers`."""

    def __init__(self, pid: int, ends: list[socket.socket]) -> None:
        self._pid: int | None = pid
        self._ends = ends
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        for end in ends:
            self._idle.put(Connection(os.dup(end.fileno())))

    @classmethod
    def fork(cls, size: int, *, wake: Wake, answer: Answer) -> "CompilerProcesses | None":
        """Start `size` processes. wake: preparation, run once. answer: handles a request. Returns None if this process
        can no longer fork safely, or the system refuses."""
        if not hasattr(os, "fork") or torch.cuda.is_initialized() or _has_threads():
            return None
        parent = os.getpid()
        pairs = [socket.socketpair() for _ in range(size)]
        try:
            pid = os.fork()
        except OSError:
            pid = None
        if pid == 0:
            _end_after(partial(_fork_all, parent, pairs, wake, answer))
        for _, theirs in pairs:
            theirs.close()
        return None if pid is None else cls(pid, [ours for ours, _ in pairs])

    @property
    def size(self) -> int:
        """See Helpers."""
        return len(self._ends)

    def ask(self, request: bytes) -> bool:
        """See Helpers. A process that has ended or hangs is not asked again."""
        try:
            connection = self._idle.get_nowait()
        except Empty:
            return False
        try:
            connection.send_bytes(request)
            answer = connection.recv_bytes() if connection.poll(ANSWER_TIMEOUT_S) else None
        except (OSError, EOFError):
            return False
        if answer is not None:
            self._idle.put(connection)
        return answer == _DONE

    def close(self) -> None:
        """See Helpers. Work in progress is lost, and a pending `ask` gets no answer."""
        pid, self._pid = self._pid, None
        if pid is None:
            return
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        if not _has_ended(pid, IDLE_END_S):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the others end with it
            _has_ended(pid, END_TIMEOUT_S)


def _has_threads() -> bool:
    """Whether there are threads that a fork would lack, while the locks that they hold would stay locked."""
    return any(each.name != shutdown.THREAD for each in threading.enumerate() if each is not threading.main_thread())


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Whether a child process ends within that time."""
    deadline_s = time.monotonic() + timeout_s
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
    return True


def _fork_all(parent: int, pairs: list[tuple[socket.socket, socket.socket]], wake: Wake, answer: Answer) -> None:
    die_with(parent)
    signal.set_wakeup_fd(-1)  # it would wake the worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal: meant for the worker
        signal.signal(number, signal.SIG_IGN)
    for ours, _ in pairs:
        ours.close()
    wake()
    gc.freeze()
    own, ends = os.getpid(), [end for _, end in pairs]
    for end in ends:
        if os.fork() == 0:
            _end_after(partial(_answer_all, own, end, ends, answer))
    for end in ends:
        end.close()
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _answer_all(parent: int, end: socket.socket, ends: list[socket.socket], answer: Answer) -> None:
    """Answer requests until the other end is closed."""
    die_with(parent)
    for other in ends:
        if other is not end:
            other.close()
    connection = Connection(end.detach())
    with suppress(EOFError, OSError):
        while True:
            request = connection.recv_bytes()
            try:
                answer(request)
                done = _DONE
            except Exception:  # the asking process then compiles it itself, and reports the error
                done = _FAILED
            connection.send_bytes(done)


def _end_after(work: Callable[[], None]) -> NoReturn:
    """Run `work`, then end this forked process without its parent's exit handlers."""
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)
