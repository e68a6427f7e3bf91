"""The queue: which requests wait, and which is next.

A higher priority goes first; an aged request counts as having the highest priority that waits. Among these, tenants
take turns (`TenantFairness`), and a tenant's requests are ordered: aged ones, then by priority, then by arrival. A
tenant keeps its turn until one of its requests is admitted, however much room that takes. A request that has run
before, and goes before the one whose turn it is (`Request.turn_rank`), needs no turn, and overtakes its tenant's other
requests. With a single tenant the order is: aged first, then by priority, then first come, first served.

Knows nothing of blocks or budgets; reads no clock. Shapes: S slots · H held slots
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.worker.scheduler.request import Phase, Request
from octavo.worker.scheduler.slot_state import SlotState

_SLACK = 64  # stale entries that are allowed in any case, so that a small heap is rarely cleaned
UNITS = 1_000_000  # cost of one token at weight 1; costs are whole numbers, so that no order depends on rounding
MAX_WEIGHT = 1000
_NONE = -1
_MIN_SWEEP = 64  # accounts


@dataclass(slots=True, eq=False)
class _Account:
    """served, and price of one token: in UNITS. number: the tenant's number in the arrays while it holds slots."""

    served: int
    price: int
    num_slots: int = 0
    number: int = _NONE


