"""Whether tenants that wait for one another get their shares, and each tenant's requests their order.

Counts tokens by looking at requests after each step, never by what `worker.scheduler.request_queue` has counted
itself.
"""

from collections import Counter
from itertools import permutations

from octavo.worker.scheduler.request import Phase, Request
from octavo.worker.scheduler.scheduler import Scheduler
from sim.journal import Journal
from sim.scenario import Scenario


class FairnessWatch:
    """Checks one worker's scheduling, from start to death.

    While two tenants both wait, their weighted shares may differ by one request (which may be the largest), and by the
    output of all requests that run before and after it is admitted: once at the beginning of that time, once at its
    end. Preempted requests continue out of turn.

    If requests differ in priority, only the order within a tenant is checked. With several tenants, a preempted request
    needs no turn to continue, and may pass earlier requests of its tenant that wait for theirs.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal, name: str, scenario: Scenario) -> None:
        requests = scenario.requests
        self._scheduler, self._journal, self._name = scheduler, journal, name
        self._longest_output = max((spec.max_tokens for spec in requests), default=1)
        longest = max((len(spec.prompt) for spec in requests), default=1) + self._longest_output
        self._gap = 2 * (longest + 2 * scenario.config.max_num_seqs * self._longest_output)
        self._has_priorities = any(spec.priority for spec in requests)
        self._ended: Counter[str] = Counter()  # tokens that requests got which are gone
        self._live: dict[int, Request] = {}
        self._weights: dict[str, int] = {}
        self._tenants: set[str] = set()  # seen so far
        self._since: dict[tuple[str, str], tuple[int, int]] = {}
        self._waiting: dict[int, tuple[Request, int]] = {}  # with how often they were preempted

    def look(self) -> None:
        """Check after every step."""
        waiting = {request.order: request for request in self._scheduler.requests if request.phase is Phase.WAITING}
        self._tenants.update(request.run.tenant for request in self._scheduler.requests)
        self._check_order(waiting)
        self._waiting = {order: (request, request.num_preemptions) for order, request in waiting.items()}
        if not self._has_priorities:
            self._check_shares({request.run.tenant for request in waiting.values()})

    def _check_order(self, waiting: dict[int, Request]) -> None:
        """First come, first served, within tenant and priority."""
        journal = self._journal
        came_in = [r for order, (r, _) in self._waiting.items() if order not in waiting and r.is_running]
        for request in came_in:
            if request.is_aged or (request.num_preemptions and len(self._tenants) > 1):
                continue
            run = request.run
            journal.counts["checks"] += 1
            overtaken = [
                other.order
                for other in waiting.values()
                if other.order < request.order
                and self._waiting.get(other.order) == (other, other.num_preemptions)
                and (other.run.tenant, other.run.priority) == (run.tenant, run.priority)
            ]
            if overtaken:
                journal.violate(f"{self._name}: {request.order} of {run.tenant!r} overtook {overtaken}")

    def _check_shares(self, tenants: set[str]) -> None:
        served = self._served()
        gap = self._gap + 2 * self._longest_output * self._scheduler.counters.num_preemptions
        self._since = {pair: at for pair, at in self._since.items() if tenants.issuperset(pair)}
        for pair in permutations(sorted(tenants), 2):
            first, second = pair
            at = self._since.setdefault(pair, (served[first], served[second]))
            got_first = (served[first] - at[0]) / self._weights[first]
            got_second = (served[second] - at[1]) / self._weights[second]
            self._journal.counts["checks"] += 1
            if got_first - got_second > gap / min(self._weights[first], self._weights[second]):
                told = f"{got_first:.0f} and {got_second:.0f} tokens by weight"
                self._journal.violate(f"{self._name}: {pair} both waited and got {told}")

    def _served(self) -> Counter[str]:
        """Tokens computed for each tenant, each counted once."""
        live = {request.order: request for request in self._scheduler.requests}
        for order, request in self._live.items():
            if order not in live:
                self._ended[request.run.tenant] += self._size(request)
        self._live, served = live, self._ended.copy()
        for request in live.values():
            self._weights[request.run.tenant] = request.run.weight
            served[request.run.tenant] += self._size(request)
        return served

    def _size(self, request: Request) -> int:
        if request.first_scheduled_s is None:
            return 0
        rows, slot = self._scheduler.requests.slots, request.slot
        num_known = len(request.token_ids_T) if slot is None else int(rows.num_known_S[slot])
        return num_known - request.num_cached_tokens
