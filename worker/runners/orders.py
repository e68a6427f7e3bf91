"""Orders from rank 0 of a group to the other ranks: bytes in memory that all of them share, and a pipe to each that
says how many have come.

    rank 0     | frame | frame | piece of a long frame |   written once, whatever the number of ranks
    pipe            8 bytes each: the piece's length, and how much of its frame is still to come
    rank 1 …   reads the pipe, takes the bytes, and notes in the shared memory how far it is

A plan of some hundred bytes could go through the pipe itself at no other cost, but masks of a full batch are megabytes
and a pipe holds 64 KiB: rank 0 would wait for every rank to read in turn (bench/worker/orders.py). The pipe is also how
a rank learns that rank 0 has ended, and what orders the writes before the reads.

Must not know: plans, what a rank does.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

RING_BYTES = 16 << 20
"""Three full batches' masks. Pages that nothing was written to take no memory."""
MAX_READERS = 63
_BELL = struct.Struct("<II")
_HEADER_BYTES = 4096


class OrderRing:
    """The writing end. One writer, in one thread."""

    def __init__(self, num_readers: int, *, num_bytes: int = RING_BYTES) -> None:
        if num_readers > MAX_READERS:
            raise ValueError(f"{num_readers} ranks read orders, and {MAX_READERS} can")
        self.descriptor = _anonymous_file(_HEADER_BYTES + num_bytes)
        self._shared, self._num_readers = _Shared(self.descriptor), num_readers
        self._written = 0

    def put(self, frame: bytes, *, wait: Callable[[], None]) -> Iterator[bytes]:
        """Write the frame; yields what to send through every reader's pipe. wait: called repeatedly while readers are
        too far behind; raises once that has lasted too long."""
        largest = self._shared.num_bytes // 2
        for start in range(0, len(frame) or 1, largest):
            piece = frame[start : start + largest]
            while self._written + len(piece) - self._shared.least_taken(self._num_readers) > self._shared.num_bytes:
                wait()
            self._shared.write(self._written, piece)
            self._written += len(piece)
            yield _BELL.pack(len(piece), len(frame) - start - len(piece))

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._shared.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class OrderReader:
    """The end of reader `number` (from 0). bells: its pipe."""

    def __init__(self, descriptor: int, number: int, bells: BinaryIO) -> None:
        self._shared, self._number, self._bells = _Shared(descriptor), number, bells
        self._taken = 0

    def take(self) -> bytes | None:
        """The next frame; None if the writer has ended."""
        pieces: list[bytes] = []
        while True:
            bell = self._bells.read(_BELL.size)
            if len(bell) < _BELL.size:
                return None
            length, rest = _BELL.unpack(bell)
            pieces.append(self._shared.read(self._taken, length))
            self._taken += length
            self._shared.set_taken(self._number, self._taken)
            if not rest:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Shared:
    """The shared memory: one 8-byte word per reader with the number of bytes it has taken, then the ring."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._view = memoryview(self._memory)
        self._taken = self._view[: 8 * MAX_READERS].cast("Q")
        self._ring = self._view[_HEADER_BYTES:]
        self.num_bytes = len(self._ring)

    def least_taken(self, num_readers: int) -> int:
        """The least of the first num_readers readers' counts."""
        return min(self._taken[:num_readers], default=0)

    def set_taken(self, number: int, taken: int) -> None:
        """Set one reader's count: the word is written at once, not byte by byte."""
        self._taken[number] = taken

    def write(self, position: int, piece: bytes) -> None:
        """Write at a position that keeps counting beyond the end of the ring."""
        start = position % self.num_bytes
        first = min(len(piece), self.num_bytes - start)
        self._ring[start : start + first] = piece[:first]
        self._ring[: len(piece) - first] = piece[first:]

    def read(self, position: int, length: int) -> bytes:
        """See write."""
        start = position % self.num_bytes
        first = min(length, self.num_bytes - start)
        found = bytes(self._ring[start : start + first])
        return found if first == length else found + bytes(self._ring[: length - first])

    def close(self) -> None:
        """Release the memory. Idempotent."""
        for view in (self._taken, self._ring, self._view):
            view.release()
        self._memory.close()


def _anonymous_file(num_bytes: int) -> int:
    """A file in memory that disappears with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo-orders")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
