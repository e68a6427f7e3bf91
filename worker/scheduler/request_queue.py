"""The queue: which requests wait, and which is next.

A higher priority goes first; an aged request counts as one of the highest priority that waits. Within that, tenants
take turns (`TenantFairness`), and each tenant's requests go in their order: the aged, then by
priority, then as they came. A tenant keeps its turn until one of its requests is admitted, whatever room that takes; a
request that has run before, and came earlier than the one whose turn it is, needs no turn, and passes those of its
tenant that wait for one. With one tenant all of this is: aged first, then by priority, first come first served.

Knows nothing of blocks or budgets; reads no clock. Shapes: S slots · H of them held
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.worker.scheduler.request import Phase, Request
from octavo.worker.scheduler.slot_state import SlotState

_SLACK = 64  # entries of requests that have left, so that a small heap is not cleaned each time
UNITS = 1_000_000  # that one token costs at weight 1: whole numbers, so that the order never hangs on rounding
MAX_WEIGHT = 1000
_NONE = -1
_MIN_SWEEP = 64  # accounts


@dataclass(slots=True, eq=False)
class _Account:
    """served: in units. number: while the tenant holds slots, its name in the arrays."""

    served: int
    price: int
    num_slots: int = 0
    number: int = _NONE


class TenantFairness:
    """What each tenant has been served, so that the next turn goes to the tenant that had least for its weight.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens, charged as they are computed, since the length of
    an output is not known before (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the prompt
    when its request gets a slot, without what was cached; output when it comes. A tenant's token costs 1 / weight. A
    token that has to be computed again is not charged again.

    A tenant that comes back begins at the clock: what it did not use is not saved up. The clock is what the tenant of
    the last turn had then. Tenants go by their labels; "" is one too. slots: of the requests that run. Knows no queue
    and no priorities.
    """

    def __init__(self, slots: SlotState) -> None:
        num_slots = len(slots.num_known_S)
        self._slots = slots
        self._clock = 0
        self._accounts: dict[str, _Account] = {}
        self._holders: list[_Account | None] = [None] * num_slots  # by number; each holds a slot, so there are enough
        self._number_S = np.full(num_slots, _NONE, np.intp)
        self._paid_S = np.zeros(num_slots, np.int64)
        self._num_appends_seen = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._accounts)

    # ------------------------------------------------------------ charging

    def begin(self, request: Request, *, num_cached_tokens: int) -> None:
        """The request has its slot: its tenant pays for what must be computed and was not paid before."""
        self.settle()
        run, slot, num_known = request.run, request.held_slot, len(request.token_ids_T)
        account = self._account(run.tenant)
        account.price = UNITS // run.weight
        num_due = num_known - max(num_cached_tokens, request.num_paid_tokens)
        if num_due > 0:
            account.served += num_due * account.price
        request.num_paid_tokens = max(num_known, request.num_paid_tokens)
        self._hold(account)
        self._number_S[slot], self._paid_S[slot] = account.number, request.num_paid_tokens

    def end(self, request: Request) -> None:
        """The request leaves its slot: what has come since it was last looked at is paid."""
        slot, account = request.held_slot, self._accounts[request.run.tenant]
        num_known = int(self._slots.num_known_S[slot])
        account.served += max(0, num_known - int(self._paid_S[slot])) * account.price
        request.num_paid_tokens = max(num_known, request.num_paid_tokens)
        self._number_S[slot] = _NONE
        account.num_slots -= 1
        if not account.num_slots:
            self._holders[account.number], account.number = None, _NONE

    def settle(self) -> None:
        """Charge every tenant for the output that has come; in numpy, whatever the number of requests."""
        if self._num_appends_seen == self._slots.num_appends:
            return
        self._num_appends_seen = self._slots.num_appends
        held_H = (self._number_S != _NONE).nonzero()[0]
        num_due_H = self._slots.num_known_S[held_H] - self._paid_S[held_H]
        sums = np.bincount(self._number_S[held_H], weights=num_due_H, minlength=1)
        for number in sums.nonzero()[0].tolist():
            account = self._holders[number]
            assert account is not None
            account.served += int(sums[number]) * account.price
        self._paid_S[held_H] += num_due_H

    def forget(self) -> None:
        """No request runs and none waits: every account is even."""
        self._accounts.clear()
        self._clock = 0

    # ------------------------------------------------------------ turns

    def served(self, tenant: str) -> int:
        """In units since some moment, at least the clock; settle first."""
        account = self._accounts.get(tenant)
        return self._clock if account is None else max(account.served, self._clock)

    def take_turn(self, tenant: str) -> None:
        """The next turn is this tenant's: what it did not use before is gone. Settle first. The clock is what it has
        now; output of its others that comes before its request does is no reason to lift those who wait."""
        account = self._account(tenant)
        self._clock = account.served = max(account.served, self._clock)

    # ------------------------------------------------------------ inside

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            account = self._accounts[tenant] = _Account(self._clock, UNITS)
        return account

    def _sweep(self) -> None:
        """Those that hold nothing and are behind the clock are as good as unknown."""
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_slots or account.served > self._clock
        }
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._accounts))

    def _hold(self, account: _Account) -> None:
        if not account.num_slots:
            account.number = self._holders.index(None)
            self._holders[account.number] = account
        account.num_slots += 1


class WaitingHeap:
    """Some of the waiting requests, in their order: the aged first, by when they became so, then by priority, then by
    arrival.

    Entries of requests that have left are skipped when they come up, and thrown out once they are the most: where
    others are served first, some would never come up. spells: order of a waiting request -> which spell of waiting this
    is; shared by all heaps, and their owner's. Knows no tenants, reads no clock.
    """

    def __init__(self, spells: Mapping[int, int]) -> None:
        self.num_waiting = 0  # the owner's to count
        self._spells = spells
        self._by_rank: list[tuple[int, int, int, Request]] = []
        self._by_age: list[tuple[float, int, int, Request]] = []

    def push(self, request: Request, *, aged_at_s: float) -> None:
        """Put it at its place."""
        if max(len(self._by_rank), len(self._by_age)) > 2 * len(self._spells) + _SLACK:
            self._throw_out()
        order = request.order
        spell = self._spells[order]
        heapq.heappush(self._by_rank, (-request.run.priority, order, spell, request))
        heapq.heappush(self._by_age, (aged_at_s, order, spell, request))

    def head(self, now_s: float) -> Request | None:
        """The next one, without removing it: the one that became aged first, else the most important one."""
        self._skip_gone(self._by_age)
        if self._by_age and self._by_age[0][0] <= now_s:
            request = self._by_age[0][-1]
            request.is_aged = True
            return request
        return self.foremost()

    def foremost(self) -> Request | None:
        """The most important one, whatever its age."""
        self._skip_gone(self._by_rank)
        return self._by_rank[0][-1] if self._by_rank else None

    def eldest(self) -> Request | None:
        """The one that has waited longest in all."""
        self._skip_gone(self._by_age)
        return self._by_age[0][-1] if self._by_age else None

    def earliest_head(self) -> int:
        """The order of whichever may be the head next, as time goes by, that came first: nobody else is before another
        request comes or leaves. One must wait."""
        self._skip_gone(self._by_age)
        self._skip_gone(self._by_rank)
        return min(self._by_age[0][1], self._by_rank[0][1])

    def contends(self, priority: int, now_s: float) -> bool:
        """Whether a request here has this priority, or is aged; none has a higher one."""
        head = self.head(now_s)
        return head is not None and (head.is_aged or head.run.priority == priority)

    def _throw_out(self) -> None:
        heaps: list[list[Any]] = [self._by_rank, self._by_age]
        for heap in heaps:
            heap[:] = [entry for entry in heap if self._spells.get(entry[1]) == entry[2]]
            heapq.heapify(heap)

    def _skip_gone(self, heap: list[Any]) -> None:
        while heap and self._spells.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)


class TenantTurns:
    """Whose turn it is, of the tenants that wait: found without a look at each, of whom there may be thousands.

    A tenant's place is what it had been served, and its next request's order, when it was looked at last. It is never
    behind its place now: what it has been served only grows, and where its requests change, `note` is told. So those
    at the front are looked at until one is found that is before the places of all others.
    """

    def __init__(self, fairness: TenantFairness, heaps: Mapping[str, WaitingHeap]) -> None:
        self._fairness = fairness
        self._heaps = heaps
        self._places: list[tuple[int, int, str]] = []  # a heap
        self._place_of: dict[str, tuple[int, int]] = {}  # other entries of the heap are out of date

    def note(self, tenant: str) -> None:
        """Its requests are other ones now, or all have left."""
        heap, former = self._heaps.get(tenant), self._place_of.pop(tenant, None)
        if heap is None:
            return
        place = self._place_of[tenant] = self._fairness.served(tenant), heap.earliest_head()
        if place != former:
            self._put(place, tenant)

    def due(self, priority: int, now_s: float) -> str:
        """Who had least of those that contend, and of equals whose next request came first. At least one contends;
        settle first."""
        best: tuple[int, int, str] | None = None
        looked_at: list[str] = []
        while self._places and (best is None or self._places[0] < best):
            served, order, tenant = heapq.heappop(self._places)
            if self._place_of.get(tenant) != (served, order):
                continue
            del self._place_of[tenant]
            looked_at.append(tenant)
            heap = self._heaps[tenant]
            if heap.contends(priority, now_s) and (head := heap.head(now_s)) is not None:
                place = self._fairness.served(tenant), head.order, tenant
                best = place if best is None else min(best, place)
        for tenant in looked_at:
            self.note(tenant)
        assert best is not None
        return best[-1]

    def _put(self, place: tuple[int, int], tenant: str) -> None:
        if len(self._places) > 2 * len(self._place_of) + _SLACK:
            self._places = [(*other, name) for name, other in self._place_of.items()]
            heapq.heapify(self._places)
        else:
            heapq.heappush(self._places, (*place, tenant))


class RequestQueue:
    """The requests that wait for a slot."""

    def __init__(self, *, aging_s: float, fairness: TenantFairness) -> None:
        self.fairness = fairness
        self._aging_s = aging_s
        self._spells: dict[int, int] = {}
        self._num_spells = 0
        self._all = WaitingHeap(self._spells)
        self._begun = WaitingHeap(self._spells)  # those that have run before
        self._by_tenant: dict[str, WaitingHeap] = {}  # of tenants that wait
        self._turns = TenantTurns(fairness, self._by_tenant)
        self._turn: str | None = None

    def __len__(self) -> int:
        return len(self._spells)

    def push(self, request: Request, now_s: float) -> None:
        """A request begins to wait (again: after a preemption, before all that came later)."""
        self._num_spells += 1
        self._spells[request.order] = self._num_spells
        request.phase, request.slot, request.waiting_since_s = Phase.WAITING, None, now_s
        heap = self._by_tenant.setdefault(request.run.tenant, WaitingHeap(self._spells))
        heap.num_waiting += 1
        aged_at_s = now_s + max(0.0, self._aging_s - request.waited_s)
        for each in (self._all, heap):
            each.push(request, aged_at_s=aged_at_s)
        if request.first_scheduled_s is not None:
            self._begun.push(request, aged_at_s=aged_at_s)
        self._turns.note(request.run.tenant)

    def remove(self, request: Request, now_s: float) -> None:
        """It waits no longer: admitted or ended."""
        del self._spells[request.order]
        request.waited_s += now_s - request.waiting_since_s
        tenant = request.run.tenant
        if len(self._by_tenant) == 1:
            self.fairness.settle()
            self.fairness.take_turn(tenant)
        heap = self._by_tenant[tenant]
        heap.num_waiting -= 1
        if not heap.num_waiting:
            del self._by_tenant[tenant]
        self._turns.note(tenant)
        if tenant == self._turn:
            self._turn = None

    def head(self, now_s: float) -> Request | None:
        """The next one, without removing it."""
        if len(self._by_tenant) < 2:
            return self._all.head(now_s)
        return self._fair_head(now_s)

    def waiting_since_s(self) -> float | None:
        """When the one that has waited longest began, as if it had waited in one go; None where nobody waits."""
        request = self._all.eldest()
        return None if request is None else request.waiting_since_s - request.waited_s

    def goes_before(self, request: Request, head: Request) -> bool:
        """Whether a request that does not wait would go before the head, if it did."""
        ours, theirs = request.turn_rank, head.turn_rank
        if ours[:2] != theirs[:2] or request.run.tenant == head.run.tenant:
            return ours < theirs
        self.fairness.settle()
        return self._due(request) < self._due(head)

    # ------------------------------------------------------------ several tenants

    def _fair_head(self, now_s: float) -> Request:
        foremost = self._all.foremost()
        assert foremost is not None
        turn = self._heap_of_turn(foremost.run.priority, now_s).head(now_s)
        begun = self._begun.head(now_s)
        assert turn is not None
        return turn if begun is None or turn.turn_rank < begun.turn_rank else begun

    def _heap_of_turn(self, priority: int, now_s: float) -> WaitingHeap:
        """priority: the highest that waits."""
        heap = self._by_tenant.get(self._turn) if self._turn is not None else None
        if heap is not None and heap.contends(priority, now_s):
            return heap
        self.fairness.settle()
        self._turn = self._turns.due(priority, now_s)
        self.fairness.take_turn(self._turn)
        return self._by_tenant[self._turn]

    def _due(self, request: Request) -> tuple[int, int]:
        return self.fairness.served(request.run.tenant), request.order
