"""Who waits, and who is next.

A higher priority goes first; an aged request counts as one of the highest priority that waits. Within that, tenants
take turns (`worker.shares`), and each tenant's requests go in their order: the aged, then by priority, then as they
came. Whose turn it is keeps it until one of its requests is admitted, whatever room that takes; a request that has
begun before, and came earlier than the one whose turn it is, needs none, and passes those of its tenant that wait for
theirs. With one tenant all of this is: aged first, then by priority, first come first served.

Knows nothing of blocks or budgets; reads no clock.
"""

from worker.line import Line
from worker.request import Phase, Request
from worker.shares import Shares


class WaitingQueue:
    """Requests that hold no slot."""

    def __init__(self, *, aging_s: float, shares: Shares) -> None:
        self.shares = shares
        self._aging_s = aging_s
        self._spells: dict[int, int] = {}
        self._num_spells = 0
        self._everybody = Line(self._spells)
        self._begun = Line(self._spells)  # those that have run before
        self._by_tenant: dict[str, Line] = {}  # of tenants that wait
        self._turn: str | None = None

    def __len__(self) -> int:
        return len(self._spells)

    def push(self, request: Request, now_s: float) -> None:
        """A request begins to wait (again: after a preemption, behind nobody who came later)."""
        self._num_spells += 1
        self._spells[request.order] = self._num_spells
        request.phase, request.slot, request.waiting_since_s = Phase.WAITING, None, now_s
        line = self._by_tenant.setdefault(request.asked.tenant, Line(self._spells))
        line.num_waiting += 1
        aged_at_s = now_s + max(0.0, self._aging_s - request.waited_s)
        for each in (self._everybody, line):
            each.push(request, aged_at_s=aged_at_s)
        if request.first_scheduled_s is not None:
            self._begun.push(request, aged_at_s=aged_at_s)

    def remove(self, request: Request, now_s: float) -> None:
        """It waits no longer: admitted or ended."""
        del self._spells[request.order]
        request.waited_s += now_s - request.waiting_since_s
        tenant = request.asked.tenant
        if len(self._by_tenant) == 1:
            self.shares.settle()
            self.shares.take_turn(tenant)
        line = self._by_tenant[tenant]
        line.num_waiting -= 1
        if not line.num_waiting:
            del self._by_tenant[tenant]
        if tenant == self._turn:
            self._turn = None

    def head(self, now_s: float) -> Request | None:
        """Who is next, without removing it."""
        if len(self._by_tenant) < 2:
            return self._everybody.head(now_s)
        return self._fair_head(now_s)

    def goes_before(self, request: Request, head: Request) -> bool:
        """Whether a request that does not wait would go before the head, if it did."""
        ours, theirs = request.turn_rank, head.turn_rank
        if ours[:2] != theirs[:2] or request.asked.tenant == head.asked.tenant:
            return ours < theirs
        self.shares.settle()
        return self._due(request) < self._due(head)

    # ------------------------------------------------------------ several tenants

    def _fair_head(self, now_s: float) -> Request:
        foremost = self._everybody.foremost()
        assert foremost is not None
        turn = self._line_of_turn(foremost.asked.priority, now_s).head(now_s)
        begun = self._begun.head(now_s)
        assert turn is not None
        return turn if begun is None or turn.turn_rank < begun.turn_rank else begun

    def _line_of_turn(self, priority: int, now_s: float) -> Line:
        """priority: the highest that waits. A look at each tenant that waits, once a turn."""
        line = self._by_tenant.get(self._turn) if self._turn is not None else None
        if line is not None and line.contends(priority, now_s):
            return line
        self.shares.settle()
        heads = [
            head
            for line in self._by_tenant.values()
            if line.contends(priority, now_s) and (head := line.head(now_s)) is not None
        ]
        self._turn = min(heads, key=self._due).asked.tenant
        self.shares.take_turn(self._turn)
        return self._by_tenant[self._turn]

    def _due(self, request: Request) -> tuple[int, int]:
        return self.shares.served(request.asked.tenant), request.order
