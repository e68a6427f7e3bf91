"""Who is next where texts wait: tenants share by bytes and weight, and within one the shorter text goes first.

A text's tag is what its tenant had been served when it came, plus its own size; the smallest goes first. So a short
text passes long ones, and a long one is passed by no more bytes than it has itself. An idle tenant earns no credit.
Where the queue is full, the tenant with the most waiting gives up what it would be served last.

Pure: no threads, no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
_BYTES_OF_ANY = 1024  # what a text costs beside its bytes
_MAX_IDLE = 64  # tenants that are remembered while they have nothing here


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Whose text it is. weight: of the tenant's share where tenants wait for one another."""

    tenant: str = ""
    weight: int = 1


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    item: T
    num_bytes: int
    tag: int
    order: int


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    weight: int
    due: float  # bytes served by weight, with a start that leaves no credit
    num_served: int = 0  # bytes
    waiting: dict[int, _Entry[T]] = field(default_factory=dict)  # by id of the item

    @property
    def load(self) -> float:
        """What waits, by weight."""
        return sum(entry.num_bytes + _BYTES_OF_ANY for entry in self.waiting.values()) / self.weight


class FairQueue(Generic[T]):
    """Of items that are their own identity."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._place: dict[int, tuple[Share, int, int]] = {}  # of items that wait, or may come back: tag and order
        self._due = 0.0  # of the tenant that was served last
        self._num_pushed = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, item: T, *, num_bytes: int, share: Share) -> None:
        """A new item. num_bytes: all that it will be served."""
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[share.tenant] = _Tenant(share.weight, self._due)
        tenant.weight = share.weight
        if not tenant.waiting:
            tenant.due = max(tenant.due, self._due)
        self._num_pushed += 1
        tag = tenant.num_served + num_bytes
        self._place[id(item)] = (share, tag, self._num_pushed)
        self._wait(item, tenant, num_bytes, tag, self._num_pushed)

    def push_back(self, item: T, *, num_bytes: int) -> None:
        """An item that was popped and has more to do, at its old place. num_bytes: that are left."""
        share, tag, order = self._place[id(item)]
        tenant = self._tenants.setdefault(share.tenant, _Tenant(share.weight, self._due))
        self._wait(item, tenant, num_bytes, tag, order)

    def _wait(self, item: T, tenant: _Tenant[T], num_bytes: int, tag: int, order: int) -> None:
        tenant.waiting[id(item)] = _Entry(item, num_bytes, tag, order)
        self._num_waiting += 1

    def pop(self, may_go: Callable[[T], bool], cost_of: Callable[[T], int]) -> T | None:
        """The next of those that may go, None where there is none; its tenant is charged cost_of(item) bytes."""
        for tenant in sorted((each for each in self._tenants.values() if each.waiting), key=lambda each: each.due):
            for entry in sorted(tenant.waiting.values(), key=lambda each: (each.tag, each.order)):
                if may_go(entry.item):
                    self._take(tenant, entry)
                    self._due = max(self._due, tenant.due)
                    cost = cost_of(entry.item)
                    tenant.num_served += cost
                    tenant.due += (cost + _BYTES_OF_ANY) / tenant.weight
                    return entry.item
        return None

    def pop_last(self) -> T:
        """What the tenant with the most waiting would be served last; at least one item waits."""
        tenant = max((each for each in self._tenants.values() if each.waiting), key=lambda each: each.load)
        entry = max(tenant.waiting.values(), key=lambda each: (each.tag, each.order))
        self._take(tenant, entry)
        self.forget(entry.item)
        return entry.item

    def remove(self, item: T) -> bool:
        """Take it out, wherever it stands; whether it waited."""
        place = self._place.get(id(item))
        tenant = self._tenants.get(place[0].tenant) if place else None
        if tenant is None or id(item) not in tenant.waiting:
            return False
        self._take(tenant, tenant.waiting[id(item)])
        self.forget(item)
        return True

    def forget(self, item: T) -> None:
        """It was popped and does not come back."""
        self._place.pop(id(item), None)

    def _take(self, tenant: _Tenant[T], entry: _Entry[T]) -> None:
        del tenant.waiting[id(entry.item)]
        self._num_waiting -= 1

    def _forget_idle(self) -> None:
        """But for those who were served most of late: they would be served first again."""
        if len(self._tenants) <= _MAX_IDLE:
            return
        idle = sorted((each.due, name) for name, each in self._tenants.items() if not each.waiting)
        for _, name in idle[: -_MAX_IDLE or None]:
            del self._tenants[name]
