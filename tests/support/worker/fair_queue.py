"""The worker's queue and its slow reference side by side, driven by hand or by events that a seed draws."""

import random
from typing import Any

import numpy as np

from octavo.wire.messages import Run, SamplingParams
from octavo.worker.scheduler.plan import Slot
from octavo.worker.scheduler.request import Phase, Request, token_ids_of
from octavo.worker.scheduler.request_queue import RequestQueue, TenantFairness
from octavo.worker.scheduler.slot_state import SlotState
from tests.support.worker.fair_reference import FairReference, ReferenceEntry
from tests.support.worker.scheduling import key

NUM_SLOTS = 4
AGING_S = 10.0
WEIGHTS = {"a": 1, "b": 2, "c": 5}
KINDS = ("add", "admit", "tokens", "end", "preempt", "cancel", "wait")


def drawn_events(seed: int, count: int) -> list[tuple[Any, ...]]:
    """What happens to the queue and to those that run; most of the time several tenants wait. A list of its own for
    each seed: what hypothesis draws is too short for tenants to owe each other anything."""
    rng = random.Random(seed)
    priorities = rng.choice([(0,), (0, 0, 0, 1, -1)])
    pause_s = rng.choice([0.1, 1.0, 8.0])
    drawn: list[tuple[Any, ...]] = []
    for kind in rng.choices(KINDS, weights=(30, 25, 25, 12, 4, 2, 2), k=count):
        match kind:
            case "add":
                drawn.append((kind, rng.choice("abc"), rng.choice(priorities), rng.choice((1, 5, 30))))
            case "tokens":
                drawn.append((kind, rng.randint(1, 8)))
            case "wait":
                drawn.append((kind, rng.uniform(0, pause_s)))
            case _:
                drawn.append((kind, rng.randint(0, 9)))
    return drawn


class Twins:
    """A queue with its slots and the reference, given the same events; they have to agree after each."""

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
        """One for everybody who runs."""
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
        """One of `drawn_events`; nothing where it does not apply."""
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
