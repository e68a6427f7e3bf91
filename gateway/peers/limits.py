"""Limits that all gateways of a service share: the reports each sends of its use, and what it makes of the others'.

No gateway asks before it admits a request: it counts its own requests exactly, and those elsewhere as last reported.
Each reports a change within `GAP_S` and a snapshot of all its use every `SNAPSHOT_S`, in absolute numbers, so that the
next report makes up for a lost one. A limit can therefore be exceeded by what the other gateways admitted since their
last report, and by no more; excess tokens are owed, and later requests wait for them. What a gateway had in flight is
forgotten once it has reported nothing for `FORGET_S`, so that nothing is refused for ever. Pure: no sockets, and times
are arguments.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from octavo.gateway.requests.admission import Admission, TenantQuotas
from octavo.wire.peer_messages import PeerUse, TenantUse

GAP_S = 0.02  # between two reports of changes
SNAPSHOT_S = 0.5  # between two reports of everything
FORGET_S = 5.0  # of silence; several snapshots, so that a short freeze forgets nothing
MAX_ROWS = 1024  # tenants in one message
_FIRST_SNAPSHOT_S = 0.2


class RequestCounts(Protocol):
    """Where requests are counted (`gateway.requests.tracker.RequestTracker`)."""

    admission: Admission
    quotas: TenantQuotas


@dataclass(slots=True, eq=False)
class _PeerState:
    """What is known of one run of another gateway."""

    name: str
    since_ns: int
    number: int
    at_ns: int
    num_outputs: int = 0
    has_left: bool = False


class SharedLimits:
    """One per gateway. introduction: what the gateway says of itself; every report repeats it."""

    def __init__(self, held: RequestCounts, introduction: PeerUse) -> None:
        self._held = held
        self._introduction = introduction
        self._number = 0
        self._states: dict[str, _PeerState] = {}  # by the gateway's id

    def take_changes(self, now_ns: int) -> list[PeerUse]:
        """The messages to send to every other gateway now, in order: what changed since the last call of this or
        `take_snapshot`."""
        return self._take(self._held.quotas.uses(sorted(self._held.quotas.changed), now_ns), is_snapshot=False)

    def take_snapshot(self, now_ns: int) -> list[PeerUse]:
        """The same, for everything that is used here."""
        return self._take(self._held.quotas.uses(None, now_ns), is_snapshot=True)

    def farewell(self) -> PeerUse:
        """The last report: nothing is in flight here, and nothing will be."""
        return self._next(is_leaving=True)

    def on_report(self, use: PeerUse, now_ns: int) -> bool:
        """Take another gateway's report. True where this is its first. Reports older than the last one taken are
        dropped, and so are changes from a gateway that has not yet reported everything."""
        state = self._states.get(use.gateway_id)
        if use.gateway_id == self._introduction.gateway_id or (state is not None and use.number <= state.number):
            return False
        is_new = state is None
        if state is None:
            if not use.is_snapshot:
                return False
            state = self._states[use.gateway_id] = _PeerState(use.name, now_ns, use.number, now_ns)
        state.number, state.at_ns = use.number, now_ns
        state.num_outputs, state.has_left = use.num_outputs, use.is_leaving
        if use.is_leaving:
            self._held.quotas.forget_peer(use.gateway_id)
        # It may have several parts.
        is_first = use.is_snapshot and now_ns - state.since_ns < _FIRST_SNAPSHOT_S * 1e9
        for each in use.tenants:
            self._held.quotas.on_peer_use(use.gateway_id, each, now_ns, is_first=is_first)
        self._add_up()
        return is_new

    def forget_silent(self, now_ns: int) -> list[str]:
        """Forget gateways that have sent nothing for FORGET_S, and any use that their later reports did not repeat.
        Returns the names of the gateways that were forgotten."""
        before_ns, silent = now_ns - round(FORGET_S * 1e9), []
        for gateway_id, state in tuple(self._states.items()):
            if state.at_ns < before_ns:
                del self._states[gateway_id]
                self._held.quotas.forget_peer(gateway_id)
                if not state.has_left:
                    silent.append(state.name)
            else:
                self._held.quotas.forget_peer(gateway_id, before_ns=before_ns)
        self._add_up()
        return silent

    def reporting_peers(self, now_ns: int) -> dict[str, tuple[str, float]]:
        """The gateways that report to this one, by id: name, and seconds since the first report."""
        here = {key: each for key, each in self._states.items() if not each.has_left}
        return {key: (each.name, (now_ns - each.since_ns) / 1e9) for key, each in here.items()}

    def age_s(self, now_ns: int) -> float:
        """Seconds since the oldest report that still counts; 0.0 if there is none."""
        oldest_ns = min((each.at_ns for each in self._states.values() if not each.has_left), default=now_ns)
        return max(0.0, (now_ns - oldest_ns) / 1e9)

    def _take(self, uses: list[TenantUse], *, is_snapshot: bool) -> list[PeerUse]:
        self._held.quotas.changed.clear()
        parts = [tuple(uses[begin : begin + MAX_ROWS]) for begin in range(0, len(uses), MAX_ROWS)] or [()]
        num_outputs = self._held.admission.counts().num_outputs
        return [self._next(num_outputs=num_outputs, tenants=part, is_snapshot=is_snapshot) for part in parts]

    def _next(self, **values: object) -> PeerUse:
        self._number += 1
        return msgspec.structs.replace(self._introduction, number=self._number, **values)

    def _add_up(self) -> None:
        self._held.admission.num_elsewhere = sum(each.num_outputs for each in self._states.values())
