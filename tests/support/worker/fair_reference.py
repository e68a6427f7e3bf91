"""The slow reference of the worker's queue between tenants: flat lists, every token charged the moment it comes, exact
fractions, nothing remembered that could be looked up. Written from docs/decisions/0012-fair-queue.md."""

from dataclasses import dataclass, field
from fractions import Fraction

from octavo.worker.scheduler.request import Request


@dataclass(slots=True)
class ReferenceEntry:
    """One that waits. aged_at_s: from then on it counts as one of the highest priority."""

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
        """In its own tenant's line: the aged by when they became so."""
        is_aged = self.aged_at_s <= now_s
        first = self.aged_at_s if is_aged else -self.request.run.priority
        return (not is_aged, first, self.request.order)


@dataclass(slots=True)
class FairReference:
    """served: tokens divided by weight."""

    waiting: list[ReferenceEntry] = field(default_factory=list)
    served: dict[str, Fraction] = field(default_factory=dict)
    clock: Fraction = Fraction(0)
    turn: str | None = None

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens that have come, or must be computed."""
        run = request.run
        self.served[run.tenant] = self.served.get(run.tenant, self.clock) + Fraction(num_tokens, run.weight)

    def admitted(self, request: Request, num_due: int) -> None:
        """It has its slot, and so many tokens must be computed that nobody has paid for."""
        self.left(request)
        self.served.setdefault(request.run.tenant, self.clock)
        if num_due > 0:
            self.charge(request, num_due)

    def left(self, request: Request) -> None:
        """It waits no longer. A tenant that waits alone has every turn."""
        if {entry.tenant for entry in self.waiting} == {request.run.tenant}:
            self.take_turn(request.run.tenant)
        self.waiting = [entry for entry in self.waiting if entry.request is not request]
        if self.turn == request.run.tenant:
            self.turn = None

    def head(self, now_s: float) -> Request | None:
        """Who is next."""
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
        """What it did not use is gone; the clock follows."""
        self.clock = self.served[tenant] = self._served(tenant)

    def _served(self, tenant: str) -> Fraction:
        return max(self.served.get(tenant, self.clock), self.clock)
