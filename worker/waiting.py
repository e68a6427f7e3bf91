"""Who waits, and who is next: higher priority first, first come first served within one, and age beats both.

Knows nothing of blocks or budgets; reads no clock.
"""

import heapq

from worker.request import Phase, Request


class WaitingQueue:
    """Requests that hold no slot. Entries of requests that have left are skipped when they come up."""

    def __init__(self, *, aging_s: float) -> None:
        self._aging_s = aging_s
        self._by_rank: list[tuple[int, int, int, Request]] = []
        self._by_age: list[tuple[float, int, int, Request]] = []
        self._spells: dict[int, int] = {}  # order of a waiting request -> which spell of waiting this is
        self._num_spells = 0

    def __len__(self) -> int:
        return len(self._spells)

    def push(self, request: Request, now_s: float) -> None:
        """A request begins to wait (again: after a preemption, behind nobody who came later)."""
        self._num_spells += 1
        spell = self._spells[request.order] = self._num_spells
        request.phase, request.slot, request.waiting_since_s = Phase.WAITING, None, now_s
        heapq.heappush(self._by_rank, (-request.asked.priority, request.order, spell, request))
        aged_at_s = now_s + max(0.0, self._aging_s - request.waited_s)
        heapq.heappush(self._by_age, (aged_at_s, request.order, spell, request))

    def remove(self, request: Request, now_s: float) -> None:
        """It waits no longer: admitted or ended."""
        del self._spells[request.order]
        request.waited_s += now_s - request.waiting_since_s

    def head(self, now_s: float) -> Request | None:
        """Who is next, without removing it: the one whose age was due first, else the most important one."""
        self._skip_gone(self._by_age)
        if self._by_age and self._by_age[0][0] <= now_s:
            request = self._by_age[0][-1]
            request.is_aged = True
            return request
        self._skip_gone(self._by_rank)
        return self._by_rank[0][-1] if self._by_rank else None

    def _skip_gone(self, heap: list) -> None:
        while heap and self._spells.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
