"""Garbage is collected when memory grows, whatever the number of objects."""

import gc
import weakref

from gateway.garbage import GarbageWatch, resident_bytes

MIB = 1 << 20


class Cycle:
    """Holds itself, and bytes."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.itself, self.ballast = self, b"x" * num_bytes


def test_it_collects_when_memory_has_grown_and_not_before() -> None:
    readings = [100, 109, 110, 104, 113, 90, 99, 100, 100]
    watch = GarbageWatch(lambda: readings.pop(0), growth_bytes=10)
    # 109: not yet; 110: collected, then 104 is the base; 113: not yet; 90 is the new base; 100: collected.
    assert [watch.look() for _ in range(5)] == [False, True, False, False, False]
    assert watch.look()
    assert watch.num_collections == 2


def test_it_collects_twice_more_when_what_was_alive_may_be_garbage() -> None:
    readings = [100, 200, *[200] * 40]
    watch = GarbageWatch(lambda: readings.pop(0), growth_bytes=10)
    assert [n for n in range(20) if watch.look()] == [0, 6, 12]


def test_cycles_that_hold_megabytes_do_not_pile_up() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        watch = GarbageWatch()
        start = resident_bytes()
        alive = [weakref.ref(Cycle(MIB)) for _ in range(8)]
        for _ in range(256):
            Cycle(MIB)
            watch.look()
        assert watch.num_collections >= 2
        assert [each() for each in alive] == [None] * 8
        assert resident_bytes() - start < 160 * MIB  # of 256; other tests' threads allocate too
    finally:
        gc.enable()
        gc.unfreeze()
