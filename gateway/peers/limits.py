"""Limits that all gateways of a service share: what each tells the others of its use, and what it makes of theirs.

Nobody is asked before a request enters: a gateway counts its own requests exactly, and those elsewhere as it was told
last. Each tells a change within `GAP_S`, and all of its use every `SWEEP_S`, in numbers that replace the former ones:
a message that got lost is made good by the next. So a limit is overshot by what the other gateways let in since
what they told last was sent, and by no more; tokens above it are owed and waited for. What a gateway had in flight is
forgotten when it has told nothing for `FORGET_S`, so that nothing is refused for ever. Pure: no sockets, and times are
arguments.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from octavo.gateway.requests.admission import Admission, TenantQuotas
from octavo.wire.peer_messages import PeerUse

GAP_S = 0.02  # between two tellings of changes
SWEEP_S = 0.5  # between two tellings of everything
FORGET_S = 5.0  # of silence; several sweeps, so that a short freeze forgets nothing
MAX_ROWS = 1024  # tenants in one message
_FIRST_SWEEP_S = 0.2


class Held(Protocol):
    """Where requests are counted (`gateway.requests.tracker.RequestTracker`)."""

    admission: Admission
    quotas: TenantQuotas


@dataclass(slots=True, eq=False)
class _Heard:
    """Of one start of another gateway."""

    name: str
    since_ns: int
    number: int
    at_ns: int
    num_outputs: int = 0
    has_left: bool = False


class SharedLimits:
    """One per gateway. introduction: a PeerUse with what the gateway says of itself, which goes with every message."""

    def __init__(self, held: Held, introduction: PeerUse) -> None:
        self._held = held
        self._introduction = introduction
        self._number = 0
        self._heard: dict[str, _Heard] = {}  # by the gateway's id

    def tell(self, now_ns: int, *, is_sweep: bool) -> list[PeerUse]:
        """What is to be sent to every other gateway now, in this order: changes since the last call, or everything."""
        quotas, names = self._held.quotas, None
        if not is_sweep:
            names = sorted(quotas.changed)
        quotas.changed.clear()
        uses = quotas.uses(names, now_ns)
        parts = [tuple(uses[begin : begin + MAX_ROWS]) for begin in range(0, len(uses), MAX_ROWS)] or [()]
        num_outputs = self._held.admission.counts().num_outputs
        return [self._next(num_outputs=num_outputs, tenants=part, is_sweep=is_sweep) for part in parts]

    def farewell(self) -> PeerUse:
        """That nothing is in flight here any more, and nothing will be."""
        return self._next(is_leaving=True)

    def hear(self, use: PeerUse, now_ns: int) -> bool:
        """What another gateway tells; whether we meet it for the first time. What is older than what we have of it is
        dropped, and so is a change of one that has not told everything yet."""
        heard = self._heard.get(use.gateway_id)
        if use.gateway_id == self._introduction.gateway_id or (heard is not None and use.number <= heard.number):
            return False
        is_new = heard is None
        if heard is None:
            if not use.is_sweep:
                return False
            heard = self._heard[use.gateway_id] = _Heard(use.name, now_ns, use.number, now_ns)
        heard.number, heard.at_ns = use.number, now_ns
        heard.num_outputs, heard.has_left = use.num_outputs, use.is_leaving
        if use.is_leaving:
            self._held.quotas.forget(use.gateway_id)
        # It may have several parts.
        is_first = use.is_sweep and now_ns - heard.since_ns < _FIRST_SWEEP_S * 1e9
        for each in use.tenants:
            self._held.quotas.hear(use.gateway_id, each, now_ns, is_first=is_first)
        self._add_up()
        return is_new

    def forget_silent(self, now_ns: int) -> list[str]:
        """Forget who has told nothing for long, and what was not told again; names of gateways that were forgotten."""
        before_ns, silent = now_ns - round(FORGET_S * 1e9), []
        for gateway_id, heard in tuple(self._heard.items()):
            if heard.at_ns < before_ns:
                del self._heard[gateway_id]
                self._held.quotas.forget(gateway_id)
                if not heard.has_left:
                    silent.append(heard.name)
            else:
                self._held.quotas.forget(gateway_id, before_ns=before_ns)
        self._add_up()
        return silent

    def heard(self, now_ns: int) -> dict[str, tuple[str, float]]:
        """Of each gateway that tells us of its use, by its id: its name, and for how many seconds it has done so."""
        here = {key: each for key, each in self._heard.items() if not each.has_left}
        return {key: (each.name, (now_ns - each.since_ns) / 1e9) for key, each in here.items()}

    def age_s(self, now_ns: int) -> float:
        """Of the oldest news that counts; 0.0 where there are none."""
        oldest_ns = min((each.at_ns for each in self._heard.values() if not each.has_left), default=now_ns)
        return max(0.0, (now_ns - oldest_ns) / 1e9)

    def _next(self, **values: object) -> PeerUse:
        self._number += 1
        return msgspec.structs.replace(self._introduction, number=self._number, **values)

    def _add_up(self) -> None:
        self._held.admission.num_elsewhere = sum(each.num_outputs for each in self._heard.values())
