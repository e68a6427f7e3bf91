"""The worker's queue and its slow reference side by side, driven by hand or by random events."""

import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from octavo.wire.messages import Run, SamplingParams
from octavo.worker.scheduler.plan import Slot
from octavo.worker.scheduler.request import Phase, Request, token_ids_of
from octavo.worker.scheduler.request_queue import RequestQueue, TenantFairness
from octavo.worker.scheduler.slot_state import SlotState
from tests.support.worker.scheduling import key


@dataclass(slots=True)
class ReferenceEntry:
    """A waiting request. aged_at_s: from then on it counts as one of the highest priority."""

    request: Request
    aged_at_s: float
    has_begun: bool

    @property
    def tenant(self) -> str:
        return self.request.run.tenant

    def rank(self, now_s: float) -> tuple[bool, int, int]:
        is_aged = self.aged_at_s <= now_s
        return (not is_aged, 0 if is_aged else -self.request.run.priority, self.request.order)

    def place(self, now_s: float) -> tuple[bool, float, int]:
        """Sort key within its tenant: aged requests first, by when they became aged."""
        is_aged = self.aged_at_s <= now_s
        first = self.aged_at_s if is_aged else -self.request.run.priority
        return (not is_aged, first, self.request.order)


@dataclass(slots=True)
class FairReference:
    """served: tokens divided by weight, by tenant."""

    waiting: list[ReferenceEntry] = field(default_factory=list)
    served: dict[str, Fraction] = field(default_factory=dict)
    clock: Fraction = Fraction(0)
    turn: str | None = None

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant for tokens that were generated or must be computed."""
        run = request.run
        self.served[run.tenant] = self.served.get(run.tenant, self.clock) + Fraction(num_tokens, run.weight)

    def admitted(self, request: Request, num_due: int) -> None:
        """The request has got a slot. num_due: tokens to compute that were not charged yet."""
        self.left(request)
        self.served.setdefault(request.run.tenant, self.clock)
        if num_due > 0:
            self.charge(request, num_due)

    def left(self, request: Request) -> None:
        """The request no longer waits. A tenant that waits alone has every turn."""
        if {entry.tenant for entry in self.waiting} == {request.run.tenant}:
            self.take_turn(request.run.tenant)
        self.waiting = [entry for entry in self.waiting if entry.request is not request]
        if self.turn == request.run.tenant:
            self.turn = None

    def head(self, now_s: float) -> Request | None:
        """The request that is next."""
        if not self.waiting:
            return None
        tenants = {entry.tenant for entry in self.waiting}
        if len(tenants) == 1:
            return min(self.waiting, key=lambda entry: entry.place(now_s)).request
        top = max(entry.request.run.priority for entry in self.waiting)
        able = [e for e in self.waiting if e.aged_at_s <= now_s or e.request.run.priority == top]
        if self.turn not in {entry.tenant for entry in able}:
            heads = [min((e for e in able if e.tenant == t), key=lambda e: e.place(now_s)) for t in sorted(tenants)
                     if any(e.tenant == t for e in able)]  # fmt: skip
            chosen = min(heads, key=lambda entry: (self._served(entry.tenant), entry.request.order))
            self.turn = chosen.tenant
            self.take_turn(self.turn)
        mine = min((e for e in able if e.tenant == self.turn), key=lambda entry: entry.place(now_s))
        begun = sorted((e for e in self.waiting if e.has_begun), key=lambda entry: entry.place(now_s))
        first = min([mine, *begun[:1]], key=lambda entry: entry.rank(now_s))
        return first.request

    def take_turn(self, tenant: str) -> None:
        """The tenant loses credit that it has not used, and the clock advances to what it was served."""
        self.clock = self.served[tenant] = self._served(tenant)

    def _served(self, tenant: str) -> Fraction:
        return max(self.served.get(tenant, self.clock), self.clock)


NUM_SLOTS = 4
AGING_S = 10.0
WEIGHTS = {"a": 1, "b": 2, "c": 5, **dict.fromkeys("defghijklmnop", 4)}
KINDS = ("add", "admit", "tokens", "end", "preempt", "cancel", "wait")


def drawn_events(seed: int, count: int, tenants: str = "abc") -> list[tuple[Any, ...]]:
    """Events of the queue and of running requests, drawn from a seed; most of the time several tenants wait. (Sequences
    that hypothesis draws are too short for tenants' shares to differ.)"""
    rng = random.Random(seed)
    priorities = rng.choice([(0,), (0, 0, 0, 1, -1)])
    pause_s = rng.choice([0.1, 1.0, 8.0])
    drawn: list[tuple[Any, ...]] = []
    for kind in rng.choices(KINDS, weights=(30, 25, 25, 12, 4, 2, 2), k=count):
        match kind:
            case "add":
                drawn.append((kind, rng.choice(tenants), rng.choice(priorities), rng.choice((1, 5, 30))))
            case "tokens":
                drawn.append((kind, rng.randint(1, 8)))
            case "wait":
                drawn.append((kind, rng.uniform(0, pause_s)))
            case _:
                drawn.append((kind, rng.randint(0, 9)))
    return drawn


class QueuePair:
    """The queue with its slots, and the reference, given the same events; they must agree after each."""

    def __init__(self) -> None:
        self.rows = SlotState(num_slots=NUM_SLOTS, max_total_tokens=400)
        self.queue = RequestQueue(aging_s=AGING_S, fairness=TenantFairness(self.rows))
        self.reference = FairReference()
        self.running: list[Request] = []
        self.now_s = 0.0
        self.num_added = 0

    def add(self, tenant: str, weight: int, priority: int, num_tokens: int) -> Request:
        run = Run(
            handle=self.num_added, request_id="r", prompt_ids=np.full(num_tokens, 3, "<i4").tobytes(),
            sampling=SamplingParams(), priority=priority, tenant=tenant, weight=weight,
        )  # fmt: skip
        request = Request(run=run, key=key(run.handle), sampling=run.sampling, order=self.num_added,
                          arrival_s=self.now_s, deadline_s=None, max_total_tokens=400,
                          token_ids_T=token_ids_of(run))  # fmt: skip
        self.num_added += 1
        self._push(request)
        return request

    def _push(self, request: Request) -> None:
        self.queue.push(request, self.now_s)
        aged_at_s = self.now_s + max(0.0, AGING_S - request.waited_s)
        self.reference.waiting.append(ReferenceEntry(request, aged_at_s, request.first_scheduled_s is not None))

    def admit(self, num_cached: int) -> Request | None:
        request = self.queue.head(self.now_s)
        if request is None or len(self.running) == NUM_SLOTS:
            return None
        taken = {int(other.held_slot) for other in self.running}
        num_known, cached = len(request.token_ids_T), min(num_cached, len(request.token_ids_T) - 1)
        self.reference.admitted(request, num_known - max(cached, request.num_paid_tokens))
        self.queue.remove(request, self.now_s)
        request.slot, request.phase = Slot(min(set(range(NUM_SLOTS)) - taken)), Phase.DECODING
        request.first_scheduled_s = self.now_s
        self.rows.join(request.slot, request, num_cached_tokens=cached, stop_ids=())
        self.queue.fairness.begin(request, num_cached_tokens=cached)
        self.running.append(request)
        return request

    def tokens(self) -> None:
        """Give each running request one token."""
        slots_N = np.asarray([request.held_slot for request in self.running], np.intp)
        self.rows.append(slots_N, np.full(len(slots_N), 7, np.int32), self.rows.num_known_S[slots_N], self.now_s)
        for request in self.running:
            self.reference.charge(request, 1)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.queue.fairness.end(request)
        self.rows.leave(request.held_slot, request)
        request.slot = None

    def preempt(self, request: Request) -> None:
        self.leave(request)
        self._push(request)

    def cancel(self, request: Request) -> None:
        self.queue.remove(request, self.now_s)
        self.reference.left(request)

    def check(self) -> None:
        if not self.running and not self.reference.waiting:
            self.queue.fairness.forget()
            self.reference = FairReference()
        assert self.queue.head(self.now_s) is self.reference.head(self.now_s)
        assert len(self.queue) == len(self.reference.waiting)

    def do(self, event: tuple[Any, ...]) -> None:
        """Apply one of `drawn_events`; does nothing if it does not apply."""
        match event:
            case "add", tenant, priority, num_tokens:
                self.add(tenant, WEIGHTS[tenant], priority, num_tokens)
            case "admit", num_cached:
                self.admit(num_cached)
            case "tokens", count:
                for _ in range(count if self.running else 0):
                    self.tokens()
            case "end" | "preempt" as action, index if index < len(self.running):
                (self.leave if action == "end" else self.preempt)(self.running[index])
            case "cancel", index if index < len(self.reference.waiting):
                self.cancel(self.reference.waiting[index].request)
            case "wait", seconds:
                self.now_s += seconds