class TenantFairness:
    """How much each tenant has been served, so that the next turn goes to the one that got least for its weight.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens. Tokens are charged as they are computed, since
    the length of an output is not known in advance (Sheng et al., "Fairness in Serving Large Language Models", OSDI
    2024): the prompt, without its cached part, when its request gets a slot, and output as it is generated. A tenant's
    token costs 1 / weight. A token that has to be computed again is not charged again.

    A tenant that returns starts at the clock, so it cannot save up unused service. The clock is what the tenant of the
    last turn had been served at that turn. Tenants are identified by their labels; "" is a tenant, too. slots: state of
    the running requests. Knows no queue and no priorities.
    """

    def __init__(self, slots: SlotState) -> None:
        num_slots = len(slots.num_known_S)
        self._slots = slots
        self._clock = 0
        self._accounts: dict[str, _Account] = {}
        self._holders: list[_Account | None] = [None] * num_slots  # by number; each holds a slot, so these are enough
        self._number_S = np.full(num_slots, _NONE, np.intp)
        self._paid_S = np.zeros(num_slots, np.int64)
        self._num_appends_seen = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._accounts)

    # ------------------------------------------------------------ charging

    def begin(self, request: Request, *, num_cached_tokens: int) -> None:
        """The request has a slot: charge its tenant for tokens that must be computed and were not charged before."""
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
        """The request leaves its slot: charge its tenant for output since the last `settle`."""
        slot, account = request.held_slot, self._accounts[request.run.tenant]
        num_known = int(self._slots.num_known_S[slot])
        account.served += max(0, num_known - int(self._paid_S[slot])) * account.price
        request.num_paid_tokens = max(num_known, request.num_paid_tokens)
        self._number_S[slot] = _NONE
        account.num_slots -= 1
        if not account.num_slots:
            self._holders[account.number], account.number = None, _NONE

    def settle(self) -> None:
        """Charge every tenant for its new output, in numpy for all requests at once."""
        if self._num_appends_seen == self._slots.num_appends:
            return
        self._num_appends_seen = self._slots.num_appends
        held_H = (self._number_S != _NONE).nonzero()[0]
        if not len(held_H):
            return
        num_due_H = self._slots.num_known_S[held_H] - self._paid_S[held_H]
        sums = np.bincount(self._number_S[held_H], weights=num_due_H, minlength=1)
        for number in sums.nonzero()[0].tolist():
            account = self._holders[number]
            assert account is not None
            account.served += int(sums[number]) * account.price
        self._paid_S[held_H] += num_due_H

    def forget(self) -> None:
        """Drop all accounts, once no request runs or waits."""
        self._accounts.clear()
        self._clock = 0

    # ------------------------------------------------------------ turns

    def served(self, tenant: str) -> int:
        """What the tenant has been served, in UNITS, at least the clock. Call `settle` first."""
        account = self._accounts.get(tenant)
        return self._clock if account is None else max(account.served, self._clock)

    def take_turn(self, tenant: str) -> None:
        """Give the next turn to this tenant. Call `settle` first. The tenant's account is raised to the clock, so
        service that it did not use is lost, and the clock is set to the account. Output that its running requests
        generate before the next one is admitted does not move the clock, and so does not raise other tenants."""
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
        """Drop the accounts of tenants that hold no slot and are not ahead of the clock: they equal new ones."""
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
    """Some of the waiting requests, in order: aged ones by when they became aged, then by priority, then by arrival.

    Entries of requests that have left are skipped when they reach the top, and removed once they are the majority,
    since those behind others would never reach it. spells: order of a waiting request -> number of its current wait;
    shared by all heaps, and maintained by their owner. Knows no tenants, reads no clock.
    """

    def __init__(self, spells: Mapping[int, int]) -> None:
        self.num_waiting = 0  # maintained by the owner
        self._spells = spells
        self._by_rank: list[tuple[int, int, int, Request]] = []
        self._by_age: list[tuple[float, int, int, Request]] = []

    def push(self, request: Request, *, aged_at_s: float) -> None:
        """Add a request that waits. aged_at_s: when it becomes aged."""
        if max(len(self._by_rank), len(self._by_age)) > 2 * len(self._spells) + _SLACK:
            self._throw_out()
        order = request.order
        spell = self._spells[order]
        heapq.heappush(self._by_rank, (-request.run.priority, order, spell, request))
        heapq.heappush(self._by_age, (aged_at_s, order, spell, request))

    def head(self, now_s: float) -> Request | None:
        """The next request, without removing it: the one that became aged first, or else the foremost; None if none
        waits."""
        self._skip_gone(self._by_age)
        if self._by_age and self._by_age[0][0] <= now_s:
            request = self._by_age[0][-1]
            request.is_aged = True
            return request
        return self.foremost()

    def foremost(self) -> Request | None:
        """The first by priority and arrival, whatever its age; None if none waits."""
        self._skip_gone(self._by_rank)
        return self._by_rank[0][-1] if self._by_rank else None

    def eldest(self) -> Request | None:
        """The request that has waited longest in total; None if none waits."""
        self._skip_gone(self._by_age)
        return self._by_age[0][-1] if self._by_age else None

    def earliest_head(self) -> int:
        """The earlier order of the two requests that may be the head, now or later: until a request joins or leaves, no
        other can be. At least one must wait."""
        self._skip_gone(self._by_age)
        self._skip_gone(self._by_rank)
        return min(self._by_age[0][1], self._by_rank[0][1])

    def contends(self, priority: int, now_s: float) -> bool:
        """Whether the head is aged or has this priority, the highest that waits."""
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
    """Whose turn it is among the tenants that wait, found without checking each of them: there may be thousands.

    A tenant's noted place is what it had been served, and its next request's order, when it was last checked. Its real
    place is never before that: what it has been served only grows, and `note` is called if its requests change. So
    tenants are checked from the front until the best one found is before the noted places of all others.
    """

    def __init__(self, fairness: TenantFairness, heaps: Mapping[str, WaitingHeap]) -> None:
        self._fairness = fairness
        self._heaps = heaps
        self._places: list[tuple[int, int, str]] = []  # a heap
        self._place_of: dict[str, tuple[int, int]] = {}  # heap entries that differ from these are stale

    def note(self, tenant: str) -> None:
        """Update the tenant's place: its requests have changed, or all have left."""
        heap, former = self._heaps.get(tenant), self._place_of.pop(tenant, None)
        if heap is None:
            return
        place = self._place_of[tenant] = self._fairness.served(tenant), heap.earliest_head()
        if place != former:
            self._put(place, tenant)

    def due(self, priority: int, now_s: float) -> str:
        """The tenant that has been served least among those that contend; of equals, the one whose next request came
        first. At least one must contend. Call `TenantFairness.settle` first."""
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
        self._begun = WaitingHeap(self._spells)  # requests that have run before
        self._by_tenant: dict[str, WaitingHeap] = {}  # only tenants with waiting requests
        self._turns = TenantTurns(fairness, self._by_tenant)
        self._turn: str | None = None

    def __len__(self) -> int:
        return len(self._spells)

    def push(self, request: Request, now_s: float) -> None:
        """A request begins to wait. After a preemption it waits again, and keeps its place by arrival."""
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
        """A request waits no longer: it is admitted, paused or ended."""
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
        """The next request, without removing it; None if none waits."""
        if len(self._by_tenant) < 2:
            return self._all.head(now_s)
        return self._fair_head(now_s)

    def waiting_since_s(self) -> float | None:
        """When the request that has waited longest would have begun, had it waited without a break; None if none
        waits."""
        request = self._all.eldest()
        return None if request is None else request.waiting_since_s - request.waited_s

    def goes_before(self, request: Request, head: Request) -> bool:
        """Whether a request that does not wait would go before the head if it did."""
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
        """The heap of the tenant whose turn it is. priority: the highest that waits."""
        heap = self._by_tenant.get(self._turn) if self._turn is not None else None
        if heap is not None and heap.contends(priority, now_s):
            return heap
        self.fairness.settle()
        self._turn = self._turns.due(priority, now_s)
        self.fairness.take_turn(self._turn)
        return self._by_tenant[self._turn]

    def _due(self, request: Request) -> tuple[int, int]:
        return self.fairness.served(request.run.tenant), request.order
