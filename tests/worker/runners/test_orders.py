"""Orders reach every rank whole and in order, however long they are, and end with the one who gives them."""

import io
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from octavo.worker.runners.orders import MAX_READERS, OrderReader, OrderRing


class Bells:
    """Pipes of a writer's readers."""

    def __init__(self, count: int) -> None:
        pipes = [os.pipe() for _ in range(count)]
        self.outs = [os.fdopen(out, "rb") for out, _ in pipes]
        self.ins = [os.fdopen(into, "wb", buffering=0) for _, into in pipes]

    def ring(self, bell: bytes) -> None:
        for pipe in self.ins:
            pipe.write(bell)

    def close(self) -> None:
        for pipe in (*self.ins, *self.outs):
            pipe.close()


@pytest.fixture
def bells() -> Iterator[Bells]:
    found = Bells(3)
    yield found
    found.close()


def frames_of(count: int, longest: int) -> list[bytes]:
    rng = np.random.default_rng(7)
    return [rng.bytes(int(length)) for length in rng.integers(0, longest, count)]


def test_every_reader_takes_every_frame_though_the_memory_is_small(bells: Bells) -> None:
    ring, frames = OrderRing(3, num_bytes=1000), frames_of(60, 2500)
    taken: list[list[bytes]] = [[], [], []]

    def read(number: int) -> None:
        reader = OrderReader(ring.descriptor, number, bells.outs[number])  # type: ignore[arg-type]
        while (frame := reader.take()) is not None:
            taken[number].append(frame)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    turn = threading.Event()
    for frame in frames:
        for bell in ring.put(frame, wait=lambda: turn.wait(0.001)):  # type: ignore[arg-type, return-value]
            bells.ring(bell)
    for pipe in bells.ins:
        pipe.close()
    for thread in threads:
        thread.join(60)
    assert taken == [frames, frames, frames]
    ring.close()
    ring.close()


def test_a_writer_waits_only_while_somebody_has_not_read(bells: Bells) -> None:
    ring, num_waits = OrderRing(2, num_bytes=100), 0

    def wait() -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 3:
            raise TimeoutError

    for _ in range(2):
        for bell in ring.put(bytes(50), wait=wait):
            bells.ring(bell)
    assert num_waits == 0
    OrderReader(ring.descriptor, 0, bells.outs[0]).take()  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):  # the other one has taken nothing
        list(ring.put(bytes(1), wait=wait))
    ring.close()


def test_a_reader_sees_the_writer_end_also_in_the_middle_of_a_frame() -> None:
    ring = OrderRing(1, num_bytes=100)
    (whole,), first = list(ring.put(b"x" * 30, wait=lambda: None)), b""
    halves = ring.put(b"y" * 60, wait=lambda: None)
    first = next(halves)
    reader = OrderReader(ring.descriptor, 0, io.BytesIO(whole + first))
    assert reader.take() == b"x" * 30
    assert reader.take() is None
    assert OrderReader(ring.descriptor, 0, io.BytesIO(b"abc")).take() is None
    ring.close()


def test_more_ranks_than_the_memory_has_words_for_are_refused() -> None:
    with pytest.raises(ValueError, match=f"64 ranks read orders, and {MAX_READERS} can"):
        OrderRing(MAX_READERS + 1)
