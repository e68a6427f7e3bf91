"""Planted bugs of the queue between tenants: the comparison with the reference notices each."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo.worker.scheduler.request_queue import RequestQueue, TenantFairness, WaitingHeap
from tests.support.worker.fair_queue import QueuePair, drawn_events

Plant = Callable[[pytest.MonkeyPatch], None]


def a_tenant_that_is_never_charged(patch: pytest.MonkeyPatch) -> None:
    served = TenantFairness.served
    patch.setattr(TenantFairness, "served", lambda self, tenant: 0 if tenant == "b" else served(self, tenant))


def output_that_is_never_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantFairness, "settle", lambda self: None)


def weights_that_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    begin = TenantFairness.begin

    def forgetful(self: TenantFairness, request: Any, *, num_cached_tokens: int) -> None:
        begin(self, request, num_cached_tokens=num_cached_tokens)
        self._accounts[request.run.tenant].price = 1_000_000

    patch.setattr(TenantFairness, "begin", forgetful)


def credit_that_is_saved_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantFairness, "take_turn", lambda self, tenant: None)


def a_price_for_what_is_computed_again(patch: pytest.MonkeyPatch) -> None:
    begin = TenantFairness.begin

    def greedy(self: TenantFairness, request: Any, *, num_cached_tokens: int) -> None:
        request.num_paid_tokens = 0
        begin(self, request, num_cached_tokens=num_cached_tokens)

    patch.setattr(TenantFairness, "begin", greedy)


def turns_that_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    heap_of_turn = RequestQueue._heap_of_turn

    def fickle(self: RequestQueue, priority: int, now_s: float) -> WaitingHeap:
        self._turn = None
        return heap_of_turn(self, priority, now_s)

    patch.setattr(RequestQueue, "_heap_of_turn", fickle)


def the_aged_of_all_tenants_first(patch: pytest.MonkeyPatch) -> None:
    fair_head = RequestQueue._fair_head

    def older(self: RequestQueue, now_s: float) -> Any:
        head = self._all.head(now_s)
        return head if head is not None and head.is_aged else fair_head(self, now_s)

    patch.setattr(RequestQueue, "_fair_head", older)


def the_preempted_where_their_tenant_is(patch: pytest.MonkeyPatch) -> None:
    def fair_head(self: RequestQueue, now_s: float) -> Any:
        foremost = self._all.foremost()
        return self._heap_of_turn(foremost.run.priority, now_s).head(now_s) if foremost else None

    patch.setattr(RequestQueue, "_fair_head", fair_head)


MUTANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        a_tenant_that_is_never_charged,
        output_that_is_never_charged,
        weights_that_are_forgotten,
        credit_that_is_saved_up,
        a_price_for_what_is_computed_again,
        turns_that_are_not_kept,
        the_aged_of_all_tenants_first,
        the_preempted_where_their_tenant_is,
    )
}


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)

    def compare() -> None:
        for seed in range(100):
            pair = QueuePair()
            for event in drawn_events(seed, 120):
                pair.do(event)
                pair.check()

    with pytest.raises(AssertionError):
        compare()
