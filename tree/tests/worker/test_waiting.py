"""The queue between tenants against its slow twin, and what it promises in plain cases."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fair_twin import FairTwin, TwinEntry
from tests.support.scheduling import key
from wire.messages import Sampling
from worker import shares as shares_module
from worker.plan import Slot
from worker.request import AddRequest, Phase, Request
from worker.rows import Rows
from worker.shares import Shares
from worker.waiting import WaitingQueue

NUM_SLOTS = 4
AGING_S = 10.0


class Twins:
    """A queue with its slots and the twin, given the same events; they have to agree after each."""

    def __init__(self) -> None:
        self.rows = Rows(num_slots=NUM_SLOTS, max_total_tokens=400)
        self.queue = WaitingQueue(aging_s=AGING_S, shares=Shares(self.rows))
        self.twin = FairTwin()
        self.running: list[Request] = []
        self.now_s = 0.0
        self.num_added = 0

    def add(self, tenant: str, weight: int, priority: int, num_tokens: int) -> Request:
        asked = AddRequest(
            key=key(self.num_added), request_id="r", prompt_ids_T=np.full(num_tokens, 3, np.int32),
            sampling=Sampling(), priority=priority, tenant=tenant, weight=weight,
        )  # fmt: skip
        request = Request(asked=asked, order=self.num_added, arrival_s=self.now_s, deadline_s=None,
                          max_total_tokens=400, token_ids_T=asked.prompt_ids_T)  # fmt: skip
        self.num_added += 1
        self._push(request)
        return request

    def _push(self, request: Request) -> None:
        self.queue.push(request, self.now_s)
        aged_at_s = self.now_s + max(0.0, AGING_S - request.waited_s)
        self.twin.waiting.append(TwinEntry(request, aged_at_s, request.first_scheduled_s is not None))

    def admit(self, num_cached: int) -> Request | None:
        request = self.queue.head(self.now_s)
        if request is None or len(self.running) == NUM_SLOTS:
            return None
        taken = {int(other.held_slot) for other in self.running}
        num_known, cached = len(request.token_ids_T), min(num_cached, len(request.token_ids_T) - 1)
        self.twin.admitted(request, num_known - max(cached, request.num_paid_tokens))
        self.queue.remove(request, self.now_s)
        request.slot, request.phase = Slot(min(set(range(NUM_SLOTS)) - taken)), Phase.DECODING
        request.first_scheduled_s = self.now_s
        self.rows.join(request.slot, request, num_cached_tokens=cached, stop_ids=())
        self.queue.shares.begin(request, num_cached_tokens=cached)
        self.running.append(request)
        return request

    def tokens(self) -> None:
        """One for everybody who runs."""
        slots_N = np.asarray([request.held_slot for request in self.running], np.intp)
        self.rows.append(slots_N, np.full(len(slots_N), 7, np.int32), self.rows.num_known_S[slots_N], self.now_s)
        for request in self.running:
            self.twin.charge(request, 1)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        request.token_ids_T = self.rows.known_tokens(request.held_slot).copy()
        self.queue.shares.end(request)
        self.rows.leave(request.held_slot)
        request.slot = None

    def preempt(self, request: Request) -> None:
        self.leave(request)
        self._push(request)

    def cancel(self, request: Request) -> None:
        self.queue.remove(request, self.now_s)
        self.twin.left(request)

    def check(self) -> None:
        if not self.running and not self.twin.waiting:
            self.queue.shares.forget()
            self.twin = FairTwin()
        assert self.queue.head(self.now_s) is self.twin.head(self.now_s)
        assert len(self.queue) == len(self.twin.waiting)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from([0, 0, 0, 1, -1]), st.integers(1, 30)),
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from([0, 0, 0, 1, -1]), st.integers(1, 30)),
        st.tuples(st.just("admit"), st.integers(0, 12)),
        st.tuples(st.just("admit"), st.integers(0, 12)),
        st.tuples(st.just("tokens"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["end", "preempt", "cancel"]), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 11.0])),
    ),
    max_size=90,
)  # fmt: skip
WEIGHTS = {"a": 1, "b": 2, "c": 5}


@settings(max_examples=400)
@given(events=EVENTS, is_one_tenant=st.sampled_from([False, False, False, True]))
def test_any_order_of_events_gives_the_twins_order(events: list[Any], is_one_tenant: bool) -> None:
    twins = Twins()
    twins.queue.shares._sweep_at = 1  # forget as often as possible: nobody may notice
    for event in events:
        match event:
            case "add", tenant, priority, num_tokens:
                twins.add(
                    "a" if is_one_tenant else tenant, 1 if is_one_tenant else WEIGHTS[tenant], priority, num_tokens
                )
            case "admit", num_cached:
                twins.admit(num_cached)
            case "tokens", count:
                for _ in range(count if twins.running else 0):
                    twins.tokens()
            case "end" | "preempt" as action, index if index < len(twins.running):
                (twins.leave if action == "end" else twins.preempt)(twins.running[index])
            case "cancel", index if index < len(twins.twin.waiting):
                twins.cancel(twins.twin.waiting[index].request)
            case "wait", seconds:
                twins.now_s += seconds
        twins.check()


@pytest.fixture(autouse=True)
def sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "_MIN_SWEEP", 1)


@settings(max_examples=100)
@given(rows=st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 9), st.floats(0, 30)), max_size=30))
def test_one_tenant_is_served_as_if_there_were_no_tenants(rows: list[tuple[int, int, float]]) -> None:
    """The order that the queue had before it knew tenants: aged first, then priority, then arrival."""
    twins = Twins()
    for priority, num_tokens, wait_s in rows:
        twins.add("", 1, priority, num_tokens)
        twins.now_s += wait_s / 10
    left = [entry.request for entry in twins.twin.waiting]
    while left:
        aged = [each for each in left if each.waiting_since_s + AGING_S <= twins.now_s]
        first = min(aged or left, key=lambda each: (0 if aged else -each.asked.priority, each.order))
        admitted = twins.admit(0)
        assert admitted is first
        twins.leave(first)
        left.remove(first)
        twins.now_s += 0.7


def serve(twins: Twins, num_turns: int, output: int = 4) -> Counter[str]:
    """One slot: a request at a time, each gives so much output. Tokens by tenant."""
    served = Counter[str]()
    for _ in range(num_turns):
        request = twins.admit(0)
        assert request is not None
        for _ in range(output):
            twins.tokens()
        served[request.asked.tenant] += len(request.asked.prompt_ids_T) + output
        twins.leave(request)
    return served


def test_a_crowd_and_a_small_tenant_get_the_same_while_both_want_more() -> None:
    twins = Twins()
    for _ in range(200):
        twins.add("crowd", 1, 0, 10)
    for _ in range(40):
        twins.add("small", 1, 0, 10)
    served = serve(twins, 60)
    assert abs(served["crowd"] - served["small"]) <= 14


def test_shares_are_as_the_weights() -> None:
    twins = Twins()
    for _ in range(100):
        twins.add("one", 1, 0, 6)
        twins.add("three", 3, 0, 6)
    served = serve(twins, 80)
    assert served == {"one": 200, "three": 600}


def test_few_long_requests_count_as_much_as_many_short_ones() -> None:
    twins = Twins()
    for _ in range(20):
        twins.add("long", 1, 0, 96)
    for _ in range(300):
        twins.add("short", 1, 0, 1)
    served = serve(twins, 210)
    assert abs(served["long"] - served["short"]) <= 100


def test_what_was_not_used_is_not_saved_up() -> None:
    twins = Twins()
    for _ in range(100):
        twins.add("early", 1, 0, 10)
    serve(twins, 50)
    for _ in range(100):
        twins.add("late", 1, 0, 10)
    served = serve(twins, 20)
    assert abs(served["early"] - served["late"]) <= 14


def test_a_flood_that_has_aged_keeps_no_other_tenant_waiting() -> None:
    twins = Twins()
    for _ in range(50):
        twins.add("crowd", 1, 0, 10)
    twins.now_s = 60.0
    serve(twins, 3)
    fresh = twins.add("small", 1, 0, 10)
    assert twins.admit(0) is fresh


def test_an_aged_request_of_no_importance_comes_in_beside_important_ones_of_others() -> None:
    twins = Twins()
    humble = twins.add("humble", 1, -5, 10)
    for _ in range(50):
        twins.add("grand", 1, 5, 10)
    serve(twins, 3)
    assert humble.phase is Phase.WAITING
    twins.now_s = AGING_S
    served = serve(twins, 2)
    assert served["humble"]


def test_whose_turn_it_is_keeps_it_while_there_is_no_room() -> None:
    """Nobody whose requests are small slips past one that needs more room than there is."""
    twins = Twins()
    running = twins.add("big", 1, 0, 1)
    twins.admit(0)
    big = twins.add("big", 1, 0, 300)
    twins.add("nimble", 1, 0, 1)
    twins.queue.shares.take_turn("big")
    assert twins.queue.head(0.0) in (big, twins.twin.head(0.0))
    head = twins.queue.head(0.0)
    for _ in range(20):
        twins.tokens()
        assert twins.queue.head(0.0) is head
    twins.leave(running)


def test_who_was_preempted_goes_on_before_what_came_later_from_anybody() -> None:
    twins = Twins()
    first = twins.add("busy", 1, 0, 100)
    twins.admit(0)
    for _ in range(5):
        twins.add("busy", 1, 0, 10)
        twins.add("idle", 1, 0, 10)
    twins.preempt(first)
    assert twins.admit(0) is first
    twins.check()


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    twins = Twins()
    twins.add("busy", 1, 0, 5)
    for number in range(300):
        twins.add("busy", 1, 0, 5)
        twins.add(f"t{number}", 1, 0, 5)
        serve(twins, 2)
    assert len(twins.queue.shares) < 10
