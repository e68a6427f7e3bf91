"""Named places where a simulation may make something go wrong: in its own scheduler, runner, pool and calls, around
what these do for the product. The product itself has no such places. Must not know what is done at a point.
"""

from collections.abc import Callable

_armed: Callable[[str], None] | None = None


def fault_point(name: str) -> None:
    """A place where a fault may be injected: an armed action may raise here."""
    if _armed is not None:
        _armed(name)


def arm(action: Callable[[str], None]) -> None:
    """Call ``action(name)`` at every fault point from now on."""
    global _armed
    _armed = action


def disarm() -> None:
    """Fault points do nothing again."""
    global _armed
    _armed = None
