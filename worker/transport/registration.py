"""Where a worker stands with one gateway: events in, answers out. Pure; no sockets, no clocks.

    OFFLINE ──connected──► PRESENTING ──Welcome──► WELCOMED
       ▲                       │                      │
       └──────disconnected─────┴──────────────────────┘

Register is repeated while PRESENTING. A Welcome under another gateway id means that the gateway was restarted: all that
its former process had asked for is over.
"""

from enum import Enum

REGISTER_INTERVAL_S = 0.5


class LinkState(Enum):
    """Where a worker stands with one gateway."""

    OFFLINE = "offline"  # no connection
    PRESENTING = "presenting"  # connected; Register is sent until a Welcome comes
    WELCOMED = "welcomed"


class Registration:
    """One per gateway."""

    def __init__(self) -> None:
        self.state = LinkState.OFFLINE
        self.gateway_id = ""
        self._next_register_s: float | None = None

    def on_connected(self) -> None:
        """The transport is connected: present yourself at once."""
        if self.state is LinkState.OFFLINE:
            self.state = LinkState.PRESENTING
            self._next_register_s = None

    def on_disconnected(self) -> bool:
        """The transport broke. Returns whether a gateway that had welcomed us is lost with it."""
        was_welcomed = self.state is LinkState.WELCOMED
        self.state = LinkState.OFFLINE
        return was_welcomed

    def on_welcome(self, gateway_id: str) -> bool:
        """Accepted. Returns whether the gateway had restarted unnoticed, so that its former process is lost."""
        is_replaced = self.state is LinkState.WELCOMED and gateway_id != self.gateway_id
        self.state = LinkState.WELCOMED
        self.gateway_id = gateway_id
        return is_replaced

    def takes_register(self, now_s: float) -> bool:
        """Whether to send Register now; then it counts as sent."""
        is_early = self._next_register_s is not None and now_s < self._next_register_s
        if self.state is not LinkState.PRESENTING or is_early:
            return False
        self._next_register_s = now_s + REGISTER_INTERVAL_S
        return True
