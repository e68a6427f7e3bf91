"""The queue between tenants against its slow reference, and what it promises in plain cases."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.scheduler import request_queue as shares_module
from octavo.worker.scheduler.request import Phase, Request
from octavo.worker.scheduler.request_queue import WaitingHeap
from tests.support.worker.fair_queue import AGING_S, WEIGHTS, QueuePair, drawn_events


@pytest.mark.parametrize("first", range(0, 300, 75))
def test_any_order_of_events_gives_the_references_order(first: int) -> None:
    for seed in range(first, first + 75):
        pair = QueuePair()
        pair.queue.fairness._sweep_at = 1  # forget as often as possible: nobody may notice
        for event in drawn_events(seed, 120):
            pair.do(("add", "a", *event[2:]) if seed % 5 == 0 and event[0] == "add" else event)
            pair.check()


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_any_order_of_events_of_many_tenants_gives_the_references_order(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares_module, "_SLACK", 0)  # what is out of date is thrown out as often as possible
    for seed in range(first, first + 25):
        pair = QueuePair()
        pair.queue.fairness._sweep_at = 1000
        for event in drawn_events(seed, 200, "".join(WEIGHTS)):
            pair.do(event)
            pair.check()


def test_a_turn_takes_no_look_at_each_of_a_thousand_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, contends = Counter[str](), WaitingHeap.contends

    def counted(self: WaitingHeap, priority: int, now_s: float) -> bool:
        looks["heaps"] += 1
        return contends(self, priority, now_s)

    monkeypatch.setattr(WaitingHeap, "contends", counted)
    pair = QueuePair()
    for number in range(1000):
        pair.add(f"t{number}", 1, 0, 1 + number % 7)
    for turn in range(100):
        request = pair.admit(0)
        assert request is not None
        assert request.run.tenant == f"t{turn}"
        pair.tokens()
        pair.leave(request)
    assert looks["heaps"] < 1000


@pytest.fixture(autouse=True)
def sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "_MIN_SWEEP", 1)


@settings(max_examples=100)
@given(rows=st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 9), st.floats(0, 30)), max_size=30))
def test_one_tenant_is_served_as_if_there_were_no_tenants(rows: list[tuple[int, int, float]]) -> None:
    """The order that the queue had before it knew tenants: aged first, then priority, then arrival."""
    pair = QueuePair()
    for priority, num_tokens, wait_s in rows:
        pair.add("", 1, priority, num_tokens)
        pair.now_s += wait_s / 10
    left = [entry.request for entry in pair.reference.waiting]
    while left:
        aged = [each for each in left if each.waiting_since_s + AGING_S <= pair.now_s]
        first = min(aged or left, key=lambda each: (0 if aged else -each.run.priority, each.order))
        admitted = pair.admit(0)
        assert admitted is first
        pair.leave(first)
        left.remove(first)
        pair.now_s += 0.7


def serve(pair: QueuePair, num_turns: int, output: int = 4) -> Counter[str]:
    """One slot: a request at a time, each gives so much output. Tokens by tenant."""
    served = Counter[str]()
    for _ in range(num_turns):
        request = pair.admit(0)
        assert request is not None
        for _ in range(output):
            pair.tokens()
        served[request.run.tenant] += len(request.prompt_ids_T) + output
        pair.leave(request)
    return served


def test_a_crowd_and_a_small_tenant_get_the_same_while_both_want_more() -> None:
    pair = QueuePair()
    for _ in range(200):
        pair.add("crowd", 1, 0, 10)
    for _ in range(40):
        pair.add("small", 1, 0, 10)
    served = serve(pair, 60)
    assert abs(served["crowd"] - served["small"]) <= 14


def test_shares_are_as_the_weights() -> None:
    pair = QueuePair()
    for _ in range(100):
        pair.add("one", 1, 0, 6)
        pair.add("three", 3, 0, 6)
    served = serve(pair, 80)
    assert served == {"one": 200, "three": 600}


def test_few_long_requests_count_as_much_as_many_short_ones() -> None:
    pair = QueuePair()
    for _ in range(20):
        pair.add("long", 1, 0, 96)
    for _ in range(300):
        pair.add("short", 1, 0, 1)
    served = serve(pair, 210)
    assert abs(served["long"] - served["short"]) <= 100


def test_what_was_not_used_is_not_saved_up() -> None:
    pair = QueuePair()
    for _ in range(100):
        pair.add("early", 1, 0, 10)
    serve(pair, 50)
    for _ in range(100):
        pair.add("late", 1, 0, 10)
    served = serve(pair, 20)
    assert abs(served["early"] - served["late"]) <= 14


def test_a_flood_that_has_aged_keeps_no_other_tenant_waiting() -> None:
    pair = QueuePair()
    for _ in range(50):
        pair.add("crowd", 1, 0, 10)
    pair.now_s = 60.0
    serve(pair, 3)
    fresh = pair.add("small", 1, 0, 10)
    assert pair.admit(0) is fresh


def test_an_aged_request_of_no_importance_comes_in_beside_important_ones_of_others() -> None:
    pair = QueuePair()
    humble = pair.add("humble", 1, -5, 10)
    for _ in range(50):
        pair.add("grand", 1, 5, 10)
    serve(pair, 3)
    assert humble.phase is Phase.WAITING
    pair.now_s = AGING_S
    served = serve(pair, 2)
    assert served["humble"]


def test_whose_turn_it_is_keeps_it_while_there_is_no_room() -> None:
    """Nobody whose requests are small slips past one that needs more room than there is."""
    pair = QueuePair()
    running = pair.add("big", 1, 0, 1)
    pair.admit(0)
    big = pair.add("big", 1, 0, 300)
    pair.add("nimble", 1, 0, 1)
    pair.queue.fairness.take_turn("big")
    assert pair.queue.head(0.0) in (big, pair.reference.head(0.0))
    head = pair.queue.head(0.0)
    for _ in range(20):
        pair.tokens()
        assert pair.queue.head(0.0) is head
    pair.leave(running)


def test_who_was_preempted_goes_on_before_what_came_later_from_anybody() -> None:
    pair = QueuePair()
    first = pair.add("busy", 1, 0, 100)
    pair.admit(0)
    for _ in range(5):
        pair.add("busy", 1, 0, 10)
        pair.add("idle", 1, 0, 10)
    pair.preempt(first)
    assert pair.admit(0) is first
    pair.check()


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    pair = QueuePair()
    pair.add("busy", 1, 0, 5)
    for number in range(300):
        pair.add("busy", 1, 0, 5)
        pair.add(f"t{number}", 1, 0, 5)
        serve(pair, 2)
    assert len(pair.queue.fairness) < 10


@pytest.mark.parametrize("tenants", [("",), ("a", "b")])
def test_an_overload_that_goes_on_leaves_nothing_of_those_that_were_served(tenants: tuple[str, ...]) -> None:
    """Everything is aged all the time, so that nobody comes up by rank, and nobody of all tenants by age."""
    pair = QueuePair()
    for number in range(3000):
        for tenant in tenants:
            pair.add(tenant, 1, number % 3, 2)
        if number >= 50:
            for _ in tenants:
                request = pair.admit(0)
                assert request is not None
                if number % 2:
                    pair.preempt(request)
                    request = pair.admit(0)
                    assert request is not None
                pair.leave(request)
        pair.now_s += 1.0
    queue = pair.queue
    lines = [queue._all, queue._begun, *queue._by_tenant.values()]
    assert max(len(heap) for line in lines for heap in (line._by_rank, line._by_age)) <= 2 * 50 * len(tenants) + 70


def test_the_order_is_kept_when_those_that_have_left_are_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "_SLACK", 0)
    for seed in range(50):
        drawn = random.Random(seed)
        spells: dict[int, int] = {}
        heap, aged_at_s = WaitingHeap(spells), {}
        requests = [SimpleNamespace(order=n, run=SimpleNamespace(priority=drawn.randint(-9, 9))) for n in range(100)]
        for request in requests:
            spells[request.order], aged_at_s[request.order] = 1, drawn.random()
            heap.push(cast(Request, request), aged_at_s=aged_at_s[request.order])
        for order in drawn.sample(range(99), 70):
            del spells[order]
        spells[100] = 1
        requests.append(SimpleNamespace(order=100, run=SimpleNamespace(priority=0)))
        aged_at_s[100] = 0.5
        heap.push(cast(Request, requests[-1]), aged_at_s=0.5)
        assert len(heap._by_rank) == len(heap._by_age) == len(spells) == 31
        while spells:
            left = [request for request in requests if request.order in spells]
            eldest, foremost = heap.eldest(), heap.foremost()
            assert eldest is min(left, key=lambda request: aged_at_s[request.order])
            assert foremost is min(left, key=lambda request: (-request.run.priority, request.order))
            del spells[foremost.order]


def test_the_longest_wait_is_of_the_eldest_and_counts_its_earlier_waits() -> None:
    pair = QueuePair()
    assert pair.queue.waiting_since_s() is None
    pair.add("a", 1, 0, 3)
    pair.now_s += 2
    pair.add("b", 1, 9, 3)  # more important, and younger
    eldest = next(each.request for each in pair.reference.waiting if each.request.run.tenant == "a")
    assert pair.queue.waiting_since_s() == eldest.waiting_since_s == pair.now_s - 2
    pair.queue.remove(eldest, pair.now_s)
    assert pair.queue.waiting_since_s() == pair.now_s
    pair.now_s += 1
    pair.queue.push(eldest, pair.now_s)  # again, with two seconds from before, where the other one has waited for one
    assert pair.queue.waiting_since_s() == pair.now_s - 2
