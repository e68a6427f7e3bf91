"""Some requests that wait, in their order: the aged first by when they became so, then by priority, then by arrival.

Entries of requests that have left are skipped when they come up, and thrown out once they are the most: where others
are served first, some would never come up. Knows no tenants, reads no clock.
"""

import heapq
from collections.abc import Mapping
from typing import Any

from worker.request import Request

_SLACK = 64  # entries, so that a queue that is nearly empty is not gone through all the time


class Line:
    """spells: order of a waiting request -> which spell of waiting this is; shared by all lines, and their owner's."""

    def __init__(self, spells: Mapping[int, int]) -> None:
        self.num_waiting = 0  # the owner's to count
        self._spells = spells
        self._by_rank: list[tuple[int, int, int, Request]] = []
        self._by_age: list[tuple[float, int, int, Request]] = []

    def push(self, request: Request, *, aged_at_s: float) -> None:
        """At its place."""
        if max(len(self._by_rank), len(self._by_age)) > 2 * len(self._spells) + _SLACK:
            self._throw_out()
        order = request.order
        spell = self._spells[order]
        heapq.heappush(self._by_rank, (-request.asked.priority, order, spell, request))
        heapq.heappush(self._by_age, (aged_at_s, order, spell, request))

    def head(self, now_s: float) -> Request | None:
        """Who is next, without removing it: the one whose age was due first, else the most important one."""
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

    def contends(self, priority: int, now_s: float) -> bool:
        """Whether somebody here has this priority, or is aged; nobody has a higher one."""
        head = self.head(now_s)
        return head is not None and (head.is_aged or head.asked.priority == priority)

    def _throw_out(self) -> None:
        heaps: list[list[Any]] = [self._by_rank, self._by_age]
        for heap in heaps:
            heap[:] = [entry for entry in heap if self._spells.get(entry[1]) == entry[2]]
            heapq.heapify(heap)

    def _skip_gone(self, heap: list) -> None:
        while heap and self._spells.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
