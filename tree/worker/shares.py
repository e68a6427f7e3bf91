"""What each tenant has been served, so that the next turn goes to whoever had least for its weight.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens, charged as they are computed since nobody knows how
long an output gets (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the prompt when its request
gets a slot, without what was cached; output when it comes. A tenant's token costs 1 / weight. Nobody is charged twice
for a token that has to be computed again.

A tenant that comes back begins at the clock, what it did not use is not saved up. The clock is what the tenant of the
last turn had then. Knows no queue and no priorities.

Shapes: S slots · H of them held
"""

from dataclasses import dataclass

import numpy as np

from worker.request import Request
from worker.rows import Rows

UNITS = 1_000_000  # that one token costs at weight 1: whole numbers, so that the order never hangs on rounding
MAX_WEIGHT = 1000
_NOBODY = -1
_MIN_SWEEP = 64


@dataclass(slots=True, eq=False)
class _Share:
    """served: in units. number: while the tenant holds slots, its name in the arrays."""

    served: int
    price: int
    num_slots: int = 0
    number: int = _NOBODY


class Shares:
    """By the tenant's label; "" is one tenant too. rows: of the requests that run."""

    def __init__(self, rows: Rows) -> None:
        num_slots = len(rows.num_known_S)
        self._rows = rows
        self._clock = 0
        self._shares: dict[str, _Share] = {}
        self._holders: list[_Share | None] = [None] * num_slots  # by number; each holds a slot, so there are enough
        self._number_S = np.full(num_slots, _NOBODY, np.intp)
        self._paid_S = np.zeros(num_slots, np.int64)
        self._num_appends_seen = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._shares)

    # ------------------------------------------------------------ charging

    def begin(self, request: Request, *, num_cached_tokens: int) -> None:
        """The request has its slot: its tenant pays for what must be computed and was not paid before."""
        self.settle()
        asked, slot, num_known = request.asked, request.held_slot, len(request.token_ids_T)
        share = self._share(asked.tenant)
        share.price = UNITS // asked.weight
        num_due = num_known - max(num_cached_tokens, request.num_paid_tokens)
        if num_due > 0:
            share.served += num_due * share.price
        request.num_paid_tokens = max(num_known, request.num_paid_tokens)
        self._hold(share)
        self._number_S[slot], self._paid_S[slot] = share.number, request.num_paid_tokens

    def end(self, request: Request) -> None:
        """The request leaves its slot: what has come since it was last looked at is paid."""
        slot, share = request.held_slot, self._shares[request.asked.tenant]
        num_known = int(self._rows.num_known_S[slot])
        share.served += max(0, num_known - int(self._paid_S[slot])) * share.price
        request.num_paid_tokens = max(num_known, request.num_paid_tokens)
        self._number_S[slot] = _NOBODY
        share.num_slots -= 1
        if not share.num_slots:
            self._holders[share.number], share.number = None, _NOBODY

    def settle(self) -> None:
        """Everybody pays for the output that has come; work of numpy, whatever the number of requests."""
        if self._num_appends_seen == self._rows.num_appends:
            return
        self._num_appends_seen = self._rows.num_appends
        held_H = (self._number_S != _NOBODY).nonzero()[0]
        num_due_H = self._rows.num_known_S[held_H] - self._paid_S[held_H]
        sums = np.bincount(self._number_S[held_H], weights=num_due_H, minlength=1)
        for number in sums.nonzero()[0].tolist():
            share = self._holders[number]
            assert share is not None
            share.served += int(sums[number]) * share.price
        self._paid_S[held_H] += num_due_H

    def forget(self) -> None:
        """Nobody runs and nobody waits: nobody owes anybody anything."""
        self._shares.clear()
        self._clock = 0

    # ------------------------------------------------------------ turns

    def served(self, tenant: str) -> int:
        """In units since some moment, at least the clock; settle first."""
        share = self._shares.get(tenant)
        return self._clock if share is None else max(share.served, self._clock)

    def take_turn(self, tenant: str) -> None:
        """The next turn is this tenant's: what it did not use before is gone. Settle first. The clock is what it has
        now; output of its others that comes before its request does is no reason to lift those who wait."""
        share = self._share(tenant)
        self._clock = share.served = max(share.served, self._clock)

    # ------------------------------------------------------------ inside

    def _share(self, tenant: str) -> _Share:
        share = self._shares.get(tenant)
        if share is None:
            if len(self._shares) >= self._sweep_at:
                self._sweep()
            share = self._shares[tenant] = _Share(self._clock, UNITS)
        return share

    def _sweep(self) -> None:
        """Those that hold nothing and are behind the clock are as good as unknown."""
        self._shares = {
            tenant: share for tenant, share in self._shares.items() if share.num_slots or share.served > self._clock
        }
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._shares))

    def _hold(self, share: _Share) -> None:
        if not share.num_slots:
            share.number = self._holders.index(None)
            self._holders[share.number] = share
        share.num_slots += 1
