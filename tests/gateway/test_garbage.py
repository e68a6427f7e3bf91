"""Garbage is collected when memory grows, whatever the number of objects."""

import gc
import weakref
from typing import cast

import pytest

from octavo.gateway import ticker
from octavo.gateway.requests.tracker import RequestTracker
from octavo.gateway.ticker import GarbageWatch, release_freed_memory
from octavo.gateway.workers.pool import WorkerPool
from tests.support.gateway.fake_pool import FakePool

MIB = 1 << 20


class Cycle:
    """Holds itself, and bytes."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.itself, self.ballast = self, b"x" * num_bytes


def test_it_collects_when_memory_has_grown_and_not_before() -> None:
    readings = [100, 109, 110, 104, 113, 90, 99, 100, 100]
    watch = GarbageWatch(lambda: readings.pop(0), growth_bytes=10)
    # 109: not yet; 110: collected, then 104 is the base; 113: not yet; 90 is the new base; 100: collected.
    assert [watch.collect_if_grown() for _ in range(5)] == [False, True, False, False, False]
    assert watch.collect_if_grown()
    assert watch.num_collections == 2


def test_while_streams_would_feel_it_it_waits_for_four_times_the_growth() -> None:
    now, is_busy = 100, True
    watch = GarbageWatch(lambda: now, growth_bytes=10, is_busy=lambda: is_busy)
    now = 139
    assert not watch.collect_if_grown()
    now = 140
    assert watch.collect_if_grown()
    now = 155
    assert not watch.collect_if_grown()
    is_busy = False
    assert watch.collect_if_grown()


def test_neither_open_requests_nor_the_index_of_prefixes_make_a_gateway_collect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trace's prompts made an index of 77 MiB: a gateway collected four times, 10 to 80 ms each, in which none of its
    callers got a token."""
    own, pool, tracked = 100 * MIB, FakePool(), list[object]()
    monkeypatch.setattr(ticker, "resident_bytes", lambda: own + pool.index_bytes)
    watch = ticker.garbage_watch(cast(RequestTracker, tracked), cast(WorkerPool, pool))
    for _ in range(100):
        pool.index_bytes += MIB
        assert not watch.collect_if_grown()
    tracked.append("a request")
    own += 63 * MIB  # what callers sent, for example
    assert not watch.collect_if_grown()
    own += MIB
    assert watch.collect_if_grown()


def test_it_collects_twice_more_when_what_was_alive_may_be_garbage() -> None:
    readings = [100, 200, *[200] * 40]
    watch = GarbageWatch(lambda: readings.pop(0), growth_bytes=10)
    assert [n for n in range(20) if watch.collect_if_grown()] == [0, 6, 12]


def test_cycles_that_hold_megabytes_do_not_pile_up() -> None:
    """By the cycles that are alive: what the process holds is others' doing too."""
    gc.collect()
    release_freed_memory()  # free memory that is still resident would take all of the cycles, and nothing would grow
    gc.freeze()
    gc.disable()
    try:
        watch, most_alive = GarbageWatch(), 0
        cycles: list[weakref.ref[Cycle]] = []
        for _ in range(256):
            cycles.append(weakref.ref(Cycle(MIB)))
            watch.collect_if_grown()
            most_alive = max(most_alive, sum(each() is not None for each in cycles))
        assert watch.num_collections >= 2
        assert most_alive < 100  # of 256; 16 MiB of growth and the allocator's own ways
    finally:
        gc.enable()
        gc.unfreeze()
