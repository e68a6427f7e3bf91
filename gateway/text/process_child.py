"""The child process for work that may loop for ever or fill memory, such as foreign code.

Started by `gateway.text.process_pool` with the pid of its parent and its limits. Reads a frame, answers with two, one
as it begins, until its input ends:

    length (4 bytes, big-endian), what is asked
    length, BEGUN
    length, kind (1 byte), text

The kernel ends it if an answer takes too much CPU time; its memory is limited, and so is what it can write. It ends
with its parent. Imports little, so that a replacement is ready in a sixth of a second.
"""

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

from octavo.wire.host import die_with

DONE, REFUSED, NO_MEMORY = b"D", b"E", b"M"  # kinds of answers; a kind of work may have more
BEGUN = b"B"


def answer_frames(answer: Callable[[bytes], tuple[bytes, bytes]]) -> None:
    """Serve until the input ends. answer: from a frame to (kind, text). argv: pid of the parent, bytes allowed beyond
    those of an idle process, seconds of CPU time allowed per answer."""
    parent, memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: the parent ends it, after its requests
        signal.signal(number, signal.SIG_IGN)
    _limit(memory_bytes)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (frame := _read(source)) is not None:
        _write(sink, BEGUN, b"")
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process: it has no handler
        try:
            kind, text = answer(frame)
        except MemoryError:
            kind, text = NO_MEMORY, b""
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, kind, text)
        if kind == NO_MEMORY:
            return


def _limit(memory_bytes: int) -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/self/statm") as file:
            now_bytes = int(file.read().split()[0]) * page_bytes
    except OSError:
        now_bytes = 1 << 30
    for limit, value in (
        (resource.RLIMIT_AS, now_bytes + memory_bytes),
        (resource.RLIMIT_CORE, 0),  # prompts are in it
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _write(sink: BinaryIO, kind: bytes, text: bytes) -> None:
    sink.write(struct.pack(">I", len(text) + 1) + kind + text)
    sink.flush()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack(">I", head)
    frame = source.read(length)
    return frame if len(frame) == length else None
